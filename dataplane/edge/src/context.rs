// SPDX-License-Identifier: Apache-2.0
//! What belongs to one request from its head to its last byte: id, counters, access log line.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use http::request::Parts;
use http::{HeaderValue, Method, Version};

use crate::client_io::BusyGuard;
use crate::headers::usable_request_id;
use crate::link::ActiveGuard;
use crate::log::{Level, Value, event};
use crate::metrics::{Class, METRICS};

/// Status noted when the client left before an answer began (as nginx does).
const CLIENT_GONE: u16 = 499;

/// One request. Dropped when its last body is finished, which is when it is counted and logged.
#[derive(Debug)]
pub struct RequestContext {
    /// Its id, from the client or made.
    pub id: HeaderValue,
    /// The version that the client spoke.
    pub version: Version,
    started: Instant,
    method: Method,
    path: Option<String>,
    class: OnceLock<Class>,
    sandbox: OnceLock<String>,
    active: Mutex<Option<ActiveGuard>>,
    failure: OnceLock<String>,
    status: AtomicU16,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    body_malformed: AtomicBool,
    busy: BusyGuard,
}

impl RequestContext {
    /// For a request's head. With `access_log` the path is kept, without the query: that may hold
    /// signatures.
    pub fn new(parts: &Parts, busy: BusyGuard, access_log: bool) -> Self {
        RequestContext {
            id: usable_request_id(&parts.headers).unwrap_or_else(new_request_id),
            version: parts.version,
            started: Instant::now(),
            method: parts.method.clone(),
            path: access_log.then(|| parts.uri.path().to_owned()),
            class: OnceLock::new(),
            sandbox: OnceLock::new(),
            active: Mutex::default(),
            failure: OnceLock::new(),
            status: AtomicU16::new(0),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
            body_malformed: AtomicBool::new(false),
            busy,
        }
    }

    /// Note the destination. Only the first call counts, as for sandbox and failure.
    pub fn set_class(&self, class: Class) {
        self.class.get_or_init(|| class);
    }

    /// The destination.
    pub fn class(&self) -> Class {
        self.class.get().copied().unwrap_or(Class::Refused)
    }

    /// Note the sandbox.
    pub fn set_sandbox(&self, id: &str) {
        self.sandbox.get_or_init(|| id.to_owned());
    }

    /// Count the request as one of the link's until it is finished or moves to another link.
    pub fn hold(&self, guard: ActiveGuard) {
        *self.active.lock().unwrap_or_else(PoisonError::into_inner) = Some(guard);
    }

    /// Note why the request failed; it makes a log line even without an access log.
    pub fn set_failure(&self, why: String) {
        self.failure.get_or_init(|| why);
    }

    /// Note the answer's status; its head is about to be sent.
    pub fn answered(&self, status: u16) {
        self.status.store(status, Ordering::Relaxed);
        METRICS.answered(self.class(), self.started.elapsed());
    }

    /// Count bytes of the request's body.
    pub fn add_in(&self, bytes: usize) {
        self.bytes_in.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Count bytes of the answer's body.
    pub fn add_out(&self, bytes: usize) {
        self.bytes_out.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Note that the request's body breaks HTTP's rules.
    pub fn set_body_malformed(&self) {
        self.body_malformed.store(true, Ordering::Release);
    }

    /// Whether the request's body broke HTTP's rules.
    pub fn body_is_malformed(&self) -> bool {
        self.body_malformed.load(Ordering::Acquire)
    }

    /// Note that the rest of the request's body will not be read.
    pub fn leave_body(&self) {
        self.busy.connection().leave_body();
    }

    /// Make the close of the client's connection a reset.
    pub fn reset_client(&self) {
        self.busy.connection().reset_on_close();
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        let status = match *self.status.get_mut() {
            0 => CLIENT_GONE,
            status => status,
        };
        let (bytes_in, bytes_out) = (*self.bytes_in.get_mut(), *self.bytes_out.get_mut());
        METRICS.request_done(self.class(), status, bytes_in, bytes_out);
        if self.path.is_none() && self.failure.get().is_none() {
            return;
        }
        let mut fields: Vec<(&str, Value<'_>)> = vec![
            ("request_id", self.id.to_str().unwrap_or_default().into()),
            ("class", self.class().name().into()),
            ("method", self.method.as_str().into()),
            ("status", u64::from(status).into()),
            ("ms", (self.started.elapsed().as_secs_f64() * 1e3).into()),
            ("bytes_in", bytes_in.into()),
            ("bytes_out", bytes_out.into()),
        ];
        if let Some(id) = self.sandbox.get() {
            fields.push(("sandbox_id", id.as_str().into()));
        }
        if let Some(path) = &self.path {
            fields.push(("path", path.as_str().into()));
        }
        match self.failure.get() {
            Some(why) => {
                fields.push(("error", why.as_str().into()));
                event(Level::Warning, "request_failed", &fields);
            }
            None => event(Level::Info, "request", &fields),
        }
    }
}

/// A request id: 32 hex digits, unique by a random start of the process and a counter.
fn new_request_id() -> HeaderValue {
    static START: LazyLock<(RandomState, u64)> = LazyLock::new(|| {
        let state = RandomState::new();
        let start = state.hash_one(0u8);
        (state, start)
    });
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let (state, start) = &*START;
    let text = format!(
        "{:016x}{:016x}",
        start.wrapping_add(number),
        state.hash_one(number)
    );
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("unknown"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_differ() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| new_request_id()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 32));
    }
}

// SPDX-License-Identifier: Apache-2.0
//! Kept HTTP/1.1 connections to one peer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::sync::Semaphore;

use crate::body::RequestBody;
use crate::limits::{H1_BUFFER_BYTES_MAX, HEADER_BYTES_MAX, HEADER_COUNT_MAX};
use crate::metrics::METRICS;
use crate::upstream::{ConnectError, Peer};

/// How many connections a pool keeps, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct PoolLimits {
    /// Most idle connections.
    pub idle_max: usize,
    /// Age at which an idle one is closed.
    pub idle_timeout: Duration,
}

/// Connections to one peer. Dropping it closes the idle ones.
#[derive(Debug)]
pub struct Pool {
    peer: Peer,
    limits: PoolLimits,
    open: Arc<Semaphore>,
    open_max: usize,
    idle: Mutex<VecDeque<Idle>>,
}

#[derive(Debug)]
struct Idle {
    sender: SendRequest<RequestBody>,
    since: Instant,
}

/// A connection in use. Dropping it closes the connection; [`Lease::release`] keeps it.
#[derive(Debug)]
pub struct Lease {
    /// Sends requests on the connection.
    pub sender: SendRequest<RequestBody>,
    /// Whether it was used before: it may have gone stale.
    pub reused: bool,
    pool: Weak<Pool>,
}

impl Pool {
    /// A pool whose open connections count against `open`, which began with `open_max` permits.
    pub fn new(peer: Peer, limits: PoolLimits, open: Arc<Semaphore>, open_max: usize) -> Arc<Self> {
        Arc::new(Pool {
            peer,
            limits,
            open,
            open_max,
            idle: Mutex::default(),
        })
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle>> {
        // The queue is valid after any panic: every change to it is a single call.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A kept connection if there is a usable one, else a new one.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn lease(self: &Arc<Self>, host: &str) -> Result<Lease, ConnectError> {
        match self.take_idle() {
            Some(sender) => Ok(Lease {
                sender,
                reused: true,
                pool: Arc::downgrade(self),
            }),
            None => self.lease_new(host).await,
        }
    }

    /// A new connection.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn lease_new(self: &Arc<Self>, host: &str) -> Result<Lease, ConnectError> {
        let permit = Arc::clone(&self.open)
            .try_acquire_owned()
            .map_err(|_| ConnectError::Limit(self.open_max))?;
        let stream = self.peer.connect(host).await?;
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(H1_BUFFER_BYTES_MAX)
            .max_header_size(HEADER_BYTES_MAX)
            .max_headers(HEADER_COUNT_MAX)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| ConnectError::Unreachable(error.to_string()))?;
        tokio::spawn(async move {
            METRICS.upstream_connections.add(1);
            // Its errors reach the request under way; an idle connection's end is no error.
            drop(connection.with_upgrades().await);
            METRICS.upstream_connections.sub(1);
            drop(permit);
        });
        Ok(Lease {
            sender,
            reused: false,
            pool: Arc::downgrade(self),
        })
    }

    /// The most recently used idle connection that is still usable.
    fn take_idle(&self) -> Option<SendRequest<RequestBody>> {
        let mut idle = self.idle();
        while let Some(entry) = idle.pop_back() {
            if entry.since.elapsed() >= self.limits.idle_timeout {
                idle.clear();
            } else if entry.sender.is_ready() {
                return Some(entry.sender);
            }
        }
        None
    }

    fn put_idle(&self, sender: SendRequest<RequestBody>) {
        if sender.is_closed() {
            return;
        }
        let mut idle = self.idle();
        idle.push_back(Idle {
            sender,
            since: Instant::now(),
        });
        if idle.len() > self.limits.idle_max {
            idle.pop_front();
        }
    }

    /// Close idle connections that are too old or closed by the peer.
    pub fn sweep(&self) {
        let mut idle = self.idle();
        idle.retain(|entry| {
            !entry.sender.is_closed() && entry.since.elapsed() < self.limits.idle_timeout
        });
        if idle.is_empty() {
            idle.shrink_to_fit();
        }
    }

    /// Whether it keeps any connection.
    pub fn has_idle(&self) -> bool {
        !self.idle().is_empty()
    }

    /// Close all idle connections.
    pub fn clear(&self) {
        self.idle().clear();
    }
}

impl Lease {
    /// Give the connection back after a complete answer.
    pub fn release(self) {
        let Lease {
            mut sender, pool, ..
        } = self;
        let Some(pool) = pool.upgrade() else { return };
        if sender.is_ready() {
            pool.put_idle(sender);
            return;
        }
        let pool = Arc::downgrade(&pool);
        // The rest of the request's body may still be on its way.
        tokio::spawn(async move {
            if sender.ready().await.is_ok()
                && let Some(pool) = pool.upgrade()
            {
                pool.put_idle(sender);
            }
        });
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The state that all requests share.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use hyper::header::HeaderMap;
use tokio::sync::{Semaphore, watch};

use crate::auth::{Secret, basic_user};
use crate::connect::{Code, RpcError};
use crate::fs::watch::WatcherTable;
use crate::limits::{BUFFERED_BODIES_BYTES_MAX, STREAMS_MAX};
use crate::metrics::CpuClock;
use crate::process::kept::KeptTable;
use crate::process::table::ProcessTable;
use crate::sys::pool;
use crate::users::{User, UserDb, unknown};

/// What `/init` has set.
#[derive(Clone, Default)]
pub struct Settings {
    /// Token of the data plane; without it every caller is let in.
    pub access_token: Option<Secret>,
    /// Token of the node and the edge; set by the first `/init`.
    pub control_token: Option<Secret>,
    /// Variables of every command.
    pub env: BTreeMap<String, String>,
    /// User of calls that name none.
    pub default_user: Option<String>,
    /// Directory of calls that name none; the user's home if absent.
    pub default_dir: Option<String>,
    /// Processors of the sandbox, for metrics.
    pub cpu_count: Option<f64>,
    /// Memory of the sandbox in bytes, for metrics.
    pub memory_bytes: Option<u64>,
    /// Disk of the sandbox in bytes, for metrics.
    pub disk_bytes: Option<u64>,
}

/// Why the sandbox is ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// Somebody asked for it.
    Killed,
    /// Its time is over.
    Timeout,
    /// It is being paused; a later `/init` wakes it.
    Paused,
}

impl EndReason {
    /// What ended streams say.
    pub fn error(self) -> RpcError {
        // The first words are those that clients of this protocol print themselves.
        let what = match self {
            EndReason::Killed => "the sandbox was killed or reached its end of life (killed)",
            EndReason::Timeout => "the sandbox was killed or reached its end of life (time-out)",
            EndReason::Paused => "the sandbox is being paused",
        };
        RpcError::new(Code::Unavailable, what)
    }
}

/// Which connections are of the time before the sandbox was restored. Numbers are given in the
/// order of acceptance.
#[derive(Clone, Copy, Default)]
pub struct Cut {
    /// Those with a lower number are cut.
    before: u64,
    /// But not this one: it brought the news.
    but: u64,
}

impl Cut {
    /// Whether the connection of this number is cut.
    pub fn hits(self, connection: u64) -> bool {
        connection < self.before && connection != self.but
    }
}

/// The agent: shared by all connections.
pub struct Agent {
    settings: Mutex<Settings>,
    /// Connections that are to be dropped at once.
    cut: watch::Sender<Cut>,
    connections: AtomicU64,
    /// Set once the sandbox ends; streams wait on it.
    pub ending: watch::Sender<Option<EndReason>>,
    /// Running and lately ended processes.
    pub processes: Arc<ProcessTable>,
    /// Programs whose outcome is kept for the node.
    pub kept: KeptTable,
    /// Directory watches.
    pub watchers: WatcherTable,
    /// User files.
    pub users: UserDb,
    /// Bytes of unary bodies that may still be taken into memory.
    pub body_budget: Semaphore,
    /// Processor use since the last metrics call.
    pub cpu_clock: Mutex<CpuClock>,
    /// The directory `/proc` as it was at the start: unmounting `/proc` does not blind the agent.
    pub proc_dir: Arc<OwnedFd>,
    /// Whether the agent is PID 1 and so may change the system around it.
    pub is_init: bool,
    /// The port it listens on.
    pub port: u16,
    started: Instant,
    last_activity_ms: AtomicU64,
    streams: AtomicUsize,
}

impl Agent {
    /// A fresh agent.
    pub fn new(
        processes: Arc<ProcessTable>,
        proc_dir: Arc<OwnedFd>,
        is_init: bool,
        port: u16,
    ) -> Self {
        Self {
            settings: Mutex::default(),
            cut: watch::Sender::new(Cut::default()),
            // 0 is nobody's number.
            connections: AtomicU64::new(1),
            ending: watch::Sender::new(None),
            processes,
            kept: KeptTable::default(),
            watchers: WatcherTable::default(),
            users: UserDb::new(),
            body_budget: Semaphore::new(BUFFERED_BODIES_BYTES_MAX),
            cpu_clock: Mutex::default(),
            proc_dir,
            is_init,
            port,
            started: Instant::now(),
            last_activity_ms: AtomicU64::new(now_ms()),
            streams: AtomicUsize::new(0),
        }
    }

    /// The settings, locked. Never hold the guard across an await.
    pub fn settings(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a connection that has just been accepted.
    pub fn number_connection(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed)
    }

    /// Drops all connections but one: their other ends belong to another sandbox, or are gone.
    pub fn drop_connections(&self, but: u64) {
        let before = self.connections.load(Ordering::Relaxed);
        self.cut.send_replace(Cut { before, but });
    }

    /// Whether a connection is cut.
    pub fn is_cut(&self, connection: u64) -> bool {
        self.cut.borrow().hits(connection)
    }

    /// Waits until a connection is cut.
    pub async fn cut(&self, connection: u64) {
        let mut cut = self.cut.subscribe();
        // The sender lives as long as the agent.
        let _ = cut.wait_for(|cut| cut.hits(connection)).await.map(drop);
    }

    /// Notes a sign of life from a client.
    pub fn touch(&self) {
        self.last_activity_ms.store(now_ms(), Ordering::Relaxed);
    }

    /// Time of the last sign of life, Unix milliseconds.
    pub fn last_activity_ms(&self) -> u64 {
        self.last_activity_ms.load(Ordering::Relaxed)
    }

    /// Milliseconds since the start.
    pub fn uptime_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Open streams and tunnels.
    pub fn active_streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Counts a stream until the guard is dropped.
    ///
    /// Errors: `resource_exhausted` at the limit.
    pub fn open_stream(self: &Arc<Self>) -> Result<StreamGuard, RpcError> {
        if self.streams.fetch_add(1, Ordering::Relaxed) >= STREAMS_MAX {
            self.streams.fetch_sub(1, Ordering::Relaxed);
            return Err(RpcError::exhausted(format!(
                "{STREAMS_MAX} streams are open in this sandbox, close some"
            )));
        }
        Ok(StreamGuard(Arc::clone(self)))
    }

    /// The user that a call runs as: of its `Authorization: Basic` header, else the default one.
    /// Blocks on the disk.
    ///
    /// Errors: `unauthenticated` for an unknown user.
    fn caller(&self, headers: &HeaderMap) -> Result<User, RpcError> {
        let named = basic_user(headers);
        let name = named.or_else(|| self.settings().default_user.clone());
        let name = name.ok_or_else(|| RpcError::new(Code::Unauthenticated, "no user specified"))?;
        self.users.snapshot().user(&name).ok_or_else(|| {
            let what = format!("invalid username: {}", unknown(&name));
            RpcError::new(Code::Unauthenticated, what)
        })
    }

    /// Waits until the sandbox ends; gives what open streams say then.
    pub async fn ended(&self) -> RpcError {
        let mut ending = self.ending.subscribe();
        let reason = ending
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|reason| *reason);
        reason.unwrap_or(EndReason::Killed).error()
    }

    /// A directory of the default settings, copied.
    pub fn default_dir(&self) -> Option<String> {
        self.settings().default_dir.clone()
    }
}

/// `Agent::caller` on a worker thread.
///
/// Errors: as there.
pub async fn caller(agent: &Arc<Agent>, headers: HeaderMap) -> Result<User, RpcError> {
    let agent = Arc::clone(agent);
    pool::run(move || agent.caller(&headers))
        .await
        .map_err(|err| RpcError::from_io("looking up the user", &err))?
}

/// Counts one open stream for as long as it lives.
pub struct StreamGuard(Arc<Agent>);

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Unix time in milliseconds.
pub fn now_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

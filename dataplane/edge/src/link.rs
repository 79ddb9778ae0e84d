// SPDX-License-Identifier: Apache-2.0
//! What joins the edge to one incarnation of a sandbox: its pools, and the switch that ends its
//! streams.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::control::Route;
use crate::limits::{
    AGENT_IDLE_MAX, AGENT_IDLE_TIMEOUT, PORT_IDLE_MAX, PORT_IDLE_TIMEOUT, SANDBOX_CONNECTIONS_MAX,
};
use crate::pool::{Pool, PoolLimits};
use crate::upstream::{Peer, PortPeer};

/// Connections to one incarnation of a sandbox.
///
/// Outlives a route that is only refreshed (a changed token or policy), so that streams under way
/// can still be ended when the sandbox goes.
#[derive(Debug)]
pub struct Link {
    agent: Arc<Pool>,
    ports: Mutex<HashMap<(u16, bool), Arc<Pool>>>,
    open: Arc<Semaphore>,
    /// Cancelled when the sandbox is gone: every stream ends.
    pub cut: CancellationToken,
    retired: AtomicBool,
    active: AtomicUsize,
    agent_address: SocketAddr,
    control_token: Arc<str>,
}

/// A request under way on a link.
#[derive(Debug)]
pub struct ActiveGuard(Arc<Link>);

impl Drop for ActiveGuard {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::Release);
    }
}

impl Link {
    /// For a route; `parent` is cancelled when the whole edge ends.
    pub fn new(route: &Route, parent: &CancellationToken) -> Arc<Self> {
        let open = Arc::new(Semaphore::new(SANDBOX_CONNECTIONS_MAX));
        let limits = PoolLimits {
            idle_max: AGENT_IDLE_MAX,
            idle_timeout: AGENT_IDLE_TIMEOUT,
        };
        Arc::new(Link {
            agent: Pool::new(
                Peer::Agent(route.agent),
                limits,
                Arc::clone(&open),
                SANDBOX_CONNECTIONS_MAX,
            ),
            ports: Mutex::default(),
            open,
            cut: parent.child_token(),
            retired: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            agent_address: route.agent,
            control_token: Arc::clone(&route.control_token),
        })
    }

    /// Whether `route` leads to the sandbox that this link was made for.
    pub fn is_same_incarnation(&self, route: &Route) -> bool {
        !self.is_retired()
            && self.agent_address == route.agent
            && self.control_token == route.control_token
    }

    /// Take no more requests: its sandbox stopped running, and what is under way ends soon.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// Whether it takes no more requests. A sandbox that runs again gets a new link.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire) || self.cut.is_cancelled()
    }

    /// Connections to the agent.
    pub fn agent_pool(&self) -> Arc<Pool> {
        Arc::clone(&self.agent)
    }

    /// Connections to a port, under the rules of `route`.
    pub fn port_pool(&self, route: &Route, port: u16) -> Arc<Pool> {
        let tls = route.https_ports.contains(&port);
        let mut ports = self.ports();
        let pool = ports.entry((port, tls)).or_insert_with(|| {
            let peer = PortPeer {
                agent: route.agent,
                port,
                control_token: Arc::clone(&route.control_token),
                tls,
            };
            let limits = PoolLimits {
                idle_max: PORT_IDLE_MAX,
                idle_timeout: PORT_IDLE_TIMEOUT,
            };
            Pool::new(
                Peer::Port(peer),
                limits,
                Arc::clone(&self.open),
                SANDBOX_CONNECTIONS_MAX,
            )
        });
        Arc::clone(pool)
    }

    fn ports(&self) -> MutexGuard<'_, HashMap<(u16, bool), Arc<Pool>>> {
        // The map is valid after any panic: every change to it is a single call.
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Note a request under way.
    pub fn begin(self: &Arc<Self>) -> ActiveGuard {
        self.active.fetch_add(1, Ordering::Acquire);
        ActiveGuard(Arc::clone(self))
    }

    /// Whether requests are under way.
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire) > 0
    }

    /// Close idle connections, and forget pools that nothing uses.
    pub fn clear_idle(&self) {
        self.agent.clear();
        self.ports().clear();
    }

    /// Close idle connections that are too old.
    pub fn sweep(&self) {
        self.agent.sweep();
        self.ports().retain(|_, pool| {
            pool.sweep();
            Arc::strong_count(pool) > 1 || pool.has_idle()
        });
    }
}

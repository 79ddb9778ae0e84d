// SPDX-License-Identifier: Apache-2.0
//! Start, signals and end of the edge.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cache::RouteCache;
use crate::cli::Args;
use crate::control::Control;
use crate::headers::Inbound;
use crate::limits::{
    API_CONNECTIONS_MAX, API_IDLE_MAX, API_IDLE_TIMEOUT, FINAL_FLUSH, RESERVED_FDS, SWEEP_INTERVAL,
};
use crate::log::{Level, event};
use crate::pool::{Pool, PoolLimits};
use crate::proxy::Client;
use crate::routing::Domain;
use crate::tls::Certificate;
use crate::upstream::Peer;
use crate::{invalidations, listener, memory, metrics_socket};

/// What all connections share.
pub struct Edge {
    /// Domain of sandbox hosts.
    pub domain: Domain,
    /// Routes to sandboxes.
    pub routes: Arc<RouteCache>,
    /// Connections to the API.
    pub api: Arc<Pool>,
    /// The listener's certificate, if TLS is served.
    pub certificate: Option<Certificate>,
    /// Whether every request makes a log line.
    pub access_log: bool,
    /// Longest time for a request head.
    pub head_timeout: Duration,
    /// Longest time without a request.
    pub idle_timeout: Duration,
    /// Cancelled when no new requests are wanted.
    pub draining: CancellationToken,
    /// Cancelled when streams must end.
    pub end: CancellationToken,
    trust_forwarded: bool,
}

impl Edge {
    fn new(args: &Args) -> Result<Arc<Self>, String> {
        let certificate = match (&args.tls_cert, &args.tls_key) {
            (Some(chain), Some(key)) => Some(Certificate::load(chain, key)?),
            _ => None,
        };
        let end = CancellationToken::new();
        let limits = PoolLimits {
            idle_max: API_IDLE_MAX,
            idle_timeout: API_IDLE_TIMEOUT,
        };
        let open = Arc::new(Semaphore::new(API_CONNECTIONS_MAX));
        Ok(Arc::new(Edge {
            domain: Domain::new(&args.domain),
            routes: RouteCache::new(Control::new(args.control_socket.clone()), end.clone()),
            api: Pool::new(
                Peer::Api(args.api_socket.clone()),
                limits,
                open,
                API_CONNECTIONS_MAX,
            ),
            certificate,
            access_log: args.access_log,
            head_timeout: Duration::from_secs(args.header_timeout_s),
            idle_timeout: Duration::from_secs(args.idle_timeout_s),
            draining: CancellationToken::new(),
            end,
            trust_forwarded: args.trust_forwarded,
        }))
    }

    /// What a request's forwarding headers are made of.
    pub fn inbound<'a>(&self, client: &Client, authority: &'a str) -> Inbound<'a> {
        Inbound {
            peer: client.peer,
            tls: client.tls,
            authority,
            trust_forwarded: self.trust_forwarded,
        }
    }
}

/// Run the edge until a signal ends it.
///
/// # Errors
/// A sentence that says why it could not start.
pub async fn run(args: Args) -> Result<(), String> {
    let slots = Arc::new(Semaphore::new(connection_cap(args.max_connections)));
    let edge = Edge::new(&args)?;
    let listeners = args
        .listen
        .iter()
        .map(|&address| listener::bind(address))
        .collect::<Result<Vec<_>, _>>()?;
    let signals = Signals::new()?;
    let metrics_socket = args
        .metrics_socket
        .as_deref()
        .map(metrics_socket::bind)
        .transpose()?;
    let tasks = TaskTracker::new();
    for (address, listener) in args.listen.iter().zip(listeners) {
        let bound = listener.local_addr().unwrap_or(*address);
        event(
            Level::Info,
            "listening",
            &[
                ("address", bound.to_string().into()),
                (
                    "tls",
                    (if edge.certificate.is_some() {
                        "yes"
                    } else {
                        "no"
                    })
                    .into(),
                ),
            ],
        );
        tokio::spawn(listener::accept_loop(
            Arc::clone(&edge),
            listener,
            Arc::clone(&slots),
            tasks.clone(),
        ));
    }
    if let Some(listener) = metrics_socket {
        tokio::spawn(metrics_socket::serve(listener));
    }
    tokio::spawn(invalidations::follow(Arc::clone(&edge.routes)));
    tokio::spawn(Arc::clone(&edge.routes).sweep());
    tokio::spawn(memory::trim());
    tokio::spawn(sweep_api(Arc::clone(&edge.api)));
    signals.wait_for_end(&edge).await;
    drain(&edge, &tasks, Duration::from_secs(args.drain_s)).await;
    if let Some(path) = &args.metrics_socket {
        // It may have been replaced or removed; either way there is nothing to do.
        drop(std::fs::remove_file(path));
    }
    event(Level::Info, "ended", &[]);
    Ok(())
}

async fn sweep_api(pool: Arc<Pool>) {
    let mut tick = tokio::time::interval(SWEEP_INTERVAL);
    loop {
        tick.tick().await;
        pool.sweep();
    }
}

/// Finish requests under way, end those that take longer, and let last frames out.
async fn drain(edge: &Edge, tasks: &TaskTracker, limit: Duration) {
    event(
        Level::Info,
        "draining",
        &[
            ("connections", (tasks.len() as u64).into()),
            ("limit_s", limit.as_secs().into()),
        ],
    );
    edge.draining.cancel();
    tasks.close();
    if tokio::time::timeout(limit, tasks.wait()).await.is_err() {
        event(
            Level::Warning,
            "drain_time_over",
            &[("connections", (tasks.len() as u64).into())],
        );
    }
    // Upgraded connections are no longer among the tasks; they end here too.
    edge.end.cancel();
    // What is still open after this is closed with the process.
    drop(tokio::time::timeout(FINAL_FLUSH, tasks.wait()).await);
}

/// Raise the descriptor limit, and keep the cap on connections below what it allows, so that some
/// are left for connections to sandboxes. Should those run out, requests get a clean 503.
fn connection_cap(wanted: usize) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let effective = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            event(
                Level::Warning,
                "descriptor_limit_not_raised",
                &[("error", error.to_string().into())],
            );
            limit.current
        }
    };
    let Some(descriptors) = effective else {
        return wanted;
    };
    let for_clients = descriptors.saturating_sub(RESERVED_FDS) / 4 * 3;
    let allowed = usize::try_from(for_clients).unwrap_or(usize::MAX).max(1);
    if allowed < wanted {
        event(
            Level::Warning,
            "connection_cap_lowered",
            &[
                ("connections", (allowed as u64).into()),
                ("wanted", (wanted as u64).into()),
                ("descriptors", descriptors.into()),
            ],
        );
    }
    wanted.min(allowed)
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> Result<Self, String> {
        let watch = |kind| signal(kind).map_err(|error| format!("Cannot watch signals: {error}"));
        Ok(Signals {
            terminate: watch(SignalKind::terminate())?,
            interrupt: watch(SignalKind::interrupt())?,
            hangup: watch(SignalKind::hangup())?,
        })
    }

    /// Return at SIGTERM or SIGINT; read the certificate again at each SIGHUP.
    async fn wait_for_end(mut self, edge: &Edge) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => reload(edge),
            }
        }
    }
}

fn reload(edge: &Edge) {
    match edge.certificate.as_ref().map(Certificate::reload) {
        Some(Ok(())) => event(Level::Info, "certificate_reloaded", &[]),
        Some(Err(why)) => event(Level::Error, "certificate_kept", &[("error", why.into())]),
        None => event(Level::Info, "nothing_to_reload", &[]),
    }
}

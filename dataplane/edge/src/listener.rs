// SPDX-License-Identifier: Apache-2.0
//! Listening sockets, and the loop that takes connections in.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::connection;
use crate::limits::{
    ACCEPT_ERROR_PAUSE, LISTEN_BACKLOG, REFUSALS_MAX, TCP_KEEPALIVE_IDLE, TCP_KEEPALIVE_INTERVAL,
    TCP_KEEPALIVE_PROBES,
};
use crate::log::{Level, event};
use crate::metrics::METRICS;
use crate::server::Edge;

/// Listen on an address.
///
/// # Errors
/// A sentence that says what to do.
pub fn bind(address: SocketAddr) -> Result<TcpListener, String> {
    open(address).map_err(|error| explain(address, &error))
}

fn open(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        // So that 0.0.0.0 and [::] can be listened on side by side.
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(LISTEN_BACKLOG)?;
    TcpListener::from_std(socket.into())
}

fn explain(address: SocketAddr, error: &io::Error) -> String {
    let port = address.port();
    match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "{address} is in use. Find the program with `ss -ltnp 'sport = :{port}'` and stop it, \
             or choose another --listen."
        ),
        io::ErrorKind::PermissionDenied => format!(
            "No right to listen on {address}. Ports below 1024 need root or CAP_NET_BIND_SERVICE; \
             choose another --listen otherwise."
        ),
        io::ErrorKind::AddrNotAvailable => format!(
            "{address} is no address of this machine. `ip addr` lists them; choose another --listen."
        ),
        _ => format!("Cannot listen on {address}: {error}"),
    }
}

/// Send at once, and find out about peers that vanished.
pub fn tune_tcp(stream: &TcpStream) {
    let keepalive = TcpKeepalive::new()
        .with_time(TCP_KEEPALIVE_IDLE)
        .with_interval(TCP_KEEPALIVE_INTERVAL)
        .with_retries(TCP_KEEPALIVE_PROBES);
    // Both fail only on a connection that is already broken, which its next use shows.
    drop(stream.set_nodelay(true));
    drop(SockRef::from(stream).set_tcp_keepalive(&keepalive));
}

/// Take connections in until the edge drains.
pub async fn accept_loop(
    edge: Arc<Edge>,
    listener: TcpListener,
    slots: Arc<Semaphore>,
    tasks: TaskTracker,
) {
    let refusals = Arc::new(Semaphore::new(REFUSALS_MAX));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = edge.draining.cancelled() => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if is_of_one_connection(&error) => continue,
            Err(error) => {
                event(
                    Level::Error,
                    "accept_failed",
                    &[("error", error.to_string().into())],
                );
                tokio::time::sleep(ACCEPT_ERROR_PAUSE).await;
                continue;
            }
        };
        tune_tcp(&stream);
        if let Ok(slot) = Arc::clone(&slots).try_acquire_owned() {
            METRICS.client_connections_accepted.add(1);
            METRICS.client_connections.add(1);
            let edge = Arc::clone(&edge);
            tasks.spawn(async move {
                connection::serve(edge, stream, peer).await;
                METRICS.client_connections.sub(1);
                drop(slot);
            });
        } else {
            METRICS.client_connections_refused.add(1);
            if let Ok(slot) = Arc::clone(&refusals).try_acquire_owned() {
                tokio::spawn(async move {
                    connection::refuse(stream).await;
                    drop(slot);
                });
            }
        }
    }
}

/// Errors of `accept` that concern only the connection that was to be taken (accept(2)).
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
    )
}

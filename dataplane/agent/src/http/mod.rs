// SPDX-License-Identifier: Apache-2.0
//! The HTTP server: connections, routing, who may pass.

pub mod body;
mod connection;
mod cors;
pub mod query;

use std::net::SocketAddr;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::ORIGIN;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use self::body::{Reply, ReplyResult, error, status_only};
use self::connection::Connection;
use crate::agent::{Agent, EndReason};
use crate::auth::ACCESS_HEADER;
use crate::limits::{
    ACCEPT_RETRY_DELAY, CONNECTION_BUFFER_BYTES_MAX, CONNECTIONS_MAX, REQUEST_HEAD_TIMEOUT,
};
use crate::{control, files, fs, metrics, process};

/// Takes connections for ever. A shortage of descriptors or memory passes, so it is waited out.
pub async fn serve(listener: TcpListener, agent: Arc<Agent>) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _peer)) => {
                let agent = Arc::clone(&agent);
                tokio::spawn(async move {
                    serve_connection(stream, agent).await;
                    drop(slot);
                });
            }
            Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
        }
    }
}

/// The way that a request came.
#[derive(Clone, Copy, Debug)]
pub struct Via {
    /// The sandbox's own address that the client reached.
    pub local: SocketAddr,
    /// The number of the connection.
    pub connection: u64,
}

async fn serve_connection(stream: TcpStream, agent: Arc<Agent>) {
    let number = agent.number_connection();
    let _ = stream.set_nodelay(true);
    // A peer that vanished without a word is found out, whatever the request is doing.
    let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
    let Ok(local) = stream.local_addr() else {
        return;
    };
    let via = Via {
        local,
        connection: number,
    };
    let known = Arc::clone(&agent);
    let service = service_fn(move |request| answer(Arc::clone(&known), via, request));
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_HEAD_TIMEOUT)
        .max_buf_size(CONNECTION_BUFFER_BYTES_MAX)
        .serve_connection(
            TokioIo::new(Connection::new(stream, Arc::clone(&agent), number)),
            service,
        )
        .with_upgrades();
    tokio::select! {
        // An error here is the client's: it broke off or spoke no HTTP.
        _ = serving => {}
        () = agent.cut(number) => {}
    }
}

async fn answer(agent: Arc<Agent>, via: Via, request: Request<Incoming>) -> ReplyResult {
    let with_origin = request.headers().contains_key(ORIGIN);
    let mut reply = match cors::preflight(request.method(), request.headers()) {
        Some(reply) => reply,
        None => route(agent, via, request).await,
    };
    if with_origin {
        cors::open(&mut reply);
    }
    Ok(reply)
}

async fn route(agent: Arc<Agent>, via: Via, request: Request<Incoming>) -> Reply {
    let path = request.uri().path().to_owned();
    if path == "/health" {
        return health(&agent, request.method());
    }
    if control::owns(&path) {
        return control::serve(agent, via, request).await;
    }
    if let Some(refusal) = gate(&agent, &path, &request) {
        return refusal;
    }
    agent.touch();
    if let Some(method) = path.strip_prefix("/process.Process/") {
        return process::service::route(&agent, method, request).await;
    }
    if let Some(method) = path.strip_prefix("/filesystem.Filesystem/") {
        return fs::service::route(&agent, method, request).await;
    }
    match (request.method(), path.as_str()) {
        (&Method::GET | &Method::HEAD, "/files") => files::download::serve(&agent, request).await,
        (&Method::POST, "/files") => files::upload::serve(&agent, request).await,
        (&Method::POST, "/files/compose") => files::compose::serve(&agent, request).await,
        (&Method::GET, "/metrics") => metrics::serve(&agent).await,
        (&Method::GET, "/envs") => envs(&agent),
        (_, "/files" | "/files/compose" | "/metrics" | "/envs") => {
            error(StatusCode::METHOD_NOT_ALLOWED, "method not allowed")
        }
        _ => error(StatusCode::NOT_FOUND, "not found"),
    }
}

/// Answers 204 while the sandbox is usable. Once it ends, the answer is the one that clients know
/// as "this sandbox is gone", so that they do not take a closing stream for a network fault.
fn health(agent: &Agent, method: &Method) -> Reply {
    if !matches!(*method, Method::GET | Method::HEAD) {
        return error(StatusCode::METHOD_NOT_ALLOWED, "method not allowed");
    }
    if agent.ending.borrow().is_some() {
        return error(StatusCode::BAD_GATEWAY, "The sandbox was not found");
    }
    status_only(StatusCode::NO_CONTENT)
}

/// What stands before the data plane: the sandbox must be set up, not ending, and the caller known.
fn gate(agent: &Agent, path: &str, request: &Request<Incoming>) -> Option<Reply> {
    let ending: Option<EndReason> = *agent.ending.borrow();
    if let Some(reason) = ending {
        return Some(error(
            StatusCode::SERVICE_UNAVAILABLE,
            reason.error().message,
        ));
    }
    let settings = agent.settings();
    if settings.control_token.is_none() {
        return Some(error(
            StatusCode::SERVICE_UNAVAILABLE,
            "the sandbox is not set up yet",
        ));
    }
    // These two decide themselves: a signature may stand for the token.
    if path == "/files" {
        return None;
    }
    match &settings.access_token {
        Some(token) if !token.in_header(request.headers(), ACCESS_HEADER) => Some(error(
            StatusCode::UNAUTHORIZED,
            "unauthorized access, please provide a valid access token or method signing if \
             supported",
        )),
        _ => None,
    }
}

fn envs(agent: &Agent) -> Reply {
    let body = serde_json::to_string(&agent.settings().env).unwrap_or_else(|_| "{}".to_owned());
    body::json(StatusCode::OK, body)
}

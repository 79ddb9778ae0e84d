// SPDX-License-Identifier: Apache-2.0
//! The calls that watch.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::pump::{self, Events};
use super::table::WatchPlace;
use super::tree::Options;
use crate::agent::{Agent, caller};
use crate::connect::call::{self, Shape};
use crate::connect::stream::{self, Gone, StreamOut};
use crate::connect::{Code, RpcError};
use crate::fs::messages::{WatchRequest, WatcherRequest};
use crate::http::body::Reply;
use crate::paths::resolve;
use crate::sys::pool;

/// File systems whose changes may be made elsewhere, unseen by inotify (statfs(2)).
const NETWORK_MAGICS: [i64; 5] = [0x6969, 0xff53_4d42, 0x517b, 0xfe53_4d42, 0x6573_5546];

/// `WatchDir`: a stream of events.
pub async fn watch_dir(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    if let Some(refusal) = call::refuse(&request, Shape::Stream) {
        return refusal;
    }
    let (head, body) = request.into_parts();
    let begun = async {
        let deadline = call::timeout(&head.headers)?.map(|limit| Instant::now() + limit);
        let message: WatchRequest = call::stream_message(agent, body).await?;
        let keepalive = call::keepalive(&head.headers);
        let (place, events) = open(agent, head.headers, message).await?;
        Ok((place, events, deadline, keepalive))
    };
    match begun.await {
        Err(err) => stream::respond_once(Err(&err)),
        Ok((place, events, deadline, keepalive)) => stream::respond(agent, |out| {
            follow(Arc::clone(agent), place, events, out, deadline, keepalive)
        }),
    }
}

/// `CreateWatcher`: a watcher that is asked for its events.
///
/// Errors: as `open`.
pub async fn create(
    agent: &Arc<Agent>,
    headers: HeaderMap,
    message: WatchRequest,
) -> Result<String, RpcError> {
    let (place, events) = open(agent, headers, message).await?;
    let id = agent.watchers.enter(place, events);
    Ok(serde_json::json!({"watcherId": id}).to_string())
}

/// `GetWatcherEvents`.
///
/// Errors: as `WatcherTable::take`.
pub async fn events(agent: &Arc<Agent>, message: WatcherRequest) -> Result<String, RpcError> {
    let events = agent.watchers.take(&message.watcher_id)?;
    Ok(format!(r#"{{"events":[{}]}}"#, events.join(",")))
}

/// `RemoveWatcher`.
///
/// Errors: `not_found`.
pub async fn remove(agent: &Arc<Agent>, message: WatcherRequest) -> Result<String, RpcError> {
    agent.watchers.remove(&message.watcher_id)?;
    Ok("{}".to_owned())
}

async fn open(
    agent: &Arc<Agent>,
    headers: HeaderMap,
    message: WatchRequest,
) -> Result<(WatchPlace, mpsc::Receiver<Events>), RpcError> {
    let user = caller(agent, headers).await?;
    let root = resolve(&message.path, &user, agent.default_dir().as_deref())?;
    let checked = root.clone();
    pool::run(move || check_root(&checked, message.allow_network_mounts))
        .await
        .map_err(|err| RpcError::from_io("watching", &err))??;
    let place = agent.watchers.reserve()?;
    let options = Options {
        root: PathBuf::from(root),
        recursive: message.recursive,
        include_entry: message.include_entry,
    };
    Ok((place, pump::open(agent, options).await?))
}

fn check_root(path: &str, allow_network: bool) -> Result<(), RpcError> {
    let meta = std::fs::metadata(path).map_err(|err| match err.kind() {
        io::ErrorKind::NotFound => RpcError::not_found(format!("path {path} not found")),
        _ => RpcError::from_io(path, &err),
    })?;
    if !meta.is_dir() {
        return Err(RpcError::invalid(format!("path {path} not a directory")));
    }
    let magic = rustix::fs::statfs(path)
        .map_err(|err| RpcError::from_io(path, &err.into()))?
        .f_type;
    if !allow_network && NETWORK_MAGICS.contains(&magic) {
        return Err(RpcError::invalid(format!(
            "cannot watch path on network filesystem: {path} (allow_network_mounts permits it, \
             but changes made elsewhere are not seen)"
        )));
    }
    Ok(())
}

async fn follow(
    agent: Arc<Agent>,
    _place: WatchPlace,
    mut events: mpsc::Receiver<Events>,
    out: Arc<StreamOut>,
    deadline: Option<Instant>,
    keepalive: Duration,
) -> Result<(), RpcError> {
    let stalled = |Gone| RpcError::exhausted("the client took no events for too long, watch again");
    out.send(br#"{"start":{}}"#).await.map_err(stalled)?;
    let mut silence_ends = Instant::now() + keepalive;
    loop {
        tokio::select! {
            biased;
            error = agent.ended() => return Err(error),
            () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                let message = "the time given for the watch is over";
                return Err(RpcError::new(Code::DeadlineExceeded, message));
            }
            batch = events.recv() => {
                let lost = || RpcError::new(Code::Internal, "the watch has ended");
                for event in batch.ok_or_else(lost)?? {
                    let message = format!(r#"{{"filesystem":{event}}}"#);
                    out.send(message.as_bytes()).await.map_err(stalled)?;
                }
            }
            () = sleep_until(silence_ends) => {
                out.send(br#"{"keepalive":{}}"#).await.map_err(stalled)?;
            }
            () = out.closed() => return Ok(()),
        }
        silence_ends = Instant::now() + keepalive;
    }
}

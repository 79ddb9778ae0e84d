// SPDX-License-Identifier: Apache-2.0
//! `filesystem.Filesystem`: the calls.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Request, StatusCode};

use super::messages::{MoveRequest, PathRequest, WatchRequest, WatcherRequest};
use super::{list, ops, watch};
use crate::agent::{Agent, caller};
use crate::connect::{RpcError, call};
use crate::http::body::{Reply, error};
use crate::paths::resolve;
use crate::sys::pool;
use crate::users::{Snapshot, User};

/// Serves a call of the service.
pub async fn route(agent: &Arc<Agent>, method: &str, request: Request<Incoming>) -> Reply {
    match method {
        "Stat" => call::unary(agent, request, |h, m| stat(agent, h, m)).await,
        "MakeDir" => call::unary(agent, request, |h, m| make_dir(agent, h, m)).await,
        "Move" => call::unary(agent, request, |h, m| rename(agent, h, m)).await,
        "ListDir" => call::unary(agent, request, |h, m| list_dir(agent, h, m)).await,
        "Remove" => call::unary(agent, request, |h, m| remove(agent, h, m)).await,
        "WatchDir" => watch::service::watch_dir(agent, request).await,
        "CreateWatcher" => {
            let create = |h, m: WatchRequest| watch::service::create(agent, h, m);
            call::unary(agent, request, create).await
        }
        "GetWatcherEvents" => {
            let events = |_, m: WatcherRequest| watch::service::events(agent, m);
            call::unary(agent, request, events).await
        }
        "RemoveWatcher" => {
            let remove = |_, m: WatcherRequest| watch::service::remove(agent, m);
            call::unary(agent, request, remove).await
        }
        _ => {
            let message = format!("filesystem.Filesystem has no method '{method}'");
            error(StatusCode::NOT_FOUND, message)
        }
    }
}

/// Runs `work` on a worker thread with the caller and the users.
async fn with_user(
    agent: &Arc<Agent>,
    headers: HeaderMap,
    work: impl FnOnce(&User, Option<&str>, &Snapshot) -> Result<String, RpcError> + Send + 'static,
) -> Result<String, RpcError> {
    let user = caller(agent, headers).await?;
    let agent = Arc::clone(agent);
    let done = pool::run(move || {
        work(
            &user,
            agent.default_dir().as_deref(),
            &agent.users.snapshot(),
        )
    });
    done.await
        .map_err(|err| RpcError::from_io("file work", &err))?
}

async fn stat(agent: &Arc<Agent>, h: HeaderMap, m: PathRequest) -> Result<String, RpcError> {
    with_user(agent, h, move |user, dir, users| {
        ops::stat(&resolve(&m.path, user, dir)?, users)
    })
    .await
}

async fn make_dir(agent: &Arc<Agent>, h: HeaderMap, m: PathRequest) -> Result<String, RpcError> {
    let work = move |user: &User, dir: Option<&str>, users: &Snapshot| {
        ops::make_dir(&resolve(&m.path, user, dir)?, user, users)
    };
    with_user(agent, h, work).await
}

async fn rename(agent: &Arc<Agent>, h: HeaderMap, m: MoveRequest) -> Result<String, RpcError> {
    let work = move |user: &User, dir: Option<&str>, users: &Snapshot| {
        let source = resolve(&m.source, user, dir)?;
        ops::rename(&source, &resolve(&m.destination, user, dir)?, user, users)
    };
    with_user(agent, h, work).await
}

async fn list_dir(agent: &Arc<Agent>, h: HeaderMap, m: PathRequest) -> Result<String, RpcError> {
    let work = move |user: &User, dir: Option<&str>, users: &Snapshot| {
        let depth = usize::try_from(m.depth.unwrap_or(0).max(1)).unwrap_or(usize::MAX);
        list::list(&resolve(&m.path, user, dir)?, depth, users)
    };
    with_user(agent, h, work).await
}

async fn remove(agent: &Arc<Agent>, h: HeaderMap, m: PathRequest) -> Result<String, RpcError> {
    with_user(agent, h, move |user, dir, _| {
        ops::remove(&resolve(&m.path, user, dir)?)
    })
    .await
}

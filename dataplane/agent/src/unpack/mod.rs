// SPDX-License-Identifier: Apache-2.0
//! `POST /opendsec/unpack`: copies files of an archive into the sandbox, as a Dockerfile's `COPY`
//! does. For the node.

mod input;
mod place;
mod sources;

use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use serde_json::json;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use self::input::{Body, Piece};
use self::place::Copy;
use crate::agent::Agent;
use crate::files::FileError;
use crate::http::body::{Reply, json as json_reply};
use crate::http::query::Query;
use crate::limits::{UNPACK_QUEUE_PIECES, UNPACK_SILENCE_MAX, UNPACK_STACK_BYTES, UNPACKS_MAX};
use crate::sys::pool;
use crate::users::unknown;

/// How long the rest of a refused body is read, so that the client gets to read the refusal.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(30);
const USER_DEFAULT: &str = "root";

static SLOTS: Semaphore = Semaphore::const_new(UNPACKS_MAX);

/// Serves the route.
pub async fn serve(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    let (head, mut body) = request.into_parts();
    let query = Query::parse(head.uri.query());
    let done = match wanted(agent, &query).await {
        Ok(copy) => run(agent, copy, &mut body).await,
        Err(err) => Err(err),
    };
    match done {
        Ok(report) => {
            let said = json!({"entries": report.entries, "bytes": report.bytes});
            json_reply(StatusCode::OK, said.to_string())
        }
        Err(err) => {
            tokio::spawn(timeout(DRAIN_TIME_MAX, drain(body)));
            err.reply()
        }
    }
}

/// What the query asks for.
async fn wanted(agent: &Arc<Agent>, query: &Query) -> Result<Copy, FileError> {
    let need = |name: &str| {
        let given = query.get(name).map(str::to_owned);
        given.ok_or_else(|| FileError::bad(format!("{name} query parameter is required")))
    };
    let target = need("target")?;
    need("source")?;
    let mode = query.get("mode").filter(|text| !text.is_empty());
    let mode = mode.map(|text| match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err(FileError::bad(format!("'{text}' is no octal mode"))),
    });
    let user = query.get("user").filter(|text| !text.is_empty());
    let user = user.unwrap_or(USER_DEFAULT).to_owned();
    let known = Arc::clone(agent);
    let owner = pool::run(move || {
        let owner = known.users.snapshot().owner(&user);
        owner.ok_or_else(|| FileError::bad(format!("cannot give files to {}", unknown(&user))))
    });
    let owner = owner
        .await
        .map_err(|err| FileError::from_io("looking up the user", &err))??;
    Copy::new(query.all("source"), target, owner, mode.transpose()?)
}

/// Unpacks on a thread of its own, while the body is fed to it here.
async fn run(
    agent: &Arc<Agent>,
    mut copy: Copy,
    body: &mut Incoming,
) -> Result<place::Report, FileError> {
    let lost = || FileError::new(StatusCode::INTERNAL_SERVER_ERROR, "unpacking failed");
    let _open = agent.open_stream()?;
    let slot = SLOTS.acquire().await.map_err(|_| lost())?;
    let (pieces, received) = mpsc::channel(UNPACK_QUEUE_PIECES);
    let (done, result) = oneshot::channel();
    std::thread::Builder::new()
        .name("unpack".into())
        .stack_size(UNPACK_STACK_BYTES)
        .spawn(move || {
            // If the caller is gone, so is the interest in the result.
            let _ = done.send(place::unpack(Body::new(received), &mut copy));
            drop(slot);
        })
        .map_err(|err| FileError::from_io("starting a thread", &err))?;
    feed(agent, body, pieces).await;
    result.await.map_err(|_| lost())?
}

/// Hands the body over. If it breaks off, its end is not told.
async fn feed(agent: &Agent, body: &mut Incoming, pieces: mpsc::Sender<Piece>) {
    loop {
        let piece = match timeout(UNPACK_SILENCE_MAX, body.frame()).await {
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) if !data.is_empty() => Piece::Data(data),
                _ => continue,
            },
            Ok(None) => Piece::End,
            Ok(Some(Err(_))) | Err(_) => return,
        };
        agent.touch();
        let is_end = matches!(piece, Piece::End);
        // Whoever unpacks may have found something wrong already.
        if pieces.send(piece).await.is_err() || is_end {
            return;
        }
    }
}

async fn drain(mut body: Incoming) {
    while let Some(Ok(_)) = body.frame().await {}
}

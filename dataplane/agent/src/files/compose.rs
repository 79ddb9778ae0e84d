// SPDX-License-Identifier: Apache-2.0
//! `POST /files/compose`: several files become one; the kernel copies.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::Path;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Request, StatusCode};
use serde::Deserialize;
use serde_json::json;

use super::{FileError, file_user};
use crate::agent::Agent;
use crate::connect::call::{parse, read_whole};
use crate::connect::json::or_default;
use crate::http::body::{Reply, json as json_reply};
use crate::limits::COMPOSE_SOURCES_MAX;
use crate::paths::{base_name, ensure_dirs, parent, resolve};
use crate::sys::pool;

#[derive(Default, Deserialize)]
#[serde(default)]
struct ComposeRequest {
    #[serde(deserialize_with = "or_default")]
    source_paths: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    destination: String,
    username: Option<String>,
}

/// Serves the route.
pub async fn serve(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    match answer(agent, request).await {
        Ok(reply) => reply,
        Err(err) => err.reply(),
    }
}

async fn answer(agent: &Arc<Agent>, request: Request<Incoming>) -> Result<Reply, FileError> {
    let (head, body) = request.into_parts();
    let request: ComposeRequest = parse(&read_whole(agent, body).await?)?;
    let agent = Arc::clone(agent);
    let path = pool::run(move || compose(&agent, &head.headers, &request))
        .await
        .map_err(|err| FileError::from_io("composing", &err))??;
    let entry = json!({"name": base_name(&path), "type": "file", "path": path});
    Ok(json_reply(StatusCode::OK, entry.to_string()))
}

fn compose(
    agent: &Arc<Agent>,
    headers: &HeaderMap,
    request: &ComposeRequest,
) -> Result<String, FileError> {
    if request.source_paths.is_empty() {
        return Err(FileError::bad("source_paths must not be empty"));
    }
    if request.source_paths.len() > COMPOSE_SOURCES_MAX {
        return Err(FileError::bad(format!(
            "more than {COMPOSE_SOURCES_MAX} source_paths"
        )));
    }
    if request.destination.is_empty() {
        return Err(FileError::bad("destination is required"));
    }
    let user = file_user(agent, headers, request.username.as_deref())?;
    let default_dir = agent.default_dir();
    let destination = resolve(&request.destination, &user, default_dir.as_deref())?;
    let mut sources = Vec::new();
    for given in &request.source_paths {
        let source = resolve(given, &user, default_dir.as_deref())?;
        if source == destination {
            let message = format!("source path '{given}' cannot be the same as destination");
            return Err(FileError::bad(message));
        }
        match fs::metadata(&source) {
            Ok(meta) if meta.is_file() => sources.push(source),
            Ok(_) => {
                let message = format!("source path is not a regular file: {given}");
                return Err(FileError::bad(message));
            }
            Err(_) => {
                let message = format!("source file not found: {given}");
                return Err(FileError::new(StatusCode::NOT_FOUND, message));
            }
        }
    }
    let failed =
        |err: io::Error| FileError::from_io(&format!("error composing '{destination}'"), &err);
    ensure_dirs(&parent(&destination), user.uid, user.gid).map_err(failed)?;
    if Path::new(&destination).is_dir() {
        return Err(FileError::bad(format!(
            "path is a directory: {destination}"
        )));
    }
    // The destination changes in one step, so that a failure leaves it as it was.
    let unfinished = format!("{destination}.compose-{}", unique());
    let made = join(&sources, &unfinished, user.uid, user.gid)
        .and_then(|()| fs::rename(&unfinished, &destination));
    if let Err(err) = made {
        let _ = fs::remove_file(&unfinished);
        return Err(failed(err));
    }
    for source in sources {
        // The content is safe; a source that stays is no reason to call this a failure.
        let _ = fs::remove_file(source);
    }
    Ok(destination)
}

fn join(sources: &[String], path: &str, uid: u32, gid: u32) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o666)
        .open(path)?;
    fchown(&file, Some(uid), Some(gid))?;
    for source in sources {
        io::copy(&mut File::open(source)?, &mut file)?;
    }
    Ok(())
}

/// A name that nobody else takes.
fn unique() -> String {
    let mut raw = [0; 8];
    let _ = rustix::rand::getrandom(&mut raw, rustix::rand::GetRandomFlags::empty());
    format!("{:016x}", u64::from_ne_bytes(raw))
}

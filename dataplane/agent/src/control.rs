// SPDX-License-Identifier: Apache-2.0
//! Routes for the node and the edge. They are never reachable from outside through the edge, and
//! they need the control token.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Method, Request, StatusCode};
use serde::Deserialize;

use crate::agent::{Agent, EndReason};
use crate::auth::{CONTROL_HEADER, Secret};
use crate::connect::call::{parse, read_whole};
use crate::http::Via;
use crate::http::body::{Reply, error, json, status_only};
use crate::http::query::Query;
use crate::process::kept;
use crate::sys::pool;
use crate::vm::clock::Timestamp;
use crate::vm::{entropy, identity};
use crate::{setup, tunnel, unpack, vm};

/// Shortest control token that is taken; it must not be guessable from inside.
const CONTROL_TOKEN_BYTES_MIN: usize = 16;
/// The version of the envd protocol that is spoken.
const ENVD_VERSION: &str = "0.9.1";
/// Calls that only virtual machines need.
const VM_ONLY: [&str; 6] = [
    "/freeze",
    "/unfreeze",
    "/collapse",
    "/fsfreeze",
    "/fsthaw",
    "/upgrade",
];

/// The body of `/init`. What is absent stays as it is.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Init {
    access_token: Option<String>,
    control_token: Option<String>,
    env_vars: Option<BTreeMap<String, String>>,
    default_user: Option<String>,
    default_workdir: Option<String>,
    ca_bundle: Option<String>,
    sandbox_id: Option<String>,
    template_id: Option<String>,
    hostname: Option<String>,
    limits: Option<Limits>,
    /// The sandbox has just been made or woken from saved memory.
    restored: bool,
    /// The node's time now, RFC 3339. Virtual machines only, as the next one.
    timestamp: Option<String>,
    /// Fresh random bytes, base64.
    entropy: Option<String>,
    machine_id: Option<String>,
    boot_id: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Limits {
    cpu_count: Option<f64>,
    memory_bytes: Option<u64>,
    disk_bytes: Option<u64>,
}

#[derive(Deserialize)]
struct Terminate {
    reason: String,
}

/// Why a call is refused.
struct Refusal(StatusCode, &'static str);

impl From<Refusal> for Reply {
    fn from(Refusal(status, message): Refusal) -> Self {
        error(status, message)
    }
}

/// Whether a path belongs to this module.
pub fn owns(path: &str) -> bool {
    path == "/init" || path.starts_with("/opendsec/") || VM_ONLY.contains(&path)
}

/// Serves such a path.
pub async fn serve(agent: Arc<Agent>, via: Via, request: Request<Incoming>) -> Reply {
    if let Err(refusal) = authorize(&agent, request.uri().path(), request.headers()) {
        return refusal.into();
    }
    let path = request.uri().path().to_owned();
    match (request.method(), path.as_str()) {
        (&Method::POST, "/init") => init(&agent, via, request).await,
        (&Method::GET, "/opendsec/status") => status(&agent),
        (&Method::POST, "/opendsec/terminate") => terminate(&agent, request).await,
        (_, "/opendsec/kept") => kept::serve(&agent, request).await,
        (&Method::POST, "/opendsec/sync") => sync().await,
        (&Method::POST, "/opendsec/unpack") => unpack::serve(&agent, request).await,
        (&Method::GET, "/opendsec/tunnel") => {
            let query = Query::parse(request.uri().query());
            let port = query.get("port").and_then(|text| text.parse::<u16>().ok());
            tunnel::serve(agent, via, port, request).await
        }
        (&Method::POST, path) if VM_ONLY.contains(&path) => error(
            StatusCode::NOT_IMPLEMENTED,
            "this sandbox is no virtual machine",
        ),
        (
            _,
            "/init"
            | "/opendsec/status"
            | "/opendsec/sync"
            | "/opendsec/terminate"
            | "/opendsec/tunnel"
            | "/opendsec/unpack",
        ) => error(StatusCode::METHOD_NOT_ALLOWED, "method not allowed"),
        _ => error(StatusCode::NOT_FOUND, "not found"),
    }
}

/// The first `/init` comes from the node before any program runs, so it needs no token: it brings
/// the token that everything after it needs.
fn authorize(agent: &Agent, path: &str, headers: &HeaderMap) -> Result<(), Refusal> {
    match &agent.settings().control_token {
        None if path == "/init" => Ok(()),
        None => Err(Refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            "the sandbox is not set up yet",
        )),
        Some(token) if token.in_header(headers, CONTROL_HEADER) => Ok(()),
        Some(_) => Err(Refusal(
            StatusCode::UNAUTHORIZED,
            "missing or wrong control token",
        )),
    }
}

async fn init(agent: &Arc<Agent>, via: Via, request: Request<Incoming>) -> Reply {
    let received = Instant::now();
    let headers = request.headers().clone();
    let body = match read_whole(agent, request.into_body()).await {
        Ok(body) => body,
        Err(err) => return error(StatusCode::BAD_REQUEST, err.message),
    };
    let mut init: Init = match parse(&body) {
        Ok(init) => init,
        Err(err) => return error(StatusCode::BAD_REQUEST, err.message),
    };
    let service = vm::current().is_some_and(|vm| vm.is_service);
    let system = match system_setup(&mut init, received) {
        Ok(system) => system,
        Err(refusal) => return refusal.into(),
    };
    let restored = init.restored;
    // Reading the body took time: two first calls may have raced, and only one may win.
    if let Err(refusal) = authorize(agent, "/init", &headers).and_then(|()| apply(agent, init)) {
        return refusal.into();
    }
    if restored {
        agent.drop_connections(via.connection);
    }
    if (agent.is_init || service)
        && let Err(err) = pool::run(move || system.apply()).await.flatten()
    {
        return error(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("set-up of the system: {err}"),
        );
    }
    if service
        && let Err(err) = pool::run(move || vm::service::remember(&body))
            .await
            .flatten()
    {
        // It works until the guest restarts itself.
        eprintln!("opendsec-agent: what the node said is not kept: {err}");
    }
    agent.ending.send_if_modified(|ending| {
        // The paused sandbox is awake again.
        let woken = *ending == Some(EndReason::Paused);
        if woken {
            *ending = None;
        }
        woken
    });
    status_only(StatusCode::NO_CONTENT)
}

/// As a service, after a restart of the guest: goes on with what the node said before.
pub fn recall(agent: &Agent) {
    let Some(body) = vm::service::remembered() else {
        return;
    };
    match parse::<Init>(&body).map(|init| apply(agent, init)) {
        Ok(Ok(())) => eprintln!("opendsec-agent: the same sandbox as before"),
        // The node tells it anew.
        Ok(Err(_)) | Err(_) => eprintln!("opendsec-agent: what the node said before is no use"),
    }
}

/// The part of an `/init` that concerns the system, taken out of it.
fn system_setup(init: &mut Init, received: Instant) -> Result<setup::SystemSetup, Refusal> {
    let bad = |what| Refusal(StatusCode::BAD_REQUEST, what);
    let valid = |id: &Option<String>, check: fn(&str) -> bool| id.as_deref().is_none_or(check);
    if !valid(&init.machine_id, identity::is_machine_id) {
        return Err(bad("machineId is not 32 hexadecimal digits"));
    }
    if !valid(&init.boot_id, identity::is_boot_id) {
        return Err(bad("bootId is no UUID"));
    }
    let timestamp = init
        .timestamp
        .take()
        .map(|text| Timestamp::parse(&text, received).ok_or(bad("timestamp is no RFC 3339 time")));
    let entropy = init.entropy.take().map(|text| {
        let bytes = STANDARD.decode(text).unwrap_or_default();
        let fits = (1..=entropy::BYTES_MAX).contains(&bytes.len());
        fits.then_some(bytes)
            .ok_or(bad("entropy must be 1 to 512 bytes in base64"))
    });
    Ok(setup::SystemSetup {
        sandbox_id: init.sandbox_id.clone(),
        template_id: init.template_id.clone(),
        hostname: init.hostname.take(),
        ca_bundle: init.ca_bundle.take(),
        timestamp: timestamp.transpose()?,
        entropy: entropy.transpose()?,
        machine_id: init.machine_id.take(),
        boot_id: init.boot_id.take(),
    })
}

fn apply(agent: &Agent, init: Init) -> Result<(), Refusal> {
    let bad = |what| Err(Refusal(StatusCode::BAD_REQUEST, what));
    if let Some(sandbox_id) = &init.sandbox_id {
        agent.kept.belong_to(sandbox_id);
    }
    let mut settings = agent.settings();
    match &init.control_token {
        Some(token) if token.len() < CONTROL_TOKEN_BYTES_MIN => {
            return bad("controlToken is too short");
        }
        None if settings.control_token.is_none() => return bad("controlToken is missing"),
        _ => {}
    }
    let names = init.env_vars.iter().flat_map(BTreeMap::iter);
    if names
        .clone()
        .any(|(k, v)| k.is_empty() || k.contains(['=', '\0']) || v.contains('\0'))
    {
        return bad("envVars holds a name or value that no environment can hold");
    }
    if let Some(token) = init.control_token {
        settings.control_token = Secret::new(token);
    }
    if let Some(token) = init.access_token {
        settings.access_token = Secret::new(token);
    }
    if let Some(env) = init.env_vars {
        let kept = settings
            .env
            .iter()
            .filter(|(name, _)| setup::is_own_variable(name));
        let kept: Vec<_> = kept
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        settings.env = env;
        settings.env.extend(kept);
    }
    settings
        .env
        .insert(setup::ENV_SANDBOX.to_owned(), "true".to_owned());
    if let Some(id) = init.sandbox_id {
        settings.env.insert(setup::ENV_SANDBOX_ID.to_owned(), id);
    }
    if let Some(id) = init.template_id {
        settings.env.insert(setup::ENV_TEMPLATE_ID.to_owned(), id);
    }
    settings.default_user = init.default_user.or(settings.default_user.take());
    settings.default_dir = init.default_workdir.or(settings.default_dir.take());
    if let Some(limits) = init.limits {
        settings.cpu_count = limits.cpu_count.or(settings.cpu_count);
        settings.memory_bytes = limits.memory_bytes.or(settings.memory_bytes);
        settings.disk_bytes = limits.disk_bytes.or(settings.disk_bytes);
    }
    Ok(())
}

fn status(agent: &Agent) -> Reply {
    let body = serde_json::json!({
        "agent_version": env!("CARGO_PKG_VERSION"),
        "envd_version": ENVD_VERSION,
        "uptime_ms": agent.uptime_ms(),
        "last_activity_ms": agent.last_activity_ms(),
        "active_streams": agent.active_streams(),
        "processes": agent.processes.live_count(),
    });
    json(StatusCode::OK, body.to_string())
}

/// Brings everything that programs have written to the disk.
async fn sync() -> Reply {
    match pool::run(setup::sync).await.flatten() {
        Ok(()) => status_only(StatusCode::NO_CONTENT),
        Err(err) => error(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("writing to the disk: {err}"),
        ),
    }
}

async fn terminate(agent: &Arc<Agent>, request: Request<Incoming>) -> Reply {
    let message = read_whole(agent, request.into_body()).await;
    let reason = match message.and_then(|body| parse::<Terminate>(&body)) {
        Ok(Terminate { reason }) => reason,
        Err(err) => return error(StatusCode::BAD_REQUEST, err.message),
    };
    let reason = match reason.as_str() {
        "killed" => EndReason::Killed,
        "timeout" => EndReason::Timeout,
        "paused" => EndReason::Paused,
        _ => {
            return error(
                StatusCode::BAD_REQUEST,
                "reason must be killed, timeout or paused",
            );
        }
    };
    agent.ending.send_replace(Some(reason));
    status_only(StatusCode::NO_CONTENT)
}

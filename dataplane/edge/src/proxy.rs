// SPDX-License-Identifier: Apache-2.0
//! Takes one request, finds its destination and passes it through.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;

use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderValue, TRANSFER_ENCODING};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body;
use hyper::body::Incoming;
use subtle::ConstantTimeEq;

use crate::body::{Cuts, EdgeBody, RequestBody, ResponseBody};
use crate::cache::Entry;
use crate::client_io::ConnState;
use crate::console::{self, Kind};
use crate::context::RequestContext;
use crate::control::{LookupError, Visitor};
use crate::errors::{Audience, EdgeError};
use crate::exchange::{Exchange, Failure};
use crate::framing::is_connect_stream;
use crate::headers::{
    HeadFault, REQUEST_ID_HEADER, TRAFFIC_TOKEN_HEADER, check_head, is_internal_path,
    strip_hop_by_hop, to_upstream, wanted_upgrade,
};
use crate::limits::QUESTIONS_PER_SANDBOX_MAX;
use crate::metrics::{Class, METRICS, UpstreamFailure};
use crate::routing::{AGENT_PORT, Refusal, Target, authority_of, classify};
use crate::server::Edge;
use crate::upgrade::Wish;
use crate::upstream::ConnectError;

/// The client's side of a connection.
#[derive(Debug)]
pub struct Client {
    /// Its address.
    pub peer: IpAddr,
    /// Whether it speaks TLS.
    pub tls: bool,
    /// Shared with the connection's transport.
    pub state: Arc<ConnState>,
}

/// A request with what was found out about it.
struct Job {
    parts: Parts,
    body: RequestBody,
    context: Arc<RequestContext>,
    authority: String,
    wish: Option<Wish>,
}

/// Answer one request.
///
/// # Errors
/// None: every failure is an answer.
pub async fn handle(
    edge: Arc<Edge>,
    client: Arc<Client>,
    request: Request<Incoming>,
) -> Result<Response<EdgeBody>, Infallible> {
    let (mut parts, body) = request.into_parts();
    let context = Arc::new(RequestContext::new(
        &parts,
        client.state.begin(),
        edge.access_log,
    ));
    let request_id = context.id.clone();
    let path = parts.uri.path().to_owned();
    let audience = Audience::of(&parts.method, &path, &parts.headers, &request_id);
    let body = RequestBody::new(body, Arc::clone(&context));
    let result = match prepare(&mut parts) {
        Ok((authority, wish)) => {
            let job = Job {
                parts,
                body,
                context: Arc::clone(&context),
                authority,
                wish,
            };
            dispatch(&edge, &client, job).await
        }
        Err(error) => Err(error),
    };
    Ok(match result {
        Ok(response) => response,
        Err(error) => refuse(&error, audience, context),
    })
}

fn refuse(
    error: &EdgeError,
    audience: Audience<'_>,
    context: Arc<RequestContext>,
) -> Response<EdgeBody> {
    if error.is_ours() {
        context.set_failure(format!("{}: {}", error.code(), error.message()));
    }
    context.answered(error.status().as_u16());
    error
        .response(audience)
        .map(|body| EdgeBody::Full(Some(body), Some(context)))
}

fn bad_request(status: StatusCode, message: impl Into<String>) -> EdgeError {
    EdgeError::Request {
        status,
        message: message.into(),
    }
}

impl From<Refusal> for EdgeError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::MissingHeader(name) => {
                bad_request(StatusCode::BAD_REQUEST, format!("Missing header: {name}"))
            }
            Refusal::InvalidHeader(name) => {
                bad_request(StatusCode::BAD_REQUEST, format!("Invalid header: {name}"))
            }
            Refusal::NoSuchSandbox(id) => EdgeError::SandboxNotFound { id },
            Refusal::Malformed(why) => {
                bad_request(StatusCode::BAD_REQUEST, format!("Malformed request: {why}"))
            }
        }
    }
}

/// Check the head; its authority, and its wish to leave HTTP.
fn prepare(parts: &mut Parts) -> Result<(String, Option<Wish>), EdgeError> {
    check_head(parts).map_err(|fault| match fault {
        HeadFault::Malformed(why) => {
            bad_request(StatusCode::BAD_REQUEST, format!("Malformed request: {why}"))
        }
        HeadFault::Expectation => {
            bad_request(StatusCode::EXPECTATION_FAILED, "Unknown expectation")
        }
        HeadFault::TransferCoding => {
            bad_request(StatusCode::NOT_IMPLEMENTED, "Unknown transfer coding")
        }
    })?;
    let authority = authority_of(parts)?;
    let wish = if parts.method == Method::CONNECT {
        let wish = Wish::from_extended_connect(parts);
        Some(
            wish.ok_or_else(|| {
                bad_request(StatusCode::METHOD_NOT_ALLOWED, "CONNECT is not offered")
            })?,
        )
    } else {
        wanted_upgrade(parts).and_then(|protocol| Wish::from_http1(protocol, &mut parts.extensions))
    };
    Ok((authority, wish))
}

async fn dispatch(edge: &Edge, client: &Client, job: Job) -> Result<Response<EdgeBody>, EdgeError> {
    match classify(&job.parts, &job.authority, &edge.domain)? {
        Target::Sandbox { id, port } => {
            job.context.set_class(if port == AGENT_PORT {
                Class::Agent
            } else {
                Class::Port
            });
            job.context.set_sandbox(&id);
            // Refused before the look-up: the answer tells nothing about which sandboxes exist.
            refuse_internal(port, job.parts.uri.path())?;
            let visitor = Visitor::of(&job.parts.headers, port);
            let entry = edge
                .routes
                .get(&id, &visitor)
                .await
                .map_err(|error| lookup_error(error, &id, port, &job.parts))?;
            to_sandbox(edge, client, job, entry, port, &visitor).await
        }
        Target::Signed(file) => {
            job.context.set_class(Class::Agent);
            let entry = edge
                .routes
                .by_signature(&file)
                .await
                .map_err(|error| match error {
                    LookupError::NotFound | LookupError::Denied => EdgeError::InvalidSignature,
                    error => lookup_error(error, "", AGENT_PORT, &job.parts),
                })?;
            job.context.set_sandbox(&entry.route.sandbox_id);
            let visitor = Visitor::of(&job.parts.headers, AGENT_PORT);
            to_sandbox(edge, client, job, entry, AGENT_PORT, &visitor).await
        }
        Target::Api => {
            job.context.set_class(Class::Api);
            if let Some(what) = console::wanted(&job.parts, job.wish.as_ref()) {
                return to_console(edge, job, what).await;
            }
            to_api(edge, client, job).await
        }
    }
}

/// A machine's console or screen. The control plane checks the token; the route, without which
/// nothing would end the stream together with the sandbox, comes second.
async fn to_console(
    edge: &Edge,
    mut job: Job,
    (id, kind): (String, Kind),
) -> Result<Response<EdgeBody>, EdgeError> {
    job.context.set_sandbox(&id);
    let visitor = Visitor::with_token(console::token(&job.parts.headers));
    let socket = edge
        .routes
        .control()
        .console(&id, kind.name(), &visitor)
        .await
        .map_err(|refusal| EdgeError::Console(Box::new(refusal)))?;
    let entry = edge
        .routes
        .get(&id, &visitor)
        .await
        .map_err(|error| lookup_error(error, &id, AGENT_PORT, &job.parts))?;
    job.context.hold(entry.link.begin());
    let wish = job.wish.take().ok_or(EdgeError::Overloaded)?;
    let cut = entry.link.cut.clone();
    console::serve(&job.parts, wish, (id, kind), &socket, job.context, cut).await
}

fn refuse_internal(port: u16, path: &str) -> Result<(), EdgeError> {
    if port == AGENT_PORT && is_internal_path(path) {
        return Err(EdgeError::InternalPath {
            path: path.to_owned(),
        });
    }
    Ok(())
}

fn lookup_error(error: LookupError, id: &str, port: u16, parts: &Parts) -> EdgeError {
    let id = id.to_owned();
    match error {
        LookupError::NotFound => EdgeError::SandboxNotFound { id },
        LookupError::Transition => EdgeError::SandboxTransition { id },
        LookupError::Denied if port == AGENT_PORT => EdgeError::AccessTokenInvalid,
        LookupError::Denied => match parts.headers.get(TRAFFIC_TOKEN_HEADER) {
            Some(value) if !value.is_empty() => EdgeError::TrafficTokenInvalid { id },
            _ => EdgeError::TrafficTokenMissing { id },
        },
        LookupError::Resume(refusal) => EdgeError::ResumeRefused { id, refusal },
        LookupError::Crowded => EdgeError::SandboxBusy {
            id,
            limit: QUESTIONS_PER_SANDBOX_MAX,
        },
        LookupError::Unavailable(message) => EdgeError::ControlUnavailable { message },
    }
}

/// Ports that are not public need the sandbox's traffic token. The agent checks its own.
fn check_traffic_token(parts: &Parts, entry: &Entry, port: u16) -> Result<(), EdgeError> {
    let route = &entry.route;
    if port == AGENT_PORT || route.allow_public_traffic {
        return Ok(());
    }
    let id = || route.sandbox_id.clone();
    let mut given = parts.headers.get_all(TRAFFIC_TOKEN_HEADER).iter();
    match (given.next(), given.next()) {
        (None, _) => Err(EdgeError::TrafficTokenMissing { id: id() }),
        (Some(value), _) if value.is_empty() => Err(EdgeError::TrafficTokenMissing { id: id() }),
        (Some(value), None)
            if !route.traffic_token.is_empty()
                && bool::from(value.as_bytes().ct_eq(route.traffic_token.as_bytes())) =>
        {
            Ok(())
        }
        _ => Err(EdgeError::TrafficTokenInvalid { id: id() }),
    }
}

async fn to_sandbox(
    edge: &Edge,
    client: &Client,
    mut job: Job,
    mut entry: Arc<Entry>,
    port: u16,
    visitor: &Visitor,
) -> Result<Response<EdgeBody>, EdgeError> {
    check_traffic_token(&job.parts, &entry, port)?;
    if port == AGENT_PORT {
        // The agent switches to nothing that clients may use; an upgraded connection would pass
        // the checks above by.
        job.wish = None;
    }
    let inbound = edge.inbound(client, &job.authority);
    let masked = mask_host(&entry, port);
    to_upstream(&mut job.parts, inbound, masked.as_ref(), &job.context.id);
    let authority = job
        .parts
        .headers
        .get(HOST)
        .and_then(|host| host.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    let mut exchange = Exchange::new(job.parts, job.body, job.wish);
    let id = entry.route.sandbox_id.clone();
    for last in [false, true] {
        job.context.hold(entry.link.begin());
        let pool = if port == AGENT_PORT {
            entry.link.agent_pool()
        } else {
            entry.link.port_pool(&entry.route, port)
        };
        let failure = match exchange.run(&pool, &authority, &entry.link.cut).await {
            Ok((response, lease)) => {
                let cuts = Cuts {
                    edge: edge.end.clone(),
                    sandbox: entry.link.cut.clone(),
                };
                return answer(response, lease, exchange.wish.take(), job.context, cuts)
                    .ok_or(EdgeError::SandboxBadAnswer { id, port });
            }
            Err(failure) => failure,
        };
        match failure {
            Failure::Connect(ConnectError::Unreachable(_) | ConnectError::Refused) if !last => {
                METRICS.upstream_failed(UpstreamFailure::Connect);
                entry = edge
                    .routes
                    .refresh(&entry, visitor)
                    .await
                    .map_err(|error| lookup_error(error, &id, port, exchange.parts()))?;
                check_traffic_token(exchange.parts(), &entry, port)?;
            }
            failure => return Err(sandbox_failure(edge, &job.context, &entry, port, failure)),
        }
    }
    Err(EdgeError::SandboxNoAnswer { id, port })
}

fn sandbox_failure(
    edge: &Edge,
    context: &RequestContext,
    entry: &Arc<Entry>,
    port: u16,
    failure: Failure,
) -> EdgeError {
    let id = entry.route.sandbox_id.clone();
    match failure {
        Failure::Connect(ConnectError::PortClosed) => {
            METRICS.upstream_failed(UpstreamFailure::PortClosed);
            EdgeError::PortNotOpen { id, port }
        }
        Failure::Connect(ConnectError::Exhausted) => EdgeError::Overloaded,
        Failure::Connect(ConnectError::Limit(limit)) => EdgeError::SandboxBusy { id, limit },
        Failure::Connect(ConnectError::Refused) => {
            context.set_failure("the agent refused the control token".to_owned());
            EdgeError::SandboxNoAnswer { id, port }
        }
        Failure::Connect(ConnectError::Unreachable(why)) => {
            METRICS.upstream_failed(UpstreamFailure::Connect);
            context.set_failure(why);
            EdgeError::PortNotOpen { id, port }
        }
        Failure::Cut if edge.end.is_cancelled() => EdgeError::Overloaded,
        Failure::Cut => EdgeError::SandboxNotFound { id },
        Failure::NoAnswer(_) if context.body_is_malformed() => malformed_body(),
        Failure::NoAnswer(why) => {
            METRICS.upstream_failed(UpstreamFailure::NoAnswer);
            context.set_failure(why);
            // The sandbox may be gone: let the next request ask.
            if port == AGENT_PORT {
                edge.routes.forget_entry(entry);
            }
            EdgeError::SandboxNoAnswer { id, port }
        }
    }
}

/// The Host header that a port's program sees in place of the client's.
fn mask_host(entry: &Entry, port: u16) -> Option<HeaderValue> {
    let mask = entry
        .route
        .mask_request_host
        .as_ref()
        .filter(|_| port != AGENT_PORT)?;
    HeaderValue::from_str(&mask.replace("${PORT}", &port.to_string())).ok()
}

async fn to_api(
    edge: &Edge,
    client: &Client,
    mut job: Job,
) -> Result<Response<EdgeBody>, EdgeError> {
    let may_repeat =
        job.parts.method.is_idempotent() || job.parts.headers.contains_key("idempotency-key");
    let inbound = edge.inbound(client, &job.authority);
    to_upstream(&mut job.parts, inbound, None, &job.context.id);
    let mut exchange = Exchange::new(job.parts, job.body, job.wish);
    match exchange.run(&edge.api, "api", &edge.end).await {
        Ok((response, lease)) => {
            let cuts = Cuts {
                edge: edge.end.clone(),
                sandbox: edge.end.clone(),
            };
            answer(response, lease, exchange.wish.take(), job.context, cuts)
                .ok_or(EdgeError::ApiNoAnswer { may_repeat: false })
        }
        Err(Failure::Connect(ConnectError::Exhausted | ConnectError::Limit(_)) | Failure::Cut) => {
            Err(EdgeError::Overloaded)
        }
        Err(Failure::Connect(error)) => {
            METRICS.upstream_failed(UpstreamFailure::Connect);
            let why = match error {
                ConnectError::Unreachable(why) => why,
                _ => "unexpected answer".to_owned(),
            };
            Err(EdgeError::ControlUnavailable {
                message: format!("The control plane is not reachable: {why}"),
            })
        }
        Err(Failure::NoAnswer(_)) if job.context.body_is_malformed() => Err(malformed_body()),
        Err(Failure::NoAnswer(why)) => {
            METRICS.upstream_failed(UpstreamFailure::NoAnswer);
            job.context.set_failure(why);
            Err(EdgeError::ApiNoAnswer { may_repeat })
        }
    }
}

/// The client's own fault: the upstream only saw its connection end.
fn malformed_body() -> EdgeError {
    bad_request(
        StatusCode::BAD_REQUEST,
        "Malformed request: unreadable body",
    )
}

/// Turn an upstream's answer into the client's; `None` if it left HTTP without being asked to.
fn answer(
    response: Response<Incoming>,
    lease: crate::pool::Lease,
    wish: Option<Wish>,
    context: Arc<RequestContext>,
    cuts: Cuts,
) -> Option<Response<EdgeBody>> {
    let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    if switched && wish.is_none() {
        // Passed on, it would let the program speak to the client outside of HTTP.
        METRICS.upstream_failed(UpstreamFailure::NoAnswer);
        context.set_failure("the answer switched protocols unasked".to_owned());
        return None;
    }
    context.answered(response.status().as_u16());
    let mut granted = match wish {
        Some(wish) if switched => {
            let id = context.id.clone();
            let mut granted = wish.grant(response, context, cuts);
            granted.headers_mut().entry(REQUEST_ID_HEADER).or_insert(id);
            return Some(granted);
        }
        _ => response,
    };
    let headers = granted.headers_mut();
    if headers.contains_key(TRANSFER_ENCODING) {
        // The chunks have been taken apart; a length beside them was never true.
        headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(headers);
    headers
        .entry(REQUEST_ID_HEADER)
        .or_insert_with(|| context.id.clone());
    let framed = granted.status() == StatusCode::OK
        && granted
            .headers()
            .get(CONTENT_TYPE)
            .is_some_and(|kind| is_connect_stream(kind.as_bytes()));
    let (mut head, body) = granted.into_parts();
    head.version = Version::HTTP_11;
    let framed = framed && !body.is_end_stream();
    let body = ResponseBody::new(body, context, lease, framed, cuts);
    Some(Response::from_parts(head, EdgeBody::Stream(Box::new(body))))
}

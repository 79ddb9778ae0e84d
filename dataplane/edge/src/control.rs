// SPDX-License-Identifier: Apache-2.0
//! Asks the control plane for routes, over its Unix socket.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::headers::{ACCESS_TOKEN_HEADER, TRAFFIC_TOKEN_HEADER};
use crate::limits::{CONTROL_ANSWER_BYTES_MAX, ROUTE_TIMEOUT, TOKEN_BYTES_MAX};
use crate::routing::{AGENT_PORT, SignedFile};

/// How to reach a running sandbox, as the control plane says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The sandbox.
    pub sandbox_id: String,
    /// Its agent.
    pub agent: SocketAddr,
    /// Token for the agent's internal routes.
    pub control_token: Arc<str>,
    /// Token for ports that are not public.
    pub traffic_token: String,
    /// Whether ports may be reached without the token.
    pub allow_public_traffic: bool,
    /// Host header for ports; `${PORT}` in it stands for the port.
    pub mask_request_host: Option<String>,
    /// Ports spoken to over TLS.
    pub https_ports: Vec<u16>,
}

/// The JSON of a route.
#[derive(Deserialize)]
struct RouteBody {
    sandbox_id: String,
    state: String,
    address: IpAddr,
    agent_port: u16,
    control_token: String,
    traffic_token: String,
    #[serde(default = "default_true")]
    allow_public_traffic: bool,
    #[serde(default)]
    mask_request_host: Option<String>,
    #[serde(default)]
    https_ports: Vec<u16>,
}

fn default_true() -> bool {
    true
}

/// What a request brings along to be let in. A paused sandbox is resumed only for the right one.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Visitor {
    port: u16,
    access_token: Option<HeaderValue>,
    traffic_token: Option<HeaderValue>,
}

// By hand: tokens must not reach a log.
impl std::fmt::Debug for Visitor {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Visitor")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl Visitor {
    /// Of a request for `port`. A token that is repeated or too long counts as none.
    pub fn of(headers: &HeaderMap, port: u16) -> Self {
        Visitor {
            port,
            access_token: token(headers, &ACCESS_TOKEN_HEADER),
            traffic_token: token(headers, &TRAFFIC_TOKEN_HEADER),
        }
    }

    /// Somebody with this token for the agent's port, wherever the token stood.
    pub fn with_token(token: Option<HeaderValue>) -> Self {
        let usable = |token: &HeaderValue| (1..=TOKEN_BYTES_MAX).contains(&token.len());
        Visitor {
            port: AGENT_PORT,
            access_token: token.filter(usable),
            traffic_token: None,
        }
    }

    /// The headers that tell the control plane.
    fn headers(&self) -> impl Iterator<Item = (&'static str, &HeaderValue)> {
        [
            ("X-Opendsec-Access-Token", self.access_token.as_ref()),
            ("X-Opendsec-Traffic-Token", self.traffic_token.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }
}

fn token(headers: &HeaderMap, name: &HeaderName) -> Option<HeaderValue> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    let usable = values.next().is_none() && (1..=TOKEN_BYTES_MAX).contains(&value.len());
    usable.then(|| value.clone())
}

/// Why a sandbox could not be resumed, in the control plane's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResumeRefusal {
    /// Its status.
    pub status: StatusCode,
    /// Its code, such as `node_full`.
    pub code: String,
    /// One sentence.
    pub message: String,
    /// Whether the same request may work later.
    pub retryable: bool,
}

/// Why the control plane refuses, in its words.
pub type Refused = ResumeRefusal;

/// Why there is no route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookupError {
    /// No such sandbox, or it does not run.
    NotFound,
    /// It starts, pauses or resumes, and that takes longer than we wait.
    Transition,
    /// It is paused, and the request's token is not one that may resume it.
    Denied,
    /// It is paused and could not be resumed.
    Resume(Box<ResumeRefusal>),
    /// Too many different questions about this sandbox are under way.
    Crowded,
    /// The control plane does not answer, or cannot say now. Says why.
    Unavailable(String),
}

/// The control plane's socket.
#[derive(Clone, Debug)]
pub struct Control {
    socket: PathBuf,
}

impl Control {
    /// Use this socket.
    pub fn new(socket: PathBuf) -> Self {
        Control { socket }
    }

    /// The route of a sandbox. Waits while it starts, pauses or resumes. For a `visitor` a paused
    /// sandbox that wants it is resumed first; without one nothing about it changes.
    ///
    /// # Errors
    /// See [`LookupError`].
    pub async fn route(
        &self,
        sandbox_id: &str,
        visitor: Option<&Visitor>,
    ) -> Result<Route, LookupError> {
        let mut target = format!("/routes/{}", encode(sandbox_id));
        if let Some(visitor) = visitor {
            target = format!("{target}?port={}", visitor.port);
        }
        self.lookup(&target, visitor).await
    }

    /// The route of the sandbox whose token made a file URL's signature.
    ///
    /// # Errors
    /// See [`LookupError`].
    pub async fn route_by_signature(&self, file: &SignedFile) -> Result<Route, LookupError> {
        let target = format!(
            "/routes/by-signature?path={}&operation={}&username={}&signature={}&expiration={}",
            encode(&file.path),
            file.operation,
            encode(&file.username),
            encode(&file.signature),
            encode(&file.expiration),
        );
        self.lookup(&target, None).await
    }

    /// The Unix socket where a sandbox's console or screen is served, for this access token.
    ///
    /// # Errors
    /// Why not, in the control plane's words.
    pub async fn console(
        &self,
        sandbox_id: &str,
        kind: &str,
        visitor: &Visitor,
    ) -> Result<PathBuf, Refused> {
        #[derive(Deserialize)]
        struct Place {
            socket: PathBuf,
        }
        let unavailable = |why: String| Refused {
            status: StatusCode::SERVICE_UNAVAILABLE,
            code: "control_plane_unavailable".to_owned(),
            message: format!("The control plane is not reachable: {why}"),
            retryable: true,
        };
        let target = format!("/consoles/{}?kind={kind}", encode(sandbox_id));
        let (status, body) = self
            .ask(&target, Some(visitor))
            .await
            .map_err(|why| unavailable(why.unwrap_or_else(|| "no answer in time".to_owned())))?;
        if status == StatusCode::OK {
            let place: Place =
                serde_json::from_slice(&body).map_err(|error| unavailable(error.to_string()))?;
            return Ok(place.socket);
        }
        let error = ErrorBody::read(&body);
        Err(Refused {
            status,
            code: error.code,
            message: error.message,
            retryable: error.retryable,
        })
    }

    async fn lookup(&self, target: &str, visitor: Option<&Visitor>) -> Result<Route, LookupError> {
        match self.ask(target, visitor).await {
            Ok((status, body)) => interpret(status, &body),
            Err(Some(why)) => Err(LookupError::Unavailable(format!(
                "The control plane is not reachable: {why}"
            ))),
            // It took the question, so the sandbox is on its way somewhere.
            Err(None) => Err(LookupError::Transition),
        }
    }

    /// An answer's status and body; an error without a text is a time-out.
    async fn ask(
        &self,
        target: &str,
        visitor: Option<&Visitor>,
    ) -> Result<(StatusCode, Bytes), Option<String>> {
        let exchange = async {
            let response = self.get(target, visitor).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), CONTROL_ANSWER_BYTES_MAX);
            let body = body
                .collect()
                .await
                .map_err(|error| error.to_string())?
                .to_bytes();
            Ok::<_, String>((status, body))
        };
        match timeout(ROUTE_TIMEOUT, exchange).await {
            Ok(answer) => answer.map_err(Some),
            Err(_) => Err(None),
        }
    }

    /// A GET on a connection of its own, which ends with the answer's body.
    ///
    /// # Errors
    /// A sentence.
    pub async fn get(
        &self,
        target: &str,
        visitor: Option<&Visitor>,
    ) -> Result<Response<Incoming>, String> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|error| format!("{}: {error}", self.socket.display()))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        let mut request = Request::builder()
            .uri(target)
            .header(http::header::HOST, "control")
            .header(http::header::CONNECTION, "close");
        for (name, value) in visitor.into_iter().flat_map(Visitor::headers) {
            request = request.header(name, value);
        }
        let request = request
            .body(Empty::<Bytes>::new())
            .map_err(|error| error.to_string())?;
        sender
            .send_request(request)
            .await
            .map_err(|error| error.to_string())
    }
}

fn encode(text: &str) -> impl std::fmt::Display + '_ {
    utf8_percent_encode(text, NON_ALPHANUMERIC)
}

/// The error inside a body of the control plane. Fields that are missing are empty.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ErrorBody {
    code: String,
    message: String,
    retryable: bool,
    details: ErrorDetails,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ErrorDetails {
    state: String,
}

impl ErrorBody {
    fn read(body: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Outer {
            error: ErrorBody,
        }
        serde_json::from_slice(body)
            .map_or_else(|_| ErrorBody::default(), |outer: Outer| outer.error)
    }
}

/// States that a sandbox leaves by itself within a moment.
const TRANSITIONS: [&str; 4] = ["pending", "starting", "pausing", "resuming"];
/// What can go wrong with a resume although the control plane is well.
const RESUME_CODES: [&str; 6] = [
    "node_full",
    "quota_exceeded",
    "resume_failed",
    "snapshot_failed",
    "snapshot_damaged",
    "snapshot_incompatible",
];

fn failure(status: StatusCode, body: &[u8]) -> LookupError {
    let error = ErrorBody::read(body);
    if RESUME_CODES.contains(&error.code.as_str()) {
        return LookupError::Resume(Box::new(ResumeRefusal {
            status,
            code: error.code,
            message: error.message,
            retryable: error.retryable,
        }));
    }
    match status {
        StatusCode::CONFLICT if TRANSITIONS.contains(&error.details.state.as_str()) => {
            LookupError::Transition
        }
        // A paused or ending sandbox is, to clients, one that was not found (E2B's wording).
        StatusCode::NOT_FOUND | StatusCode::CONFLICT => LookupError::NotFound,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => LookupError::Denied,
        _ if error.message.is_empty() => {
            LookupError::Unavailable(format!("The control plane answered {status}"))
        }
        _ => LookupError::Unavailable(error.message),
    }
}

fn interpret(status: StatusCode, body: &[u8]) -> Result<Route, LookupError> {
    if status != StatusCode::OK {
        return Err(failure(status, body));
    }
    let body: RouteBody = serde_json::from_slice(body).map_err(|error| {
        LookupError::Unavailable(format!("The control plane's route is unreadable: {error}"))
    })?;
    if body.state != "running" {
        return Err(LookupError::NotFound);
    }
    Ok(Route {
        sandbox_id: body.sandbox_id,
        agent: SocketAddr::new(body.address, body.agent_port),
        control_token: body.control_token.into(),
        traffic_token: body.traffic_token,
        allow_public_traffic: body.allow_public_traffic,
        mask_request_host: body.mask_request_host,
        https_ports: body.https_ports,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &str = r#"{"sandbox_id":"i1","state":"running","address":"10.201.0.5","agent_port":49983,
        "control_token":"c","traffic_token":"t","allow_public_traffic":false,
        "mask_request_host":null,"https_ports":[8443],"later_field":1}"#;

    #[test]
    fn answers() {
        let route = interpret(StatusCode::OK, BODY.as_bytes()).expect("route");
        assert_eq!(route.agent.to_string(), "10.201.0.5:49983");
        assert_eq!(route.https_ports, [8443]);
        assert!(!route.allow_public_traffic);
        let paused = BODY.replace("running", "paused");
        assert_eq!(
            interpret(StatusCode::OK, paused.as_bytes()),
            Err(LookupError::NotFound)
        );
        assert_eq!(
            interpret(StatusCode::NOT_FOUND, b""),
            Err(LookupError::NotFound)
        );
        assert_eq!(
            interpret(StatusCode::CONFLICT, b""),
            Err(LookupError::NotFound)
        );
        let busy = interpret(
            StatusCode::SERVICE_UNAVAILABLE,
            br#"{"error":{"message":"the node restarts"}}"#,
        );
        assert_eq!(
            busy,
            Err(LookupError::Unavailable("the node restarts".to_owned()))
        );
        for status in [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN] {
            assert_eq!(interpret(status, b"{}"), Err(LookupError::Denied));
        }
        let conflict = |state: &str| {
            let body = format!(
                r#"{{"error":{{"code":"sandbox_state_conflict","message":"m","details":{{"state":"{state}"}}}}}}"#
            );
            interpret(StatusCode::CONFLICT, body.as_bytes())
        };
        for state in TRANSITIONS {
            assert_eq!(conflict(state), Err(LookupError::Transition), "{state}");
        }
        for state in ["paused", "stopping", "ended"] {
            assert_eq!(conflict(state), Err(LookupError::NotFound), "{state}");
        }
        let full = interpret(
            StatusCode::SERVICE_UNAVAILABLE,
            br#"{"error":{"code":"node_full","message":"no memory","retryable":true,"details":{}}}"#,
        );
        assert_eq!(
            full,
            Err(LookupError::Resume(Box::new(ResumeRefusal {
                status: StatusCode::SERVICE_UNAVAILABLE,
                code: "node_full".to_owned(),
                message: "no memory".to_owned(),
                retryable: true,
            })))
        );
        assert!(matches!(
            interpret(StatusCode::OK, b"{"),
            Err(LookupError::Unavailable(_))
        ));
    }

    #[test]
    fn visitors() {
        let headers = |pairs: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.append(*name, HeaderValue::from_str(value).expect("value"));
            }
            headers
        };
        let given = headers(&[
            ("x-access-token", "hush"),
            ("e2b-traffic-access-token", "psst"),
        ]);
        let visitor = Visitor::of(&given, 80);
        let sent: Vec<_> = visitor.headers().collect();
        assert_eq!(sent.len(), 2);
        assert_eq!(
            sent[0],
            ("X-Opendsec-Access-Token", &HeaderValue::from_static("hush"))
        );
        assert!(!format!("{visitor:?}").contains("hush"));
        assert_ne!(visitor, Visitor::of(&given, 81));
        let long = "x".repeat(TOKEN_BYTES_MAX + 1);
        for unusable in [
            headers(&[("x-access-token", "a"), ("x-access-token", "b")]),
            headers(&[("x-access-token", "")]),
            headers(&[("x-access-token", &long)]),
        ] {
            assert_eq!(Visitor::of(&unusable, 80).headers().count(), 0);
        }
    }
}

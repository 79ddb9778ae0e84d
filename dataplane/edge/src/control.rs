// SPDX-License-Identifier: Apache-2.0
//! Asks the control plane for routes, over its Unix socket.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::limits::{CONTROL_ANSWER_BYTES_MAX, ROUTE_TIMEOUT};
use crate::routing::SignedFile;

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

/// Why there is no route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookupError {
    /// No such sandbox, or it does not run.
    NotFound,
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

    /// The route of a sandbox. Waits while it starts.
    ///
    /// # Errors
    /// See [`LookupError`].
    pub async fn route(&self, sandbox_id: &str) -> Result<Route, LookupError> {
        self.lookup(&format!("/routes/{}", encode(sandbox_id)))
            .await
    }

    /// The route of the sandbox whose token made a file URL's signature.
    ///
    /// # Errors
    /// See [`LookupError`].
    pub async fn route_by_signature(&self, file: &SignedFile) -> Result<Route, LookupError> {
        self.lookup(&format!(
            "/routes/by-signature?path={}&operation={}&username={}&signature={}&expiration={}",
            encode(&file.path),
            file.operation,
            encode(&file.username),
            encode(&file.signature),
            encode(&file.expiration),
        ))
        .await
    }

    async fn lookup(&self, target: &str) -> Result<Route, LookupError> {
        let unavailable = |why: String| {
            LookupError::Unavailable(format!("The control plane is not reachable: {why}"))
        };
        let exchange = async {
            let response = self.get(target).await?;
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
            Ok(Ok((status, body))) => interpret(status, &body),
            Ok(Err(why)) => Err(unavailable(why)),
            Err(_) => Err(unavailable("it did not answer in time".to_owned())),
        }
    }

    /// A GET on a connection of its own, which ends with the answer's body.
    ///
    /// # Errors
    /// A sentence.
    pub async fn get(&self, target: &str) -> Result<Response<Incoming>, String> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|error| format!("{}: {error}", self.socket.display()))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        let request = Request::builder()
            .uri(target)
            .header(http::header::HOST, "control")
            .header(http::header::CONNECTION, "close")
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

/// The message inside an error body of the control plane, if it has one.
fn error_message(body: &[u8]) -> Option<String> {
    let value: serde_json::Value = serde_json::from_slice(body).ok()?;
    Some(value.get("error")?.get("message")?.as_str()?.to_owned())
}

fn interpret(status: StatusCode, body: &[u8]) -> Result<Route, LookupError> {
    match status {
        StatusCode::OK => {}
        // A paused or ending sandbox is, to clients, one that was not found (E2B's wording).
        StatusCode::NOT_FOUND | StatusCode::CONFLICT => return Err(LookupError::NotFound),
        _ => {
            let why = error_message(body)
                .unwrap_or_else(|| format!("The control plane answered {status}"));
            return Err(LookupError::Unavailable(why));
        }
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
            br#"{"error":{"message":"node is full"}}"#,
        );
        assert_eq!(
            busy,
            Err(LookupError::Unavailable("node is full".to_owned()))
        );
        assert!(matches!(
            interpret(StatusCode::OK, b"{"),
            Err(LookupError::Unavailable(_))
        ));
    }
}

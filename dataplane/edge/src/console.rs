// SPDX-License-Identifier: Apache-2.0
//! Serial consoles and screens of virtual machines, as WebSockets at the API's address.
//!
//! `GET /v1/sandboxes/{id}/console` and `…/vnc`, upgraded, with the sandbox's access token: in
//! `X-Access-Token`, or, from a browser, as the subprotocol `opendsec.token.<token>` beside
//! `binary`. The control plane checks the token and names the monitor's Unix socket; bytes go
//! straight from there to the client in binary messages, unchanged: a console's as the guest
//! writes them, a screen's as RFB.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::BytesMut;
use futures_util::{SinkExt, StreamExt};
use http::header::{HeaderName, HeaderValue, SEC_WEBSOCKET_PROTOCOL};
use http::request::Parts;
use http::{HeaderMap, Method, Response, StatusCode};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use tokio_util::sync::CancellationToken;

use crate::body::EdgeBody;
use crate::context::RequestContext;
use crate::control::Refused;
use crate::errors::EdgeError;
use crate::headers::ACCESS_TOKEN_HEADER;
use crate::limits::{
    CONSOLE_CONNECT_TIMEOUT, CONSOLE_MESSAGE_BYTES_MAX, CONSOLE_STALL_TIMEOUT, UPGRADE_BUFFER_BYTES,
};
use crate::metrics::METRICS;
use crate::upgrade::Wish;

/// A subprotocol that carries the access token.
const TOKEN_PROTOCOL: &str = "opendsec.token.";
const VERSION: HeaderName = HeaderName::from_static("sec-websocket-version");

/// What a client wants to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The serial console. One client at a time.
    Console,
    /// The screen.
    Vnc,
}

impl Kind {
    /// As in paths.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Console => "console",
            Kind::Vnc => "vnc",
        }
    }
}

/// The sandbox and what of it a request asks for, if it asks for a console by WebSocket.
pub fn wanted(parts: &Parts, wish: Option<&Wish>) -> Option<(String, Kind)> {
    if parts.method != Method::GET || !wish?.is_websocket() {
        return None;
    }
    let path = parts.uri.path().strip_prefix("/v1/sandboxes/")?;
    let (id, kind) = path.split_once('/')?;
    let kind = match kind {
        "console" => Kind::Console,
        "vnc" => Kind::Vnc,
        _ => return None,
    };
    Some((id.to_owned(), kind))
}

/// The access token of a request, if there is exactly one.
pub fn token(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut values = headers.get_all(ACCESS_TOKEN_HEADER).iter();
    if let Some(value) = values.next() {
        return values.next().is_none().then(|| value.clone());
    }
    let mut tokens = protocols(headers).filter_map(|name| name.strip_prefix(TOKEN_PROTOCOL));
    let token = tokens.next()?;
    let alone = tokens.next().is_none();
    HeaderValue::from_str(token).ok().filter(|_| alone)
}

fn protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers
        .get_all(SEC_WEBSOCKET_PROTOCOL)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

/// The subprotocol to answer with: browsers want one if they have offered any. The token is only
/// sent back if nothing else was offered.
fn chosen_protocol(headers: &HeaderMap) -> Option<HeaderValue> {
    let plain = protocols(headers).find(|name| !name.starts_with(TOKEN_PROTOCOL));
    let chosen = plain.or_else(|| protocols(headers).next())?;
    HeaderValue::from_str(chosen).ok()
}

/// Answer a client and carry bytes both ways, until one end closes or `cut`.
///
/// # Errors
/// The request is no proper WebSocket handshake, the console is taken, or the monitor does not
/// take a connection.
pub async fn serve(
    parts: &Parts,
    wish: Wish,
    (id, kind): (String, Kind),
    socket: &Path,
    context: Arc<RequestContext>,
    cut: CancellationToken,
) -> Result<Response<EdgeBody>, EdgeError> {
    if parts.headers.get(VERSION).is_none_or(|v| v != "13") {
        return Err(EdgeError::Request {
            status: StatusCode::BAD_REQUEST,
            message: "Sec-WebSocket-Version must be 13".to_owned(),
        });
    }
    let guard = Claim::new(id, kind)?;
    let machine = match timeout(CONSOLE_CONNECT_TIMEOUT, UnixStream::connect(socket)).await {
        Ok(Ok(machine)) => machine,
        Ok(Err(error)) => return Err(unreachable(error.to_string())),
        Err(_) => return Err(unreachable("connecting timed out".to_owned())),
    };
    let (response, client) = wish
        .accept(&parts.headers, chosen_protocol(&parts.headers))
        .ok_or_else(|| EdgeError::Request {
            status: StatusCode::BAD_REQUEST,
            message: "Sec-WebSocket-Key is missing".to_owned(),
        })?;
    context.answered(response.status().as_u16());
    tokio::spawn(async move {
        let _guard = guard;
        tokio::select! {
            () = carry(client, machine, &context) => {}
            () = cut.cancelled() => context.reset_client(),
        }
    });
    Ok(response)
}

fn unreachable(why: String) -> EdgeError {
    EdgeError::Console(Box::new(Refused {
        status: StatusCode::BAD_GATEWAY,
        code: "console_unavailable".to_owned(),
        message: format!("The machine monitor does not serve it: {why}"),
        retryable: true,
    }))
}

/// Open consoles. The monitor serves one client at a time, and others would wait without a word.
static OPEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn open_consoles() -> MutexGuard<'static, BTreeSet<String>> {
    // Every change is a single call.
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Claim(Option<String>);

impl Claim {
    fn new(id: String, kind: Kind) -> Result<Self, EdgeError> {
        if kind == Kind::Vnc {
            return Ok(Claim(None));
        }
        if !open_consoles().insert(id.clone()) {
            return Err(EdgeError::Console(Box::new(Refused {
                status: StatusCode::CONFLICT,
                code: "console_in_use".to_owned(),
                message: "Somebody else has the console open".to_owned(),
                retryable: true,
            })));
        }
        Ok(Claim(Some(id)))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(id) = &self.0 {
            open_consoles().remove(id);
        }
    }
}

async fn carry(client: OnUpgrade, machine: UnixStream, context: &RequestContext) {
    // An error means that the client left during the switch.
    let Ok(client) = client.await else { return };
    METRICS.upgraded_connections.add(1);
    let mut config = WebSocketConfig::default();
    config.max_message_size = Some(CONSOLE_MESSAGE_BYTES_MAX);
    config.max_frame_size = Some(CONSOLE_MESSAGE_BYTES_MAX);
    let client = TokioIo::new(client);
    let socket = WebSocketStream::from_raw_socket(client, Role::Server, Some(config)).await;
    let (mut sink, mut stream) = socket.split();
    let (mut from_machine, mut to_machine) = machine.into_split();
    let inward = async {
        while let Some(Ok(message)) = stream.next().await {
            let data = match message {
                Message::Binary(data) => data,
                Message::Text(text) => text.into(),
                Message::Close(_) => return,
                _ => continue,
            };
            context.add_in(data.len());
            if to_machine.write_all(&data).await.is_err() {
                return;
            }
        }
    };
    let outward = async {
        let mut buffer = BytesMut::new();
        loop {
            buffer.reserve(UPGRADE_BUFFER_BYTES);
            match from_machine.read_buf(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => context.add_out(count),
            }
            // A guest waits for its console; it must not wait for a client that reads nothing.
            let sent = sink.send(Message::Binary(buffer.split().freeze()));
            if !matches!(timeout(CONSOLE_STALL_TIMEOUT, sent).await, Ok(Ok(()))) {
                return;
            }
        }
    };
    tokio::select! {
        () = inward => {}
        () = outward => {}
    }
    // A proper end, if the client still listens.
    drop(timeout(CONSOLE_CONNECT_TIMEOUT, sink.close()).await);
    METRICS.upgraded_connections.sub(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().expect("value")));
        pairs.collect()
    }

    #[test]
    fn tokens() {
        let plain = headers(&[("x-access-token", "t")]);
        assert_eq!(token(&plain).expect("token"), "t");
        let browser = headers(&[("sec-websocket-protocol", "binary, opendsec.token.abc")]);
        assert_eq!(token(&browser).expect("token"), "abc");
        assert_eq!(chosen_protocol(&browser).expect("protocol"), "binary");
        let two = headers(&[(
            "sec-websocket-protocol",
            "opendsec.token.a, opendsec.token.b",
        )]);
        assert_eq!(token(&two), None);
        assert_eq!(token(&headers(&[])), None);
        assert_eq!(chosen_protocol(&headers(&[])), None);
    }

    #[test]
    fn a_console_is_claimed_once_and_given_back() {
        let first = Claim::new("i1".to_owned(), Kind::Console).expect("free");
        assert!(Claim::new("i1".to_owned(), Kind::Console).is_err());
        assert!(Claim::new("i1".to_owned(), Kind::Vnc).is_ok());
        drop(first);
        assert!(Claim::new("i1".to_owned(), Kind::Console).is_ok());
    }
}

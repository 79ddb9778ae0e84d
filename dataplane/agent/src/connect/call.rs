// SPDX-License-Identifier: Apache-2.0
//! The HTTP side of calls: what a request must look like, reading its message, answering it.

use std::future::Future;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{ALLOW, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, Request, StatusCode};
use serde::de::DeserializeOwned;
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::error::{Code, RpcError};
use super::frame::{Decoder, Frame, HEAD_BYTES};
use crate::agent::Agent;
use crate::http::body::{Reply, json, status_only};
use crate::limits::MESSAGE_BYTES_MAX;

/// Content type of unary calls.
pub const UNARY_TYPE: &str = "application/json";
/// Content type of streams.
pub const STREAM_TYPE: &str = "application/connect+json";
const TIMEOUT_HEADER: &str = "connect-timeout-ms";
const KEEPALIVE_HEADER: &str = "keepalive-ping-interval";
/// The protocol allows ten digits.
const TIMEOUT_MS_MAX: u64 = 9_999_999_999;

/// Whether a call has one message each way or streams.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One message each way, plain JSON bodies.
    Unary,
    /// Framed messages.
    Stream,
}

/// Checks method and content type; `Some` is the refusal.
pub fn refuse<B>(request: &Request<B>, shape: Shape) -> Option<Reply> {
    if request.method() != Method::POST {
        let mut reply = status_only(StatusCode::METHOD_NOT_ALLOWED);
        reply
            .headers_mut()
            .insert(ALLOW, HeaderValue::from_static("POST"));
        return Some(reply);
    }
    let wanted = match shape {
        Shape::Unary => UNARY_TYPE,
        Shape::Stream => STREAM_TYPE,
    };
    let given = request
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or("");
    let media = given.split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case(wanted) {
        return None;
    }
    let message = format!(
        "content type '{given}' is not supported: this call takes '{wanted}' (JSON codec only)"
    );
    let body = serde_json::json!({"code": "unknown", "message": message}).to_string();
    let mut reply = json(StatusCode::UNSUPPORTED_MEDIA_TYPE, body);
    reply
        .headers_mut()
        .insert("accept-post", HeaderValue::from_static(wanted));
    Some(reply)
}

/// The time that the caller gives, if any. Zero means none.
///
/// Errors: `invalid_argument` if it is no number of the allowed length.
pub fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, RpcError> {
    let Some(value) = headers.get(TIMEOUT_HEADER) else {
        return Ok(None);
    };
    let text = value.to_str().unwrap_or_default().trim();
    match text.parse::<u64>() {
        Ok(0) => Ok(None),
        Ok(ms) if ms <= TIMEOUT_MS_MAX => Ok(Some(Duration::from_millis(ms))),
        _ => Err(RpcError::invalid(
            "Connect-Timeout-Ms must be a positive number of ≤ 10 digits",
        )),
    }
}

/// The time between keepalive events that the caller wants.
pub fn keepalive(headers: &HeaderMap) -> Duration {
    let seconds = headers
        .get(KEEPALIVE_HEADER)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.trim().parse::<u32>().ok())
        .filter(|seconds| *seconds > 0);
    seconds.map_or(crate::limits::KEEPALIVE_DEFAULT, |s| {
        Duration::from_secs(u64::from(s))
    })
}

/// Reads a JSON message.
///
/// Errors: `invalid_argument`. An empty message means all defaults.
pub fn parse<T: DeserializeOwned>(message: &[u8]) -> Result<T, RpcError> {
    let message = if message.trim_ascii().is_empty() {
        b"{}"
    } else {
        message
    };
    serde_json::from_slice(message)
        .map_err(|err| RpcError::invalid(format!("cannot read the message: {err}")))
}

/// Reads a request body piece by piece, within the limits per body and for all bodies.
struct BoundedBody<'a> {
    agent: &'a Agent,
    body: Incoming,
    total_bytes: usize,
    permits: Option<SemaphorePermit<'a>>,
}

impl<'a> BoundedBody<'a> {
    fn new(agent: &'a Agent, body: Incoming) -> Self {
        Self {
            agent,
            body,
            total_bytes: 0,
            permits: None,
        }
    }

    async fn next(&mut self) -> Result<Option<Bytes>, RpcError> {
        // What is announced too large is refused unread, while the client can still hear it.
        let announced = usize::try_from(self.body.size_hint().lower()).unwrap_or(usize::MAX);
        Self::within_limit(self.total_bytes.saturating_add(announced))?;
        loop {
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            let frame = frame.map_err(|err| RpcError::invalid(format!("request body: {err}")))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            self.account(data.len())?;
            return Ok(Some(data));
        }
    }

    fn within_limit(bytes: usize) -> Result<(), RpcError> {
        if bytes > MESSAGE_BYTES_MAX + HEAD_BYTES {
            return Err(RpcError::exhausted(format!(
                "request body is over the limit of {MESSAGE_BYTES_MAX} bytes"
            )));
        }
        Ok(())
    }

    fn account(&mut self, bytes: usize) -> Result<(), RpcError> {
        self.total_bytes += bytes;
        Self::within_limit(self.total_bytes)?;
        let count = u32::try_from(bytes).unwrap_or(u32::MAX);
        let more = self
            .agent
            .body_budget
            .try_acquire_many(count)
            .map_err(|_| RpcError::exhausted("too many large requests at once, try again later"))?;
        match &mut self.permits {
            Some(permits) => permits.merge(more),
            None => self.permits = Some(more),
        }
        Ok(())
    }
}

/// Reads a whole body into memory.
///
/// Errors: `resource_exhausted` over a limit, `invalid_argument` if the body breaks off.
pub async fn read_whole(agent: &Agent, body: Incoming) -> Result<Bytes, RpcError> {
    let mut body = BoundedBody::new(agent, body);
    let mut collected = BytesMut::new();
    while let Some(piece) = body.next().await? {
        collected.extend_from_slice(&piece);
    }
    Ok(collected.freeze())
}

/// Reads the one message of a server stream's request.
///
/// Errors: as `read_whole`, and those of the frame decoder.
pub async fn stream_message<T: DeserializeOwned>(
    agent: &Agent,
    body: Incoming,
) -> Result<T, RpcError> {
    let mut body = BoundedBody::new(agent, body);
    let mut decoder = Decoder::default();
    while let Some(piece) = body.next().await? {
        decoder.push(&piece);
        match decoder.next_frame()? {
            Some(Frame::Message(message)) => return parse(&message),
            Some(Frame::End) => break,
            None => {}
        }
    }
    Err(RpcError::invalid("the stream holds no whole message"))
}

/// Serves a unary call: reads, runs, answers; ends with `deadline_exceeded` when the caller's
/// time is over.
pub async fn unary<T, F, Fut>(agent: &Agent, request: Request<Incoming>, run: F) -> Reply
where
    T: DeserializeOwned,
    F: FnOnce(HeaderMap, T) -> Fut,
    Fut: Future<Output = Result<String, RpcError>>,
{
    if let Some(refusal) = refuse(&request, Shape::Unary) {
        return refusal;
    }
    let (head, body) = request.into_parts();
    let work = async {
        if let Some(encoding) = head.headers.get(CONTENT_ENCODING)
            && !encoding.as_bytes().eq_ignore_ascii_case(b"identity")
        {
            let what = "compressed requests are not supported, send identity";
            return Err(RpcError::new(Code::Unimplemented, what));
        }
        let message = parse(&read_whole(agent, body).await?)?;
        run(head.headers.clone(), message).await
    };
    let outcome = match timeout(&head.headers) {
        Err(err) => Err(err),
        Ok(None) => work.await,
        Ok(Some(limit)) => timeout_at(Instant::now() + limit, work)
            .await
            .unwrap_or_else(|_| {
                Err(RpcError::new(
                    Code::DeadlineExceeded,
                    "the time given for the call is over",
                ))
            }),
    };
    match outcome {
        Ok(message) => json(StatusCode::OK, message),
        Err(err) => json(err.code.http_status(), err.to_json().to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_static(value));
        headers
    }

    #[test]
    fn timeouts() {
        assert_eq!(timeout(&HeaderMap::new()).unwrap(), None);
        assert_eq!(timeout(&headers(TIMEOUT_HEADER, "0")).unwrap(), None);
        let ms = timeout(&headers(TIMEOUT_HEADER, "1500")).unwrap();
        assert_eq!(ms, Some(Duration::from_millis(1500)));
        for bad in ["-1", "x", "99999999999"] {
            assert!(timeout(&headers(TIMEOUT_HEADER, bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn keepalives() {
        assert_eq!(
            keepalive(&headers(KEEPALIVE_HEADER, "50")),
            Duration::from_secs(50)
        );
        assert_eq!(
            keepalive(&headers(KEEPALIVE_HEADER, "0")),
            crate::limits::KEEPALIVE_DEFAULT
        );
        assert_eq!(
            keepalive(&headers(KEEPALIVE_HEADER, "x")),
            crate::limits::KEEPALIVE_DEFAULT
        );
    }

    #[test]
    fn other_codecs_are_refused_clearly() {
        let request = |kind: &str| {
            Request::post("/x")
                .header(CONTENT_TYPE, kind)
                .body(())
                .unwrap()
        };
        assert!(refuse(&request("application/json; charset=utf-8"), Shape::Unary).is_none());
        assert!(refuse(&request("application/connect+json"), Shape::Stream).is_none());
        let refusal = refuse(&request("application/proto"), Shape::Unary).unwrap();
        assert_eq!(refusal.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
        assert!(refuse(&request("application/connect+proto"), Shape::Stream).is_some());
        let get = Request::get("/x").body(()).unwrap();
        assert_eq!(
            refuse(&get, Shape::Unary).unwrap().status(),
            StatusCode::METHOD_NOT_ALLOWED
        );
    }
}

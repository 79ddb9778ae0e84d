// SPDX-License-Identifier: Apache-2.0
//! Answers that the edge gives itself, to the byte as E2B's clients expect them.

use bytes::Bytes;
use http::header::{
    ACCEPT, ACCESS_CONTROL_ALLOW_ORIGIN, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue,
    RETRY_AFTER,
};
use http::{HeaderMap, Method, Response, StatusCode};
use serde::Serialize;

use crate::control::ResumeRefusal;
use crate::headers::{REQUEST_ID_HEADER, TRAFFIC_TOKEN_HEADER};

/// Read by E2B's Python SDK: whether a call may be repeated.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

/// A refusal or failure that the edge answers itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EdgeError {
    /// 502: no such sandbox, or it does not run.
    SandboxNotFound { id: String },
    /// 502: nothing listens there, or the agent cannot be reached.
    PortNotOpen { id: String, port: u16 },
    /// 502: the connection broke before the answer began.
    SandboxNoAnswer { id: String, port: u16 },
    /// 502: it switched to a protocol that nobody asked for.
    SandboxBadAnswer { id: String, port: u16 },
    /// 409: it starts, pauses or resumes, and takes long.
    SandboxTransition { id: String },
    /// As the control plane says: it is paused and could not be resumed.
    ResumeRefused {
        id: String,
        refusal: Box<ResumeRefusal>,
    },
    /// As the control plane says: its console or screen is not for this caller, or not there.
    Console(Box<ResumeRefusal>),
    /// 401: it is paused, and the token for its agent is missing or wrong.
    AccessTokenInvalid,
    /// 403: the port is not public and the token is missing.
    TrafficTokenMissing { id: String },
    /// 403: the port is not public and the token is wrong.
    TrafficTokenInvalid { id: String },
    /// 429: too many connections to one sandbox.
    SandboxBusy { id: String, limit: usize },
    /// 404: a path of the agent that is not for clients.
    InternalPath { path: String },
    /// 401: no sandbox's token made this signature.
    InvalidSignature,
    /// 503: the control plane does not answer, or says that it cannot now.
    ControlUnavailable { message: String },
    /// 502: the API took the request and then broke off. It may have acted on it.
    ApiNoAnswer { may_repeat: bool },
    /// 503: the edge has no descriptors left for another connection.
    Overloaded,
    /// 400, 405, 417, 501: the request itself.
    Request { status: StatusCode, message: String },
}

/// What the client can read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Audience<'a> {
    /// A person looks at it: answer a page.
    pub html: bool,
    /// The native API's error shape.
    pub native: bool,
    /// The request's id.
    pub request_id: Option<&'a HeaderValue>,
}

impl<'a> Audience<'a> {
    /// Tell the audience from a request's head.
    pub fn of(
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        request_id: &'a HeaderValue,
    ) -> Self {
        Audience {
            html: wants_html(method, headers),
            native: path.starts_with("/v1/"),
            request_id: Some(request_id),
        }
    }
}

/// A navigation of a browser: it accepts HTML, and no script made the request.
fn wants_html(method: &Method, headers: &HeaderMap) -> bool {
    let accepts = headers.get_all(ACCEPT).iter().any(|value| {
        value.as_bytes().split(|&byte| byte == b',').any(|item| {
            let kind = item.split(|&byte| byte == b';').next().unwrap_or_default();
            kind.trim_ascii().eq_ignore_ascii_case(b"text/html")
        })
    });
    let by_script = headers
        .get("sec-fetch-mode")
        .is_some_and(|mode| mode != "navigate")
        || headers.contains_key("x-requested-with");
    accepts && !by_script && (method == Method::GET || method == Method::HEAD)
}

// Field order is the order in the JSON text; clients match on it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SandboxBody<'a> {
    // Not known of a signed URL whose sandbox could not be resumed.
    #[serde(skip_serializing_if = "str::is_empty")]
    sandbox_id: &'a str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    connection_limit: Option<usize>,
    #[serde(rename = "error_code", skip_serializing_if = "Option::is_none")]
    error_code: Option<&'a str>,
}

#[derive(Serialize)]
struct PlainBody<'a> {
    code: u16,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error_code: Option<&'a str>,
}

#[derive(Serialize)]
struct NativeBody<'a> {
    error: NativeError<'a>,
}

#[derive(Serialize)]
struct NativeError<'a> {
    code: &'a str,
    message: &'a str,
    remediation: &'a str,
    retryable: bool,
    fault: &'a str,
    details: serde_json::Map<String, serde_json::Value>,
    request_id: &'a str,
}

impl EdgeError {
    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            EdgeError::SandboxNotFound { .. }
            | EdgeError::PortNotOpen { .. }
            | EdgeError::SandboxNoAnswer { .. }
            | EdgeError::SandboxBadAnswer { .. }
            | EdgeError::ApiNoAnswer { .. } => StatusCode::BAD_GATEWAY,
            EdgeError::SandboxTransition { .. } => StatusCode::CONFLICT,
            EdgeError::ResumeRefused { refusal, .. } | EdgeError::Console(refusal) => {
                refusal.status
            }
            EdgeError::TrafficTokenMissing { .. } | EdgeError::TrafficTokenInvalid { .. } => {
                StatusCode::FORBIDDEN
            }
            EdgeError::SandboxBusy { .. } => StatusCode::TOO_MANY_REQUESTS,
            EdgeError::InternalPath { .. } => StatusCode::NOT_FOUND,
            EdgeError::InvalidSignature | EdgeError::AccessTokenInvalid => StatusCode::UNAUTHORIZED,
            EdgeError::ControlUnavailable { .. } | EdgeError::Overloaded => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            EdgeError::Request { status, .. } => *status,
        }
    }

    /// Short name for logs and the native API.
    pub fn code(&self) -> &str {
        match self {
            EdgeError::SandboxNotFound { .. } => "sandbox_not_found",
            EdgeError::PortNotOpen { .. } => "port_not_open",
            EdgeError::SandboxNoAnswer { .. } => "sandbox_no_answer",
            EdgeError::SandboxBadAnswer { .. } => "sandbox_bad_answer",
            EdgeError::SandboxTransition { .. } => "sandbox_state_conflict",
            EdgeError::ResumeRefused { refusal, .. } | EdgeError::Console(refusal) => &refusal.code,
            EdgeError::AccessTokenInvalid => "access_token_invalid",
            EdgeError::TrafficTokenMissing { .. } => "traffic_token_missing",
            EdgeError::TrafficTokenInvalid { .. } => "traffic_token_invalid",
            EdgeError::SandboxBusy { .. } => "sandbox_connection_limit",
            EdgeError::InternalPath { .. } => "not_found",
            EdgeError::InvalidSignature => "invalid_signature",
            EdgeError::ControlUnavailable { .. } => "control_plane_unavailable",
            EdgeError::ApiNoAnswer { .. } => "api_no_answer",
            EdgeError::Overloaded => "edge_overloaded",
            EdgeError::Request { .. } => "invalid_request",
        }
    }

    /// The sentence for people.
    pub fn message(&self) -> String {
        let header = TRAFFIC_TOKEN_HEADER;
        match self {
            EdgeError::SandboxNotFound { .. } => "The sandbox was not found".to_owned(),
            EdgeError::PortNotOpen { .. } => "The sandbox is running but port is not open".to_owned(),
            EdgeError::SandboxNoAnswer { .. } => {
                "The sandbox closed the connection before it answered".to_owned()
            }
            EdgeError::SandboxBadAnswer { .. } => {
                "The sandbox switched to a protocol that the request did not ask for".to_owned()
            }
            // E2B's words.
            EdgeError::SandboxTransition { .. } => {
                "The sandbox is still transitioning. Try again in a moment.".to_owned()
            }
            EdgeError::ResumeRefused { refusal, .. } => {
                format!("The sandbox is paused and could not be resumed: {}", refusal.message)
            }
            EdgeError::Console(refusal) => refusal.message.clone(),
            EdgeError::AccessTokenInvalid => {
                "The sandbox is paused, and the request has no access token that may resume it"
                    .to_owned()
            }
            EdgeError::TrafficTokenMissing { .. } => format!(
                "Sandbox is secured with traffic access token. Token header '{header}' is missing"
            ),
            EdgeError::TrafficTokenInvalid { .. } => format!(
                "Sandbox is secured with traffic access token. Provided token in header '{header}' is invalid"
            ),
            EdgeError::SandboxBusy { limit, .. } => {
                format!("The sandbox has too many open connections (limit: {limit})")
            }
            EdgeError::InternalPath { .. } => {
                "This path is reserved for the platform and cannot be called from outside".to_owned()
            }
            EdgeError::InvalidSignature => "invalid signature".to_owned(),
            EdgeError::ControlUnavailable { message } => message.clone(),
            EdgeError::ApiNoAnswer { .. } => {
                "The API closed the connection before it answered; the request may have taken effect".to_owned()
            }
            EdgeError::Overloaded => "The edge has no room for another connection".to_owned(),
            EdgeError::Request { message, .. } => message.clone(),
        }
    }

    fn remediation(&self) -> &'static str {
        match self {
            EdgeError::ControlUnavailable { .. }
            | EdgeError::Overloaded
            | EdgeError::SandboxTransition { .. } => "Retry after a moment.",
            EdgeError::ApiNoAnswer { may_repeat: true } => "Retry.",
            EdgeError::ApiNoAnswer { may_repeat: false } => {
                "Look whether the request took effect before you repeat it, or use an idempotency key."
            }
            _ => "Correct the request and send it again.",
        }
    }

    fn retryable(&self) -> bool {
        match self {
            EdgeError::ControlUnavailable { .. }
            | EdgeError::Overloaded
            | EdgeError::SandboxTransition { .. }
            | EdgeError::ApiNoAnswer { may_repeat: true } => true,
            EdgeError::ResumeRefused { refusal, .. } | EdgeError::Console(refusal) => {
                refusal.retryable
            }
            _ => false,
        }
    }

    /// Our fault, not the client's or the sandbox's: worth a log line always.
    pub fn is_ours(&self) -> bool {
        matches!(
            self,
            EdgeError::ControlUnavailable { .. }
                | EdgeError::Overloaded
                | EdgeError::ResumeRefused { .. }
                | EdgeError::ApiNoAnswer { .. }
        )
    }

    fn json(&self, audience: Audience<'_>) -> Vec<u8> {
        let code = self.status().as_u16();
        let message = self.message();
        let sandbox = |id, port, connection_limit| {
            serde_json::to_vec(&SandboxBody {
                sandbox_id: id,
                message: &message,
                port,
                code,
                connection_limit,
                error_code: match self {
                    EdgeError::SandboxTransition { .. } | EdgeError::ResumeRefused { .. } => {
                        Some(self.code())
                    }
                    _ => None,
                },
            })
        };
        let body = match self {
            EdgeError::SandboxNotFound { id }
            | EdgeError::SandboxTransition { id }
            | EdgeError::ResumeRefused { id, .. }
            | EdgeError::TrafficTokenMissing { id }
            | EdgeError::TrafficTokenInvalid { id } => sandbox(id, None, None),
            EdgeError::PortNotOpen { id, port }
            | EdgeError::SandboxNoAnswer { id, port }
            | EdgeError::SandboxBadAnswer { id, port } => sandbox(id, Some(*port), None),
            EdgeError::SandboxBusy { id, limit } => sandbox(id, None, Some(*limit)),
            _ if audience.native => serde_json::to_vec(&NativeBody {
                error: self.native(&message, audience),
            }),
            EdgeError::ControlUnavailable { .. }
            | EdgeError::ApiNoAnswer { .. }
            | EdgeError::Overloaded => serde_json::to_vec(&PlainBody {
                code,
                message: &message,
                error_code: Some(self.code()),
            }),
            _ => serde_json::to_vec(&PlainBody {
                code,
                message: &message,
                error_code: None,
            }),
        };
        // Strings and numbers always serialise.
        body.unwrap_or_default()
    }

    fn native<'a>(&'a self, message: &'a str, audience: Audience<'a>) -> NativeError<'a> {
        NativeError {
            code: self.code(),
            message,
            remediation: self.remediation(),
            retryable: self.retryable(),
            fault: if self.is_ours() { "platform" } else { "user" },
            details: serde_json::Map::new(),
            request_id: audience
                .request_id
                .and_then(|id| id.to_str().ok())
                .unwrap_or_default(),
        }
    }

    /// The answer.
    pub fn response(&self, audience: Audience<'_>) -> Response<Bytes> {
        let (kind, body) = if audience.html {
            ("text/html; charset=utf-8", page(self).into_bytes())
        } else {
            ("application/json; charset=utf-8", self.json(audience))
        };
        let mut response = Response::new(Bytes::from(body));
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // Scripts on other origins must be able to read why a call failed, as with the agent's answers.
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        if let Some(id) = audience.request_id {
            headers.insert(REQUEST_ID_HEADER, id.clone());
        }
        if self.retryable() {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if matches!(self, EdgeError::ApiNoAnswer { may_repeat: false }) {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        response
    }
}

fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\'', "&#39;")
}

fn page(error: &EdgeError) -> String {
    let status = error.status();
    let detail = match error {
        EdgeError::SandboxNotFound { id } => format!(
            "There is no running sandbox <code>{}</code>. It may have ended or reached its time limit.",
            escape_html(id)
        ),
        EdgeError::PortNotOpen { id, port } => format!(
            "The sandbox <code>{}</code> runs, but no program in it listens on port <code>{port}</code>. \
             Start the program and load this page again.",
            escape_html(id)
        ),
        EdgeError::TrafficTokenMissing { .. } | EdgeError::TrafficTokenInvalid { .. } => format!(
            "The ports of this sandbox are not public. Send its token in the header <code>{TRAFFIC_TOKEN_HEADER}</code>."
        ),
        _ => "Load the page again in a moment.".to_owned(),
    };
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{code} {message}</title>\
         <style>body{{font:16px/1.5 system-ui,sans-serif;max-width:38rem;margin:15vh auto;padding:0 1rem}}\
         code{{background:#8882;padding:.1em .3em;border-radius:.2em}}</style></head>\
         <body><h1>{message}</h1><p>{detail}</p><p><small>{status}</small></p></body></html>\n",
        code = status.as_u16(),
        message = escape_html(&error.message()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(error: &EdgeError) -> String {
        String::from_utf8(error.response(Audience::default()).into_body().to_vec()).expect("UTF-8")
    }

    #[test]
    fn bodies_to_the_byte() {
        let id = || "iabc".to_owned();
        assert_eq!(
            text(&EdgeError::SandboxNotFound { id: id() }),
            r#"{"sandboxId":"iabc","message":"The sandbox was not found","code":502}"#
        );
        assert_eq!(
            text(&EdgeError::PortNotOpen {
                id: id(),
                port: 8000
            }),
            r#"{"sandboxId":"iabc","message":"The sandbox is running but port is not open","port":8000,"code":502}"#
        );
        assert!(
            text(&EdgeError::TrafficTokenMissing { id: id() })
                .starts_with(r#"{"sandboxId":"iabc","message":""#)
        );
        assert!(text(&EdgeError::TrafficTokenInvalid { id: id() }).ends_with(r#"","code":403}"#));
        let control = EdgeError::ControlUnavailable {
            message: "m".to_owned(),
        };
        assert_eq!(
            text(&control),
            r#"{"code":503,"message":"m","error_code":"control_plane_unavailable"}"#
        );
        assert_eq!(
            control.response(Audience::default()).headers()["retry-after"],
            "1"
        );
    }

    #[test]
    fn the_native_api_gets_its_own_shape() {
        let id = HeaderValue::from_static("r1");
        let audience = Audience {
            native: true,
            request_id: Some(&id),
            ..Audience::default()
        };
        let error = EdgeError::ControlUnavailable {
            message: "m".to_owned(),
        };
        let value: serde_json::Value = serde_json::from_slice(&error.json(audience)).expect("JSON");
        assert_eq!(value["error"]["code"], "control_plane_unavailable");
        assert_eq!(value["error"]["fault"], "platform");
        assert_eq!(value["error"]["request_id"], "r1");
    }

    #[test]
    fn pages_only_for_navigation() {
        let headers = |pairs: &[(&'static str, &'static str)]| {
            pairs
                .iter()
                .map(|&(name, value)| {
                    (
                        HeaderName::from_static(name),
                        HeaderValue::from_static(value),
                    )
                })
                .collect::<HeaderMap>()
        };
        let browser = headers(&[("accept", "text/html,application/xhtml+xml,*/*;q=0.8")]);
        assert!(wants_html(&Method::GET, &browser));
        assert!(!wants_html(&Method::POST, &browser));
        assert!(!wants_html(&Method::GET, &headers(&[("accept", "*/*")])));
        assert!(!wants_html(
            &Method::GET,
            &headers(&[("accept", "text/html"), ("sec-fetch-mode", "cors")])
        ));
        let id = "<script>".to_owned();
        let response = EdgeError::SandboxNotFound { id }.response(Audience {
            html: true,
            ..Audience::default()
        });
        assert!(!String::from_utf8_lossy(response.body()).contains("<script>"));
        assert_eq!(
            response.headers()["content-type"],
            "text/html; charset=utf-8"
        );
    }
}

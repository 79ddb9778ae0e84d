// SPDX-License-Identifier: Apache-2.0
//! Cross-origin rules: a sandbox is opened by its token, not by where the page came from, so every
//! origin may call.

use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderMap, HeaderValue,
};
use hyper::{Method, StatusCode};

use super::body::{Reply, status_only};

const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE");
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "Location, Cache-Control, X-Content-Type-Options, Content-Disposition, Content-Encoding, \
     Content-Range, ETag, Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin",
);
/// Two hours, the longest that browsers keep a preflight answer.
const MAX_AGE_S: HeaderValue = HeaderValue::from_static("7200");

/// The answer to a preflight request, or `None` if the request is none.
pub fn preflight(method: &Method, headers: &HeaderMap) -> Option<Reply> {
    if method != Method::OPTIONS || !headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD) {
        return None;
    }
    let mut reply = status_only(StatusCode::NO_CONTENT);
    let out = reply.headers_mut();
    out.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    out.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE_S);
    let wanted = headers.get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    out.insert(
        ACCESS_CONTROL_ALLOW_HEADERS,
        wanted.unwrap_or_else(|| HeaderValue::from_static("*")),
    );
    Some(reply)
}

/// Opens an answer to every origin.
pub fn open(reply: &mut Reply) {
    let headers = reply.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
}

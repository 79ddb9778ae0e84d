// SPDX-License-Identifier: Apache-2.0
//! Checks of request heads, and the headers that a hop changes.

use std::net::IpAddr;

use http::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST, HeaderName, HeaderValue, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::{HeaderMap, Method, Uri, Version};

use crate::limits::REQUEST_ID_BYTES_MAX;

/// Header with the token between edge and agent. From outside it is always removed.
pub const CONTROL_HEADER: HeaderName = HeaderName::from_static("x-opendsec-control");
/// Header with the token for ports that are not public.
pub const TRAFFIC_TOKEN_HEADER: HeaderName = HeaderName::from_static("e2b-traffic-access-token");
/// Header with the token for the agent.
pub const ACCESS_TOKEN_HEADER: HeaderName = HeaderName::from_static("x-access-token");
/// Header with the request's id.
pub const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// What is known about the client's side of a request.
#[derive(Clone, Copy, Debug)]
pub struct Inbound<'a> {
    /// The client's address.
    pub peer: IpAddr,
    /// Whether the client spoke TLS.
    pub tls: bool,
    /// The authority that the client addressed.
    pub authority: &'a str,
    /// Whether forwarding headers of the client are believed.
    pub trust_forwarded: bool,
}

/// Why a head is refused although it could be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadFault {
    /// 400 with a reason.
    Malformed(&'static str),
    /// 417: an expectation other than `100-continue`.
    Expectation,
    /// 501: a transfer coding other than `chunked`.
    TransferCoding,
}

/// Refuse heads that two parsers could read in two ways (RFC 9112 sections 6.1 and 11.2).
///
/// The parser has already refused folded lines, NUL, spaces before colons, contradicting lengths
/// and transfer codings that do not end in `chunked`.
///
/// # Errors
/// See [`HeadFault`].
pub fn check_head(parts: &Parts) -> Result<(), HeadFault> {
    if let Some(value) = single(
        &parts.headers,
        &TRANSFER_ENCODING,
        "repeated Transfer-Encoding",
    )? {
        if !value.as_bytes().eq_ignore_ascii_case(b"chunked") {
            return Err(HeadFault::TransferCoding);
        }
        if parts.headers.contains_key(CONTENT_LENGTH) {
            return Err(HeadFault::Malformed(
                "Content-Length beside Transfer-Encoding",
            ));
        }
    }
    if let Some(value) = single(&parts.headers, &EXPECT, "repeated Expect")?
        && !value.as_bytes().eq_ignore_ascii_case(b"100-continue")
    {
        return Err(HeadFault::Expectation);
    }
    single(&parts.headers, &CONTENT_LENGTH, "repeated Content-Length")?;
    Ok(())
}

fn single<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
    fault: &'static str,
) -> Result<Option<&'a HeaderValue>, HeadFault> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        Err(HeadFault::Malformed(fault))
    } else {
        Ok(first)
    }
}

/// The protocol that an HTTP/1.1 request wants to switch to. `h2c` is not offered (RFC 9113
/// section 3.1), so it is no wish.
pub fn wanted_upgrade(parts: &Parts) -> Option<HeaderValue> {
    if parts.version != Version::HTTP_11 || !connection_has(&parts.headers, "upgrade") {
        return None;
    }
    let value = parts.headers.get(UPGRADE)?;
    let first = value
        .as_bytes()
        .split(|&byte| byte == b',')
        .next()
        .unwrap_or_default();
    (!first.trim_ascii().eq_ignore_ascii_case(b"h2c")).then(|| value.clone())
}

/// Whether a `Connection` header lists `option`.
pub fn connection_has(headers: &HeaderMap, option: &str) -> bool {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|&byte| byte == b','))
        .any(|item| item.trim_ascii().eq_ignore_ascii_case(option.as_bytes()))
}

/// Remove what concerns one connection only (RFC 9110 section 7.6.1), in either direction.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|&byte| byte == b','))
        .filter_map(|item| HeaderName::from_bytes(item.trim_ascii()).ok())
        .collect();
    for name in named {
        // Framing and routing are not the client's to remove by naming them here.
        if name != CONTENT_LENGTH && name != HOST && name != TE {
            headers.remove(name);
        }
    }
    for name in [
        CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        TRANSFER_ENCODING,
        UPGRADE,
        HTTP2_SETTINGS,
    ] {
        headers.remove(name);
    }
}

/// Turn a client's head into the one for the upstream: HTTP/1.1, origin form, hop-by-hop headers
/// gone, forwarding headers and request id set. `host` replaces the Host header if given.
///
/// No `Via` is added: common servers stop compressing for requests that carry one, and a program
/// in a sandbox shall see the request as if it were reached directly.
pub fn to_upstream(
    parts: &mut Parts,
    inbound: Inbound<'_>,
    host: Option<&HeaderValue>,
    request_id: &HeaderValue,
) {
    let wants_trailers = parts.headers.get_all(TE).iter().any(|value| {
        value
            .as_bytes()
            .split(|&byte| byte == b',')
            .any(|item| item.trim_ascii().eq_ignore_ascii_case(b"trailers"))
    });
    let headers = &mut parts.headers;
    strip_hop_by_hop(headers);
    for name in [TE, EXPECT, CONTROL_HEADER] {
        headers.remove(name);
    }
    if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    join_cookies(headers);
    set_forwarded(headers, inbound);
    headers.insert(REQUEST_ID_HEADER, request_id.clone());
    let own_host = HeaderValue::from_str(inbound.authority).ok();
    if let Some(value) = host.cloned().or(own_host) {
        headers.insert(HOST, value);
    }
    parts.uri = origin_form(&parts.method, &parts.uri);
    parts.version = Version::HTTP_11;
    parts.extensions = http::Extensions::new();
}

fn origin_form(method: &Method, uri: &Uri) -> Uri {
    let asterisk = *method == Method::OPTIONS && uri.path() == "*";
    let path = match uri.path_and_query() {
        Some(path) if asterisk || path.as_str().starts_with('/') => path.clone(),
        // An absolute target may have no path, only a query.
        Some(path) => format!("/{}", path.as_str())
            .parse()
            .unwrap_or_else(|_| http::uri::PathAndQuery::from_static("/")),
        None => http::uri::PathAndQuery::from_static("/"),
    };
    Uri::from(path)
}

/// HTTP/2 clients may split Cookie; HTTP/1.1 needs one line (RFC 9113 section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<&[u8]> = headers
        .get_all(COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if cookies.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

fn set_forwarded(headers: &mut HeaderMap, inbound: Inbound<'_>) {
    if !inbound.trust_forwarded {
        for name in [FORWARDED, FORWARDED_FOR, FORWARDED_PROTO, FORWARDED_HOST] {
            headers.remove(name);
        }
    }
    let peer = inbound.peer.to_canonical().to_string();
    let mut chain: Vec<u8> = headers
        .get_all(&FORWARDED_FOR)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect::<Vec<_>>()
        .join(&b", "[..]);
    if !chain.is_empty() {
        chain.extend_from_slice(b", ");
    }
    chain.extend_from_slice(peer.as_bytes());
    if let Ok(value) = HeaderValue::from_bytes(&chain) {
        headers.insert(FORWARDED_FOR, value);
    }
    if !headers.contains_key(&FORWARDED_PROTO) {
        let proto = if inbound.tls { "https" } else { "http" };
        headers.insert(FORWARDED_PROTO, HeaderValue::from_static(proto));
    }
    if !headers.contains_key(&FORWARDED_HOST)
        && let Ok(value) = HeaderValue::from_str(inbound.authority)
        && !value.is_empty()
    {
        headers.insert(FORWARDED_HOST, value);
    }
}

/// The client's request id, if it is one that logs can hold.
pub fn usable_request_id(headers: &HeaderMap) -> Option<HeaderValue> {
    let value = headers.get(REQUEST_ID_HEADER)?;
    let sane = (1..=REQUEST_ID_BYTES_MAX).contains(&value.len())
        && value
            .as_bytes()
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._:-".contains(byte));
    sane.then(|| value.clone())
}

/// Whether the path, in any spelling that a server might fold, is one of the agent's internal ones.
pub fn is_internal_path(path: &str) -> bool {
    const INTERNAL: [&str; 7] = [
        "init", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw", "upgrade",
    ];
    let mut decoded = path.as_bytes().to_vec();
    // Decoding again and again is how a lenient server may read `%2569nit`; three rounds show it.
    for _ in 0..3 {
        decoded = percent_encoding::percent_decode(&decoded).collect();
    }
    let text = String::from_utf8_lossy(&decoded).to_ascii_lowercase();
    let mut segments: Vec<&str> = Vec::new();
    for segment in text.split(['/', '\\']) {
        match segment.split(';').next().unwrap_or_default() {
            "" | "." => {}
            ".." => drop(segments.pop()),
            name => segments.push(name),
        }
    }
    match segments.as_slice() {
        ["opendsec", ..] => true,
        [only] => INTERNAL.contains(only),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn parts(headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri("http://a.test/x?y=1");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("request").into_parts().0
    }

    fn inbound(trust_forwarded: bool) -> Inbound<'static> {
        Inbound {
            peer: IpAddr::from([192, 0, 2, 7]),
            tls: true,
            authority: "a.test",
            trust_forwarded,
        }
    }

    fn sent(headers: &[(&str, &str)], trust: bool) -> Parts {
        let mut parts = parts(headers);
        to_upstream(
            &mut parts,
            inbound(trust),
            None,
            &HeaderValue::from_static("rid"),
        );
        parts
    }

    #[test]
    fn hop_by_hop_headers_go_and_named_ones_too() {
        let parts = sent(
            &[
                ("connection", "close, X-Private, content-length"),
                ("x-private", "1"),
                ("keep-alive", "5"),
                ("content-length", "3"),
                ("x-opendsec-control", "stolen"),
                ("expect", "100-continue"),
                ("x-kept", "1"),
            ],
            false,
        );
        for gone in [
            "connection",
            "x-private",
            "keep-alive",
            "x-opendsec-control",
            "expect",
        ] {
            assert!(!parts.headers.contains_key(gone), "{gone}");
        }
        assert_eq!(parts.headers["x-kept"], "1");
        assert_eq!(parts.headers["content-length"], "3");
        assert_eq!(parts.headers["host"], "a.test");
        assert_eq!(parts.uri, "/x?y=1");
    }

    #[test]
    fn forwarding_headers_are_ours_unless_trusted() {
        let given = [
            ("x-forwarded-for", "10.0.0.1"),
            ("x-forwarded-proto", "http"),
            ("forwarded", "for=x"),
        ];
        let ours = sent(&given, false);
        assert_eq!(ours.headers["x-forwarded-for"], "192.0.2.7");
        assert_eq!(ours.headers["x-forwarded-proto"], "https");
        assert_eq!(ours.headers["x-forwarded-host"], "a.test");
        assert!(!ours.headers.contains_key("forwarded"));
        let trusted = sent(&given, true);
        assert_eq!(trusted.headers["x-forwarded-for"], "10.0.0.1, 192.0.2.7");
        assert_eq!(trusted.headers["x-forwarded-proto"], "http");
    }

    #[test]
    fn naming_a_forwarding_header_does_not_remove_ours() {
        let parts = sent(&[("connection", "x-forwarded-for")], false);
        assert_eq!(parts.headers["x-forwarded-for"], "192.0.2.7");
    }

    #[test]
    fn trailers_and_cookies() {
        let parts = sent(
            &[
                ("te", "trailers, deflate"),
                ("cookie", "a=1"),
                ("cookie", "b=2"),
            ],
            false,
        );
        assert_eq!(parts.headers["te"], "trailers");
        assert_eq!(parts.headers["cookie"], "a=1; b=2");
    }

    #[test]
    fn ambiguous_heads_are_refused() {
        let check = |headers: &[(&str, &str)]| check_head(&parts(headers));
        assert_eq!(check(&[("transfer-encoding", "chunked")]), Ok(()));
        assert_eq!(
            check(&[("transfer-encoding", "gzip, chunked")]),
            Err(HeadFault::TransferCoding)
        );
        assert!(check(&[("transfer-encoding", "chunked"), ("content-length", "1")]).is_err());
        assert!(
            check(&[
                ("transfer-encoding", "chunked"),
                ("transfer-encoding", "chunked")
            ])
            .is_err()
        );
        assert!(check(&[("content-length", "1"), ("content-length", "1")]).is_err());
        assert_eq!(check(&[("expect", "200-ok")]), Err(HeadFault::Expectation));
        assert_eq!(check(&[("expect", "100-Continue")]), Ok(()));
    }

    #[test]
    fn upgrades() {
        let wish = |headers: &[(&str, &str)]| wanted_upgrade(&parts(headers));
        assert!(
            wish(&[
                ("connection", "keep-alive, Upgrade"),
                ("upgrade", "websocket")
            ])
            .is_some()
        );
        assert!(wish(&[("upgrade", "websocket")]).is_none());
        assert!(wish(&[("connection", "upgrade"), ("upgrade", "h2c")]).is_none());
    }

    #[test]
    fn request_ids() {
        let id = |value: &str| usable_request_id(&parts(&[("x-request-id", value)]).headers);
        assert!(id("abc-1.2_3:x").is_some());
        assert!(id("").is_none());
        assert!(id("a b").is_none());
        assert!(id(&"x".repeat(REQUEST_ID_BYTES_MAX + 1)).is_none());
    }

    #[test]
    fn internal_paths_in_every_spelling() {
        for path in [
            "/init",
            "//init",
            "/init/",
            "/./init",
            "/x/../init",
            "/%69nit",
            "/%2569nit",
            "/INIT",
            "/init;a=b",
            "/opendsec/tunnel",
            "/opendsec",
            "/%2fopendsec/status",
            "/freeze",
            "/fsthaw",
            "/\\init",
        ] {
            assert!(is_internal_path(path), "{path}");
        }
        for path in [
            "/",
            "/files",
            "/health",
            "/process.Process/Start",
            "/init/x",
            "/x/init",
            "/opendsecx",
        ] {
            assert!(!is_internal_path(path), "{path}");
        }
    }
}

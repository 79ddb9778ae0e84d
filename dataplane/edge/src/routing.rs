// SPDX-License-Identifier: Apache-2.0
//! Decides where a request goes, from its head alone.
//!
//! Order: routing headers, then the host's left-most label, then signed file URLs, then the API.

use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, Method, Version};

use crate::limits::SANDBOX_ID_BYTES_MAX;

/// Header that names the sandbox.
pub const SANDBOX_ID_HEADER: &str = "E2b-Sandbox-Id";
/// Header that names the port in the sandbox.
pub const SANDBOX_PORT_HEADER: &str = "E2b-Sandbox-Port";
/// Port that stands for the agent in clients' requests.
pub const AGENT_PORT: u16 = 49_983;

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A port of a sandbox.
    Sandbox {
        /// Its id, of the right shape but possibly unknown.
        id: String,
        /// The port the client named.
        port: u16,
    },
    /// A file URL whose signature alone tells the sandbox.
    Signed(SignedFile),
    /// The API.
    Api,
}

/// What a signed file URL says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SignedFile {
    /// Path in the sandbox.
    pub path: String,
    /// `read` or `write`.
    pub operation: &'static str,
    /// User; empty when the URL names none.
    pub username: String,
    /// The signature.
    pub signature: String,
    /// Unix seconds as text; empty when the signature does not expire.
    pub expiration: String,
}

/// Why a request's head is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// One routing header without the other; names the missing one.
    MissingHeader(&'static str),
    /// A header value that cannot be used; names the header.
    InvalidHeader(&'static str),
    /// The id cannot be that of a sandbox.
    NoSuchSandbox(String),
    /// The message breaks HTTP's rules.
    Malformed(&'static str),
}

/// Domain part of hosts that the edge was told about, in lower case, without a port.
#[derive(Clone, Debug)]
pub struct Domain(String);

impl Domain {
    /// Take the configured domain; a port in it does not matter for routing.
    pub fn new(configured: &str) -> Self {
        Domain(
            host_without_port(configured)
                .trim_end_matches('.')
                .to_ascii_lowercase(),
        )
    }
}

/// The authority that the client addressed: of the target when it has one, else the Host header.
///
/// # Errors
/// [`Refusal::Malformed`] if Host is missing where it is required, repeated, unusable, or
/// contradicts `:authority` (RFC 9112 section 3.2, RFC 9113 section 8.3.1).
pub fn authority_of(parts: &Parts) -> Result<String, Refusal> {
    let mut hosts = parts.headers.get_all(http::header::HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(Refusal::Malformed("more than one Host header"));
    }
    let host = match host {
        None => None,
        Some(value) if value.is_empty() => Some(""),
        Some(value) => {
            let text = value
                .to_str()
                .map_err(|_| Refusal::Malformed("unusable Host header"))?;
            let authority: Authority = text
                .parse()
                .map_err(|_| Refusal::Malformed("unusable Host header"))?;
            if authority.as_str().contains('@') {
                return Err(Refusal::Malformed("unusable Host header"));
            }
            Some(text)
        }
    };
    if host.is_none() && parts.version == Version::HTTP_11 {
        return Err(Refusal::Malformed("missing Host header"));
    }
    match parts.uri.authority() {
        Some(authority) => {
            if authority.as_str().contains('@') {
                return Err(Refusal::Malformed("user name in the request target"));
            }
            let differs = |host: &str| !host.eq_ignore_ascii_case(authority.as_str());
            if parts.version >= Version::HTTP_2 && host.is_some_and(differs) {
                return Err(Refusal::Malformed("Host differs from :authority"));
            }
            Ok(authority.as_str().to_owned())
        }
        None => Ok(host.unwrap_or_default().to_owned()),
    }
}

/// Where the request goes; `authority` comes from [`authority_of`].
///
/// # Errors
/// See [`Refusal`].
pub fn classify(parts: &Parts, authority: &str, domain: &Domain) -> Result<Target, Refusal> {
    if let Some((id, port)) = from_headers(&parts.headers)? {
        return Ok(Target::Sandbox { id, port });
    }
    if let Some((id, port)) = from_host(authority, domain) {
        return Ok(Target::Sandbox { id, port });
    }
    Ok(signed_file(parts).map_or(Target::Api, Target::Signed))
}

fn single<'a>(headers: &'a HeaderMap, name: &'static str) -> Result<Option<&'a str>, Refusal> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.any(|other| other != value) {
        return Err(Refusal::InvalidHeader(name));
    }
    let text = value
        .to_str()
        .map_err(|_| Refusal::InvalidHeader(name))?
        .trim();
    Ok(if text.is_empty() { None } else { Some(text) })
}

fn from_headers(headers: &HeaderMap) -> Result<Option<(String, u16)>, Refusal> {
    let id = single(headers, SANDBOX_ID_HEADER)?;
    let port = single(headers, SANDBOX_PORT_HEADER)?;
    match (id, port) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(Refusal::MissingHeader(SANDBOX_ID_HEADER)),
        (Some(_), None) => Err(Refusal::MissingHeader(SANDBOX_PORT_HEADER)),
        (Some(id), Some(port)) => {
            let port = parse_port(port).ok_or(Refusal::InvalidHeader(SANDBOX_PORT_HEADER))?;
            if !could_be_id(id) {
                return Err(Refusal::NoSuchSandbox(
                    id.chars().take(SANDBOX_ID_BYTES_MAX).collect(),
                ));
            }
            Ok(Some((id.to_owned(), port)))
        }
    }
}

/// A port from decimal digits; no sign, no zero.
fn parse_port(text: &str) -> Option<u16> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|&port| port != 0)
}

/// Whether a header's id is worth asking the control plane about.
fn could_be_id(id: &str) -> bool {
    (1..=SANDBOX_ID_BYTES_MAX).contains(&id.len())
        && id
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

/// Whether a label has exactly the shape of an id: `i` and 19 of `[a-z0-9]`.
fn is_id(id: &str) -> bool {
    id.len() == 20 && id.starts_with('i') && could_be_id(id)
}

fn host_without_port(authority: &str) -> &str {
    if authority.starts_with('[') {
        return authority
            .find(']')
            .map_or(authority, |end| &authority[..=end]);
    }
    authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host)
}

/// Sandbox and port from `<port>-<id>.<domain>`. Under the configured domain any plausible id
/// counts, so that its owner learns that the sandbox is gone; under others only the exact shape.
fn from_host(authority: &str, domain: &Domain) -> Option<(String, u16)> {
    let host = host_without_port(authority)
        .trim_end_matches('.')
        .to_ascii_lowercase();
    let (label, rest) = host.split_once('.')?;
    let (port, id) = label.split_once('-')?;
    let port = parse_port(port)?;
    let ours = rest == domain.0;
    let fits = if ours {
        could_be_id(id)
    } else {
        !rest.is_empty() && is_id(id)
    };
    fits.then(|| (id.to_owned(), port))
}

/// The signed file URL in the request's target, if it is one.
fn signed_file(parts: &Parts) -> Option<SignedFile> {
    if parts.uri.path() != "/files" {
        return None;
    }
    let query = parts.uri.query()?;
    let mut file = SignedFile {
        operation: operation_of(parts)?,
        ..SignedFile::default()
    };
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let field = match name {
            "path" => &mut file.path,
            "username" => &mut file.username,
            "signature" => &mut file.signature,
            "signature_expiration" => &mut file.expiration,
            _ => continue,
        };
        *field = decode_query(value);
    }
    (!file.signature.is_empty()).then_some(file)
}

/// Whether the request reads or writes the file; a CORS preflight counts as what it asks for.
fn operation_of(parts: &Parts) -> Option<&'static str> {
    let method = if parts.method == Method::OPTIONS {
        let asked = parts
            .headers
            .get(http::header::ACCESS_CONTROL_REQUEST_METHOD)?;
        Method::from_bytes(asked.as_bytes()).ok()?
    } else {
        parts.method.clone()
    };
    match method {
        Method::GET | Method::HEAD => Some("read"),
        Method::POST | Method::PUT => Some("write"),
        _ => None,
    }
}

fn decode_query(value: &str) -> String {
    let spaced = value.replace('+', " ");
    percent_encoding::percent_decode_str(&spaced)
        .decode_utf8_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;
    use proptest::prelude::*;

    const ID: &str = "iabcd0123456789abcde";

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("request").into_parts().0
    }

    fn route(uri: &str, headers: &[(&str, &str)]) -> Result<Target, Refusal> {
        let parts = parts(uri, headers);
        let authority = authority_of(&parts)?;
        classify(&parts, &authority, &Domain::new("sbx.test:7300"))
    }

    fn sandbox(id: &str, port: u16) -> Result<Target, Refusal> {
        Ok(Target::Sandbox {
            id: id.to_owned(),
            port,
        })
    }

    #[test]
    fn headers_win_over_the_host_form() {
        let host = format!("3000-{ID}.sbx.test");
        let headers = [
            ("host", host.as_str()),
            ("e2b-sandbox-id", "iother"),
            ("e2b-sandbox-port", "8080"),
        ];
        assert_eq!(route("/", &headers), sandbox("iother", 8080));
    }

    #[test]
    fn one_header_without_the_other() {
        let id_only = [("host", "x"), ("e2b-sandbox-id", ID)];
        assert_eq!(
            route("/", &id_only),
            Err(Refusal::MissingHeader(SANDBOX_PORT_HEADER))
        );
        let port_only = [("host", "x"), ("e2b-sandbox-port", "1")];
        assert_eq!(
            route("/", &port_only),
            Err(Refusal::MissingHeader(SANDBOX_ID_HEADER))
        );
    }

    #[test]
    fn contradicting_or_unusable_headers_are_refused() {
        let twice = [
            ("host", "x"),
            ("e2b-sandbox-id", "a"),
            ("e2b-sandbox-id", "b"),
            ("e2b-sandbox-port", "1"),
        ];
        assert_eq!(
            route("/", &twice),
            Err(Refusal::InvalidHeader(SANDBOX_ID_HEADER))
        );
        for port in ["0", "65536", "+1", "1a", "-1", "99999999999999999999"] {
            let headers = [
                ("host", "x"),
                ("e2b-sandbox-id", ID),
                ("e2b-sandbox-port", port),
            ];
            assert_eq!(
                route("/", &headers),
                Err(Refusal::InvalidHeader(SANDBOX_PORT_HEADER)),
                "{port}"
            );
        }
        let odd = [
            ("host", "x"),
            ("e2b-sandbox-id", "../x"),
            ("e2b-sandbox-port", "1"),
        ];
        assert_eq!(
            route("/", &odd),
            Err(Refusal::NoSuchSandbox("../x".to_owned()))
        );
    }

    #[test]
    fn host_forms() {
        let host = |host: &str| route("/", &[("host", host)]);
        assert_eq!(host(&format!("3000-{ID}.sbx.test")), sandbox(ID, 3000));
        assert_eq!(host(&format!("3000-{ID}.SBX.test:7300")), sandbox(ID, 3000));
        assert_eq!(host(&format!("3000-{ID}.sbx.test.")), sandbox(ID, 3000));
        assert_eq!(host("3000-gone.sbx.test"), sandbox("gone", 3000));
        assert_eq!(
            host(&format!("49983-{ID}.other.example")),
            sandbox(ID, 49_983)
        );
        for api in [
            "sbx.test",
            "api.sbx.test",
            "2024-report.example.com",
            "10-x.y",
            "127.0.0.1:7300",
            "[::1]:7300",
            "localhost",
        ] {
            assert_eq!(host(api), Ok(Target::Api), "{api}");
        }
        assert_eq!(host(&format!("3000-{ID}")), Ok(Target::Api));
        assert_eq!(host(&format!("70000-{ID}.sbx.test")), Ok(Target::Api));
    }

    #[test]
    fn an_absolute_target_names_the_host() {
        let uri = format!("http://3000-{ID}.sbx.test/x");
        assert_eq!(route(&uri, &[("host", "other")]), sandbox(ID, 3000));
    }

    #[test]
    fn signed_urls() {
        let uri = "/files?path=%2Fhome%2Fuser%2Fa+b&username=user&signature=v1_a%2Bb&signature_expiration=9";
        let Ok(Target::Signed(file)) = route(uri, &[("host", "localhost:7300")]) else {
            panic!("not signed");
        };
        assert_eq!(file.path, "/home/user/a b");
        assert_eq!(file.signature, "v1_a+b");
        assert_eq!(
            (
                file.username.as_str(),
                file.expiration.as_str(),
                file.operation
            ),
            ("user", "9", "read")
        );
        assert_eq!(route("/files?path=x", &[("host", "h")]), Ok(Target::Api));
        assert_eq!(
            route("/filesx?signature=x", &[("host", "h")]),
            Ok(Target::Api)
        );
    }

    #[test]
    fn bad_hosts_are_refused() {
        assert!(matches!(route("/", &[]), Err(Refusal::Malformed(_))));
        assert!(matches!(
            route("/", &[("host", "a"), ("host", "a")]),
            Err(Refusal::Malformed(_))
        ));
        assert!(matches!(
            route("/", &[("host", "a b")]),
            Err(Refusal::Malformed(_))
        ));
        assert!(matches!(
            route("/", &[("host", "u@a")]),
            Err(Refusal::Malformed(_))
        ));
        assert!(matches!(
            route("http://u@a/", &[("host", "a")]),
            Err(Refusal::Malformed(_))
        ));
    }

    proptest! {
        /// Any valid id and port come back from every spelling of the host.
        #[test]
        fn host_round_trip(id in "i[a-z0-9]{19}", port in 1u16.., domain in "[a-z]{1,9}(\\.[a-z]{2,5}){0,2}", with_port in any::<bool>()) {
            let suffix = if with_port { ":8443" } else { "" };
            let authority = format!("{port}-{id}.{domain}{suffix}");
            prop_assert_eq!(from_host(&authority, &Domain::new("sbx.test")), Some((id, port)));
        }

        /// Arbitrary hosts and header values never panic, and never yield an unusable id.
        #[test]
        fn arbitrary_input(host in "\\PC{0,80}", id in "\\PC{0,80}", port in "\\PC{0,8}") {
            let found = from_host(&host, &Domain::new("sbx.test"));
            prop_assert!(found.is_none_or(|(id, port)| could_be_id(&id) && port > 0));
            let mut headers = HeaderMap::new();
            if let (Ok(id), Ok(port)) = (id.parse(), port.parse()) {
                headers.insert(SANDBOX_ID_HEADER, id);
                headers.insert(SANDBOX_PORT_HEADER, port);
            }
            if let Ok(Some((id, port))) = from_headers(&headers) {
                prop_assert!(could_be_id(&id) && port > 0);
            }
        }
    }
}

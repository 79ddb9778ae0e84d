// SPDX-License-Identifier: Apache-2.0
//! Who may call: access token, control token, signed file addresses, and the user name of a call.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use hyper::header::{AUTHORIZATION, HeaderMap};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Header with the token of the data plane.
pub const ACCESS_HEADER: &str = "x-access-token";
/// Header with the token of the node and the edge.
pub const CONTROL_HEADER: &str = "x-opendsec-control";

/// A token. It has no `Debug` and is compared in constant time.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// Takes a token; an empty one is none.
    pub fn new(text: String) -> Option<Self> {
        (!text.is_empty()).then_some(Self(text))
    }

    /// Whether `other` is the token. The time taken depends on the length only.
    pub fn matches(&self, other: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(other).into()
    }

    /// Whether the named header carries the token.
    pub fn in_header(&self, headers: &HeaderMap, name: &str) -> bool {
        headers
            .get(name)
            .is_some_and(|value| self.matches(value.as_bytes()))
    }

    /// Signature of a file address, version 1: SHA-256 over
    /// `path:operation:user:token[:expiration]`, base64 without padding.
    fn sign(&self, path: &str, operation: &str, user: &str, expiration: Option<i64>) -> String {
        let mut hash = Sha256::new();
        for part in [path, ":", operation, ":", user, ":", &self.0] {
            hash.update(part.as_bytes());
        }
        if let Some(expiration) = expiration {
            hash.update(format!(":{expiration}").as_bytes());
        }
        format!("v1_{}", STANDARD_NO_PAD.encode(hash.finalize()))
    }
}

/// What a signed file address says.
pub struct FileClaim<'a> {
    /// `path` as in the query, unresolved.
    pub path: &'a str,
    /// `read` or `write`.
    pub operation: &'a str,
    /// `username` as in the query; empty if absent (the default user signs differently).
    pub user: &'a str,
    /// `signature` of the query.
    pub signature: Option<&'a str>,
    /// `signature_expiration` of the query, in Unix seconds.
    pub expiration: Option<&'a str>,
}

/// Decides on a `/files` request: by token if the header is there, else by signature.
///
/// Errors: a message for a 401 answer.
pub fn check_file_access(
    token: Option<&Secret>,
    headers: &HeaderMap,
    claim: &FileClaim<'_>,
    now_s: i64,
) -> Result<(), &'static str> {
    let Some(token) = token else { return Ok(()) };
    if let Some(given) = headers.get(ACCESS_HEADER) {
        return if token.matches(given.as_bytes()) {
            Ok(())
        } else {
            Err("access token present in header but does not match")
        };
    }
    let signature = claim.signature.ok_or("missing signature query parameter")?;
    let expiration = match claim.expiration {
        None => None,
        Some(text) => Some(text.parse::<i64>().map_err(|_| "invalid signature")?),
    };
    let expected = token.sign(claim.path, claim.operation, claim.user, expiration);
    if !bool::from(expected.as_bytes().ct_eq(signature.as_bytes())) {
        return Err("invalid signature");
    }
    match expiration {
        Some(expiration) if expiration < now_s => Err("signature is already expired"),
        _ => Ok(()),
    }
}

/// The user name of `Authorization: Basic base64("name:")`, if there is one. The name may be
/// `name:group`; there are no passwords, so the last colon ends it.
pub fn basic_user(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, rest) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let text = String::from_utf8(STANDARD.decode(rest.trim()).ok()?).ok()?;
    let (name, _password) = text.rsplit_once(':')?;
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim<'a>(signature: Option<&'a str>, expiration: Option<&'a str>) -> FileClaim<'a> {
        FileClaim {
            path: "/home/user/a",
            operation: "read",
            user: "",
            signature,
            expiration,
        }
    }

    #[test]
    fn signature_agrees_with_the_published_client() {
        let token = Secret::new("envdtok".into()).unwrap();
        let seen = "v1_8RXODqNeADarD9vmCEFJbwl7o5g1JnXdtHUz5upb32w";
        assert_eq!(token.sign("/home/user/a", "read", "", None), seen);
        let none = HeaderMap::new();
        assert!(check_file_access(Some(&token), &none, &claim(Some(seen), None), 0).is_ok());
        assert_eq!(
            check_file_access(Some(&token), &none, &claim(None, None), 0),
            Err("missing signature query parameter")
        );
        assert_eq!(
            check_file_access(Some(&token), &none, &claim(Some("v1_x"), None), 0),
            Err("invalid signature")
        );
        let signed = token.sign("/home/user/a", "read", "", Some(100));
        assert!(
            check_file_access(Some(&token), &none, &claim(Some(&signed), Some("100")), 100).is_ok()
        );
        assert_eq!(
            check_file_access(Some(&token), &none, &claim(Some(&signed), Some("100")), 101),
            Err("signature is already expired")
        );
    }

    #[test]
    fn wrong_token_is_not_saved_by_a_good_signature() {
        let token = Secret::new("envdtok".into()).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(ACCESS_HEADER, "other".parse().unwrap());
        let seen = "v1_8RXODqNeADarD9vmCEFJbwl7o5g1JnXdtHUz5upb32w";
        assert!(check_file_access(Some(&token), &headers, &claim(Some(seen), None), 0).is_err());
    }

    #[test]
    fn reads_the_basic_user() {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, "Basic cm9vdDo=".parse().unwrap());
        assert_eq!(basic_user(&headers).as_deref(), Some("root"));
        headers.insert(AUTHORIZATION, "Bearer cm9vdDo=".parse().unwrap());
        assert_eq!(basic_user(&headers), None);
    }
}

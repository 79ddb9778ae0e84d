// SPDX-License-Identifier: Apache-2.0
//! Connections that leave HTTP: WebSocket and whatever else a program upgrades to.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use http::header::{CONNECTION, HeaderName, HeaderValue, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use http::request::Parts;
use http::{Extensions, HeaderMap, Method, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::ext::Protocol;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_util::sync::CancellationToken;

use crate::body::{Cuts, EdgeBody};
use crate::context::RequestContext;
use crate::headers::strip_hop_by_hop;
use crate::limits::UPGRADE_BUFFER_BYTES;
use crate::metrics::METRICS;

const SEC_WEBSOCKET_KEY: HeaderName = HeaderName::from_static("sec-websocket-key");
const SEC_WEBSOCKET_ACCEPT: HeaderName = HeaderName::from_static("sec-websocket-accept");

/// A client's wish to leave HTTP.
#[derive(Debug)]
pub struct Wish {
    protocol: HeaderValue,
    client: OnUpgrade,
    /// Asked by an extended CONNECT of HTTP/2 (RFC 8441), which is answered with 200.
    extended_connect: bool,
}

impl Wish {
    /// An HTTP/1.1 upgrade to `protocol`.
    pub fn from_http1(protocol: HeaderValue, extensions: &mut Extensions) -> Option<Self> {
        let client = extensions.remove::<OnUpgrade>()?;
        Some(Wish {
            protocol,
            client,
            extended_connect: false,
        })
    }

    /// A WebSocket asked for by an extended CONNECT; the head becomes that of an HTTP/1.1 upgrade.
    pub fn from_extended_connect(parts: &mut Parts) -> Option<Self> {
        let protocol = parts.extensions.remove::<Protocol>()?;
        if parts.method != Method::CONNECT || protocol.as_str() != "websocket" {
            return None;
        }
        let client = parts.extensions.remove::<OnUpgrade>()?;
        parts.method = Method::GET;
        parts.version = Version::HTTP_11;
        parts.headers.insert(SEC_WEBSOCKET_KEY, websocket_key());
        Some(Wish {
            protocol: HeaderValue::from_static("websocket"),
            client,
            extended_connect: true,
        })
    }

    /// Whether the request's body is the tunnel itself.
    pub fn owns_body(&self) -> bool {
        self.extended_connect
    }

    /// Whether it is one for a WebSocket.
    pub fn is_websocket(&self) -> bool {
        self.protocol.as_bytes().eq_ignore_ascii_case(b"websocket")
    }

    /// Answer a WebSocket's handshake here: the answer's head, and the connection that follows it.
    /// `None` if the handshake has no key.
    pub fn accept(
        self,
        request: &HeaderMap,
        protocol: Option<HeaderValue>,
    ) -> Option<(Response<EdgeBody>, OnUpgrade)> {
        let mut response = Response::new(EdgeBody::empty());
        let headers = response.headers_mut();
        if let Some(protocol) = protocol {
            headers.insert(SEC_WEBSOCKET_PROTOCOL, protocol);
        }
        if !self.extended_connect {
            let key = request.get(SEC_WEBSOCKET_KEY)?;
            let proof = derive_accept_key(key.as_bytes());
            headers.insert(SEC_WEBSOCKET_ACCEPT, HeaderValue::try_from(proof).ok()?);
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, self.protocol);
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        }
        Some((response, self.client))
    }

    /// Put the wish into the head for the upstream.
    pub fn write(&self, parts: &mut Parts) {
        parts
            .headers
            .insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(UPGRADE, self.protocol.clone());
    }

    /// Answer the client and copy bytes both ways, until both ends closed or the sandbox is gone.
    pub fn grant(
        self,
        mut response: Response<Incoming>,
        context: Arc<RequestContext>,
        cuts: Cuts,
    ) -> Response<EdgeBody> {
        let upstream = hyper::upgrade::on(&mut response);
        let (mut head, _) = response.into_parts();
        let protocol = head.headers.get(UPGRADE).cloned().unwrap_or(self.protocol);
        strip_hop_by_hop(&mut head.headers);
        if self.extended_connect {
            head.status = StatusCode::OK;
            head.headers.remove(SEC_WEBSOCKET_ACCEPT);
        } else {
            head.headers
                .insert(CONNECTION, HeaderValue::from_static("upgrade"));
            head.headers.insert(UPGRADE, protocol);
        }
        let client = self.client;
        tokio::spawn(async move { copy(client, upstream, &context, &cuts.sandbox).await });
        Response::from_parts(head, EdgeBody::empty())
    }
}

/// Copy both ways until both ends closed, one broke, or `cut`.
async fn copy(
    client: OnUpgrade,
    upstream: OnUpgrade,
    context: &RequestContext,
    cut: &CancellationToken,
) {
    let both = tokio::select! {
        both = async { tokio::join!(client, upstream) } => both,
        () = cut.cancelled() => return,
    };
    // An error means that one side left during the switch; the other is closed by the drop.
    let (Ok(client), Ok(upstream)) = both else {
        return;
    };
    METRICS.upgraded_connections.add(1);
    let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
    let size = UPGRADE_BUFFER_BYTES;
    let copied = tokio::select! {
        copied = copy_bidirectional_with_sizes(&mut client, &mut upstream, size, size) => copied.ok(),
        () = cut.cancelled() => None,
    };
    if let Some((sent, received)) = copied {
        context.add_in(usize::try_from(sent).unwrap_or(usize::MAX));
        context.add_out(usize::try_from(received).unwrap_or(usize::MAX));
    } else if context.version == Version::HTTP_11 {
        // A broken connection is how many of these end; how many bytes went through is not known.
        // Many protocols take an orderly end for the end of the data, so it must not look like one.
        // (In HTTP/2 the drop resets the one stream.)
        context.reset_client();
    }
    METRICS.upgraded_connections.sub(1);
}

/// A nonce for the WebSocket handshake (RFC 6455 section 4.1): 16 bytes in base64. It only has to
/// differ between handshakes.
fn websocket_key() -> HeaderValue {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let high = RandomState::new().hash_one(1u8);
    let low = RandomState::new().hash_one(2u8);
    let bits = u128::from(high) << 64 | u128::from(low);
    // 128 bits are 21 digits of six bits and one of the last two bits.
    let mut text: Vec<u8> = (0..21)
        .map(|digit| DIGITS[(bits >> (122 - 6 * digit)) as usize & 63])
        .collect();
    text.push(DIGITS[(bits as usize & 3) << 4]);
    text.extend_from_slice(b"==");
    HeaderValue::from_bytes(&text)
        .unwrap_or_else(|_| HeaderValue::from_static("AAAAAAAAAAAAAAAAAAAAAA=="))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn websocket_keys_are_base64_of_16_bytes() {
        let key = websocket_key();
        let text = key.to_str().expect("ASCII");
        assert_eq!(text.len(), 24);
        assert!(text.ends_with("=="));
        assert!(b"AQgw".contains(&text.as_bytes()[21]), "{text}");
        assert_ne!(websocket_key(), websocket_key());
    }
}

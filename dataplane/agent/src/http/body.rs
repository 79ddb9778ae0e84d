// SPDX-License-Identifier: Apache-2.0
//! Response bodies and the answers made of them.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use tokio::sync::mpsc;

/// A response body: nothing, one piece, or pieces that a task makes.
pub enum ReplyBody {
    /// The whole content, taken by the first poll.
    Whole(Option<Bytes>),
    /// Pieces from a bounded channel; an error breaks the connection, so that a client sees a
    /// short answer as broken and not as whole.
    Pieces(mpsc::Receiver<io::Result<Bytes>>),
}

impl ReplyBody {
    /// An empty body.
    pub fn empty() -> Self {
        ReplyBody::Whole(None)
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            ReplyBody::Whole(content) => Poll::Ready(content.take().map(|c| Ok(Frame::data(c)))),
            ReplyBody::Pieces(pieces) => pieces
                .poll_recv(cx)
                .map(|piece| piece.map(|p| p.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, ReplyBody::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ReplyBody::Whole(content) => {
                SizeHint::with_exact(content.as_ref().map_or(0, |c| c.len() as u64))
            }
            ReplyBody::Pieces(_) => SizeHint::default(),
        }
    }
}

/// An answer of the agent.
pub type Reply = Response<ReplyBody>;
/// What a request handler gives to hyper: it always answers.
pub type ReplyResult = Result<Reply, Infallible>;

/// An answer without a body.
pub fn status_only(status: StatusCode) -> Reply {
    let mut reply = Response::new(ReplyBody::empty());
    *reply.status_mut() = status;
    reply
}

/// An answer with a JSON body.
pub fn json(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(ReplyBody::Whole(Some(body.into())));
    *reply.status_mut() = status;
    reply
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
        .headers_mut()
        .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    reply
}

/// An error of the plain HTTP routes, in their form `{"code": <status>, "message": …}`.
pub fn error(status: StatusCode, message: impl AsRef<str>) -> Reply {
    let body = serde_json::json!({"code": status.as_u16(), "message": message.as_ref()});
    json(status, body.to_string())
}

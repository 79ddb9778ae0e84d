// SPDX-License-Identifier: Apache-2.0
//! Bodies on their way through: counted, never collected.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Version;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::context::RequestContext;
use crate::framing::{FrameTracker, unavailable_end_frame};
use crate::metrics::{METRICS, UpstreamFailure};
use crate::pool::Lease;

/// Why a body ended early.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// A request's body on its way to an upstream.
#[derive(Debug)]
pub enum RequestBody {
    /// None.
    Empty,
    /// The client's.
    Stream(ClientBody),
}

/// A body that a client sends.
#[derive(Debug)]
pub struct ClientBody {
    inner: Incoming,
    context: Arc<RequestContext>,
    ended: bool,
}

impl RequestBody {
    /// Pass a client's body on, counted in `context`.
    pub fn new(inner: Incoming, context: Arc<RequestContext>) -> Self {
        RequestBody::Stream(ClientBody {
            inner,
            context,
            ended: false,
        })
    }
}

impl Drop for ClientBody {
    fn drop(&mut self) {
        if !self.ended && !self.inner.is_end_stream() {
            self.context.leave_body();
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let RequestBody::Stream(body) = &mut *self else {
            return Poll::Ready(None);
        };
        let polled = Pin::new(&mut body.inner).poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                body.context.add_in(frame.data_ref().map_or(0, Bytes::len));
            }
            Poll::Ready(None) => body.ended = true,
            Poll::Ready(Some(Err(error))) if is_malformed(error) => {
                body.context.set_body_malformed();
            }
            _ => {}
        }
        // Else an error means that the client left. The upstream's connection is closed at once.
        polled.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        match self {
            RequestBody::Empty => true,
            RequestBody::Stream(body) => body.inner.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            RequestBody::Empty => SizeHint::with_exact(0),
            RequestBody::Stream(body) => body.inner.size_hint(),
        }
    }
}

/// Whether a body's error is that of hyper's decoder, and not the end of the connection.
fn is_malformed(error: &hyper::Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(cause) = cause.downcast_ref::<io::Error>() {
            return matches!(
                cause.kind(),
                io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData
            );
        }
        source = cause.source();
    }
    false
}

/// An answer's body on its way to the client.
#[derive(Debug)]
pub enum EdgeBody {
    /// Made here.
    Full(Option<Bytes>, Option<Arc<RequestContext>>),
    /// An upstream's.
    Stream(Box<ResponseBody>),
}

impl EdgeBody {
    /// No bytes, and nothing to account for.
    pub fn empty() -> Self {
        EdgeBody::Full(None, None)
    }
}

impl Body for EdgeBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut *self {
            EdgeBody::Full(bytes, context) => Poll::Ready(bytes.take().map(|bytes| {
                if let Some(context) = context {
                    context.add_out(bytes.len());
                }
                Ok(Frame::data(bytes))
            })),
            EdgeBody::Stream(body) => body.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            EdgeBody::Full(bytes, _) => bytes.as_ref().is_none_or(Bytes::is_empty),
            EdgeBody::Stream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            EdgeBody::Full(bytes, _) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            EdgeBody::Stream(body) => body.size_hint(),
        }
    }
}

/// The two switches that end a stream.
#[derive(Debug)]
pub struct Cuts {
    /// The whole edge ends.
    pub edge: CancellationToken,
    /// The sandbox is gone; a child of `edge`.
    pub sandbox: CancellationToken,
}

/// An upstream's answer.
#[derive(Debug)]
pub struct ResponseBody {
    inner: Incoming,
    context: Arc<RequestContext>,
    lease: Option<Lease>,
    tracker: Option<FrameTracker>,
    cuts: Cuts,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    finished: bool,
}

impl ResponseBody {
    /// Pass `inner` on; `framed` if it is a Connect stream, whose end must be explicit. A complete
    /// body gives the lease back to its pool.
    pub fn new(
        inner: Incoming,
        context: Arc<RequestContext>,
        lease: Lease,
        framed: bool,
        cuts: Cuts,
    ) -> Self {
        // A body of known length leaves no room for a frame of ours.
        let framed = framed && inner.size_hint().exact().is_none();
        let cut = Box::pin(cuts.sandbox.clone().cancelled_owned());
        let tracker = framed.then(FrameTracker::default);
        ResponseBody {
            inner,
            context,
            lease: Some(lease),
            tracker,
            cuts,
            cut,
            finished: false,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.finished {
            return Poll::Ready(None);
        }
        if self.cuts.sandbox.is_cancelled() {
            return Poll::Ready(self.cut_off());
        }
        match Pin::new(&mut self.inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    self.context.add_out(data.len());
                    if let Some(tracker) = &mut self.tracker {
                        tracker.feed(data);
                    }
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                METRICS.upstream_failed(UpstreamFailure::Truncated);
                let why = format!("the answer broke off: {error}");
                Poll::Ready(self.fail(why, "the connection to the sandbox was lost"))
            }
            Poll::Ready(None) => Poll::Ready(self.complete()),
            Poll::Pending => {
                if self.cut.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(self.cut_off());
                }
                Poll::Pending
            }
        }
    }

    fn complete(&mut self) -> Option<Result<Frame<Bytes>, BodyError>> {
        if self
            .tracker
            .as_ref()
            .is_some_and(|tracker| !tracker.end_seen())
        {
            let why = "the stream ended without an end frame".to_owned();
            return self.fail(why, "the stream ended without a result");
        }
        self.finished = true;
        if let Some(lease) = self.lease.take() {
            lease.release();
        }
        None
    }

    fn cut_off(&mut self) -> Option<Result<Frame<Bytes>, BodyError>> {
        if self.cuts.edge.is_cancelled() {
            self.fail(
                "the edge ended".to_owned(),
                "the gateway is restarting; connect again",
            )
        } else {
            self.fail(
                "the sandbox ended or was paused".to_owned(),
                "the sandbox has ended or was paused",
            )
        }
    }

    /// End with an explicit error: a Connect end frame where one fits, else a broken-off body.
    fn fail(&mut self, why: String, message: &str) -> Option<Result<Frame<Bytes>, BodyError>> {
        self.finished = true;
        self.lease = None;
        self.context.set_failure(why.clone());
        match &self.tracker {
            Some(tracker) if tracker.at_boundary() && tracker.end_seen() => None,
            Some(tracker) if tracker.at_boundary() => {
                let frame = unavailable_end_frame(message);
                self.context.add_out(frame.len());
                Some(Ok(Frame::data(frame)))
            }
            _ => {
                if self.context.version < Version::HTTP_11 {
                    // Without chunks an orderly close would read as the end of the body.
                    self.context.reset_client();
                }
                Some(Err(why.into()))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.finished || (self.tracker.is_none() && self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        if self.tracker.is_some() {
            SizeHint::default()
        } else {
            self.inner.size_hint()
        }
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        // A body that is over without a last poll: an empty one, or one of known length.
        if !self.finished
            && self.tracker.is_none()
            && self.inner.is_end_stream()
            && let Some(lease) = self.lease.take()
        {
            lease.release();
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! The answering half of streams: a task puts frames into a short queue, hyper sends them. The
//! queue is the backpressure.

use std::future::Future;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use hyper::Response;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use tokio::sync::mpsc;

use super::call::STREAM_TYPE;
use super::error::RpcError;
use super::frame::{encode_end, encode_message};
use crate::agent::{Agent, StreamGuard};
use crate::http::body::{Reply, ReplyBody};
use crate::limits::STREAM_STALL_MAX;

/// Frames between the task and the connection.
const QUEUE_FRAMES: usize = 2;

/// The client is gone or takes nothing.
#[derive(Debug)]
pub struct Gone;

/// Where a stream's task puts its messages.
pub struct StreamOut {
    agent: Arc<Agent>,
    queue: mpsc::Sender<io::Result<Bytes>>,
    _guard: StreamGuard,
}

impl StreamOut {
    /// Sends one message. Waits while the client is slow, for a stated time.
    pub async fn send(&self, json: &[u8]) -> Result<(), Gone> {
        self.agent.touch();
        self.put(encode_message(json)).await
    }

    async fn put(&self, frame: Bytes) -> Result<(), Gone> {
        self.queue
            .send_timeout(Ok(frame), STREAM_STALL_MAX)
            .await
            .map_err(|_| Gone)
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.queue.closed().await;
    }
}

/// Answers with a stream that `run` feeds. The HTTP status is 200 whatever happens; the outcome
/// is in the last frame.
pub fn respond<F, Fut>(agent: &Arc<Agent>, run: F) -> Reply
where
    F: FnOnce(Arc<StreamOut>) -> Fut,
    Fut: Future<Output = Result<(), RpcError>> + Send + 'static,
{
    let (queue, pieces) = mpsc::channel(QUEUE_FRAMES);
    match agent.open_stream() {
        Err(err) => {
            // The queue is empty, so there is room for the one frame.
            let _ = queue.try_send(Ok(encode_end(Some(&err))));
        }
        Ok(guard) => {
            let out = Arc::new(StreamOut {
                agent: Arc::clone(agent),
                queue,
                _guard: guard,
            });
            let work = run(Arc::clone(&out));
            tokio::spawn(async move {
                let outcome = work.await;
                let _ = out.put(encode_end(outcome.err().as_ref())).await;
            });
        }
    }
    framed(ReplyBody::Pieces(pieces))
}

/// A stream answer that is only its end: the reply of a client stream, or an early error.
pub fn respond_once(outcome: Result<&[u8], &RpcError>) -> Reply {
    let mut whole = Vec::new();
    match outcome {
        Ok(message) => {
            whole.extend_from_slice(&encode_message(message));
            whole.extend_from_slice(&encode_end(None));
        }
        Err(err) => whole.extend_from_slice(&encode_end(Some(err))),
    }
    framed(ReplyBody::Whole(Some(whole.into())))
}

fn framed(body: ReplyBody) -> Reply {
    let mut reply = Response::new(body);
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(STREAM_TYPE));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    reply
}

// SPDX-License-Identifier: Apache-2.0
//! Sends one request over a pooled connection, and decides when it may be sent again.
//!
//! A request is repeated only if a kept connection turned out to be stale, and only if nothing
//! can have happened: hyper handed the request back unsent, or it is idempotent and has no body.

use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use tokio_util::sync::CancellationToken;

use crate::body::RequestBody;
use crate::metrics::METRICS;
use crate::pool::{Lease, Pool};
use crate::upgrade::Wish;
use crate::upstream::ConnectError;
use std::sync::Arc;

/// Why there is no answer.
#[derive(Debug)]
pub enum Failure {
    /// No connection was made: the request is untouched.
    Connect(ConnectError),
    /// The connection ended before an answer.
    NoAnswer(String),
    /// The sandbox, or the edge, ended.
    Cut,
}

/// A request that may need more than one attempt.
#[derive(Debug)]
pub struct Exchange {
    parts: Parts,
    body: Option<RequestBody>,
    /// The client's wish to leave HTTP.
    pub wish: Option<Wish>,
}

impl Exchange {
    /// Of a head that is ready for the upstream.
    pub fn new(mut parts: Parts, body: RequestBody, wish: Option<Wish>) -> Self {
        if let Some(wish) = &wish {
            wish.write(&mut parts);
        }
        // The body of an extended CONNECT is the tunnel itself, which the wish holds.
        let body = if body.is_end_stream() || wish.as_ref().is_some_and(Wish::owns_body) {
            RequestBody::Empty
        } else {
            body
        };
        Exchange {
            parts,
            body: Some(body),
            wish,
        }
    }

    /// The head.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Send it, at most twice.
    ///
    /// # Errors
    /// See [`Failure`]. After [`Failure::Connect`] it may be run again.
    pub async fn run(
        &mut self,
        pool: &Arc<Pool>,
        host: &str,
        cut: &CancellationToken,
    ) -> Result<(Response<Incoming>, Lease), Failure> {
        let mut lease = pool.lease(host).await.map_err(Failure::Connect)?;
        loop {
            let body = self.body.take().unwrap_or(RequestBody::Empty);
            let replayable =
                matches!(body, RequestBody::Empty) && self.parts.method.is_idempotent();
            let reused = lease.reused;
            let request = Request::from_parts(self.parts.clone(), body);
            let sent = tokio::select! {
                sent = lease.sender.try_send_request(request) => sent,
                () = cut.cancelled() => return Err(Failure::Cut),
            };
            let mut error = match sent {
                Ok(response) => return Ok((response, lease)),
                Err(error) => error,
            };
            let unsent = error.take_message();
            if !reused || !(unsent.is_some() || replayable) {
                return Err(Failure::NoAnswer(error.into_error().to_string()));
            }
            self.body = unsent.map(Request::into_body);
            METRICS.stale_retries.add(1);
            lease = pool.lease_new(host).await.map_err(Failure::Connect)?;
        }
    }
}

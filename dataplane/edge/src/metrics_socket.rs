// SPDX-License-Identifier: Apache-2.0
//! Answers Prometheus' scrapes on a Unix socket.

use std::convert::Infallible;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::UnixListener;

use crate::limits::ACCEPT_ERROR_PAUSE;
use crate::metrics::METRICS;

/// Only the owner may read the figures.
const SOCKET_MODE: u32 = 0o600;

/// Listen at `path`, in place of a socket that an earlier edge left there.
///
/// # Errors
/// A sentence that names the path.
pub fn bind(path: &Path) -> Result<UnixListener, String> {
    let fail = |error: io::Error| {
        format!(
            "Cannot listen on the metrics socket {}: {error}",
            path.display()
        )
    };
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fail(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(fail)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE)).map_err(fail)?;
    Ok(listener)
}

/// Answer scrapes for ever.
pub async fn serve(listener: UnixListener) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_ERROR_PAUSE).await;
            continue;
        };
        tokio::spawn(async move {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .serve_connection(TokioIo::new(stream), service_fn(answer));
            // A scraper that leaves early is no one's concern.
            drop(connection.await);
        });
    }
}

async fn answer(_request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::from(METRICS.render()));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

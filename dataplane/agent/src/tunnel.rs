// SPDX-License-Identifier: Apache-2.0
//! Tunnels to ports inside the sandbox, so that programs that listen on 127.0.0.1 only are
//! reachable as well: `GET /opendsec/tunnel?port=P` with an upgrade, then raw bytes.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE};
use hyper::upgrade::OnUpgrade;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use self::counted::Counted;
use crate::agent::{Agent, StreamGuard};
use crate::http::Via;
use crate::http::body::{Reply, error, json, status_only};
use crate::limits::{TUNNEL_BUFFER_BYTES, TUNNEL_CONNECT_TIMEOUT};

const PROTOCOL: &str = "opendsec-tunnel";

/// Opens a tunnel.
pub async fn serve(
    agent: Arc<Agent>,
    via: Via,
    port: Option<u16>,
    mut request: Request<Incoming>,
) -> Reply {
    let Some(port) = port.filter(|port| *port != 0) else {
        return error(
            StatusCode::BAD_REQUEST,
            "port must be a number from 1 to 65535",
        );
    };
    if port == agent.port {
        return error(
            StatusCode::BAD_REQUEST,
            "this is the agent's own port, call it directly",
        );
    }
    let asked = request
        .headers()
        .get(UPGRADE)
        .and_then(|value| value.to_str().ok());
    if !asked.is_some_and(|value| value.eq_ignore_ascii_case(PROTOCOL)) {
        let message = format!("the request must upgrade to '{PROTOCOL}'");
        return error(StatusCode::UPGRADE_REQUIRED, message);
    }
    if let Some(reason) = *agent.ending.borrow() {
        return error(StatusCode::SERVICE_UNAVAILABLE, reason.error().message);
    }
    let guard = match agent.open_stream() {
        Ok(guard) => guard,
        Err(err) => return error(StatusCode::SERVICE_UNAVAILABLE, err.message),
    };
    agent.touch();
    let Ok(target) = connect(via.local.ip(), port).await else {
        let body = serde_json::json!({
            "code": "port_not_open",
            "message": format!("nothing listens on port {port} in the sandbox"),
        });
        return json(StatusCode::BAD_GATEWAY, body.to_string());
    };
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(copy(agent, via, upgrade, target, guard));
    let mut reply = status_only(StatusCode::SWITCHING_PROTOCOLS);
    reply
        .headers_mut()
        .insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    reply
        .headers_mut()
        .insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
    reply
}

/// Tries the loopback addresses first: that is where most development servers listen.
async fn connect(own: IpAddr, port: u16) -> io::Result<TcpStream> {
    let loopback = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];
    let own = (!own.is_loopback()).then_some(own);
    let mut last = io::Error::from(io::ErrorKind::ConnectionRefused);
    for ip in loopback.into_iter().chain(own) {
        let attempt = TcpStream::connect(SocketAddr::new(ip, port));
        match tokio::time::timeout(TUNNEL_CONNECT_TIMEOUT, attempt).await {
            // A client port may meet itself when the target is in the range of client ports
            // (TCP simultaneous open): then nothing listens.
            Ok(Ok(stream)) if stream.local_addr().ok() != stream.peer_addr().ok() => {
                return Ok(stream);
            }
            Ok(Ok(_)) => {}
            Ok(Err(err)) => last = err,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

async fn copy(
    agent: Arc<Agent>,
    via: Via,
    upgrade: OnUpgrade,
    mut target: TcpStream,
    _guard: StreamGuard,
) {
    let Ok(upgraded) = upgrade.await else { return };
    let _ = target.set_nodelay(true);
    let mut client = Counted {
        inner: TokioIo::new(upgraded),
        agent: Arc::clone(&agent),
    };
    let pump = tokio::io::copy_bidirectional_with_sizes(
        &mut client,
        &mut target,
        TUNNEL_BUFFER_BYTES,
        TUNNEL_BUFFER_BYTES,
    );
    tokio::select! {
        _ = pump => {}
        _ = agent.ended() => {}
        () = agent.cut(via.connection) => {}
    }
}

mod counted {
    //! A stream that notes activity with each byte.

    use std::io;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Poll};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    use crate::agent::Agent;

    pub struct Counted<T> {
        pub inner: T,
        pub agent: Arc<Agent>,
    }

    impl<T: AsyncRead + Unpin> AsyncRead for Counted<T> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.agent.touch();
            Pin::new(&mut self.inner).poll_read(cx, buf)
        }
    }

    impl<T: AsyncWrite + Unpin> AsyncWrite for Counted<T> {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.agent.touch();
            Pin::new(&mut self.inner).poll_write(cx, buf)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.inner).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.inner).poll_shutdown(cx)
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
//! One client connection from its first byte to its end.

use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::client_io::{ClientIo, ConnState, Transport, WaitLimits};
use crate::errors::{Audience, EdgeError};
use crate::limits::{
    H1_BUFFER_BYTES_MAX, H2_CONNECTION_WINDOW_BYTES, H2_FRAME_BYTES_MAX, H2_PING_INTERVAL,
    H2_PING_TIMEOUT, H2_SEND_BUFFER_BYTES, H2_STREAM_WINDOW_BYTES, H2_STREAMS_MAX,
    HEADER_BYTES_MAX, HEADER_COUNT_MAX, REFUSAL_TIMEOUT, REST_AFTER, TLS_HANDSHAKE_TIMEOUT,
};
use crate::log::{Level, event};
use crate::memory;
use crate::metrics::METRICS;
use crate::prefixed::Prefixed;
use crate::proxy::{Client, handle};
use crate::server::Edge;

/// First byte of a TLS record that holds a handshake (RFC 8446 section 5.1).
const TLS_HANDSHAKE_RECORD: u8 = 0x16;
/// What an HTTP/2 client sends first (RFC 9113 section 3.4).
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Serve a connection to its end. Until its first byte it costs no more than its socket and task.
pub async fn serve(edge: Arc<Edge>, stream: TcpStream, peer: SocketAddr) {
    let first = tokio::select! {
        first = first_byte(&stream, edge.idle_timeout) => first,
        () = edge.draining.cancelled() => None,
    };
    let Some(first) = first else { return };
    // Boxed, so that a connection that waits for its first byte does not reserve the space.
    Box::pin(serve_protocol(edge, stream, peer, first)).await;
    memory::note_freed();
}

/// The first byte, left in the socket; `None` if the client left or waited too long.
async fn first_byte(stream: &TcpStream, limit: Duration) -> Option<u8> {
    let mut byte = [0];
    match timeout(limit, stream.peek(&mut byte)).await {
        Ok(Ok(1..)) => Some(byte[0]),
        _ => None,
    }
}

async fn serve_protocol(edge: Arc<Edge>, mut stream: TcpStream, peer: SocketAddr, first: u8) {
    let state = Arc::new(ConnState::default());
    let tls = first == TLS_HANDSHAKE_RECORD;
    let client = Arc::new(Client {
        peer: peer.ip(),
        tls,
        state: Arc::clone(&state),
    });
    let (transport, head, h2) = if tls {
        let Some(certificate) = &edge.certificate else {
            return close_cleanly(stream).await;
        };
        let acceptor = TlsAcceptor::from(certificate.server_config());
        match timeout(TLS_HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => {
                let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                (Transport::Tls(Box::new(stream)), Bytes::new(), h2)
            }
            _ => return METRICS.tls_failures.add(1),
        }
    } else {
        let Ok(Ok((head, h2))) = timeout(edge.head_timeout, read_preface(&mut stream)).await else {
            return;
        };
        (Transport::Plain(stream), head, h2)
    };
    let limits = WaitLimits {
        head: (!h2).then_some(edge.head_timeout),
        idle: edge.idle_timeout,
    };
    let io = Prefixed::new(head, ClientIo::new(transport, state, limits));
    let ended = if h2 {
        Box::pin(serve_h2(&edge, client, io)).await
    } else {
        serve_h1(&edge, client, io).await
    };
    if let Err(error) = ended {
        event(
            Level::Debug,
            "client_connection_failed",
            &[("error", error.to_string().into())],
        );
    }
}

/// Read until it is clear whether this is HTTP/2 with prior knowledge.
async fn read_preface(stream: &mut TcpStream) -> io::Result<(Bytes, bool)> {
    let mut head = BytesMut::with_capacity(H2_PREFACE.len());
    loop {
        let common = head.len().min(H2_PREFACE.len());
        if head[..common] != H2_PREFACE[..common] {
            return Ok((head.freeze(), false));
        }
        if common == H2_PREFACE.len() {
            return Ok((head.freeze(), true));
        }
        let missing = (H2_PREFACE.len() - common) as u64;
        if (&mut *stream).take(missing).read_buf(&mut head).await? == 0 {
            return Ok((head.freeze(), false));
        }
    }
}

/// Serve HTTP/1 requests. A connection at rest gives up its parser and buffers, some 25 KiB, until
/// the next request begins: most of many thousand connections are at rest.
async fn serve_h1(
    edge: &Arc<Edge>,
    client: Arc<Client>,
    mut io: Prefixed<ClientIo>,
) -> hyper::Result<()> {
    loop {
        // Boxed, so that the parser's space is free while the connection is at rest.
        let Some((read, mut rest)) = Box::pin(serve_h1_until_rest(edge, &client, io)).await? else {
            return Ok(());
        };
        memory::note_freed();
        let mut first = [0];
        let next = if read.is_empty() {
            let woken = tokio::select! {
                woken = rest.read(&mut first) => woken,
                () = edge.draining.cancelled() => return Ok(()),
            };
            match woken {
                Ok(1..) => Bytes::copy_from_slice(&first),
                // The client left, or stayed idle for too long.
                _ => return Ok(()),
            }
        } else {
            read
        };
        io = Prefixed::new(next, rest);
    }
}

/// Serve until the connection ends (`None`), or rests: then bytes already read, and the connection.
async fn serve_h1_until_rest(
    edge: &Arc<Edge>,
    client: &Arc<Client>,
    io: Prefixed<ClientIo>,
) -> hyper::Result<Option<(Bytes, ClientIo)>> {
    let service =
        |request: Request<Incoming>| handle(Arc::clone(edge), Arc::clone(client), request);
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // `ClientIo` tells a slow head from an idle connection, which this does not.
        .header_read_timeout(None)
        .max_headers(HEADER_COUNT_MAX)
        .max_header_size(HEADER_BYTES_MAX)
        .max_buf_size(H1_BUFFER_BYTES_MAX)
        .serve_connection(TokioIo::new(io), service_fn(service))
        .with_upgrades();
    let mut seen = None;
    loop {
        tokio::select! {
            ended = &mut connection => return ended.map(|()| None),
            () = edge.draining.cancelled() => break,
            () = tokio::time::sleep(REST_AFTER) => {
                let resting = client.state.at_rest();
                if resting.is_some() && resting == seen {
                    let Some(parts) = connection.into_parts() else { return Ok(None) };
                    let (prefix, io) = parts.io.into_inner().into_parts();
                    // Copied, because even an empty remainder would hold the whole buffer.
                    let read = Bytes::from([&parts.read_buf[..], &prefix[..]].concat());
                    return Ok(Some((read, io)));
                }
                seen = resting;
            }
        }
    }
    Pin::new(&mut connection).graceful_shutdown();
    connection.await.map(|()| None)
}

async fn serve_h2(
    edge: &Arc<Edge>,
    client: Arc<Client>,
    io: Prefixed<ClientIo>,
) -> hyper::Result<()> {
    let owned = Arc::clone(edge);
    let service =
        move |request: Request<Incoming>| handle(Arc::clone(&owned), Arc::clone(&client), request);
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(H2_STREAMS_MAX)
        .initial_stream_window_size(H2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(H2_CONNECTION_WINDOW_BYTES)
        .max_frame_size(H2_FRAME_BYTES_MAX)
        .max_send_buf_size(H2_SEND_BUFFER_BYTES)
        .max_header_list_size(HEADER_BYTES_MAX as u32)
        .keep_alive_interval(H2_PING_INTERVAL)
        .keep_alive_timeout(H2_PING_TIMEOUT)
        .enable_connect_protocol()
        .serve_connection(TokioIo::new(io), service_fn(service));
    let mut connection = pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return ended,
        () = edge.draining.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

/// Close after reading what has arrived: bytes left unread would make the close a reset.
async fn close_cleanly(mut stream: TcpStream) {
    let mut scratch = [0; 1024];
    while matches!(stream.try_read(&mut scratch), Ok(1..)) {}
    // The client may be gone already.
    drop(stream.shutdown().await);
}

/// Answer 503 to a connection above the cap, once it has asked something.
pub async fn refuse(mut stream: TcpStream) {
    let Some(first) = first_byte(&stream, REFUSAL_TIMEOUT).await else {
        return;
    };
    if first == TLS_HANDSHAKE_RECORD {
        return close_cleanly(stream).await;
    }
    let answer = EdgeError::Overloaded.response(Audience::default());
    let mut text = format!(
        "HTTP/1.1 {}\r\nConnection: close\r\nContent-Length: {}\r\n",
        answer.status(),
        answer.body().len()
    );
    for (name, value) in answer.headers() {
        text.push_str(&format!(
            "{name}: {}\r\n",
            value.to_str().unwrap_or_default()
        ));
    }
    text.push_str("\r\n");
    let written = async {
        stream.write_all(text.as_bytes()).await?;
        stream.write_all(answer.body()).await
    };
    // A client too slow for this is closed without an answer.
    drop(timeout(REFUSAL_TIMEOUT, written).await);
    close_cleanly(stream).await;
}

// SPDX-License-Identifier: Apache-2.0
//! HTTP/2 with prior knowledge and by ALPN, TLS beside plain HTTP, HTTPS ports.

mod common;

use std::sync::Arc;

use bytes::Bytes;
use common::{Body, Wire, channel_body};
use common::{
    ID, Options, World, chunked, echo_agent, frame, full, route, soon, tcp_server, to_port, until,
    write_certificate,
};
use http::{Method, Request, StatusCode, Version};
use http_body_util::BodyExt;
use hyper::client::conn::http2::{self, SendRequest};
use hyper::ext::Protocol;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

async fn h2(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> SendRequest<Body> {
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .expect("HTTP/2");
    tokio::spawn(connection);
    sender
}

fn to(method: Method, id: &str, port: u16, path: &str, body: Body) -> Request<Body> {
    Request::builder()
        .method(method)
        .uri(format!("http://localhost{path}"))
        .header("e2b-sandbox-id", id)
        .header("e2b-sandbox-port", port)
        .body(body)
        .expect("request")
}

fn provider() -> Arc<tokio_rustls::rustls::crypto::CryptoProvider> {
    Arc::new(tokio_rustls::rustls::crypto::ring::default_provider())
}

async fn tls(
    world: &World,
    certificate: &[u8],
    alpn: &str,
) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from(certificate))
        .expect("certificate");
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    let name = ServerName::try_from("localhost").expect("name");
    let stream = TcpStream::connect(world.edge).await.expect("connect");
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
}

#[tokio::test]
async fn h2c_with_prior_knowledge() {
    let world = World::start().await;
    world.add(ID, echo_agent().await);
    let mut sender = h2(TcpStream::connect(world.edge).await.expect("connect")).await;
    for round in 0..3 {
        let request = to(Method::POST, ID, 49_983, "/x?y=1", full("abc"));
        let response = soon("answer", sender.send_request(request))
            .await
            .expect("answer");
        assert_eq!(
            (response.status(), response.version()),
            (StatusCode::OK, Version::HTTP_2),
            "{round}"
        );
        let body = response
            .into_body()
            .collect()
            .await
            .expect("body")
            .to_bytes();
        let seen: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(seen["uri"], "/x?y=1");
        assert_eq!(seen["headers"]["host"], "localhost");
        assert_eq!(seen["bytes"], 3);
    }
    let mut request = to(Method::GET, ID, 49_983, "/", full(""));
    request
        .headers_mut()
        .insert("host", "other".parse().expect("value"));
    let refused = soon("answer", sender.send_request(request))
        .await
        .expect("answer");
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn h2_streams_both_ways_and_is_told_about_broken_ones() {
    let world = World::start().await;
    let agent = tcp_server(|mut wire| async move {
        let (line, _) = wire.request_head().await;
        wire.send("HTTP/1.1 200 OK\r\nContent-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\n").await;
        if line.contains("broken") {
            wire.send(chunked(&frame(0, "{}")[..3])).await;
            return;
        }
        while let Ok(Some(chunk)) = wire.chunk().await {
            wire.send(chunked(&frame(0, &String::from_utf8_lossy(&chunk)))).await;
        }
        wire.send(chunked(&frame(2, "{}"))).await;
        wire.send("0\r\n\r\n").await;
    })
    .await;
    world.add(ID, agent);
    let mut sender = h2(TcpStream::connect(world.edge).await.expect("connect")).await;
    let (chunks, body) = channel_body();
    let response = soon(
        "head",
        sender.send_request(to(Method::POST, ID, 49_983, "/s", body)),
    )
    .await
    .expect("head");
    let mut body = response.into_body();
    for round in 0..5 {
        chunks
            .send(Bytes::from(format!("r{round}")))
            .await
            .expect("send");
        let data = soon("frame", body.frame())
            .await
            .expect("frame")
            .expect("frame")
            .into_data()
            .expect("data");
        assert_eq!(data, frame(0, &format!("r{round}")));
    }
    drop(chunks);
    let rest = body.collect().await.expect("end").to_bytes();
    assert_eq!(rest, frame(2, "{}"));

    // The reset may overtake the head; what must not be seen is an end.
    if let Ok(broken) = sender
        .send_request(to(Method::POST, ID, 49_983, "/broken", full("")))
        .await
    {
        assert!(
            soon("end", broken.into_body().collect()).await.is_err(),
            "a reset, not an end"
        );
    }
    // The connection itself goes on.
    let after = to(Method::GET, "igone", 49_983, "/", full(""));
    assert_eq!(
        sender.send_request(after).await.expect("answer").status(),
        StatusCode::BAD_GATEWAY
    );
}

#[tokio::test]
async fn a_websocket_over_h2() {
    let world = World::start().await;
    let app = tcp_server(|mut wire| async move {
        let (line, head) = wire.request_head().await;
        assert!(line.starts_with("GET /ws "), "{line}");
        assert!(head.to_lowercase().contains("sec-websocket-key: "), "{head}");
        wire.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\nSec-WebSocket-Protocol: chat\r\n\r\n").await;
        while wire.more().await {
            let bytes = std::mem::take(&mut wire.buffer);
            wire.send(bytes).await;
        }
    })
    .await;
    world.add(ID, echo_agent().await);
    let mut sender = h2(TcpStream::connect(world.edge).await.expect("connect")).await;
    let mut request = to(Method::CONNECT, ID, app.port(), "/ws", full(""));
    request
        .extensions_mut()
        .insert(Protocol::from_static("websocket"));
    // The server's settings must have arrived before CONNECT may carry a protocol.
    let warm = sender
        .send_request(to(Method::GET, "igone", 1, "/", full("")))
        .await
        .expect("answer");
    drop(warm);
    let mut response = soon("answer", sender.send_request(request))
        .await
        .expect("answer");
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["sec-websocket-protocol"], "chat");
    let mut stream = TokioIo::new(hyper::upgrade::on(&mut response).await.expect("upgrade"));
    for _ in 0..3 {
        stream.write_all(b"ping").await.expect("send");
        let mut echo = [0; 4];
        soon("echo", stream.read_exact(&mut echo))
            .await
            .expect("echo");
        assert_eq!(&echo, b"ping");
    }
}

#[tokio::test]
async fn tls_and_plain_http_on_one_port() {
    let world = World::start_with(Options {
        tls: true,
        ..Options::default()
    })
    .await;
    world.add(ID, echo_agent().await);
    let certificate = world.certificate.clone().expect("certificate");
    assert_eq!(
        world.get(ID, 49_983, "/").await.json()["headers"]["x-forwarded-proto"],
        "http"
    );

    let mut wire = Wire::new(tls(&world, &certificate, "http/1.1").await.expect("TLS"));
    wire.send(to_port("GET", ID, 49_983, "/", "")).await;
    assert_eq!(
        wire.answer().await.json()["headers"]["x-forwarded-proto"],
        "https"
    );

    let mut sender = h2(tls(&world, &certificate, "h2").await.expect("TLS")).await;
    let response = sender
        .send_request(to(Method::GET, ID, 49_983, "/", full("")))
        .await
        .expect("answer");
    assert_eq!(response.version(), Version::HTTP_2);

    // A new certificate is used after SIGHUP; a broken one is not.
    let renewed = write_certificate(world.dir.path());
    world.signal("HUP");
    until("reload", || world.log().contains("certificate_reloaded")).await;
    assert!(tls(&world, &certificate, "h2").await.is_err());
    assert!(tls(&world, &renewed, "h2").await.is_ok());
    std::fs::write(world.dir.path().join("cert.pem"), "rubbish").expect("write");
    world.signal("HUP");
    until("refusal", || world.log().contains("certificate_kept")).await;
    assert!(tls(&world, &renewed, "h2").await.is_ok());
    // The connections from before live on.
    wire.send(to_port("GET", ID, 49_983, "/", "")).await;
    assert_eq!(wire.answer().await.status, 200);
}

#[tokio::test]
async fn https_ports_in_the_sandbox() {
    let world = World::start().await;
    let dir = tempfile::tempdir().expect("folder");
    write_certificate(dir.path());
    let chain = CertificateDer::from_pem_file(dir.path().join("cert.pem")).expect("certificate");
    let key = PrivateKeyDer::from_pem_file(dir.path().join("key.pem")).expect("key");
    let config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![chain], key)
        .expect("fit");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let app = tcp_server(move |wire| {
        let acceptor = acceptor.clone();
        async move {
            let Ok(stream) = acceptor.accept(wire.stream).await else {
                return;
            };
            let mut wire = Wire::new(stream);
            wire.request_head().await;
            wire.send("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecure")
                .await;
            wire.more().await;
        }
    })
    .await;
    let mut secured = route(ID, echo_agent().await);
    secured["https_ports"] = json!([app.port()]);
    world.control.set(ID, secured);
    assert_eq!(world.get(ID, app.port(), "/").await.text(), "secure");
}

// SPDX-License-Identifier: Apache-2.0
//! Consoles and screens of machines: who may open them, and that bytes go through unchanged.

mod common;

use std::path::{Path, PathBuf};

use common::{ID, World, echo_agent, soon, until};
use futures_util::{SinkExt, StreamExt};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};

/// A world with one machine, and the folder where its monitor listens.
async fn world() -> (World, TempDir) {
    let world = World::start().await;
    let folder = TempDir::new().expect("folder");
    world.add(ID, echo_agent().await);
    for kind in ["console", "vnc"] {
        world.control.state.consoles.lock().expect("lock").insert(
            format!("{ID}?kind={kind}"),
            ("right".to_owned(), socket_of(folder.path(), kind)),
        );
    }
    (world, folder)
}

fn socket_of(folder: &Path, kind: &str) -> PathBuf {
    folder.join(format!("{kind}.sock"))
}

/// A monitor that sends back what it gets, but for `bye`, at which it leaves.
fn monitor(path: &Path) {
    let listener = UnixListener::bind(path).expect("socket");
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("accept");
            tokio::spawn(echo(stream));
        }
    });
}

async fn echo(mut stream: UnixStream) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        if &buffer[..count] == b"bye" || stream.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

async fn open(
    world: &World,
    kind: &str,
    headers: &[(&'static str, &str)],
) -> Result<(WebSocketStream<TcpStream>, Option<String>), (u16, String)> {
    let stream = TcpStream::connect(world.edge).await.expect("edge");
    let url = format!("ws://{}/v1/sandboxes/{ID}/{kind}", world.edge);
    let mut request = url.into_client_request().expect("request");
    for (name, value) in headers {
        request
            .headers_mut()
            .insert(*name, value.parse().expect("value"));
    }
    match soon("handshake", client_async(request, stream)).await {
        Ok((socket, response)) => {
            let protocol = response.headers().get("sec-websocket-protocol");
            let protocol = protocol.map(|value| value.to_str().expect("text").to_owned());
            Ok((socket, protocol))
        }
        Err(Error::Http(response)) => {
            let body = response.body().clone().unwrap_or_default();
            let body = String::from_utf8_lossy(&body).into_owned();
            Err((response.status().as_u16(), body))
        }
        Err(error) => panic!("{error}"),
    }
}

const RIGHT: [(&str, &str); 1] = [("x-access-token", "right")];

#[tokio::test]
async fn bytes_go_through_unchanged_both_ways() {
    let (world, folder) = world().await;
    monitor(&socket_of(folder.path(), "vnc"));
    let (mut socket, protocol) = open(&world, "vnc", &RIGHT).await.expect("open");
    assert_eq!(protocol, None);
    let all: Vec<u8> = (0..=255).collect();
    for message in [Message::Binary(all.clone().into()), Message::text("grüße")] {
        let sent = message.clone().into_data();
        socket.send(message).await.expect("sent");
        let mut back = Vec::new();
        while back.len() < sent.len() {
            let message = soon("echo", socket.next())
                .await
                .expect("more")
                .expect("ok");
            assert!(message.is_binary());
            back.extend_from_slice(&message.into_data());
        }
        assert_eq!(back, sent);
    }
    // The monitor leaves: the client is told properly.
    socket.send(Message::text("bye")).await.expect("sent");
    let last = soon("end", socket.next())
        .await
        .expect("close")
        .expect("ok");
    assert!(last.is_close());
}

#[tokio::test]
async fn the_token_is_needed_and_a_browser_can_bring_it() {
    let (world, folder) = world().await;
    monitor(&socket_of(folder.path(), "vnc"));
    for headers in [&[][..], &[("x-access-token", "wrong")][..]] {
        let (status, body) = open(&world, "vnc", headers).await.expect_err("refused");
        assert_eq!(status, 401);
        assert!(body.contains("\"code\":\"unauthenticated\""), "{body}");
    }
    let browser = [("sec-websocket-protocol", "binary, opendsec.token.right")];
    let (_socket, protocol) = open(&world, "vnc", &browser).await.expect("open");
    assert_eq!(protocol.as_deref(), Some("binary"));
}

#[tokio::test]
async fn a_console_has_one_client_at_a_time() {
    let (world, folder) = world().await;
    monitor(&socket_of(folder.path(), "console"));
    let (first, _) = open(&world, "console", &RIGHT).await.expect("open");
    let (status, body) = open(&world, "console", &RIGHT).await.expect_err("taken");
    assert_eq!(status, 409);
    assert!(body.contains("console_in_use"), "{body}");
    drop(first);
    for _ in 0..200 {
        if open(&world, "console", &RIGHT).await.is_ok() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!("the console is not given back");
}

#[tokio::test]
async fn a_monitor_that_is_not_there() {
    let (world, _folder) = world().await;
    let (status, body) = open(&world, "vnc", &RIGHT)
        .await
        .expect_err("nobody listens");
    assert_eq!(status, 502);
    assert!(body.contains("console_unavailable"), "{body}");
}

#[tokio::test]
async fn a_console_ends_with_its_sandbox() {
    let (world, folder) = world().await;
    world.control.streams_opened(1).await;
    monitor(&socket_of(folder.path(), "console"));
    let (mut socket, _) = open(&world, "console", &RIGHT).await.expect("open");
    socket.send(Message::text("x")).await.expect("sent");
    soon("echo", socket.next())
        .await
        .expect("more")
        .expect("ok");
    world.control.remove(ID);
    world
        .control
        .notify(serde_json::json!({"event": "invalidate", "sandbox_id": ID}));
    until("the invalidation", || world.control.lookups() >= 1).await;
    // It ends without a proper close, so that it does not look like an end of the output.
    let ended = soon("end", socket.next()).await;
    assert!(
        !matches!(ended, Some(Ok(ref message)) if !message.is_close()),
        "{ended:?}"
    );
}

#[tokio::test]
async fn without_an_upgrade_it_is_the_apis() {
    let (world, _folder) = world().await;
    let request = format!("GET /v1/sandboxes/{ID}/console HTTP/1.1\r\nHost: x\r\n\r\n");
    let answer = world.ask(&request).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["api"], true);
}

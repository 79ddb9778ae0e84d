// SPDX-License-Identifier: Apache-2.0
//! Bodies on their way: both directions, early ends, upgrades, kept connections.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Answer, ID, World, chunked, echo_agent, frame, soon, tcp_server, to_port, until};
use serde_json::json;
use tokio::sync::Notify;

const STREAM_HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\n";

fn chunked_post(path: &str, headers: &str) -> String {
    to_port(
        "POST",
        ID,
        49_983,
        path,
        &format!("Transfer-Encoding: chunked\r\n{headers}"),
    )
}

#[tokio::test]
async fn both_directions_at_once() {
    let world = World::start().await;
    // Sends each chunk back as soon as it comes.
    let agent = tcp_server(|mut wire| async move {
        wire.request_head().await;
        wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            .await;
        while let Ok(Some(chunk)) = wire.chunk().await {
            wire.send(chunked(&chunk)).await;
        }
        wire.send("0\r\n\r\n").await;
    })
    .await;
    world.add(ID, agent);
    let mut wire = world.connect().await;
    wire.send(chunked_post("/echo", "")).await;
    for round in 0..50 {
        let text = format!("round {round}");
        wire.send(chunked(text.as_bytes())).await;
        if round == 0 {
            assert_eq!(wire.head().await.0, 200);
        }
        assert_eq!(wire.chunk().await, Ok(Some(text.into_bytes())));
    }
    wire.send("0\r\n\r\n").await;
    assert_eq!(wire.chunk().await, Ok(None));
}

#[tokio::test]
async fn trailers_pass_and_expectations_are_met() {
    let world = World::start().await;
    let agent = tcp_server(|mut wire| async move {
        let (_, head) = wire.request_head().await;
        let head = head.to_lowercase();
        assert!(head.contains("te: trailers") && !head.contains("expect:"), "{head}");
        wire.until(b"0\r\n").await;
        let trailer = String::from_utf8(wire.until(b"\r\n\r\n").await).expect("text");
        assert_eq!(trailer.to_lowercase(), "x-sum: 7\r\n\r\n");
        wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Result\r\n\r\n2\r\nok\r\n0\r\nX-Result: fine\r\n\r\n").await;
        wire.more().await;
    })
    .await;
    world.add(ID, agent);
    let mut wire = world.connect().await;
    wire.send(chunked_post(
        "/",
        "TE: trailers\r\nConnection: te\r\nTrailer: X-Sum\r\nExpect: 100-continue\r\n",
    ))
    .await;
    assert_eq!(
        wire.head().await.0,
        100,
        "the edge asks for the body once the sandbox is connected"
    );
    wire.send("3\r\nabc\r\n0\r\nX-Sum: 7\r\n\r\n").await;
    assert_eq!(wire.head().await.0, 200);
    assert_eq!(wire.chunk().await, Ok(Some(b"ok".to_vec())));
    let rest = String::from_utf8(wire.until(b"\r\n\r\n").await)
        .expect("text")
        .to_lowercase();
    assert!(rest.contains("x-result: fine"), "{rest}");
}

#[tokio::test]
async fn no_body_is_asked_for_when_the_answer_is_known() {
    let world = World::start().await;
    let mut wire = world.connect().await;
    wire.send(to_port(
        "POST",
        "igone",
        49_983,
        "/files",
        "Content-Length: 5000000\r\nExpect: 100-continue\r\n",
    ))
    .await;
    assert_eq!(wire.head().await.0, 502, "not 100");
}

/// Start a stream, let the agent send `before` and then break off.
async fn broken_stream(before: Vec<u8>, head: &'static str) -> Answer {
    let world = World::start().await;
    let agent = tcp_server(move |mut wire| {
        let before = before.clone();
        async move {
            wire.request_head().await;
            wire.send(head).await;
            wire.send(before).await;
            // Dropped: the connection ends without a last chunk.
        }
    })
    .await;
    world.add(ID, agent);
    let answer = world
        .ask(&to_port(
            "POST",
            ID,
            49_983,
            "/process.Process/Start",
            "Content-Length: 0\r\n",
        ))
        .await;
    until("a log line, as for every error", || {
        world.log().contains("request_failed")
    })
    .await;
    answer
}

#[tokio::test]
async fn an_agent_that_dies_between_frames() {
    let first = frame(0, r#"{"event":{}}"#);
    let answer = broken_stream(chunked(&first), STREAM_HEAD).await;
    assert!(answer.complete);
    let end = &answer.body[first.len()..];
    assert_eq!(end[0], 2, "an end frame");
    assert_eq!(
        u32::from_be_bytes(end[1..5].try_into().expect("four")) as usize,
        end.len() - 5
    );
    let end: serde_json::Value = serde_json::from_slice(&end[5..]).expect("JSON");
    assert_eq!(end["error"]["code"], "unavailable");
    assert!(end["error"]["message"].is_string());
}

#[tokio::test]
async fn an_agent_that_dies_within_a_frame_or_a_plain_body() {
    let cut = frame(0, r#"{"event":{}}"#)[..9].to_vec();
    let answer = broken_stream(chunked(&cut), STREAM_HEAD).await;
    assert!(!answer.complete);
    assert_eq!(answer.body, cut);
    let plain = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert!(!broken_stream(chunked(b"half"), plain).await.complete);
    let sized = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n";
    assert!(!broken_stream(b"half".to_vec(), sized).await.complete);
}

#[tokio::test]
async fn an_old_client_sees_a_reset_not_an_end() {
    let world = World::start().await;
    let agent = tcp_server(|mut wire| async move {
        wire.request_head().await;
        wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
            .await;
    })
    .await;
    world.add(ID, agent);
    let mut wire = world.connect().await;
    let request = to_port("GET", ID, 49_983, "/", "").replace("HTTP/1.1", "HTTP/1.0");
    wire.send(request).await;
    wire.head().await;
    let mut chunk = [0; 64];
    let end = loop {
        match soon(
            "read",
            tokio::io::AsyncReadExt::read(&mut wire.stream, &mut chunk),
        )
        .await
        {
            Ok(0) => break "end",
            Ok(_) => {}
            Err(_) => break "reset",
        }
    };
    assert_eq!(end, "reset");
}

#[tokio::test]
async fn streams_of_a_sandbox_that_is_gone_end_with_a_frame() {
    let world = World::start().await;
    let agent = tcp_server(|mut wire| async move {
        wire.request_head().await;
        wire.send(STREAM_HEAD).await;
        wire.send(chunked(&frame(0, "{}"))).await;
        // Silent from here on, as when the network was taken down without a packet.
        std::future::pending::<()>().await;
    })
    .await;
    world.add(ID, agent);
    let mut wire = world.connect().await;
    wire.send(to_port(
        "POST",
        ID,
        49_983,
        "/process.Process/Start",
        "Content-Length: 0\r\n",
    ))
    .await;
    wire.head().await;
    wire.chunk().await.expect("first frame");
    // A notice alone (a changed policy) leaves the stream be; the sandbox still runs.
    world
        .control
        .notify(json!({"event": "invalidate", "sandbox_id": ID}));
    until("a check", || world.control.lookups() == 2).await;
    world.control.remove(ID);
    world
        .control
        .notify(json!({"event": "invalidate", "sandbox_id": ID}));
    let end = wire.chunk().await.expect("end frame").expect("end frame");
    assert_eq!(end[0], 2);
    assert!(String::from_utf8_lossy(&end).contains("the sandbox has ended"));
    assert_eq!(wire.chunk().await, Ok(None));
}

#[tokio::test]
async fn a_client_that_vanishes_ends_the_upstream_at_once() {
    let world = World::start().await;
    let begun = Arc::new(AtomicUsize::new(0));
    let ended = Arc::new(AtomicUsize::new(0));
    let (begun_there, ended_there) = (Arc::clone(&begun), Arc::clone(&ended));
    let agent = tcp_server(move |mut wire| {
        let (begun, ended) = (Arc::clone(&begun_there), Arc::clone(&ended_there));
        async move {
            let (line, _) = wire.request_head().await;
            if line.contains("/stream") {
                wire.send(STREAM_HEAD).await;
            }
            begun.fetch_add(1, Ordering::SeqCst);
            while wire.more().await {}
            ended.fetch_add(1, Ordering::SeqCst);
        }
    })
    .await;
    world.add(ID, agent);
    let upload = "Content-Length: 1000000\r\n";
    for (round, (path, headers)) in [("/files", upload), ("/wait", ""), ("/stream", "")]
        .into_iter()
        .enumerate()
    {
        let mut wire = world.connect().await;
        wire.send(to_port("POST", ID, 49_983, path, headers)).await;
        wire.send(if headers.is_empty() {
            &b""[..]
        } else {
            &[0; 5000]
        })
        .await;
        until("request", || begun.load(Ordering::SeqCst) == round + 1).await;
        drop(wire);
        until("end of the upstream", || {
            ended.load(Ordering::SeqCst) == round + 1
        })
        .await;
    }
}

#[tokio::test]
async fn an_answer_before_the_end_of_the_upload() {
    let world = World::start().await;
    let agent = tcp_server(|mut wire| async move {
        wire.request_head().await;
        wire.send("HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 4\r\n\r\nfull")
            .await;
        while wire.more().await {}
    })
    .await;
    world.add(ID, agent);
    let mut wire = world.connect().await;
    wire.send(to_port(
        "POST",
        ID,
        49_983,
        "/files",
        "Content-Length: 100000000\r\n",
    ))
    .await;
    wire.send([0; 100_000]).await;
    let answer = wire.answer().await;
    assert_eq!((answer.status, answer.text()), (507, "full"));
}

#[tokio::test]
async fn stale_kept_connections() {
    let world = World::start().await;
    let connections = Arc::new(AtomicUsize::new(0));
    let seen = Arc::new(AtomicUsize::new(0));
    let (connections_there, seen_there) = (Arc::clone(&connections), Arc::clone(&seen));
    // Answers once on each connection, and closes when the second request arrives.
    let agent = tcp_server(move |mut wire| {
        let (connections, seen) = (Arc::clone(&connections_there), Arc::clone(&seen_there));
        async move {
            connections.fetch_add(1, Ordering::SeqCst);
            wire.request_head().await;
            seen.fetch_add(1, Ordering::SeqCst);
            wire.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                .await;
            if wire.more().await {
                seen.fetch_add(1, Ordering::SeqCst);
            }
        }
    })
    .await;
    world.add(ID, agent);
    assert_eq!(world.get(ID, 49_983, "/1").await.text(), "ok");
    assert_eq!(
        world.get(ID, 49_983, "/2").await.text(),
        "ok",
        "repeated on a new connection"
    );
    assert_eq!(connections.load(Ordering::SeqCst), 2);
    assert_eq!(seen.load(Ordering::SeqCst), 3);
    // A body was on its way: it must not be sent twice.
    let post = to_port("POST", ID, 49_983, "/3", "Content-Length: 3\r\n") + "abc";
    let answer = world.ask(&post).await;
    assert_eq!(answer.status, 502);
    assert!(!answer.text().contains("was not found") && !answer.text().contains("not open"));
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn connections_are_kept_and_dropped_at_invalidation() {
    let world = World::start().await;
    let open = Arc::new(AtomicUsize::new(0));
    let (opened, open_there) = (Arc::new(AtomicUsize::new(0)), Arc::clone(&open));
    let opened_there = Arc::clone(&opened);
    let app = tcp_server(move |mut wire| {
        let (opened, open) = (Arc::clone(&opened_there), Arc::clone(&open_there));
        async move {
            opened.fetch_add(1, Ordering::SeqCst);
            open.fetch_add(1, Ordering::SeqCst);
            while !wire.buffer.is_empty() || wire.more().await {
                wire.request_head().await;
                wire.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                    .await;
            }
            open.fetch_sub(1, Ordering::SeqCst);
        }
    })
    .await;
    world.add(ID, echo_agent().await);
    for _ in 0..20 {
        assert_eq!(world.get(ID, app.port(), "/").await.text(), "ok");
    }
    // The next request may overtake the tunnel's way back into the pool; seldom.
    assert!(opened.load(Ordering::SeqCst) <= 4, "few tunnels for all");
    world
        .control
        .notify(json!({"event": "invalidate", "sandbox_id": ID}));
    until("the tunnel closed", || open.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test]
async fn upgrades_pass_through_the_tunnel() {
    let world = World::start().await;
    let app = tcp_server(|mut wire| async move {
        let (_, head) = wire.request_head().await;
        let head = head.to_lowercase();
        assert!(head.contains("connection: upgrade") && head.contains("upgrade: websocket"), "{head}");
        assert!(head.contains("sec-websocket-key: abc"));
        wire.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: xyz\r\n\r\nhello").await;
        while wire.more().await {
            let bytes = std::mem::take(&mut wire.buffer);
            wire.send(bytes).await;
        }
    })
    .await;
    world.add(ID, echo_agent().await);
    let ask = to_port(
        "GET",
        ID,
        app.port(),
        "/ws",
        "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: abc\r\n",
    );
    let mut wire = world.connect().await;
    wire.send(&ask).await;
    let (status, head) = wire.head().await;
    let head = head.to_lowercase();
    assert_eq!(status, 101);
    assert!(
        head.contains("upgrade: websocket") && head.contains("sec-websocket-accept: xyz"),
        "{head}"
    );
    assert_eq!(wire.until(b"hello").await, b"hello");
    for _ in 0..3 {
        wire.send("ping").await;
        assert_eq!(wire.until(b"ping").await, b"ping");
    }
    // The agent itself is never left HTTP with.
    let refused = world
        .ask(&ask.replace(&app.port().to_string(), "49983"))
        .await;
    assert_eq!(refused.status, 200);
    assert!(refused.json()["headers"].get("upgrade").is_none());
    // A sandbox that ends takes its upgraded connections along.
    world.control.remove(ID);
    world
        .control
        .notify(json!({"event": "invalidate", "sandbox_id": ID}));
    assert!(soon("end of the upgrade", wire.closed()).await);
}

#[tokio::test]
async fn memory_stays_flat_under_a_slow_reader() {
    let world = World::start().await;
    let sent = Arc::new(AtomicUsize::new(0));
    let sent_there = Arc::clone(&sent);
    let agent = tcp_server(move |mut wire| {
        let sent = Arc::clone(&sent_there);
        async move {
            wire.request_head().await;
            wire.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
                .await;
            let block = vec![7; 1 << 16];
            loop {
                tokio::io::AsyncWriteExt::write_all(&mut wire.stream, &block)
                    .await
                    .expect("send");
                sent.fetch_add(block.len(), Ordering::SeqCst);
            }
        }
    })
    .await;
    world.add(ID, agent);
    let before = world.memory_kb();
    let mut wire = world.connect().await;
    wire.send(to_port("GET", ID, 49_983, "/files", "")).await;
    wire.head().await;
    // The client reads nothing more: what is under way must stop growing.
    let mut last = usize::MAX;
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = sent.load(Ordering::SeqCst);
        if now == last {
            break;
        }
        last = now;
    }
    assert!(
        last < 64 << 20,
        "backpressure reaches the sandbox: {last} bytes were taken"
    );
    assert!(
        world.memory_kb() - before < 8 * 1024,
        "{} kB more",
        world.memory_kb() - before
    );
}

#[tokio::test]
async fn requests_under_way_finish_at_sigterm() {
    let world = World::start_with(common::Options::flags(&["--drain-s", "1"])).await;
    let go = Arc::new(Notify::new());
    let go_there = Arc::clone(&go);
    let agent = tcp_server(move |mut wire| {
        let go = Arc::clone(&go_there);
        async move {
            let (line, _) = wire.request_head().await;
            if line.contains("Start") {
                wire.send(STREAM_HEAD).await;
                wire.send(chunked(&frame(0, "{}"))).await;
                std::future::pending::<()>().await;
            }
            go.notified().await;
            wire.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
                .await;
        }
    })
    .await;
    world.add(ID, agent);
    let mut short = world.connect().await;
    short.send(to_port("GET", ID, 49_983, "/", "")).await;
    let mut long = world.connect().await;
    long.send(to_port(
        "POST",
        ID,
        49_983,
        "/process.Process/Start",
        "Content-Length: 0\r\n",
    ))
    .await;
    long.head().await;
    long.chunk().await.expect("first frame");
    let mut idle = world.connect().await;
    world.signal("TERM");
    assert!(idle.closed().await, "an idle connection is closed at once");
    until("no new connections", || {
        std::net::TcpStream::connect(world.edge).is_err()
    })
    .await;
    go.notify_one();
    assert_eq!(short.answer().await.text(), "done");
    let end = long.chunk().await.expect("end frame").expect("end frame");
    assert!(String::from_utf8_lossy(&end).contains("connect again"));
    assert_eq!(long.chunk().await, Ok(None));
    assert!(world.ended().await.success());
}

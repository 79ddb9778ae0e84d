// SPDX-License-Identifier: Apache-2.0
//! Clients that are slow, many, or mean harm; and what operators see.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{ID, Options, World, echo_agent, tcp_server, to_port, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

#[tokio::test]
async fn smuggling_is_closed() {
    let world = World::start().await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let seen_there = Arc::clone(&seen);
    let agent = tcp_server(move |mut wire| {
        let seen = Arc::clone(&seen_there);
        async move {
            while !wire.buffer.is_empty() || wire.more().await {
                let (line, head) = wire.request_head().await;
                seen.lock().expect("lock").push(line);
                if head.to_lowercase().contains("transfer-encoding: chunked") {
                    while let Ok(Some(_)) = wire.chunk().await {}
                    wire.until(b"\r\n").await;
                }
                wire.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    .await;
            }
        }
    })
    .await;
    world.add(ID, agent);
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let with = |headers: &str, body: &str| to_port("POST", ID, 49_983, "/outer", headers) + body;
    let refused = [
        with("Content-Length: 5\r\nContent-Length: 6\r\n", "hello"),
        with("Content-Length: +5\r\n", "hello"),
        with("Content-Length: 5, 6\r\n", "hello"),
        with("Content-Length: 0x5\r\n", "hello"),
        with("Content-Length: 99999999999999999999999\r\n", ""),
        with("Transfer-Encoding: xchunked\r\n", smuggled),
        with("Transfer-Encoding: chunked, identity\r\n", smuggled),
        with("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"),
        with(
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "0\r\n\r\n",
        ),
        with(
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
            smuggled,
        ),
        with("Transfer-Encoding : chunked\r\n", "0\r\n\r\n"),
        with("X: a\r\n Transfer-Encoding: chunked\r\n", ""),
        with("X: a\0b\r\n", ""),
        with("X: a\rTransfer-Encoding: chunked\r\n", ""),
        with("X\0: a\r\n", ""),
        with(": a\r\n", ""),
        with("Host: other\r\n", ""),
        with("Expect: something\r\n", ""),
        to_port(
            "POST",
            ID,
            49_983,
            "/outer",
            "Transfer-Encoding: chunked\r\n",
        )
        .replace("HTTP/1.1", "HTTP/1.0"),
        to_port("GET", ID, 49_983, "/a b", ""),
        to_port("G T", ID, 49_983, "/", ""),
        "GET / HTTP/1.1\r\n\r\n".to_owned(),
        "GET / HTTP/3.7\r\nHost: x\r\n\r\n".to_owned(),
        "GET http://u:p@x/ HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "\u{1}\u{2}\u{3}\r\n\r\n".to_owned(),
    ];
    for request in &refused {
        let mut wire = world.connect().await;
        wire.send(request).await;
        let (status, head) = wire.head().await;
        assert!(
            (400..=599).contains(&status) && status != 502,
            "{request:?} got {head}"
        );
    }
    assert!(
        seen.lock().expect("lock").is_empty(),
        "nothing reached the sandbox: {seen:?}"
    );

    // A length beside chunks, in both orders: the chunks count, the connection ends, and what was
    // smuggled behind them is not answered.
    for headers in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    ] {
        let mut wire = world.connect().await;
        wire.send(with(headers, &format!("0\r\n\r\n{smuggled}")))
            .await;
        wire.head().await;
        while wire.more().await {}
        assert!(
            !String::from_utf8_lossy(&wire.buffer).contains("HTTP/1.1 "),
            "only one answer"
        );
    }
    let seen = seen.lock().expect("lock");
    assert!(
        seen.iter().all(|line| line.starts_with("POST /outer")),
        "{seen:?}"
    );
}

#[tokio::test]
async fn large_heads_are_refused() {
    let world = World::start().await;
    let long = format!("X-Long: {}\r\n", "a".repeat(70_000));
    assert_eq!(
        world
            .ask(&to_port("GET", ID, 49_983, "/", &long))
            .await
            .status,
        431
    );
    let many = "X-Many: a\r\n".repeat(200);
    assert_eq!(
        world
            .ask(&to_port("GET", ID, 49_983, "/", &many))
            .await
            .status,
        431
    );
    let path = format!("/{}", "a".repeat(66_000));
    assert!(
        (400..500).contains(
            &world
                .ask(&to_port("GET", ID, 49_983, &path, ""))
                .await
                .status
        )
    );
}

#[tokio::test]
async fn slow_heads_and_idle_connections_are_closed_but_slow_bodies_are_not() {
    let flags = Options::flags(&["--header-timeout-s", "1", "--idle-timeout-s", "2"]);
    let world = World::start_with(flags).await;
    world.add(ID, echo_agent().await);
    let mut silent = world.connect().await;
    let drip = world.connect().await;
    let mut kept = world.connect().await;
    let mut kept_drip = world.connect().await;
    let mut upload = world.connect().await;
    let get = to_port("GET", ID, 49_983, "/", "");
    for wire in [&mut kept, &mut kept_drip] {
        wire.send(&get).await;
        assert_eq!(wire.answer().await.status, 200);
    }
    upload
        .send(to_port(
            "POST",
            ID,
            49_983,
            "/slow",
            "Content-Length: 30\r\n",
        ))
        .await;
    let dripping = async {
        let mut writer = drip;
        for byte in get.as_bytes() {
            if writer.stream.write_all(&[*byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        while writer.more().await {}
        writer
    };
    let uploading = async {
        for _ in 0..30 {
            upload.send("x").await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        upload.answer().await
    };
    let kept_dripping = async {
        kept_drip.send("GET / HT").await;
        kept_drip.closed().await
    };
    let (drip, answer, kept_drip, kept, silent) = tokio::join!(
        dripping,
        uploading,
        kept_dripping,
        kept.closed(),
        silent.closed()
    );
    assert!(
        !String::from_utf8_lossy(&drip.buffer).contains("200 OK"),
        "the slow head is not served"
    );
    assert_eq!(answer.json()["bytes"], 30, "a body may be slow");
    assert!(kept_drip && kept && silent);
}

#[tokio::test]
async fn connections_above_the_cap_get_an_answer() {
    let world = World::start_with(Options::flags(&["--max-connections", "3"])).await;
    world.add(ID, echo_agent().await);
    let mut held = Vec::new();
    let get = to_port("GET", ID, 49_983, "/", "");
    // The harness's own probe connection may still hold a slot for a moment.
    for _ in 0..200 {
        let mut wire = world.connect().await;
        wire.send(&get).await;
        let answer = wire.answer().await;
        if answer.status == 200 && held.len() < 3 {
            held.push(wire);
        } else if held.len() == 3 {
            assert_eq!(answer.status, 503);
            assert_eq!(answer.header("retry-after"), Some("1"));
            assert_eq!(answer.header("connection"), Some("close"));
            assert!(wire.closed().await);
            break;
        }
    }
    assert_eq!(held.len(), 3);
    drop(held);
    let mut status = 0;
    for _ in 0..200 {
        status = world.ask(&get).await.status;
        if status == 200 {
            break;
        }
    }
    assert_eq!(status, 200, "room again");
}

#[tokio::test]
async fn a_tls_hello_without_a_certificate_is_closed() {
    let world = World::start().await;
    let mut wire = world.connect().await;
    wire.send(b"\x16\x03\x01\x00\x05hello").await;
    let mut bytes = Vec::new();
    let end = wire.stream.read_to_end(&mut bytes).await;
    assert_eq!(end.expect("an orderly close"), 0);
}

#[tokio::test]
async fn metrics_and_access_log() {
    let dir = tempfile::tempdir().expect("folder");
    let socket = dir.path().join("metrics.sock");
    let flags = [
        "--access-log",
        "--metrics-socket",
        socket.to_str().expect("path"),
    ];
    let world = World::start_with(Options::flags(&flags)).await;
    world.add(ID, echo_agent().await);
    let request = to_port(
        "POST",
        ID,
        49_983,
        "/files?signature=hush",
        "Content-Length: 3\r\n",
    ) + "abc";
    assert_eq!(world.ask(&request).await.status, 200);
    until("the log line", || {
        world.log().contains("\"event\":\"request\"")
    })
    .await;
    let log = world.log();
    let line = log
        .lines()
        .find(|line| line.contains("\"event\":\"request\""))
        .expect("line");
    let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(line["path"], "/files");
    assert_eq!(line["sandbox_id"], ID);
    assert_eq!(
        (line["status"].as_u64(), line["bytes_in"].as_u64()),
        (Some(200), Some(3))
    );
    assert!(line["bytes_out"].as_u64() > Some(0) && line["ms"].is_number());
    assert!(!log.contains("hush"), "signatures stay out of logs");

    let mut stream = UnixStream::connect(&socket).await.expect("metrics socket");
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .expect("ask");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("read");
    assert!(
        text.contains("opendsec_edge_requests_total{class=\"agent\",status=\"2xx\"} 1\n"),
        "{text}"
    );
    assert!(text.contains("opendsec_edge_bytes_total{class=\"agent\",direction=\"in\"} 3\n"));
    assert!(text.contains("opendsec_edge_control_connected 1\n"));
    assert!(!text.contains(ID));
}

#[tokio::test]
async fn a_port_in_use_is_explained() {
    let world = World::start().await;
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_opendsec-edge"))
        .args([
            "--listen",
            &world.edge.to_string(),
            "--api-socket",
            "a",
            "--control-socket",
            "c",
            "--domain",
            "d",
        ])
        .output()
        .expect("edge");
    assert!(!output.status.success());
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(
        log.contains("is in use") && log.contains("--listen"),
        "{log}"
    );
}

#[tokio::test]
async fn connections_at_rest_wake_up_where_they_were() {
    let world = World::start_with(Options {
        tls: true,
        ..Options::default()
    })
    .await;
    world.add(ID, echo_agent().await);
    let get = to_port("GET", ID, 49_983, "/", "");
    let post = to_port("POST", ID, 49_983, "/post", "Content-Length: 4\r\n") + "body";
    let (early, late) = get.split_at(9);
    let mut plain = world.connect().await;
    let mut half = world.connect().await;
    let mut unread = world.connect().await;
    for wire in [&mut plain, &mut half] {
        wire.send(&get).await;
        assert_eq!(wire.answer().await.status, 200);
    }
    // The edge refuses this before the body has come: what follows is not a request.
    unread
        .send(to_port(
            "POST",
            "igone",
            49_983,
            "/",
            "Content-Length: 1000\r\n",
        ))
        .await;
    assert_eq!(unread.answer().await.status, 502);
    half.send(early).await;
    // Longer than it takes to come to rest.
    tokio::time::sleep(Duration::from_secs(5)).await;
    half.send(late).await;
    assert_eq!(half.answer().await.status, 200);
    for _ in 0..3 {
        plain.send(&post).await;
        assert_eq!(plain.answer().await.json()["bytes"], 4);
    }
    drop(unread.stream.write_all(get.as_bytes()).await);
    while unread.more().await {}
    assert_eq!(String::from_utf8_lossy(&unread.buffer), "");
}

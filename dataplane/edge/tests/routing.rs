// SPDX-License-Identifier: Apache-2.0
//! Where requests go, what the destination sees, and the edge's own answers.

mod common;

use common::{ID, World, agent, echo_agent, full, route, soon, tcp_server, to_port, until};
use http::Response;
use serde_json::json;

#[tokio::test]
async fn api_headers_and_host_form() {
    let world = World::start().await;
    world.add(ID, echo_agent().await);
    let api = world.ask("GET /sandboxes?x=%20y HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: mine-1\r\nX-Forwarded-For: 6.6.6.6\r\nX-Opendsec-Control: stolen\r\n\r\n").await;
    let seen = api.json();
    assert_eq!(seen["api"], true);
    assert_eq!(seen["uri"], "/sandboxes?x=%20y");
    assert_eq!(seen["headers"]["x-request-id"], "mine-1");
    assert_eq!(seen["headers"]["x-forwarded-for"], "127.0.0.1");
    assert_eq!(seen["headers"]["x-forwarded-proto"], "http");
    assert_eq!(seen["headers"]["x-forwarded-host"], "localhost");
    assert_eq!(seen["headers"]["host"], "localhost");
    assert!(seen["headers"].get("x-opendsec-control").is_none());
    assert_eq!(api.header("x-request-id"), Some("mine-1"));

    let by_header = world.get(ID, 49_983, "/health").await.json();
    assert_eq!(by_header["uri"], "/health");
    assert_eq!(by_header["headers"]["e2b-sandbox-id"], ID);
    for domain in ["sbx.test", "SBX.test:7300", "elsewhere.example"] {
        let request =
            format!("GET /h HTTP/1.1\r\nHost: 49983-{ID}.{domain}\r\nX-Access-Token: t\r\n\r\n");
        let seen = world.ask(&request).await.json();
        assert_eq!(seen["uri"], "/h", "{domain}");
        assert_eq!(seen["headers"]["x-access-token"], "t");
        assert_eq!(seen["headers"]["host"], format!("49983-{ID}.{domain}"));
    }
    assert_eq!(world.control.lookups(), 1, "one question for all of them");
}

#[tokio::test]
async fn errors_to_the_byte() {
    let world = World::start().await;
    world.add(ID, echo_agent().await);
    let gone = world.get("igone", 49_983, "/health").await;
    assert_eq!(gone.status, 502);
    assert_eq!(
        gone.text(),
        r#"{"sandboxId":"igone","message":"The sandbox was not found","code":502}"#
    );
    assert_eq!(
        gone.header("content-type"),
        Some("application/json; charset=utf-8")
    );
    let closed = world.get(ID, 1, "/").await;
    assert_eq!(closed.status, 502);
    assert_eq!(
        closed.text(),
        format!(
            r#"{{"sandboxId":"{ID}","message":"The sandbox is running but port is not open","port":1,"code":502}}"#
        )
    );
    let missing = world
        .ask(&format!(
            "GET / HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {ID}\r\n\r\n"
        ))
        .await;
    assert_eq!(
        (missing.status, missing.text()),
        (
            400,
            r#"{"code":400,"message":"Missing header: E2b-Sandbox-Port"}"#
        )
    );
    let missing = world
        .ask("GET / HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Port: 80\r\n\r\n")
        .await;
    assert_eq!(
        (missing.status, missing.text()),
        (
            400,
            r#"{"code":400,"message":"Missing header: E2b-Sandbox-Id"}"#
        )
    );
    let page = world
        .ask(&to_port("GET", ID, 1, "/", "Accept: text/html,*/*\r\n"))
        .await;
    assert_eq!(page.status, 502);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    for path in [
        "/init",
        "//init",
        "/%69nit",
        "/opendsec/tunnel?port=22",
        "/x/../freeze",
    ] {
        assert_eq!(world.get(ID, 49_983, path).await.status, 404, "{path}");
    }
    assert_eq!(
        world
            .ask("CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n")
            .await
            .status,
        405
    );
}

#[tokio::test]
async fn ports_tokens_and_masks() {
    let world = World::start().await;
    let app = tcp_server(|mut wire| async move {
        let (_, head) = wire.request_head().await;
        let body = head.to_lowercase();
        wire.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ))
        .await;
    })
    .await;
    let agent = echo_agent().await;
    world.add(ID, agent);
    let open = world.get(ID, app.port(), "/a?b=c").await;
    assert!(open.text().starts_with("get /a?b=c http/1.1"), "{open:?}");
    assert!(open.text().contains("\r\nhost: localhost\r\n"));
    assert!(!open.text().contains("x-opendsec-control"));

    let mut closed = route("iclosed", agent);
    closed["allow_public_traffic"] = json!(false);
    closed["mask_request_host"] = json!("localhost:${PORT}");
    world.control.set("iclosed", closed);
    let missing = world.get("iclosed", app.port(), "/").await;
    assert_eq!(missing.status, 403);
    assert!(
        missing
            .text()
            .starts_with(r#"{"sandboxId":"iclosed","message":""#),
        "{missing:?}"
    );
    assert!(missing.text().ends_with(r#"","code":403}"#), "{missing:?}");
    let wrong = world
        .ask(&to_port(
            "GET",
            "iclosed",
            app.port(),
            "/",
            "E2b-Traffic-Access-Token: nope\r\n",
        ))
        .await;
    assert_eq!(wrong.status, 403);
    assert_ne!(wrong.text(), missing.text());
    let right = world
        .ask(&to_port(
            "GET",
            "iclosed",
            app.port(),
            "/",
            "E2b-Traffic-Access-Token: traffic\r\n",
        ))
        .await;
    assert_eq!(right.status, 200);
    assert!(
        right
            .text()
            .contains(&format!("\r\nhost: localhost:{}\r\n", app.port())),
        "{right:?}"
    );
    assert!(right.text().contains("x-forwarded-host: localhost\r\n"));
    assert_eq!(
        world.get("iclosed", 49_983, "/health").await.status,
        200,
        "the agent checks for itself"
    );
}

#[tokio::test]
async fn signed_urls_without_an_id() {
    let world = World::start().await;
    world.add(ID, echo_agent().await);
    world
        .control
        .state
        .signatures
        .lock()
        .expect("lock")
        .insert("signature=v1%5Fgood".to_owned(), ID.to_owned());
    let good = world.ask("GET /files?path=%2Fa+b&username=user&signature=v1_good HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert_eq!(
        good.json()["uri"],
        "/files?path=%2Fa+b&username=user&signature=v1_good"
    );
    let query = world.control.state.signature_queries.lock().expect("lock")[0].clone();
    assert_eq!(
        query,
        "path=%2Fa%20b&operation=read&username=user&signature=v1%5Fgood&expiration="
    );
    let bad = world.ask("POST /files?path=a&signature=v1_bad&signature_expiration=5 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!(
        (bad.status, bad.text()),
        (401, r#"{"code":401,"message":"invalid signature"}"#)
    );
    let query = world.control.state.signature_queries.lock().expect("lock")[1].clone();
    assert!(
        query.contains("operation=write") && query.ends_with("expiration=5"),
        "{query}"
    );
}

#[tokio::test]
async fn invalidation_single_flight_and_refresh() {
    let world = World::start().await;
    let named = |name: &'static str| agent(move |_| async move { Response::new(full(name)) });
    world.add(ID, named("first").await);
    *world.control.state.gated.lock().expect("lock") = true;
    let answers = futures_util::future::join_all((0..20).map(|_| world.get(ID, 49_983, "/")));
    let open_gate = async {
        until("a look-up", || world.control.lookups() == 1).await;
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        *world.control.state.gated.lock().expect("lock") = false;
        world.control.state.gate.notify_waiters();
    };
    let (answers, ()) = tokio::join!(answers, open_gate);
    assert!(answers.iter().all(|answer| answer.text() == "first"));
    assert_eq!(world.control.lookups(), 1, "single flight");

    world.add(ID, named("second").await);
    assert_eq!(
        world.get(ID, 49_983, "/").await.text(),
        "first",
        "still cached"
    );
    world
        .control
        .notify(json!({"event": "invalidate", "sandbox_id": ID}));
    let mut text = String::new();
    for _ in 0..400 {
        text = world.get(ID, 49_983, "/").await.text().to_owned();
        if text == "second" {
            break;
        }
    }
    assert_eq!(text, "second");

    // A route that leads nowhere is asked for once more.
    let unused = {
        std::net::TcpListener::bind("127.0.0.1:0")
            .expect("bind")
            .local_addr()
            .expect("address")
    };
    world.add("imoved", unused);
    let before = world.control.lookups();
    let answer = world.get("imoved", 49_983, "/").await;
    assert_eq!(answer.status, 502);
    assert!(answer.text().contains("port is not open"));
    assert_eq!(world.control.lookups(), before + 2);
}

#[tokio::test]
async fn the_control_plane_may_be_away() {
    let world = World::start().await;
    world.add(ID, echo_agent().await);
    assert_eq!(world.get(ID, 49_983, "/").await.status, 200);
    world.control.stop();
    world.stop_api();
    for _ in 0..3 {
        assert_eq!(world.get(ID, 49_983, "/").await.status, 200, "cached");
    }
    let unknown = world.get("iother", 49_983, "/").await;
    assert_eq!(unknown.status, 503);
    assert_eq!(unknown.json()["error_code"], "control_plane_unavailable");
    assert_eq!(unknown.header("retry-after"), Some("1"));
    let api = world
        .ask("GET /sandboxes HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    assert_eq!(api.status, 503);
    assert_eq!(api.header("retry-after"), Some("1"));
    assert_eq!(api.json()["code"], 503);
    let native = world
        .ask("GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    assert_eq!(native.json()["error"]["code"], "control_plane_unavailable");
    // Back again: the cache is flushed, so a changed route is seen without a notice.
    let moved = agent(|_| async { Response::new(full("moved")) }).await;
    world.add(ID, moved);
    world.control.resume();
    soon("new stream", world.control.streams_opened(2)).await;
    let mut text = String::new();
    for _ in 0..400 {
        text = world.get(ID, 49_983, "/").await.text().to_owned();
        if text == "moved" {
            break;
        }
    }
    assert_eq!(text, "moved");
}

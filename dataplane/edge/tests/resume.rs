// SPDX-License-Identifier: Apache-2.0
//! Paused sandboxes: who may wake them, who waits for it, and what their streams see.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{
    Answer, ID, Options, Paused, World, chunked, echo_agent, frame, route, soon, tcp_server,
    to_port, until,
};
use futures_util::future::join_all;
use serde_json::json;

const AGENT: u16 = 49_983;

async fn ask(world: &World, port: u16, headers: &str) -> Answer {
    world.ask(&to_port("GET", ID, port, "/x", headers)).await
}

#[tokio::test]
async fn one_question_for_all_with_the_same_token_and_none_shared_with_others() {
    let world = World::start_with(Options::flags(&["--access-log"])).await;
    world.add(ID, echo_agent().await);
    world.control.pause(ID, Paused::Wants("right"));
    world.control.shut_gate();
    let right = join_all((0..20).map(|_| ask(&world, AGENT, "X-Access-Token: right\r\n")));
    let others = async {
        until("the right question", || world.control.lookups() >= 1).await;
        // All of these are answered while the right ones wait.
        for headers in [
            "X-Access-Token: wrong\r\n",
            "",
            "E2b-Traffic-Access-Token: right\r\n",
        ] {
            let refused = ask(&world, AGENT, headers).await;
            assert_eq!(refused.status, 401, "{headers}");
            assert_eq!(refused.json()["code"], 401);
        }
        let twice = "X-Access-Token: right\r\nX-Access-Token: right\r\n";
        assert_eq!(ask(&world, AGENT, twice).await.status, 401);
        let long = format!("X-Access-Token: {}\r\n", "x".repeat(5000));
        assert_eq!(ask(&world, AGENT, &long).await.status, 401);
        world.control.open_gate();
    };
    let (right, ()) = tokio::join!(right, others);
    assert!(right.iter().all(|answer| answer.status == 200), "{right:?}");
    let questions = world.control.questions();
    let with_right = questions
        .iter()
        .filter(|question| question.access.as_deref() == Some("right"));
    assert_eq!(with_right.count(), 1, "{questions:?}");
    assert_eq!(questions.len(), 6, "one for each of the refused, too");
    assert!(
        questions
            .iter()
            .all(|question| question.port.as_deref() == Some("49983"))
    );
    let log = world.log();
    assert!(
        !log.contains("right") && !log.contains("wrong"),
        "no token in the log"
    );
}

#[tokio::test]
async fn ports_want_the_traffic_token() {
    let world = World::start().await;
    let agent = echo_agent().await;
    let app = tcp_server(|mut wire| async move {
        wire.request_head().await;
        wire.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            .await;
    })
    .await;
    let mut closed = route(ID, agent);
    closed["allow_public_traffic"] = json!(false);
    world.control.set(ID, closed);
    world.control.pause(ID, Paused::Wants("traffic"));
    let port = app.port();
    let missing = ask(&world, port, "X-Access-Token: traffic\r\n").await;
    assert_eq!(missing.status, 403);
    assert!(missing.text().contains("is missing"), "{missing:?}");
    let wrong = ask(&world, port, "E2b-Traffic-Access-Token: nope\r\n").await;
    assert_eq!(wrong.status, 403);
    assert!(wrong.text().contains("is invalid"), "{wrong:?}");
    let right = ask(&world, port, "E2b-Traffic-Access-Token: traffic\r\n").await;
    assert_eq!((right.status, right.text()), (200, "ok"));
    assert_eq!(
        world
            .control
            .questions()
            .last()
            .and_then(|last| last.port.clone()),
        Some(port.to_string())
    );
}

#[tokio::test]
async fn an_upgrade_waits_for_the_resume_too() {
    let world = World::start().await;
    let app = tcp_server(|mut wire| async move {
        wire.request_head().await;
        wire.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello").await;
        wire.more().await;
    })
    .await;
    world.add(ID, echo_agent().await);
    world.control.pause(ID, Paused::Wants("t"));
    world.control.shut_gate();
    let mut wire = world.connect().await;
    wire.send(to_port(
        "GET",
        ID,
        app.port(),
        "/ws",
        "E2b-Traffic-Access-Token: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
    ))
    .await;
    until("the question", || world.control.lookups() == 1).await;
    world.control.open_gate();
    assert_eq!(wire.head().await.0, 101);
    assert_eq!(wire.until(b"hello").await, b"hello");
}

#[tokio::test]
async fn what_the_control_plane_says_reaches_the_client() {
    let world = World::start().await;
    let conflict = |state: &str| {
        Paused::Answers(
            409,
            json!({"code": "sandbox_state_conflict", "message": "m", "details": {"state": state}}),
        )
    };
    world.control.pause(ID, conflict("paused"));
    let paused = ask(&world, AGENT, "").await;
    assert_eq!(
        (paused.status, paused.text().to_owned()),
        (
            502,
            format!(r#"{{"sandboxId":"{ID}","message":"The sandbox was not found","code":502}}"#)
        )
    );
    for state in ["pausing", "resuming", "starting"] {
        world.control.pause(ID, conflict(state));
        let moving = ask(&world, 80, "").await;
        assert_eq!(
            (moving.status, moving.text().to_owned()),
            (
                409,
                format!(
                    r#"{{"sandboxId":"{ID}","message":"The sandbox is still transitioning. Try again in a moment.","code":409,"error_code":"sandbox_state_conflict"}}"#
                )
            )
        );
        assert_eq!(moving.header("retry-after"), Some("1"));
    }
    let full = json!({"code": "node_full", "message": "no memory is left", "retryable": true, "details": {}});
    world.control.pause(ID, Paused::Answers(503, full));
    let full = ask(&world, AGENT, "").await;
    assert_eq!(full.status, 503);
    assert_eq!(full.json()["error_code"], "node_full");
    assert_eq!(full.json()["sandboxId"], ID);
    assert!(full.text().contains("no memory is left"));
    assert_eq!(full.header("retry-after"), Some("1"));
    let broken = json!({"code": "snapshot_damaged", "message": "it is cut short", "retryable": false, "details": {}});
    world.control.pause(ID, Paused::Answers(500, broken));
    let broken = ask(&world, AGENT, "").await;
    assert_eq!((broken.status, broken.header("retry-after")), (500, None));
    assert_eq!(broken.json()["error_code"], "snapshot_damaged");
    until("a log line", || world.log().contains("snapshot_damaged")).await;
    // A signed URL tells no id, so the answer has none.
    let known = ("signature=v1%5Fgood".to_owned(), ID.to_owned());
    world
        .control
        .state
        .signatures
        .lock()
        .expect("lock")
        .extend([known]);
    let signed = world
        .ask("GET /files?path=a&signature=v1_good HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    assert_eq!(signed.status, 500, "{signed:?}");
    assert!(signed.json().get("sandboxId").is_none());
    assert_eq!(signed.json()["error_code"], "snapshot_damaged");
}

#[tokio::test]
async fn a_question_ends_with_the_last_who_waits_for_it() {
    let world = World::start().await;
    world.add(ID, echo_agent().await);
    world.control.pause(ID, Paused::Wants("t"));
    world.control.shut_gate();
    let request = to_port("GET", ID, AGENT, "/x", "X-Access-Token: t\r\n");
    let (mut first, mut second) = (world.connect().await, world.connect().await);
    first.send(&request).await;
    until("the question", || world.control.lookups() == 1).await;
    second.send(&request).await;
    // The second must have joined before the first leaves: its own request is under way then.
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    drop(first);
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    assert_eq!(world.control.state.abandoned.load(Ordering::SeqCst), 0);
    drop(second);
    until("the question's end", || {
        world.control.state.abandoned.load(Ordering::SeqCst) == 1
    })
    .await;
    let third = world.ask(&request);
    let open = async {
        until("another question", || world.control.lookups() == 2).await;
        world.control.open_gate();
    };
    let (third, ()) = tokio::join!(third, open);
    assert_eq!(third.status, 200);
}

#[tokio::test]
async fn streams_of_a_paused_sandbox_end_and_those_after_its_resume_do_not() {
    let world = World::start().await;
    let begun = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let begun_there = Arc::clone(&begun);
    // Silent after the first frame, as a sandbox that is frozen where it stands.
    let agent = tcp_server(move |mut wire| {
        let begun = Arc::clone(&begun_there);
        async move {
            wire.request_head().await;
            wire.send("HTTP/1.1 200 OK\r\nContent-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\n").await;
            wire.send(chunked(&frame(0, "{}"))).await;
            begun.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        }
    })
    .await;
    world.add(ID, agent);
    let start = to_port(
        "POST",
        ID,
        AGENT,
        "/process.Process/Start",
        "Content-Length: 0\r\nX-Access-Token: t\r\n",
    );
    let mut old = world.connect().await;
    old.send(&start).await;
    old.head().await;
    old.chunk().await.expect("first frame");
    world.control.pause(ID, Paused::Wants("t"));
    world
        .control
        .notify(json!({"event": "invalidate", "sandbox_id": ID}));
    until("a check", || world.control.lookups() == 2).await;
    assert_eq!(
        world.control.questions()[1].port,
        None,
        "a check is no visitor: it must not wake the sandbox"
    );
    // Woken within the grace of the old streams: the new one outlives it.
    let mut new = world.connect().await;
    new.send(&start).await;
    new.head().await;
    new.chunk().await.expect("first frame");
    let end = old.chunk().await.expect("end frame").expect("end frame");
    assert_eq!(end[0], 2);
    let text = String::from_utf8_lossy(&end);
    assert!(
        text.contains("unavailable") && text.contains("paused"),
        "{text}"
    );
    assert_eq!(old.chunk().await, Ok(None));
    let silent = tokio::time::timeout(std::time::Duration::from_millis(500), new.more()).await;
    assert!(silent.is_err(), "the new stream goes on");
    assert_eq!(begun.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn an_upgraded_connection_that_is_cut_does_not_look_complete() {
    let world = World::start().await;
    let app = tcp_server(|mut wire| async move {
        wire.request_head().await;
        wire.send(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\nhalf",
        )
        .await;
        std::future::pending::<()>().await;
    })
    .await;
    world.add(ID, echo_agent().await);
    let mut wire = world.connect().await;
    wire.send(to_port(
        "GET",
        ID,
        app.port(),
        "/",
        "Connection: Upgrade\r\nUpgrade: raw\r\n",
    ))
    .await;
    wire.head().await;
    wire.until(b"half").await;
    world.control.pause(ID, Paused::Sleeps);
    world
        .control
        .notify(json!({"event": "invalidate", "sandbox_id": ID}));
    let mut rest = [0; 16];
    let end = soon(
        "the end",
        tokio::io::AsyncReadExt::read(&mut wire.stream, &mut rest),
    )
    .await;
    assert!(end.is_err(), "a reset, not an end: {end:?}");
}

#[tokio::test]
async fn a_program_that_switches_protocols_unasked_is_refused() {
    let world = World::start().await;
    let app = tcp_server(|mut wire| async move {
        wire.request_head().await;
        wire.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: evil\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nowned").await;
        wire.more().await;
    })
    .await;
    world.add(ID, echo_agent().await);
    let mut wire = world.connect().await;
    let request = to_port("GET", ID, app.port(), "/", "");
    wire.send(&request).await;
    let answer = wire.answer().await;
    assert_eq!(answer.status, 502, "{answer:?}");
    assert!(answer.text().contains("did not ask for"), "{answer:?}");
    // The connection goes on with the client's next request, not with the program's bytes.
    wire.send(to_port("GET", "igone", 80, "/", "")).await;
    let next = wire.answer().await;
    assert!(next.text().contains("was not found"), "{next:?}");
}

#[tokio::test]
async fn an_unreadable_chunk_is_the_clients_fault() {
    let world = World::start().await;
    let agent = tcp_server(|mut wire| async move {
        wire.request_head().await;
        while wire.more().await {}
    })
    .await;
    world.add(ID, agent);
    for body in [
        "zz\r\nabc\r\n",
        "3\r\nabcdef",
        "fffffffffffffffff\r\n",
        "3\r\nabc\r\nX\r\n",
    ] {
        for head in [
            to_port(
                "POST",
                ID,
                AGENT,
                "/files",
                "Transfer-Encoding: chunked\r\n",
            ),
            "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                .to_owned(),
        ] {
            let answer = world.ask(&format!("{head}{body}")).await;
            assert_eq!(answer.status, 400, "{body:?} got {answer:?}");
            assert!(answer.text().contains("unreadable body"), "{answer:?}");
        }
    }
}

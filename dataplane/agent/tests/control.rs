// SPDX-License-Identifier: Apache-2.0
//! Set-up, who may pass, tunnels, the end.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;

use serde_json::json;
use support::{ACCESS, Agent, CONTROL};

#[test]
fn nothing_works_before_the_first_init_and_only_one_is_free() {
    let agent = Agent::start_bare();
    assert_eq!(agent.send("GET", "/health", &[], b"").status, 204);
    assert_eq!(
        agent
            .send("GET", "/files?path=/etc/passwd", &[], b"")
            .status,
        503
    );
    assert_eq!(
        agent
            .send("POST", "/process.Process/List", &[], b"{}")
            .status,
        503
    );
    assert_eq!(agent.send("GET", "/opendsec/status", &[], b"").status, 503);
    for bad in ["{", r#"{"accessToken":"x"}"#, r#"{"controlToken":"short"}"#] {
        assert_eq!(
            agent.send("POST", "/init", &[], bad.as_bytes()).status,
            400,
            "{bad}"
        );
    }
    let init = json!({"controlToken": CONTROL, "envVars": {"A": "1"}}).to_string();
    assert_eq!(
        agent.send("POST", "/init", &[], init.as_bytes()).status,
        204
    );
    assert_eq!(
        agent.send("POST", "/init", &[], init.as_bytes()).status,
        401
    );
    // No access token: everybody may.
    assert_eq!(agent.send("GET", "/envs", &[], b"").json()["A"], "1");
    let later = json!({"accessToken": ACCESS}).to_string();
    assert_eq!(agent.control("POST", "/init", later.as_bytes()).status, 204);
    assert_eq!(agent.send("GET", "/envs", &[], b"").status, 401);
    let envs = agent.call("GET", "/envs", &[], b"").json();
    assert_eq!(envs, json!({"A": "1", "E2B_SANDBOX": "true"}));
}

#[test]
fn tokens_cors_and_routes() {
    let agent = Agent::start();
    let wrong = [("X-Access-Token", "other")];
    assert_eq!(agent.send("GET", "/metrics", &wrong, b"").status, 401);
    assert_eq!(
        agent
            .send(
                "GET",
                "/opendsec/status",
                &[("X-Access-Token", ACCESS)],
                b""
            )
            .status,
        401
    );
    let metrics = agent.call("GET", "/metrics", &[], b"").json();
    assert_eq!(metrics["cpu_count"], 2);
    assert_eq!(metrics["mem_total_mib"], 1024);
    assert_eq!(metrics["disk_total"], 1i64 << 31);
    let status = agent.control("GET", "/opendsec/status", b"").json();
    assert_eq!(status["envd_version"], "0.9.1");
    assert_eq!(status["processes"], 0);
    let preflight = [
        ("Origin", "http://x"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "x-access-token"),
    ];
    let answer = agent.send("OPTIONS", "/process.Process/Start", &preflight, b"");
    assert_eq!(answer.status, 204);
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
    assert_eq!(
        answer.header("access-control-allow-headers"),
        Some("x-access-token")
    );
    let refused = agent.send("GET", "/envs", &[("Origin", "http://x")], b"");
    assert_eq!(refused.header("access-control-allow-origin"), Some("*"));
    assert_eq!(agent.control("POST", "/freeze", b"").status, 501);
    assert_eq!(agent.call("GET", "/nothing", &[], b"").status, 404);
    assert_eq!(agent.call("DELETE", "/files", &[], b"").status, 405);
}

#[test]
fn other_codecs_and_methods_are_refused() {
    let agent = Agent::start();
    let proto = [("Content-Type", "application/proto")];
    let answer = agent.call("POST", "/process.Process/List", &proto, b"");
    assert_eq!(answer.status, 415);
    assert_eq!(answer.header("accept-post"), Some("application/json"));
    assert_eq!(
        agent
            .call("POST", "/process.Process/Start", &proto, b"")
            .status,
        415
    );
    assert_eq!(
        agent.call("GET", "/process.Process/List", &[], b"").status,
        405
    );
    assert_eq!(agent.unary("process.Process/Nothing", json!({})).0, 404);
    let (status, error) = agent.unary("process.Process/List", json!([1]));
    assert_eq!((status, error["code"].as_str()), (200, None));
    let (status, error) = agent.unary("filesystem.Filesystem/Stat", json!({"path": 5}));
    assert_eq!(
        (status, error["code"].as_str()),
        (400, Some("invalid_argument"))
    );
}

#[test]
fn tunnels() {
    let agent = Agent::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let path = format!("/opendsec/tunnel?port={port}");
    let upgrade = [
        ("Connection", "Upgrade"),
        ("Upgrade", "opendsec-tunnel"),
        ("X-Opendsec-Control", CONTROL),
    ];
    let mut client = agent.open("GET", &path, &upgrade);
    let (mut server, _) = listener.accept().unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    assert!(head.starts_with(b"HTTP/1.1 101 "));
    client.write_all(b"ping").unwrap();
    let mut four = [0; 4];
    server.read_exact(&mut four).unwrap();
    assert_eq!(&four, b"ping");
    server.write_all(b"pong").unwrap();
    drop(server);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"pong");
    drop(listener);
    let mut closed = upgrade.to_vec();
    closed.push(("Connection", "close"));
    let answer = agent.send("GET", &path, &closed[1..], b"");
    assert_eq!(answer.status, 502);
    assert_eq!(answer.json()["code"], "port_not_open");
    let control = [("X-Opendsec-Control", CONTROL)];
    assert_eq!(agent.send("GET", &path, &control, b"").status, 426);
    assert_eq!(
        agent
            .send("GET", "/opendsec/tunnel?port=0", &upgrade[1..], b"")
            .status,
        400
    );
    assert_eq!(agent.send("GET", &path, &upgrade[..2], b"").status, 401);
    let own = format!("/opendsec/tunnel?port={}", agent.address.port());
    assert_eq!(agent.send("GET", &own, &upgrade[1..], b"").status, 400);
}

#[test]
fn the_end_is_told_to_everybody() {
    let agent = Agent::start();
    let sleep = json!({"process": {"cmd": "sleep", "args": ["60"]}, "stdin": false});
    let mut stream = agent.open_stream("process.Process/Start", &[], sleep);
    let pid = stream.next().1["event"]["start"]["pid"].as_i64().unwrap();
    assert_eq!(
        agent
            .control("POST", "/opendsec/terminate", br#"{"reason":"why"}"#)
            .status,
        400
    );
    assert_eq!(
        agent
            .control("POST", "/opendsec/terminate", br#"{"reason":"paused"}"#)
            .status,
        204
    );
    let (flags, end) = stream.next();
    assert_eq!(
        (flags, end["error"]["code"].as_str()),
        (2, Some("unavailable"))
    );
    assert_eq!(agent.call("GET", "/envs", &[], b"").status, 503);
    let health = agent.send("GET", "/health", &[], b"");
    assert_eq!(health.status, 502);
    assert!(
        health.json()["message"]
            .as_str()
            .unwrap()
            .contains("was not found")
    );
    // A paused sandbox is woken by its next set-up, with its programs.
    assert_eq!(agent.control("POST", "/init", b"{}").status, 204);
    let (_, listed) = agent.unary("process.Process/List", json!({}));
    assert_eq!(listed["processes"][0]["pid"], pid);
    let kill = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"});
    assert_eq!(agent.unary("process.Process/SendSignal", kill).0, 200);
}

#[test]
fn a_restored_sandbox_drops_what_was_open_and_keeps_its_programs() {
    let agent = Agent::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let upgrade = [
        ("Connection", "Upgrade"),
        ("Upgrade", "opendsec-tunnel"),
        ("X-Opendsec-Control", CONTROL),
    ];
    let path = format!("/opendsec/tunnel?port={port}");
    let mut tunnel = agent.open("GET", &path, &upgrade);
    let (mut server, _) = listener.accept().unwrap();
    let mut head = [0; 12];
    tunnel.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 101");
    // One with half a request, one with a stream.
    let mut half = agent.connect();
    half.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    let message = json!({"process": {"cmd": "sleep", "args": ["60"]}, "stdin": false});
    let body = support::frame(&message);
    let length = body.len().to_string();
    let headers = [
        ("Content-Type", "application/connect+json"),
        ("X-Access-Token", ACCESS),
        ("Content-Length", length.as_str()),
    ];
    let mut stream = agent.open("POST", "/process.Process/Start", &headers);
    stream.write_all(&body).unwrap();
    stream.read_exact(&mut head).unwrap();
    support::eventually("the program runs", || {
        let (_, listed) = agent.unary("process.Process/List", json!({}));
        listed["processes"].as_array().map(Vec::len) == Some(1)
    });

    for bad in [
        r#"{"restored":true,"timestamp":"yesterday"}"#,
        r#"{"restored":true,"entropy":"?"}"#,
        r#"{"restored":true,"entropy":""}"#,
        r#"{"restored":true,"machineId":"x"}"#,
        r#"{"restored":true,"bootId":"x"}"#,
    ] {
        assert_eq!(
            agent.control("POST", "/init", bad.as_bytes()).status,
            400,
            "{bad}"
        );
    }
    let token = "another-control-token-0123";
    let init = json!({
        "restored": true, "controlToken": token, "accessToken": "another", "sandboxId": "iother",
        "hostname": "iother", "timestamp": "2030-01-01T00:00:00.000000001Z",
        "entropy": support::encode(&[7; 64]), "machineId": "0123456789abcdef0123456789abcdef",
        "bootId": "6dbcc4e0-5a52-4b2e-9f0a-6a0d4a3c1f11", "envVars": {"B": "2"},
    });
    let init = init.to_string();
    assert_eq!(
        agent.send("POST", "/init", &[], init.as_bytes()).status,
        401
    );
    // Whoever brings the news hears the answer.
    assert_eq!(agent.control("POST", "/init", init.as_bytes()).status, 204);
    for mut old in [tunnel, half, stream] {
        let mut rest = Vec::new();
        let end = old.read_to_end(&mut rest).unwrap_err();
        assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    }
    // Inside the sandbox the tunnel is closed as well.
    assert_eq!(server.read(&mut [0]).unwrap_or_default(), 0);

    let old = [("X-Opendsec-Control", CONTROL)];
    let new = [("X-Opendsec-Control", token)];
    assert_eq!(agent.send("GET", "/opendsec/status", &old, b"").status, 401);
    let status = agent.send("GET", "/opendsec/status", &new, b"").json();
    assert_eq!(
        (&status["processes"], &status["active_streams"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(agent.call("GET", "/envs", &[], b"").status, 401);
    let access = [("X-Access-Token", "another")];
    let envs = agent.send("GET", "/envs", &access, b"").json();
    assert_eq!(envs["E2B_SANDBOX_ID"], "iother");
    assert_eq!((&envs["B"], &envs["GLOBAL"]), (&json!("2"), &json!(null)));
    assert_eq!(agent.send("POST", "/opendsec/sync", &new, b"").status, 204);
    assert_eq!(agent.send("POST", "/opendsec/sync", &old, b"").status, 401);
    assert_eq!(agent.send("GET", "/opendsec/sync", &new, b"").status, 405);
}

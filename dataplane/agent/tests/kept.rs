// SPDX-License-Identifier: Apache-2.0
//! Programs whose outcome is kept for the node.

mod support;

use serde_json::{Value, json};
use support::{Agent, Answer, decode, own_user};

fn start(agent: &Agent, tag: &str, script: &str, more: Value) -> Answer {
    let mut order = json!({
        "tag": tag,
        "cmd": "/bin/sh",
        "args": ["-c", script],
        "user": own_user(),
        "outputBytes": 64,
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        order[key] = value.clone();
    }
    agent.control("POST", "/opendsec/kept", order.to_string().as_bytes())
}

fn ask(agent: &Agent, tag: &str, more: &str) -> Value {
    let answer = agent.control("GET", &format!("/opendsec/kept?tag={tag}{more}"), b"");
    assert_eq!(answer.status, 200);
    answer.json()
}

fn text(output: &Value) -> (String, String) {
    let read = |part: &str| String::from_utf8(decode(&output[part])).unwrap();
    (read("head"), read("tail"))
}

#[test]
fn the_outcome_waits_for_the_node_and_a_tag_starts_once() {
    let agent = Agent::start();
    let file = agent.path("count");
    let script = format!("echo once >> {file}; echo out; echo err >&2; exit 3");
    let started = start(&agent, "a", &script, json!({}));
    assert_eq!(started.status, 200);
    assert_eq!(start(&agent, "a", &script, json!({})).status, 409);
    let ended = ask(&agent, "a", "&wait_ms=20000");
    assert_eq!(ended["instance"], started.json()["instance"]);
    assert_eq!(
        (ended["state"].as_str(), ended["exitCode"].as_i64()),
        (Some("ended"), Some(3))
    );
    assert_eq!(text(&ended["stdout"]), ("out\n".into(), String::new()));
    assert_eq!(text(&ended["stderr"]), ("err\n".into(), String::new()));
    // As often as it is asked, until it is forgotten; and even then it does not run again.
    assert_eq!(ask(&agent, "a", ""), ended);
    assert_eq!(start(&agent, "a", &script, json!({})).status, 409);
    assert_eq!(
        agent.control("DELETE", "/opendsec/kept?tag=a", b"").status,
        204
    );
    assert_eq!(ask(&agent, "a", "")["state"], "void");
    assert_eq!(start(&agent, "a", &script, json!({})).status, 409);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "once\n");
}

#[test]
fn what_was_meant_for_another_agent_does_not_start() {
    let agent = Agent::start();
    let refused = start(&agent, "d", "true", json!({"instance": "another"}));
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["code"], "failed_precondition");
    let instance = ask(&agent, "d", "")["instance"].clone();
    assert_eq!(
        start(&agent, "d", "true", json!({"instance": instance})).status,
        200
    );
}

#[test]
fn a_fork_knows_nothing_of_what_its_source_had_started() {
    let agent = Agent::start();
    let own = json!({"sandboxId": "ione"}).to_string();
    assert_eq!(agent.control("POST", "/init", own.as_bytes()).status, 204);
    start(&agent, "e", "true", json!({}));
    // Told again, as after a pause: nothing changes.
    assert_eq!(agent.control("POST", "/init", own.as_bytes()).status, 204);
    assert_eq!(ask(&agent, "e", "&wait_ms=20000")["state"], "ended");
    let other = json!({"sandboxId": "iother"}).to_string();
    assert_eq!(agent.control("POST", "/init", other.as_bytes()).status, 204);
    assert_eq!(ask(&agent, "e", "")["state"], "missing");
}

#[test]
fn what_was_declared_void_never_starts() {
    let agent = Agent::start();
    assert_eq!(ask(&agent, "b", "")["state"], "missing");
    assert_eq!(ask(&agent, "b", "&void=1")["state"], "missing");
    assert_eq!(ask(&agent, "b", "&void=1")["state"], "void");
    assert_eq!(start(&agent, "b", "true", json!({})).status, 409);
}

#[test]
fn long_output_is_cut_in_the_middle_and_time_outs_and_signals_are_told() {
    let agent = Agent::start();
    let script = "printf start; head -c 100000 /dev/zero | tr '\\0' x; printf end";
    start(&agent, "long", script, json!({}));
    let ended = ask(&agent, "long", "&wait_ms=20000");
    let (head, tail) = text(&ended["stdout"]);
    assert_eq!((head.len(), tail.len()), (32, 32));
    assert!(head.starts_with("start") && tail.ends_with("xend"));
    assert_eq!(ended["stdout"]["bytes"], 100_008);
    start(
        &agent,
        "slow",
        "echo begun; sleep 60",
        json!({"timeoutMs": 300}),
    );
    let ended = ask(&agent, "slow", "&wait_ms=20000");
    assert_eq!(
        (ended["timedOut"].as_bool(), ended["signal"].as_i64()),
        (Some(true), Some(9))
    );
    assert_eq!(text(&ended["stdout"]).0, "begun\n");
    start(&agent, "term", "kill -TERM $$", json!({}));
    assert_eq!(ask(&agent, "term", "&wait_ms=20000")["signal"], 15);
}

#[test]
fn what_cannot_start_leaves_no_trace_and_bad_orders_are_refused() {
    let agent = Agent::start();
    let answer = start(&agent, "c", "true", json!({"cmd": "/nothing/here"}));
    assert_eq!(
        (answer.status, answer.json()["code"].as_str()),
        (400, Some("invalid_argument"))
    );
    assert_eq!(
        start(&agent, "c", "true", json!({"user": "nobody-here"})).status,
        401
    );
    assert_eq!(
        start(&agent, "c", "true", json!({"cwd": "/nothing"})).status,
        400
    );
    assert_eq!(
        start(&agent, "c", "true", json!({"outputBytes": 1 << 30})).status,
        400
    );
    assert_eq!(start(&agent, "", "true", json!({})).status, 400);
    assert_eq!(agent.control("POST", "/opendsec/kept", b"{").status, 400);
    assert_eq!(agent.control("GET", "/opendsec/kept", b"").status, 400);
    assert_eq!(
        agent.control("PUT", "/opendsec/kept?tag=c", b"").status,
        405
    );
    assert_eq!(
        agent.send("GET", "/opendsec/kept?tag=c", &[], b"").status,
        401
    );
    assert_eq!(ask(&agent, "c", "")["state"], "missing");
    assert_eq!(start(&agent, "c", "true", json!({})).status, 200);
    let wide = json!({"outputBytes": 1024 * 1024});
    for number in 0..8 {
        start(&agent, &format!("wide{number}"), "true", wide.clone());
    }
    assert_eq!(start(&agent, "over", "true", wide).status, 429);
}

// SPDX-License-Identifier: Apache-2.0
//! Programs: starting, output, input, signals, deadlines, ends.

mod support;

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{ACCESS, Agent, decode, encode, eventually, exists, frame, outcome, read_answer};

/// Longer than any test may take: a test that waits for it has failed.
const LONG: &str = "1000";

fn alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

#[test]
fn output_exit_code_and_environment() {
    let agent = Agent::start();
    let command = "echo out; echo err >&2; echo $GLOBAL $BOTH $OWN $E2B_SANDBOX_ID $USER; exit 3";
    let config = json!({
        "cmd": "/bin/sh", "args": ["-c", command], "envs": {"BOTH": "own", "OWN": "o"}, "cwd": "/",
    });
    let message = json!({"process": config, "tag": "t1"});
    let done = outcome(&agent.stream("process.Process/Start", &[], message));
    assert_eq!(
        done.stdout,
        format!("out\ng own o itest {}\n", support::own_user())
    );
    assert_eq!(done.stderr, "err\n");
    assert_eq!(done.end["exitCode"], 3);
    assert_eq!(done.end["status"], "exit status 3");
    assert_eq!(done.error, Value::Null);
    // Late, by pid and by tag.
    for name in [json!({"pid": done.pid}), json!({"tag": "t1"})] {
        let message = json!({"process": name});
        let late = outcome(&agent.stream("process.Process/Connect", &[], message));
        assert_eq!((late.pid, &late.end["exitCode"]), (done.pid, &json!(3)));
    }
    let name = json!({"process": {"tag": "none"}});
    let missing = outcome(&agent.stream("process.Process/Connect", &[], name));
    assert_eq!(missing.error["code"], "not_found");
}

#[test]
fn what_cannot_be_started() {
    let agent = Agent::start();
    let error = |process: Value| {
        let message = json!({"process": process});
        outcome(&agent.stream("process.Process/Start", &[], message)).error["code"].clone()
    };
    assert_eq!(error(json!({"cmd": "no-such-program"})), "invalid_argument");
    assert_eq!(
        error(json!({"cmd": "true", "cwd": "/no/such/dir"})),
        "invalid_argument"
    );
    assert_eq!(
        error(json!({"cmd": "true", "cwd": "/etc/passwd"})),
        "invalid_argument"
    );
    assert_eq!(error(json!({"cmd": ""})), "invalid_argument");
    assert_eq!(
        error(json!({"cmd": "true", "args": ["a\u{0}b"]})),
        "invalid_argument"
    );
    assert_eq!(
        error(json!({"cmd": "true", "envs": {"A=B": "c"}})),
        "invalid_argument"
    );
    let unknown = format!("Basic {}", encode(b"nobody-here:"));
    let refused = agent.run("true", &[("Authorization", &unknown)]);
    assert_eq!(refused.error["code"], "unauthenticated");
    assert_eq!(
        agent.run("true", &[("Connect-Timeout-Ms", "x")]).error["code"],
        "invalid_argument"
    );
}

#[test]
fn programs_inherit_nothing_and_are_ordinary() {
    let agent = Agent::start();
    let done = agent.run(
        "ls /proc/self/fd | wc -l; cat /proc/self/oom_score_adj; nice; umask; \
         grep -E 'SigBlk|SigIgn' /proc/self/status",
        &[],
    );
    let lines: Vec<&str> = done.stdout.lines().collect();
    // Three, and the one that lists.
    assert_eq!(lines[0].trim(), "4");
    assert_eq!(lines[1], "100");
    assert_eq!(&lines[2..4], ["0", "0022"]);
    assert!(
        lines[4..]
            .iter()
            .all(|line| line.ends_with("0000000000000000")),
        "{lines:?}"
    );
}

#[test]
fn much_output_comes_whole() {
    let agent = Agent::start();
    let done = agent.run(
        "head -c 2000000 /dev/zero | tr '\\0' x; head -c 300000 /dev/zero >&2",
        &[],
    );
    assert_eq!(done.stdout.len(), 2_000_000);
    assert_eq!(done.stderr.len(), 300_000);
}

#[test]
fn a_child_that_keeps_the_pipe_does_not_hold_the_end_and_lives_on() {
    let agent = Agent::start();
    let flag = agent.path("wrote");
    let gate = agent.path("gate");
    let command = format!(
        "(until [ -e {gate} ]; do sleep 0.05; done; echo late && echo late >&2 && touch {flag}) & echo now"
    );
    let begun = Instant::now();
    let done = agent.run(&command, &[]);
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(done.stdout, "now\n");
    assert_eq!(done.end["exited"], true);
    std::fs::write(gate, "").unwrap();
    eventually("the child can still write", || exists(&flag));
}

#[test]
fn a_deadline_ends_the_whole_tree() {
    let agent = Agent::start();
    let pids = agent.path("pids");
    let note = format!("echo $$ >> {pids}");
    // A plain child; one with a session of its own; one that is also an orphan, with no environment.
    let command = format!(
        "{note}; sh -c '{note}; exec sleep {LONG}' & setsid sh -c '{note}; exec sleep {LONG}' & \
         (setsid env -i /bin/sh -c '{note}; exec sleep {LONG}' &) ; exec sleep {LONG}"
    );
    let done = agent.run(&command, &[("Connect-Timeout-Ms", "1500")]);
    assert_eq!(done.error["code"], "deadline_exceeded");
    let noted = std::fs::read_to_string(pids).unwrap();
    assert_eq!(noted.lines().count(), 4);
    eventually("all are gone", || !noted.lines().any(alive));
    let message = json!({"process": {"pid": done.pid}});
    let late = outcome(&agent.stream("process.Process/Connect", &[], message));
    assert_eq!(late.end["status"], "signal: killed");
}

#[test]
fn killing_the_keeper_loses_nothing() {
    let agent = Agent::start();
    let done = agent.run("kill -9 $PPID; sleep 0.2; exit 5", &[]);
    assert_eq!(done.end["exitCode"], 5);
    let done = agent.run(
        &format!("kill -9 $PPID; sleep {LONG}"),
        &[("Connect-Timeout-Ms", "500")],
    );
    assert_eq!(done.error["code"], "deadline_exceeded");
    eventually("it is gone", || !alive(&done.pid.to_string()));
}

#[test]
fn orphans_are_reaped() {
    let agent = Agent::start();
    let done = agent.run(
        "for i in 1 2 3; do (setsid sh -c 'echo $$; exit' &); done; sleep 0.1",
        &[],
    );
    let stat = |pid: &str| exists(&format!("/proc/{pid}/stat"));
    assert_eq!(done.stdout.lines().count(), 3);
    eventually("no zombie is left", || !done.stdout.lines().any(stat));
}

#[test]
fn input_by_calls() {
    let agent = Agent::start();
    let message = json!({"process": {"cmd": "cat"}, "tag": "cat", "stdin": true});
    let mut stream = agent.open_stream("process.Process/Start", &[], message);
    let pid = stream.next().1["event"]["start"]["pid"].as_u64().unwrap();
    let by_tag = json!({"tag": "cat"});
    let (_, listed) = agent.unary("process.Process/List", json!({}));
    assert_eq!(listed["processes"][0]["tag"], "cat");
    let input = json!({"process": by_tag, "input": {"stdin": encode(b"one\n")}});
    assert_eq!(agent.unary("process.Process/SendInput", input).0, 200);
    let (_, echo) = stream.next();
    assert_eq!(decode(&echo["event"]["data"]["stdout"]), b"one\n");
    let to_pty = json!({"process": {"pid": pid}, "input": {"pty": encode(b"x")}});
    assert_eq!(agent.unary("process.Process/SendInput", to_pty).0, 500);
    let close = json!({"process": {"pid": pid}});
    assert_eq!(agent.unary("process.Process/CloseStdin", close).0, 200);
    let (_, end) = stream.next();
    assert_eq!(end["event"]["end"]["status"], "exit status 0");
    let late = json!({"process": {"pid": pid}, "input": {"stdin": encode(b"x")}});
    assert_eq!(agent.unary("process.Process/SendInput", late).0, 404);
}

#[test]
fn input_by_stream() {
    let agent = Agent::start();
    let message = json!({"process": {"cmd": "wc", "args": ["-c"]}, "stdin": true});
    let mut stream = agent.open_stream("process.Process/Start", &[], message);
    let pid = stream.next().1["event"]["start"]["pid"].as_u64().unwrap();
    let headers = [
        ("Content-Type", "application/connect+json"),
        ("X-Access-Token", ACCESS),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close"),
    ];
    let mut request = agent.open("POST", "/process.Process/StreamInput", &headers);
    let mut wire = frame(&json!({"start": {"process": {"pid": pid}}}));
    for _ in 0..20 {
        let data = encode(&[b'x'; 10_000]);
        wire.extend(frame(&json!({"data": {"input": {"stdin": data}}})));
        wire.extend(frame(&json!({"keepalive": {}})));
    }
    // Cut where it does not fit the frames.
    for piece in wire.chunks(777) {
        request
            .write_all(format!("{:x}\r\n", piece.len()).as_bytes())
            .unwrap();
        request.write_all(piece).unwrap();
        request.write_all(b"\r\n").unwrap();
    }
    request.write_all(b"0\r\n\r\n").unwrap();
    let (messages, end) = read_answer(request).frames();
    assert_eq!((messages, end), (vec![json!({})], json!({})));
    assert_eq!(
        agent
            .unary(
                "process.Process/CloseStdin",
                json!({"process": {"pid": pid}})
            )
            .0,
        200
    );
    let (_, count) = stream.next();
    assert_eq!(
        decode(&count["event"]["data"]["stdout"]).trim_ascii(),
        b"200000"
    );
    let lost = json!({"data": {"input": {"stdin": "eA=="}}});
    let answer = agent.stream("process.Process/StreamInput", &[], lost);
    assert_eq!(answer.frames().1["error"]["code"], "invalid_argument");
}

#[test]
fn terminals() {
    let agent = Agent::start();
    let message = json!({
        "process": {"cmd": "/bin/sh", "args": ["-c", "stty size; read line; stty size; tty; exit 4"]},
        "pty": {"size": {"cols": 100, "rows": 30}},
    });
    let mut stream = agent.open_stream("process.Process/Start", &[], message);
    let pid = stream.next().1["event"]["start"]["pid"].as_u64().unwrap();
    let first = stream.next().1;
    assert_eq!(decode(&first["event"]["data"]["pty"]), b"30 100\r\n");
    let resize = json!({"process": {"pid": pid}, "pty": {"size": {"cols": 120, "rows": 40}}});
    assert_eq!(agent.unary("process.Process/Update", resize).0, 200);
    let close = json!({"process": {"pid": pid}});
    assert_eq!(agent.unary("process.Process/CloseStdin", close).0, 500);
    let input = json!({"process": {"pid": pid}, "input": {"pty": encode(b"go\n")}});
    assert_eq!(agent.unary("process.Process/SendInput", input).0, 200);
    let mut text = String::new();
    loop {
        let (_, message) = stream.next();
        if let Some(end) = message["event"].get("end") {
            assert_eq!(end["exitCode"], 4);
            break;
        }
        text += &String::from_utf8_lossy(&decode(&message["event"]["data"]["pty"]));
    }
    assert!(text.contains("40 120"), "{text}");
    assert!(text.contains("/dev/pts/"), "{text}");
}

#[test]
fn signals_and_keepalives() {
    let agent = Agent::start();
    let trap = "trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let message = json!({"process": {"cmd": "/bin/sh", "args": ["-c", trap]}, "stdin": false});
    let headers = [("Keepalive-Ping-Interval", "1")];
    let mut stream = agent.open_stream("process.Process/Start", &headers, message);
    let pid = stream.next().1["event"]["start"]["pid"].as_u64().unwrap();
    assert_eq!(
        decode(&stream.next().1["event"]["data"]["stdout"]),
        b"ready\n"
    );
    assert_eq!(stream.next().1, json!({"event": {"keepalive": {}}}));
    let signal = |signal: Value| json!({"process": {"pid": pid}, "signal": signal});
    assert_eq!(
        agent
            .unary("process.Process/SendSignal", signal(json!("SIGNAL_WRONG")))
            .0,
        501
    );
    assert_eq!(
        agent
            .unary(
                "process.Process/SendSignal",
                signal(json!("SIGNAL_SIGTERM"))
            )
            .0,
        200
    );
    let mut end = Value::Null;
    while end.is_null() {
        end = stream.next().1["event"]["end"].clone();
    }
    assert_eq!(end["exitCode"], 9);
    let (status, error) = agent.unary(
        "process.Process/SendSignal",
        signal(json!("SIGNAL_SIGKILL")),
    );
    assert_eq!((status, error["code"].as_str()), (404, Some("not_found")));
}

#[test]
fn a_client_that_goes_leaves_the_program() {
    let agent = Agent::start();
    let message = json!({"process": {"cmd": "sleep", "args": [LONG]}, "tag": "stays"});
    let mut stream = agent.open_stream("process.Process/Start", &[], message);
    let pid = stream.next().1["event"]["start"]["pid"].clone();
    drop(stream);
    let mut again = agent.open_stream(
        "process.Process/Connect",
        &[],
        json!({"process": {"tag": "stays"}}),
    );
    assert_eq!(again.next().1["event"]["start"]["pid"], pid);
    let kill = json!({"process": {"tag": "stays"}, "signal": 9});
    assert_eq!(agent.unary("process.Process/SendSignal", kill).0, 200);
    assert_eq!(again.next().1["event"]["end"]["exitCode"], -1);
}

#[test]
fn a_slow_client_holds_the_program_back_and_memory_stays() {
    let agent = Agent::start();
    let resident_kib = || -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .unwrap()
            .to_owned();
        line.trim().split(' ').next().unwrap().parse().unwrap()
    };
    let before = resident_kib();
    let message = json!({"process": {"cmd": "cat", "args": ["/dev/zero"]}, "stdin": false});
    let mut stream = agent.open_stream("process.Process/Start", &[], message);
    let pid = stream.next().1["event"]["start"]["pid"].clone();
    let written = || std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let mut last = String::new();
    eventually("the program is held back", || {
        std::thread::sleep(Duration::from_millis(200));
        let same = last == written();
        last = written();
        same
    });
    assert!(resident_kib() < before + 8 * 1024);
    let kill = json!({"process": {"pid": pid}, "signal": 9});
    assert_eq!(agent.unary("process.Process/SendSignal", kill).0, 200);
}

# SPDX-License-Identifier: Apache-2.0
"""The command line as a program, against a scripted server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from opendsec.cli._parser import build_parser

from .fake_server import SANDBOX_ID, Answer, Asked, FakeServer, end, error, sandbox
from .test_streams import exited, output, started, stream

START = "/process.Process/Start"
ONE = f"/v1/sandboxes/{SANDBOX_ID}"
WAIT_S = 30


def hear_interrupts() -> None:
    """A test run in the background ignores SIGINT, and its children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(server: FakeServer | None, **extra: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")}
    env["OPENDSEC_STATE_DIR"] = "/nonexistent"
    if server is not None:
        env |= {"OPENDSEC_API_URL": server.url, "OPENDSEC_API_KEY": "e2b_test"}
    return env | extra


def cli(
    server: FakeServer | None, *args: str, stdin: bytes | None = None, **extra: str
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "opendsec.cli.main", *args]
    env = environment(server, **extra)
    if stdin is None:
        return subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT_S
        )
    return subprocess.run(command, env=env, input=stdin, capture_output=True, timeout=WAIT_S)


@pytest.fixture
def ready(server: FakeServer) -> FakeServer:
    """A server that creates, runs and removes."""
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    server.on("GET", ONE, Answer(200, sandbox()))
    server.on("DELETE", ONE, Answer(200, sandbox(state="ended")))
    server.on("POST", START, stream(started(), output("stdout", b"42\n"), exited(), end()))
    return server


def process_of(asked: Asked) -> Any:
    return json.loads(asked.body[5:])["process"]


# --- grammar -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["run", "--", "python3", "-c", "x"], ["python3", "-c", "x"]),
        (["run", "--cpu", "2", "python3", "-c", "x"], ["python3", "-c", "x"]),
        (["run", "-c", "code", "arg", "--flag"], ["arg", "--flag"]),
        (["run", "-e", "A=1", "--no-network", "ls", "--help"], ["ls", "--help"]),
        (["exec", "-it", "i1", "bash", "-l"], ["bash", "-l"]),
        (["exec", "i1", "--", "ls", "--", "x"], ["ls", "--", "x"]),
        (["exec", "-iu", "root", "i1", "id"], ["id"]),
        (["exec", "--user=root", "i1", "id", "-u"], ["id", "-u"]),
    ],
)
def test_options_end_where_the_program_begins(line: list[str], expected: list[str]) -> None:
    args = build_parser().parse_args(line)
    assert args.program == expected


def test_address_is_taken_before_and_after_the_command() -> None:
    parser = build_parser()
    assert parser.parse_args(["--url", "http://a", "ls"]).url == "http://a"
    assert parser.parse_args(["ls", "--url", "http://b"]).url == "http://b"
    assert parser.parse_args(["exec", "--url", "http://c", "i1", "ls", "--url"]).url == "http://c"
    assert parser.parse_args(["ls"]).url is None


def test_values() -> None:
    args = build_parser().parse_args(["create", "--memory", "2g", "--timeout", "5m", "-e", "A=b=c"])
    assert (args.memory, args.timeout, args.env) == (2048, 300, [("A", "b=c")])


@pytest.mark.parametrize(
    "line",
    [
        ["create", "--timeout", "-1"],
        ["create", "--memory", "lots"],
        ["create", "-e", "NOT_SET_ANYWHERE"],
        ["create", "--metadata", "x"],
        ["nonsense"],
        ["url", "i1", "port"],
    ],
)
def test_wrong_usage_is_2(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(line)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_and_version() -> None:
    assert b"exit codes:" in cli(None, "--help").stdout
    assert cli(None, "--version").stdout.startswith(b"opendsec ")
    assert cli(None).returncode == 2


def test_completion() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert b"opendsec" in cli(None, "completion", shell).stdout
    # argcomplete writes what it offers to file descriptor 8.
    done = subprocess.run(
        ["bash", "-c", f"exec 8>&1 9>&2; {sys.executable} -m opendsec.cli.main"],
        env=environment(None, _ARGCOMPLETE="1", COMP_LINE="opendsec templ", COMP_POINT="14"),
        capture_output=True,
        timeout=WAIT_S,
    )
    assert b"templates" in done.stdout


# --- run and exec ------------------------------------------------------------------


def test_run_creates_runs_removes(ready: FakeServer) -> None:
    done = cli(ready, "run", "-c", "print(42)", "-e", "A=b", "--no-network", "--", "arg")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"42\n", b"")
    body = ready.of("POST", "/v1/sandboxes")[0].json
    assert body["env"] == {"A": "b"}
    assert body["network"]["internet"] is False
    process = process_of(ready.of("POST", START)[0])
    assert [process["cmd"], *process["args"]] == ["python3", "-u", "-c", "print(42)", "arg"]
    assert len(ready.of("DELETE", ONE)) == 1


def test_run_passes_the_programs_code_and_bytes(ready: FakeServer) -> None:
    ready.on(
        "POST",
        START,
        stream(
            started(), output("stdout", b"\xff\x00"), output("stderr", b"oops"), exited(3), end()
        ),
    )
    done = cli(ready, "run", "--", "false")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"\xff\x00", b"oops")
    assert len(ready.of("DELETE", ONE)) == 1


def test_run_feeds_piped_input(ready: FakeServer) -> None:
    fed = threading.Event()

    def start(_: Asked) -> Answer:
        return stream(started(), exited(), end())

    def send(_: Asked) -> Answer:
        fed.set()
        return Answer(200, {})

    ready.on("POST", START, start)
    ready.on("POST", "/process.Process/SendInput", send)
    ready.on("POST", "/process.Process/CloseStdin", Answer(200, {}))
    done = cli(ready, "run", "--", "cat", stdin=b"hello")
    assert done.returncode == 0, done.stderr
    assert json.loads(ready.of("POST", START)[0].body[5:])["stdin"] is True
    assert fed.is_set()


def test_run_file_is_uploaded(ready: FakeServer, tmp_path: Any) -> None:
    script = tmp_path / "my script.py"
    script.write_text("print(42)")
    entry = {"name": script.name, "type": "file", "path": f"/tmp/{script.name}"}
    ready.on("POST", "/files", Answer(200, [entry]))
    assert cli(ready, "run", "-f", str(script), "--", "-x").returncode == 0
    assert ready.of("POST", "/files")[0].body == b"print(42)"
    process = process_of(ready.of("POST", START)[0])
    assert [process["cmd"], *process["args"]] == ["python3", "-u", "/tmp/my script.py", "-x"]


def test_platform_failure_is_125_and_explained(ready: FakeServer) -> None:
    ready.on("POST", "/v1/sandboxes", Answer(500, error("internal", fault="platform")))
    done = cli(ready, "run", "--", "true")
    assert done.returncode == 125
    text = done.stderr.decode()
    assert "message of internal" in text
    assert "remediation of internal" in text
    assert "code internal" in text
    assert "request req-1" in text
    assert "\x1b" not in text
    as_json = cli(ready, "run", "--json", "--", "true")
    assert json.loads(as_json.stderr)["error"]["code"] == "internal"


def test_lost_stream_is_125_and_removes_the_sandbox(ready: FakeServer) -> None:
    ready.on("POST", START, stream(started(), whole=False))
    ready.on("GET", "/health", Answer(204))
    done = cli(ready, "run", "--", "true")
    assert done.returncode == 125
    assert b"connection_failed" in done.stderr
    assert len(ready.of("DELETE", ONE)) == 1


def test_time_limit_is_124(ready: FakeServer) -> None:
    late = end({"code": "deadline_exceeded", "message": ""})
    ready.on("POST", START, stream(started(), output("stdout", b"part"), late))
    done = cli(ready, "run", "--timeout", "1", "--", "sleep", "9")
    assert (done.returncode, done.stdout) == (124, b"part")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_removes_the_sandbox(
    ready: FakeServer, number: signal.Signals, code: int
) -> None:
    running, release = threading.Event(), threading.Event()

    def hang(_: Asked) -> Answer:
        running.set()
        release.wait(WAIT_S)
        return Answer(drop=True)

    ready.on("POST", START, hang)
    process = subprocess.Popen(
        [sys.executable, "-m", "opendsec.cli.main", "run", "--", "sleep", "99"],
        env=environment(ready),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    )
    try:
        assert running.wait(WAIT_S)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=WAIT_S)
    finally:
        release.set()
        process.kill()
    assert process.returncode == code, stderr
    assert len(ready.of("DELETE", ONE)) == 1


def test_interrupted_create_leaves_nothing(ready: FakeServer) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(_: Asked) -> Answer:
        asked.set()
        release.wait(WAIT_S)
        return Answer(drop=True)

    ready.on("POST", "/v1/sandboxes", hang, Answer(201, sandbox()))
    process = subprocess.Popen(
        [sys.executable, "-m", "opendsec.cli.main", "run", "--", "true"],
        env=environment(ready),
        stdin=subprocess.DEVNULL,
        preexec_fn=hear_interrupts,
    )
    try:
        assert asked.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    finally:
        release.set()
        process.kill()
    keys = {a.headers["idempotency-key"] for a in ready.of("POST", "/v1/sandboxes")}
    assert len(keys) == 1
    assert len(ready.of("DELETE", ONE)) == 1


def test_exec(ready: FakeServer) -> None:
    done = cli(ready, "exec", "-u", "root", "-w", "/w", SANDBOX_ID, "--", "id", "-u")
    assert (done.returncode, done.stdout) == (0, b"42\n")
    asked = ready.of("POST", START)[0]
    assert process_of(asked)["cwd"] == "/w"
    assert not ready.of("DELETE", ONE)
    detached = cli(ready, "exec", "-d", SANDBOX_ID, "sleep", "9")
    assert detached.stdout == b"7\n"
    assert cli(ready, "exec", "-it", SANDBOX_ID, "sh").returncode == 125  # No terminal here.
    assert cli(ready, "exec", SANDBOX_ID).returncode == 125


# --- the others --------------------------------------------------------------------


def test_ls_is_plain_text_or_json(ready: FakeServer) -> None:
    page = {"sandboxes": [sandbox(labels=["a"], task_id="t")], "next_cursor": None}
    ready.on("GET", "/v1/sandboxes", Answer(200, page))
    plain = cli(ready, "ls").stdout.decode()
    assert plain.splitlines()[0].split()[:3] == ["ID", "STATE", "BACKEND"]
    assert SANDBOX_ID in plain
    assert "\x1b" not in plain
    as_json = json.loads(cli(ready, "ls", "--json").stdout)
    assert as_json[0]["sandbox_id"] == SANDBOX_ID
    assert cli(ready, "ls", "-q").stdout.decode().split() == [SANDBOX_ID]
    refused = cli(ready, "ls", "--watch", "-q")
    assert refused.returncode == 1
    assert b"--quiet" in refused.stderr


def test_create_prints_the_id(ready: FakeServer) -> None:
    done = cli(ready, "create", "--cpu", "0.5", "--label", "x", "--metadata", "k=v")
    assert done.stdout.decode().strip() == SANDBOX_ID
    body = ready.of("POST", "/v1/sandboxes")[0].json
    assert (body["cpu"], body["labels"], body["metadata"]) == (0.5, ["x"], {"k": "v"})


def test_kill_by_id_and_filter(ready: FakeServer) -> None:
    assert cli(ready, "kill").returncode == 1
    assert cli(ready, "kill", SANDBOX_ID).stdout.decode().split() == [SANDBOX_ID]
    ready.on("DELETE", "/v1/sandboxes/i2", Answer(404, error("sandbox_not_found")))
    missing = cli(ready, "kill", SANDBOX_ID, "i2")
    assert missing.returncode == 1
    assert b"i2" in missing.stderr
    page = {"sandboxes": [sandbox()], "next_cursor": None}
    ready.on("GET", "/v1/sandboxes", Answer(200, page))
    done = cli(ready, "kill", "--label", "x", "--json")
    assert json.loads(done.stdout) == {"killed": [SANDBOX_ID]}
    assert ready.of("GET", "/v1/sandboxes")[0].query["label"] == ["x"]


def test_env(ready: FakeServer) -> None:
    lines = cli(ready, "env").stdout.decode().splitlines()
    assert lines == [
        "export E2B_API_KEY=e2b_test",
        f"export E2B_API_URL={ready.url}",
        f"export E2B_SANDBOX_URL={ready.url}",
    ]
    assert json.loads(cli(ready, "env", "--json").stdout)["E2B_API_KEY"] == "e2b_test"
    assert cli(None, "env").returncode == 77


def test_logs_follow_to_the_end(ready: FakeServer) -> None:
    first = {"from": None, "to": "running", "at": "2026-12-01T10:00:00Z", "reason": None}
    last = {"from": "running", "to": "ended", "at": "2026-12-01T10:01:00Z", "reason": "timeout"}
    ready.on(
        "GET",
        f"{ONE}/transitions",
        Answer(200, {"transitions": [first]}),
        Answer(200, {"transitions": [first, last]}),
    )
    lines = cli(ready, "logs", "-f", SANDBOX_ID).stdout.decode().splitlines()
    assert len(lines) == 2
    assert "running -> ended" in lines[1]
    assert "timeout" in lines[1]


def test_info_url_ps_metrics_templates(ready: FakeServer) -> None:
    ready.on("GET", ONE, Answer(200, sandbox()))
    ready.on("GET", "/v1/info", Answer(200, {"version": "0.1.0", "domain": "localhost:7300"}))
    ready.on("GET", f"{ONE}/metrics", Answer(200, {"samples": [{"at": "2026-12-01T10:00:00Z"}]}))
    ready.on("GET", "/v1/templates", Answer(200, {"templates": [{"template_id": "base"}]}))
    process = {"config": {"cmd": "/bin/sleep", "args": ["9"]}, "pid": 12}
    ready.on("POST", "/process.Process/List", Answer(200, {"processes": [process]}))
    described = cli(ready, "info", SANDBOX_ID).stdout
    assert b"running" in described
    assert b"access_token     (hidden" in described
    assert b"0.1.0" in cli(ready, "info").stdout
    assert cli(ready, "url", SANDBOX_ID, "80").stdout.decode().startswith("http://80-")
    assert b"/bin/sleep 9" in cli(ready, "ps", SANDBOX_ID).stdout
    assert json.loads(cli(ready, "ps", "--json", SANDBOX_ID).stdout)[0]["pid"] == 12
    assert cli(ready, "metrics", SANDBOX_ID).returncode == 0
    assert b"base" in cli(ready, "templates").stdout


def test_exit_codes_tell_who_has_to_act(ready: FakeServer) -> None:
    cases = [
        (404, error("sandbox_not_found"), 1),
        (401, error("unauthenticated"), 77),
        (500, error("internal", fault="platform"), 70),
        (429, error("quota_exceeded", fault="capacity"), 75),
    ]
    for status, body, code in cases:
        ready.on("GET", ONE, Answer(status, body))
        assert cli(ready, "info", SANDBOX_ID).returncode == code, body
    ready.on("GET", ONE, Answer(200, sandbox()))
    assert cli(ready, "cp", "a", "b").returncode == 1
    assert cli(ready, "cp", "/nonexistent/file", f"{SANDBOX_ID}:/x").returncode == 1


def test_unreachable_server_is_69() -> None:
    url = "http://127.0.0.1:9"
    done = cli(None, "ls", OPENDSEC_API_URL=url, OPENDSEC_API_KEY="k")
    assert done.returncode == 69
    assert b"Cannot connect to http://127.0.0.1:9" in done.stderr
    doctor = cli(None, "--url", url, "doctor", OPENDSEC_API_KEY="k")
    assert doctor.returncode == 1
    assert b"Cannot connect to http://127.0.0.1:9" in doctor.stdout


def test_doctor_merges_the_servers_findings(ready: FakeServer, tmp_path: Any) -> None:
    ready.on("GET", "/v1/info", Answer(200, {"version": "0.1.0", "domain": "d"}))
    done = cli(ready, "doctor", "--json")
    names = [check["name"] for check in json.loads(done.stdout)["checks"]]
    assert names[:4] == ["client", "address", "API key", "server"]


def test_reader_that_goes_away_is_no_error_text(ready: FakeServer) -> None:
    ready.on(
        "POST", START, stream(started(), *[output("stdout", b"y\n" * 5000)] * 50, exited(), end())
    )
    ready.on("POST", "/process.Process/SendSignal", Answer(200, {}))
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m opendsec.cli.main run -- yes | head -n1"],
        env=environment(ready),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WAIT_S,
    )
    assert done.stdout == b"y\n"
    assert b"Traceback" not in done.stderr
    assert len(ready.of("DELETE", ONE)) == 1

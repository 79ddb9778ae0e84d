# SPDX-License-Identifier: Apache-2.0
"""The data half against a scripted server: what no healthy agent would send."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest

from opendsec import (
    BadResponse,
    CommandFailed,
    CommandTimeout,
    ConnectionFailed,
    FileNotFound,
    InvalidRequest,
    ProcessNotFound,
    SandboxNotFound,
    Unauthenticated,
    _limits,
)

from .fake_server import SANDBOX_ID, Answer, FakeServer, end, error, frame, sandbox
from .kits import collect, done

START = "/process.Process/Start"
ONE = f"/v1/sandboxes/{SANDBOX_ID}"
GONE = Answer(502, {"sandboxId": SANDBOX_ID, "message": "The sandbox was not found", "code": 502})


def started(pid: int = 7) -> bytes:
    return frame({"event": {"start": {"pid": pid}}})


def output(stream: str, data: bytes) -> bytes:
    return frame({"event": {"data": {stream: base64.b64encode(data).decode()}}})


def exited(code: int = 0) -> bytes:
    event: dict[str, Any] = {"exited": True, "status": f"exit status {code}"}
    if code:
        event["exitCode"] = code
    return frame({"event": {"end": event}})


def stream(*pieces: bytes, whole: bool = True) -> Answer:
    return Answer(raw=[*pieces, b""] if whole else list(pieces))


async def test_request_is_the_protocols(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(), output("stdout", b"hi\n"), exited(), end()))
    result = await done(box.exec("echo hi", cwd="/w", env={"A": "1"}, user="root", timeout_s=1.5))
    assert (result.exit_code, result.stdout, result.ok) == (0, "hi\n", True)
    asked = server.of("POST", START)[0]
    assert asked.headers["e2b-sandbox-id"] == SANDBOX_ID
    assert asked.headers["e2b-sandbox-port"] == "49983"
    assert asked.headers["x-access-token"] == "access"
    assert asked.headers["authorization"] == "Basic cm9vdDo="
    assert asked.headers["connect-timeout-ms"] == "1500"
    assert asked.headers["content-type"] == "application/connect+json"
    assert int.from_bytes(asked.body[1:5], "big") == len(asked.body) - 5
    assert json.loads(asked.body[5:]) == {
        "process": {
            "cmd": "/bin/bash",
            "args": ["-l", "-c", "echo hi"],
            "envs": {"A": "1"},
            "cwd": "/w",
        },
        "stdin": False,
    }


async def test_frames_cut_anywhere(box: Any, server: FakeServer) -> None:
    whole = (
        started()
        + frame({"event": {"keepalive": {}}})
        + output("stdout", "ä€".encode()[:1])
        + output("stdout", "ä€".encode()[1:])
        + output("stderr", b"\xff")
        + exited(3)
        + end()
    )
    server.on("POST", START, stream(*(whole[i : i + 1] for i in range(len(whole)))))
    seen: list[str] = []
    result = await done(box.exec(["x"], on_stdout=seen.append))
    assert (result.exit_code, result.stdout, result.stderr) == (3, "ä€", "\ufffd")
    assert "".join(seen) == "ä€"
    assert result.stderr_bytes == b"\xff"


async def test_connections_are_used_again(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(), exited(), end()))
    for _ in range(5):
        await done(box.exec("x"))
    assert len({asked.peer for asked in server.of("POST", START)}) == 1


async def test_check_raises_with_the_result(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(), output("stderr", b"a\nboom\n"), exited(2), end()))
    with pytest.raises(CommandFailed, match=r"exit code 2.*boom") as caught:
        await done(box.exec("x", check=True))
    assert caught.value.result.exit_code == 2
    assert caught.value.fault == "user"


async def test_output_limit_is_kept_and_told(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(), output("stdout", b"x" * 100), exited(), end()))
    seen: list[str] = []
    result = await done(box.exec("x", output_limit_bytes=10, on_stdout=seen.append))
    assert result.stdout == "x" * 10
    assert result.stdout_truncated
    assert result.truncated
    assert not result.stderr_truncated
    assert "".join(seen) == "x" * 100


async def test_cut_stream_with_live_sandbox(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(42), output("stdout", b"half"), whole=False))
    server.on("GET", "/health", Answer(204))
    with pytest.raises(ConnectionFailed) as caught:
        await done(box.exec("x"))
    assert caught.value.sandbox_alive is True
    assert caught.value.pid == 42
    assert caught.value.stdout == "half"
    assert caught.value.fault == "platform"
    assert len(server.of("POST", START)) == 1, "a command must never be started twice"


async def test_edge_that_restarts_is_waited_for(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(42), whole=False))
    server.on("GET", "/health", Answer(drop=True), Answer(503), Answer(204))
    with pytest.raises(ConnectionFailed) as caught:
        await done(box.exec("x"))
    assert caught.value.sandbox_alive is True


async def test_complete_http_answer_without_end_record_is_a_loss_too(
    box: Any, server: FakeServer
) -> None:
    server.on("POST", START, stream(started(), output("stdout", b"half")))
    server.on("GET", "/health", Answer(204))
    with pytest.raises(ConnectionFailed):
        await done(box.exec("x"))


async def test_end_record_without_end_event_is_not_a_success(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(), end()))
    with pytest.raises(ConnectionFailed, match="how the process ended"):
        await done(box.exec("x"))


async def test_cut_stream_with_dead_sandbox_says_why(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(), whole=False))
    server.on("GET", "/health", GONE)
    ended = sandbox(state="ended", end_reason="oom", message="Memory limit.", fault="user")
    server.on("GET", ONE, Answer(200, ended))
    with pytest.raises(SandboxNotFound, match="oom") as caught:
        await done(box.exec("x"))
    assert caught.value.details["end_reason"] == "oom"
    assert caught.value.fault == "user"


async def test_platforms_fault_is_said(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(), whole=False))
    server.on("GET", "/health", GONE)
    lost = sandbox(state="ended", end_reason="lost", fault="platform")
    server.on("GET", ONE, Answer(200, lost))
    with pytest.raises(SandboxNotFound) as caught:
        await done(box.exec("x"))
    assert caught.value.fault == "platform"


async def test_unavailable_while_the_sandbox_is_ending(box: Any, server: FakeServer) -> None:
    record = {"code": "unavailable", "message": "the sandbox is ending: timeout"}
    server.on("POST", START, stream(started(), end(record)))
    server.on("GET", "/health", Answer(204))
    server.on("GET", ONE, Answer(200, sandbox(state="stopping", end_reason="timeout")))
    with pytest.raises(SandboxNotFound, match="timeout"):
        await done(box.exec("x"))


async def test_nothing_answers_any_more(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(), whole=False))
    server.on("GET", "/health", Answer(drop=True))
    server.on("GET", ONE, Answer(drop=True))
    with pytest.raises(ConnectionFailed) as caught:
        await done(box.exec("x"))
    assert caught.value.sandbox_alive is None


async def test_deadline_is_typed_and_keeps_the_output(box: Any, server: FakeServer) -> None:
    late = end({"code": "deadline_exceeded", "message": "context deadline exceeded"})
    server.on("POST", START, stream(started(), output("stdout", b"so far"), late))
    with pytest.raises(CommandTimeout) as caught:
        await done(box.exec("sleep 9", timeout_s=1))
    assert (caught.value.timeout_s, caught.value.stdout) == (1, "so far")


async def test_silent_stream_counts_as_lost(
    box: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_limits, "STREAM_SILENCE_MAX_S", 0.2)

    def slow(_: Any) -> Answer:
        time.sleep(1.0)
        return stream(started(), exited(), end())

    server.on("POST", START, slow)
    with pytest.raises(ConnectionFailed, match="in time"):
        await done(box.exec("x"))


@pytest.mark.parametrize(
    "text", [b"\x00\x00\x00\x00\x03abc", b"\x01\x00\x00\x00\x00", b"\x00\xff\xff\xff\xff"]
)
async def test_nonsense_is_typed(box: Any, server: FakeServer, text: bytes) -> None:
    server.on("POST", START, stream(started(), text))
    with pytest.raises(BadResponse):
        await done(box.exec("x"))


async def test_start_that_may_have_been_seen_is_not_repeated(box: Any, server: FakeServer) -> None:
    server.on("POST", START, Answer(drop=True))
    with pytest.raises(ConnectionFailed):
        await done(box.exec("x"))
    server.on("POST", START, Answer(503, {"code": 503, "message": "m"}))
    with pytest.raises(Exception, match="m"):
        await done(box.exec("x"))
    assert len(server.of("POST", START)) == 2


async def test_start_that_was_not_forwarded_is_repeated(box: Any, server: FakeServer) -> None:
    busy = {"code": 503, "message": "m", "error_code": "control_plane_unavailable"}
    ok = stream(started(), exited(), end())
    server.on("POST", START, Answer(503, busy, {"Retry-After": "0"}), ok)
    assert (await done(box.exec("x"))).ok


async def test_refused_starts_are_typed(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(end({"code": "invalid_argument", "message": "no such cwd"})))
    with pytest.raises(InvalidRequest, match="no such cwd"):
        await done(box.exec("x", cwd="/nowhere"))
    server.on("POST", START, Answer(401, {"code": 401, "message": "bad token"}))
    with pytest.raises(Unauthenticated):
        await done(box.exec("x"))
    with pytest.raises(InvalidRequest):
        await done(box.exec([]))
    with pytest.raises(InvalidRequest):
        await done(box.exec("x", timeout_s=0))


async def test_failing_callback_kills_the_command(box: Any, server: FakeServer) -> None:
    server.on("POST", START, stream(started(5), output("stdout", b"x"), exited(), end()))
    server.on("POST", "/process.Process/SendSignal", Answer(200, {}))

    def broken(_: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await done(box.exec("x", on_stdout=broken))
    assert server.of("POST", "/process.Process/SendSignal")[0].json == {
        "process": {"pid": 5},
        "signal": "SIGNAL_SIGKILL",
    }


async def test_attach_to_nothing(box: Any, server: FakeServer) -> None:
    missing = {"code": "not_found", "message": "no process 9"}
    server.on("POST", "/process.Process/Connect", stream(end(missing)))
    with pytest.raises(ProcessNotFound, match="no process 9"):
        await done(box.attach(9))


async def test_file_errors_are_those_of_files(box: Any, server: FakeServer) -> None:
    server.on("GET", "/files", Answer(404, {"code": 404, "message": "no file"}))
    with pytest.raises(FileNotFound):
        await done(box.files.read("/x"))
    missing = {"code": "not_found", "message": "no file"}
    server.on("POST", "/filesystem.Filesystem/Stat", Answer(404, missing))
    assert await done(box.files.exists("/x")) is False
    server.on("GET", "/files", GONE)
    with pytest.raises(SandboxNotFound):
        await done(box.files.read("/x"))


async def test_reading_files_is_repeated(box: Any, server: FakeServer) -> None:
    server.on("GET", "/files", Answer(drop=True), Answer(200, b"data"))
    assert await done(box.files.read("/x")) == b"data"


async def test_cut_download_is_typed(box: Any, server: FakeServer) -> None:
    server.on("GET", "/files", Answer(200, raw=[b"some", b"bytes"]))
    server.on("GET", "/health", Answer(204))
    content = await done(box.files.stream("/x"))
    with pytest.raises(ConnectionFailed) as caught:
        await collect(content)
    assert caught.value.sandbox_alive is True


async def test_watch_ends_with_its_deadline(box: Any, server: FakeServer) -> None:
    server.on(
        "POST",
        "/filesystem.Filesystem/WatchDir",
        stream(
            frame({"start": {}}),
            frame({"filesystem": {"name": "a/b", "type": "EVENT_TYPE_CREATE"}}),
            frame({"keepalive": {}}),
            end({"code": "deadline_exceeded", "message": ""}),
        ),
    )
    watch = await done(box.files.watch("/w", timeout_s=1, recursive=True))
    events = await collect(watch)
    assert [(event.type, event.name) for event in events] == [("create", "a/b")]


async def test_signed_urls(box: Any, server: FakeServer) -> None:
    url = box.files.download_url("/home/user/ä b", user="root", expires_in_s=60)
    assert url.startswith(f"{server.url}/files?path=%2Fhome%2Fuser%2F%C3%A4+b&username=root&")
    assert "signature=v1_" in url
    assert "signature_expiration=" in url
    assert "username" not in box.files.upload_url("/x")


async def test_port_client_carries_routing(box: Any, server: FakeServer) -> None:
    server.on("GET", "/hello", Answer(200, {"ok": True}))
    http = box.http(8000)
    try:
        assert (await done(http.get("/hello"))).json() == {"ok": True}
    finally:
        await done(http.aclose() if hasattr(http, "aclose") else http.close())
    headers = server.of("GET", "/hello")[0].headers
    assert headers["e2b-sandbox-port"] == "8000"
    assert headers["e2b-traffic-access-token"] == "traffic"


async def test_error_codes_reach_the_caller(client: Any, server: FakeServer) -> None:
    server.on("GET", "/v1/templates", Answer(400, error("invalid_request")))
    with pytest.raises(InvalidRequest) as caught:
        await done(client.templates())
    assert caught.value.to_dict()["code"] == "invalid_request"

# SPDX-License-Identifier: Apache-2.0
"""Tasks: both halves of the SDK, and the command line's words; a scripted server."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from opendsec import (
    KEEP,
    Conflict,
    InvalidRequest,
    TaskEnded,
    TaskNotFound,
    TaskOperationInfo,
    TaskSandboxes,
    _limits,
)

from .fake_server import Answer, FakeServer, error
from .kits import Kit, collect, done
from .test_cli import cli

ONE = "/v1/tasks/train%2F7"
OPERATION = {"operation_id": "o1", "kind": "pause", "asked": 3, "done": 0, "failed": 0}
END = {**OPERATION, "done": 2, "failed": 1, "memory_freed_bytes": 7}
OUTCOMES = f"{ONE}/operations/o1/outcomes"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_limits, "RECONNECT_PAUSE_S", 0.01)


def task(**changes: Any) -> dict[str, Any]:
    counted = {"live": 2, "by_state": {"paused": 2}, "by_backend": {"container": 2}, "ended": []}
    record = {"task_id": "train/7", "state": "paused", "made": 2, "sandboxes": counted}
    return {**record, "usage": {"cpu_seconds": 1.5}, "operation": None, **changes}


def text(*lines: Any) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def outcome(seq: int, **changes: Any) -> dict[str, Any]:
    return {"sandbox_id": f"i{seq}", "seq": seq, "outcome": "done", **changes}


async def test_calls(kit: Kit, client: Any, server: FakeServer) -> None:
    server.on("POST", "/v1/tasks", Answer(201, task()))
    server.on("GET", ONE, Answer(200, task()))
    server.on("PATCH", ONE, Answer(200, task()))
    at = datetime(2031, 5, 1, 12, tzinfo=UTC)
    made = await done(client.tasks.create("train/7", deadline=at, sandboxes_max=5))
    assert (made.sandboxes.by_state, made.usage.cpu_seconds) == ({"paused": 2}, 1.5)
    assert server.of("POST", "/v1/tasks")[0].json == {
        "task_id": "train/7",
        "deadline_at": "2031-05-01T12:00:00+00:00",
        "sandboxes_max": 5,
        "cpu_seconds_max": None,
    }
    assert (await done(client.tasks.get("train/7"))).task_id == "train/7"
    await done(client.tasks.set("train/7", deadline=None, cpu_seconds_max=9, reopen=True))
    assert server.of("PATCH", ONE)[0].json == {
        "reopen": True,
        "deadline_at": None,
        "cpu_seconds_max": 9,
    }
    assert repr(KEEP) == "KEEP"


async def test_pages(kit: Kit, client: Any, server: FakeServer) -> None:
    pages = [
        {"tasks": [task(task_id="b")], "next_cursor": "c"},
        {"tasks": [task(task_id="a")], "next_cursor": None},
    ]
    server.on("GET", "/v1/tasks", *(Answer(200, page) for page in pages))
    found = await collect(client.tasks.list(states=["open", "paused"]))
    assert [one.task_id for one in found] == ["b", "a"]
    first, second = server.of("GET", "/v1/tasks")
    assert first.query["state"] == ["open,paused"]
    assert second.query["cursor"] == ["c"]


async def test_an_operation_is_followed_over_broken_connections(
    kit: Kit, client: Any, server: FakeServer
) -> None:
    server.on("POST", f"{ONE}/pause", Answer(202, OPERATION))
    failed = {"code": "snapshot_failed", "message": "full", "fault": "platform"}
    stopping = error("node_unavailable", retryable=True, fault="platform")["error"]
    server.on(
        "GET",
        OUTCOMES,
        Answer(raw=[text({"operation": OPERATION}, outcome(1, memory_freed_bytes=7))]),
        Answer(raw=[text({"operation": OPERATION}, {"failed": stopping})]),
        Answer(drop=True),
        Answer(raw=[text(outcome(2, outcome="error", error=failed), outcome(3), {"done": END})]),
    )
    operation = await done(client.tasks.pause("train/7", mode="filesystem"))
    asked = server.of("POST", f"{ONE}/pause")[0]
    assert asked.json == {"mode": "filesystem"}
    assert asked.query == {"stream": ["false"]}
    assert asked.headers["idempotency-key"].startswith("sdk-")
    outcomes = await collect(operation)
    assert [one.seq for one in outcomes] == [1, 2, 3]
    assert outcomes[1].error == failed
    assert (operation.info.done, operation.info.failed) == (2, 1)
    afters = [one.query["after"] for one in server.of("GET", OUTCOMES)]
    assert (afters[0], afters[-1]) == (["0"], ["1"])


async def test_waiting_tells_the_counts(kit: Kit, client: Any, server: FakeServer) -> None:
    server.on("POST", f"{ONE}/kill", Answer(202, OPERATION))
    lines = text(outcome(1), outcome(2, outcome="error"), outcome(3), {"done": END})
    server.on("GET", OUTCOMES, Answer(raw=[lines]))
    seen: list[TaskOperationInfo] = []
    operation = await done(client.tasks.kill("train/7", end=False))
    assert server.of("POST", f"{ONE}/kill")[0].json == {"end": False}
    info = await done(operation.wait(on_progress=seen.append))
    assert (info.done, info.failed, info.memory_freed_bytes) == (2, 1, 7)
    assert [(one.done, one.failed) for one in seen] == [(1, 0), (1, 1), (2, 1)]


async def test_wait(kit: Kit, client: Any, server: FakeServer) -> None:
    live = {"sandboxes": {"live": 1, "by_state": {"running": 1}}}
    gone = {"sandboxes": {"live": 0}}
    server.on(
        "GET",
        f"{ONE}/wait",
        Answer(raw=[text(live)]),
        Answer(raw=[text(gone, {"done": {"reached": True}})]),
    )
    seen: list[TaskSandboxes] = []
    assert await done(client.tasks.wait("train/7", on_change=seen.append))
    assert [one.live for one in seen] == [1, 0]
    server.on("GET", f"{ONE}/wait", Answer(raw=[text({"done": {"reached": False}})]))
    assert not await done(client.tasks.wait("train/7", "paused", timeout_s=0))


async def test_refusals(kit: Kit, client: Any, server: FakeServer) -> None:
    server.on("POST", f"{ONE}/resume", Answer(409, error("task_ended")))
    with pytest.raises(TaskEnded) as caught:
        await done(client.tasks.resume("train/7"))
    assert isinstance(caught.value, Conflict)
    server.on("GET", ONE, Answer(404, error("task_not_found")))
    with pytest.raises(TaskNotFound):
        await done(client.tasks.get("train/7"))
    for bad in ("", ".", ".."):
        with pytest.raises(InvalidRequest):
            await done(client.tasks.get(bad))
    for deadline in (datetime(2031, 5, 1), 1e30):
        with pytest.raises(InvalidRequest):
            await done(client.tasks.create("a", deadline=deadline))


def test_command_line(server: FakeServer) -> None:
    server.on("GET", "/v1/tasks", Answer(200, {"tasks": [task()], "next_cursor": None}))
    ran = cli(server, "task", "ls")
    assert b"train/7  paused  2 paused" in ran.stdout
    assert cli(server, "task", "ls", "-q").stdout == b"train/7\n"
    server.on("GET", ONE, Answer(200, task(operation=END)))
    ran = cli(server, "task", "show", "train/7")
    assert b"cpu       1.50 s\n" in ran.stdout
    assert b"pause: 2 of 3 done, 1 failed, 7 B memory freed" in ran.stdout
    server.on("PATCH", ONE, Answer(200, task()))
    cli(server, "task", "set", "train/7", "--sandboxes", "none", "--cpu-seconds", "9.5")
    assert server.of("PATCH", ONE)[0].json == {
        "reopen": False,
        "sandboxes_max": None,
        "cpu_seconds_max": 9.5,
    }
    assert cli(server, "task", "set", "train/7", "--sandboxes", "1.5").returncode == 1
    assert cli(server, "task", "set", "train/7", "--sandboxes", "few").returncode == 2
    # What failed is said, and is the exit code.
    server.on("POST", f"{ONE}/pause", Answer(202, OPERATION))
    failed = {"code": "snapshot_failed", "message": "the disk is full", "fault": "platform"}
    lines = text(outcome(1), outcome(2, outcome="error", error=failed), outcome(3), {"done": END})
    server.on("GET", OUTCOMES, Answer(raw=[lines]))
    ran = cli(server, "task", "pause", "train/7")
    assert ran.returncode == 70
    assert ran.stderr == b"opendsec: i2: the disk is full\n"
    assert cli(server, "task", "pause", "train/7", "--detach").stdout == b"o1\n"
    server.on("GET", f"{ONE}/wait", Answer(raw=[text({"done": {"reached": False}})]))
    assert cli(server, "task", "wait", "train/7", "--timeout", "0").returncode == 1

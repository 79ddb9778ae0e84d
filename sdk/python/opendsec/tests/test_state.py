# SPDX-License-Identifier: Apache-2.0
"""Pause, resume, fork and snapshots, and what running calls see of them; a scripted server."""

from __future__ import annotations

import re
from typing import Any

import pytest

from opendsec import (
    AlreadyPaused,
    InvalidRequest,
    NodeFull,
    NotSupported,
    OpendsecError,
    ProgramNotExecutable,
    ProgramNotFound,
    ResumeFailed,
    SandboxNotFound,
    SandboxPaused,
    SnapshotDamaged,
    SnapshotNotFound,
    StateConflict,
)

from .fake_server import SANDBOX_ID, Answer, Asked, FakeServer, end, error, sandbox
from .kits import collect, done
from .test_streams import GONE, START, exited, output, started, stream

ONE = f"/v1/sandboxes/{SANDBOX_ID}"
PAUSED = sandbox(state="paused", paused_mode="full", end_at=None, access_token=None)
FIGURES = {
    "took_s": 1.5,
    "memory_before_bytes": 300,
    "memory_freed_bytes": 200,
    "stored_bytes": 100,
}
# The edge's answer to a request without a token that may resume.
ASLEEP = Answer(401, {"code": 401, "message": "The sandbox is paused, and ..."})


def snapshot(**changes: Any) -> dict[str, Any]:
    record = {
        "id": "s1",
        "name": "warm:v1",
        "names": ["warm:v1"],
        "source_id": SANDBOX_ID,
        "backend": "vm",
        "mode": "full",
        "template": "base",
        "cpu": 1.0,
        "memory_mb": 512,
        "disk_mb": 1024,
        "created_at": "2026-12-01T10:00:00Z",
        "disk_bytes": 10,
        "memory_bytes": 20,
        "project_id": "p1",
    }
    return {**record, **changes}


# --- pause and resume ----------------------------------------------------------------


async def test_pause_and_resume(box: Any, server: FakeServer) -> None:
    server.on("POST", f"{ONE}/pause", Answer(200, {**PAUSED, "pause": FIGURES}))
    report = await done(box.pause())
    assert server.of("POST", f"{ONE}/pause")[0].json == {"mode": "full"}
    assert (report.took_s, report.memory_freed_bytes, report.stored_bytes) == (1.5, 200, 100)
    assert (box.record.state, box.record.paused_mode, box.record.end_at) == ("paused", "full", None)
    assert box.record.asleep
    assert box.record.access_token == "access", "an answer without tokens does not lose them"
    server.on("POST", f"{ONE}/resume", Answer(200, sandbox()))
    record = await done(box.resume(timeout_s=59.5, reboot=True))
    assert server.of("POST", f"{ONE}/resume")[0].json == {"timeout_s": 60, "reboot": True}
    assert record.state == box.record.state == "running"
    await done(box.resume())
    assert server.of("POST", f"{ONE}/resume")[1].json == {"reboot": False}


async def test_failures_are_typed(client: Any, server: FakeServer) -> None:
    server.on("POST", f"{ONE}/pause", Answer(409, error("already_paused")))
    with pytest.raises(AlreadyPaused) as already:
        await done(client.pause(SANDBOX_ID, mode="filesystem"))
    assert isinstance(already.value, StateConflict)
    assert len(server.of("POST", f"{ONE}/pause")) == 1
    failed = error("resume_failed", fault="platform", retryable=True)
    server.on("POST", f"{ONE}/resume", Answer(500, failed), Answer(200, sandbox()))
    assert (await done(client.resume(SANDBOX_ID))).state == "running"
    server.on("POST", f"{ONE}/resume", Answer(500, failed))
    with pytest.raises(ResumeFailed) as broken:
        await done(client.resume(SANDBOX_ID))
    assert broken.value.fault == "platform"
    server.on("POST", f"{ONE}/resume", Answer(500, error("snapshot_damaged", fault="platform")))
    with pytest.raises(SnapshotDamaged):
        await done(client.resume(SANDBOX_ID))


async def test_create_asks_for_it(client: Any, server: FakeServer) -> None:
    made = sandbox(
        backend="vm",
        accelerator="tcg",
        vmm="qemu 7.2",
        on_timeout="pause",
        pause_mode="filesystem",
        auto_resume=True,
    )
    server.on("POST", "/v1/sandboxes", Answer(201, made))
    box = await done(
        client.create(
            "warm:v1",
            backend="vm",
            on_timeout="pause",
            pause_mode="filesystem",
            auto_resume=True,
        )
    )
    assert server.of("POST", "/v1/sandboxes")[0].json == {
        "template": "warm:v1",
        "timeout_s": 300,
        "on_timeout": "pause",
        "pause_mode": "filesystem",
        "auto_resume": True,
        "backend": "vm",
    }
    record = box.record
    assert (record.accelerator, record.vmm, record.auto_resume) == ("tcg", "qemu 7.2", True)


async def test_connect_wakes(client: Any, server: FakeServer) -> None:
    server.on("GET", ONE, Answer(200, PAUSED))
    server.on("POST", f"{ONE}/connect", Answer(200, sandbox()))
    box = await done(client.connect(SANDBOX_ID))
    assert box.record.state == "running"
    assert server.of("POST", f"{ONE}/connect")[0].json == {}


# --- calls on a paused sandbox -------------------------------------------------------


@pytest.mark.parametrize("health", [ASLEEP, GONE])
async def test_command_whose_sandbox_is_paused(
    box: Any, server: FakeServer, health: Answer
) -> None:
    cut = end({"code": "unavailable", "message": "the sandbox has ended or was paused"})
    server.on("POST", START, stream(started(42), output("stdout", b"half"), cut))
    server.on("GET", "/health", health)
    server.on("GET", ONE, Answer(200, PAUSED))
    with pytest.raises(SandboxPaused) as caught:
        await done(box.exec("x"))
    paused = caught.value
    assert (paused.pid, paused.stdout, paused.fault) == (42, "half", "user")
    assert paused.details == {"state": "paused", "paused_mode": "full"}
    asked = server.of("GET", "/health")
    assert asked
    assert all("x-access-token" not in one.headers for one in asked), (
        "asking for its health must not resume it"
    )


async def test_cut_connection_of_a_sandbox_that_is_just_being_paused(
    box: Any, server: FakeServer
) -> None:
    server.on("POST", START, stream(started(42), whole=False))
    moving = {"code": 409, "message": "m", "error_code": "sandbox_state_conflict"}
    server.on("GET", "/health", Answer(409, moving, {"Retry-After": "1"}))
    with pytest.raises(SandboxPaused):
        await done(box.exec("x"))
    server.on("GET", "/health", Answer(drop=True))
    server.on("GET", ONE, Answer(200, sandbox(state="pausing")))
    with pytest.raises(SandboxPaused, match="pausing"):
        await done(box.exec("x"))


async def test_new_calls_say_that_it_is_paused(box: Any, server: FakeServer) -> None:
    server.on("GET", ONE, Answer(200, PAUSED))
    for method, path in (("POST", START), ("GET", "/files"), ("POST", "/files")):
        server.on(method, path, GONE)
    with pytest.raises(SandboxPaused):
        await done(box.exec("x"))
    with pytest.raises(SandboxPaused):
        await done(box.files.read("/x"))
    with pytest.raises(SandboxPaused):
        await done(box.files.write("/x", b""))
    ended = sandbox(state="ended", end_reason="timeout")
    server.on("GET", ONE, Answer(200, ended))
    server.on("POST", START, GONE)
    with pytest.raises(SandboxNotFound, match="timeout"):
        await done(box.exec("x"))


async def test_asking_whether_it_runs_does_not_wake_it(box: Any, server: FakeServer) -> None:
    for answer, expected in ((ASLEEP, False), (GONE, False), (Answer(204), True)):
        server.on("GET", "/health", answer)
        assert await done(box.is_running()) is expected
    assert all("x-access-token" not in asked.headers for asked in server.of("GET", "/health"))


async def test_call_that_could_not_wake_it_is_typed_and_repeated_if_that_helps(
    box: Any, server: FakeServer
) -> None:
    moving = {"code": 409, "message": "m", "error_code": "sandbox_state_conflict"}
    full = {"code": 503, "message": "m", "error_code": "node_full"}
    now = {"Retry-After": "0"}
    ok = stream(started(), exited(), end())
    server.on("POST", START, Answer(409, moving, now), Answer(503, full, now), ok)
    assert (await done(box.exec("x"))).ok
    server.on("POST", START, Answer(503, full, now))
    with pytest.raises(NodeFull):
        await done(box.exec("x"))
    broken = {"code": 500, "message": "m", "error_code": "snapshot_damaged"}
    server.on("POST", START, Answer(500, broken))
    before = len(server.of("POST", START))
    with pytest.raises(SnapshotDamaged):
        await done(box.exec("x"))
    assert len(server.of("POST", START)) == before + 1


# --- forks ---------------------------------------------------------------------------


async def test_fork_has_an_outcome_for_each_child(box: Any, server: FakeServer) -> None:
    items = [
        {"sandbox": sandbox("i2")},
        {"error": error("node_full", fault="capacity", retryable=True)["error"]},
        {"sandbox": sandbox("i3")},
    ]
    server.on("POST", f"{ONE}/fork", Answer(201, {"items": items}))
    first, second, third = await done(box.fork(3, timeout_s=60, labels=["child"]))
    assert (first.sandbox_id, third.sandbox_id) == ("i2", "i3")
    assert isinstance(second, NodeFull)
    assert (second.fault, second.retryable, second.request_id) == ("capacity", True, "req-1")
    asked = server.of("POST", f"{ONE}/fork")[0]
    assert asked.json == {"count": 3, "mode": "full", "timeout_s": 60, "labels": ["child"]}
    server.on("POST", START, stream(started(), exited(), end()))
    assert (await done(first.exec("x"))).ok
    assert server.of("POST", START)[0].headers["e2b-sandbox-id"] == "i2"


async def test_fork_and_snapshot_are_repeated_with_the_same_key(
    box: Any, server: FakeServer
) -> None:
    busy = Answer(503, error("node_unavailable", retryable=True, fault="platform"))
    server.on(
        "POST", f"{ONE}/fork", Answer(drop=True), busy, Answer(201, {"items": [{"error": {}}]})
    )
    (outcome,) = await done(box.fork())
    assert isinstance(outcome, OpendsecError)
    server.on("POST", f"{ONE}/snapshots", Answer(drop=True), busy, Answer(201, snapshot()))
    await done(box.snapshot())
    for path in ("fork", "snapshots"):
        asked = server.of("POST", f"{ONE}/{path}")
        keys = {one.headers["idempotency-key"] for one in asked}
        assert len(asked) == 3
        assert len(keys) == 1
        assert re.fullmatch(r"[A-Za-z0-9._:-]{1,255}", keys.pop())
    await done(box.fork(idempotency_key="mine"))
    assert server.of("POST", f"{ONE}/fork")[-1].headers["idempotency-key"] == "mine"


async def test_fork_of_memory_that_cannot_be(box: Any, server: FakeServer) -> None:
    no = error("not_supported", remediation='Ask for mode "filesystem".')
    server.on("POST", f"{ONE}/fork", Answer(501, no))
    with pytest.raises(NotSupported) as caught:
        await done(box.fork(2))
    assert "filesystem" in caught.value.remediation
    for count in (0, 101):
        with pytest.raises(InvalidRequest):
            await done(box.fork(count))
    assert len(server.of("POST", f"{ONE}/fork")) == 1


# --- snapshots -----------------------------------------------------------------------


async def test_snapshots(box: Any, client: Any, server: FakeServer) -> None:
    server.on("POST", f"{ONE}/snapshots", Answer(201, snapshot()))
    made = await done(box.snapshot("warm:v1"))
    assert server.of("POST", f"{ONE}/snapshots")[0].json == {"mode": "full", "name": "warm:v1"}
    assert (made.snapshot_id, made.mode, made.memory_bytes) == ("s1", "full", 20)
    assert made.created_at.year == 2026
    server.on(
        "GET",
        "/v1/snapshots",
        Answer(200, {"snapshots": [snapshot(id="s1"), snapshot(id="s2")], "next_cursor": "c"}),
        Answer(200, {"snapshots": [snapshot(id="s3")], "next_cursor": None}),
    )
    found = await collect(client.snapshots.list(sandbox_id=SANDBOX_ID, name="warm"))
    assert [one.snapshot_id for one in found] == ["s1", "s2", "s3"]
    first, second = server.of("GET", "/v1/snapshots")
    assert first.query == {"sandbox_id": [SANDBOX_ID], "name": ["warm"], "limit": ["100"]}
    assert second.query["cursor"] == ["c"]
    server.on("GET", "/v1/snapshots/warm%3Av1", Answer(200, snapshot()))
    assert (await done(client.snapshots.get("warm:v1"))).snapshot_id == "s1"
    server.on("DELETE", "/v1/snapshots/s1", Answer(204), Answer(404, error("snapshot_not_found")))
    assert await done(client.snapshots.delete("s1")) is True
    assert await done(client.snapshots.delete("s1")) is False
    server.on("GET", "/v1/snapshots/s9", Answer(404, error("snapshot_not_found")))
    with pytest.raises(SnapshotNotFound):
        await done(client.snapshots.get("s9"))
    with pytest.raises(InvalidRequest):
        await done(client.snapshots.delete(""))


# --- what the server is --------------------------------------------------------------


async def test_server_names_its_backends(client: Any, server: FakeServer) -> None:
    info = {
        "version": "0.2.0",
        "default_backend": "container",
        "backends": [
            {
                "name": "vm",
                "accelerator": "tcg",
                "vmm": "qemu 7.2",
                "capabilities": {"memory_snapshot": True, "a_later_one": True},
            },
            {"name": "container", "capabilities": {"fork": True}},
        ],
    }
    server.on("GET", "/v1/info", Answer(200, info))
    vm, container = (await done(client.server_info())).backends
    assert (vm.name, vm.accelerator, vm.vmm) == ("vm", "tcg", "qemu 7.2")
    assert vm.capabilities.memory_snapshot
    assert not container.capabilities.memory_snapshot
    assert (container.accelerator, container.vmm) == ("none", None)


async def test_project_and_keys(client: Any, server: FakeServer) -> None:
    project = {"project_id": "p1", "name": "default", "sandboxes_max": 9}
    server.on("GET", "/v1/project", Answer(200, project))
    assert (await done(client.project())).sandboxes_max == 9
    key = {"key_id": "k1", "name": "ci", "hint": "e2b_4f…09ab"}
    server.on("GET", "/v1/api-keys", Answer(200, {"api_keys": [key]}))
    assert [one.name for one in await done(client.api_keys.list())] == ["ci"]
    server.on("POST", "/v1/api-keys", Answer(201, {**key, "key": "e2b_secret"}))
    assert (await done(client.api_keys.create("ci"))).key == "e2b_secret"
    server.on("POST", "/v1/api-keys", Answer(drop=True))
    with pytest.raises(OpendsecError):
        await done(client.api_keys.create("ci"))
    assert len(server.of("POST", "/v1/api-keys")) == 2, "a second try would make a second key"
    server.on("DELETE", "/v1/api-keys/k1", Answer(204), Answer(404, error("not_found")))
    assert await done(client.api_keys.delete("k1")) is True
    assert await done(client.api_keys.delete("k1")) is False


# --- programs that cannot be started -------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words", "cls"),
    [
        (2, "No such file or directory", ProgramNotFound),
        (13, "Permission denied", ProgramNotExecutable),
        (8, "Exec format error", ProgramNotExecutable),
    ],
)
async def test_program_that_cannot_be_started(
    box: Any, server: FakeServer, number: int, words: str, cls: type[OpendsecError]
) -> None:
    message = f"cannot run 'foo': {words} (os error {number})"

    def answer(_: Asked) -> Answer:
        return stream(end({"code": "invalid_argument", "message": message}))

    server.on("POST", START, answer)
    with pytest.raises(cls, match="foo"):
        await done(box.exec(["foo"]))

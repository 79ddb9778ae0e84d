# SPDX-License-Identifier: AGPL-3.0-only
"""Start commands of containers on a real node."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from opendsec_server.contract.images import ReadyCheck, StartCommand

from .machine import CallError, NodeProcess, small_spec
from .test_suspend import resume, snapshot

pytestmark = pytest.mark.node

LISTEN = """
import socket, sys, time
print("warming up", flush=True)
time.sleep(0.5)
server = socket.create_server(("127.0.0.1", 8123))
while True:
    connection, _ = server.accept()
    data = connection.recv(4096)
    if data.startswith(b"GET /healthy "):
        connection.sendall(b"HTTP/1.1 204 No Content\\r\\n\\r\\n")
    elif data:
        connection.sendall(b"HTTP/1.1 503 Busy\\r\\nContent-Length: 0\\r\\n\\r\\n")
    connection.close()
"""


def sh(script: str, **ready: Any) -> StartCommand:
    return StartCommand(argv=("/bin/sh", "-c", script), ready=ReadyCheck(**ready))


def server(**ready: Any) -> StartCommand:
    return StartCommand(argv=("python3", "-c", LISTEN), ready=ReadyCheck(**ready))


@pytest.mark.parametrize(
    "ready", [{"port": 8123}, {"url": "http://localhost:8123/healthy"}], ids=["port", "url"]
)
async def test_a_server_is_awaited(node: NodeProcess, ready: dict[str, Any]) -> None:
    spec = await node.create(start=server(**ready))
    check = "exec 3<>/dev/tcp/127.0.0.1/8123 && pgrep -fc '[w]arming'"
    assert await node.exec(spec, check) == (0, "1\n")
    log = node.config.state_path / "pool/sandboxes" / spec.sandbox_id / "start.log"
    assert log.read_text() == "warming up\n"
    assert log.stat().st_mode & 0o777 == 0o600


async def test_user_directory_environment_and_command(node: NodeProcess) -> None:
    start = StartCommand(
        argv=("/bin/sh", "-c", "id -un; pwd; echo $A$B; sleep 0.3; touch up; exec sleep 55"),
        user="root",
        workdir="/tmp",
        env={"B": "2"},
        ready=ReadyCheck(command="test -e up && test $A$B = 12"),
    )
    spec = await node.create(start=start, env={"A": "1", "B": "0"})
    folder = node.config.state_path / "pool/sandboxes" / spec.sandbox_id
    assert (folder / "start.log").read_text() == "root\n/tmp\n12\n"
    assert (await node.exec(spec, "pgrep -fc '^sleep 55'"))[1] == "1\n"


async def test_its_output_is_kept(node: NodeProcess) -> None:
    script = "echo first; sleep 1; head -c 700000 /dev/zero | tr '\\0' x; echo last; exec sleep 77"
    spec = await node.create(start=sh(script))
    look = "until tail -n1 /run/opendsec/start.log | grep -q last; do sleep 0.1; done;"
    look += "stat -c '%s %a %U' /run/opendsec/start.log*"
    seen = (await node.exec(spec, look, "root"))[1].split()
    assert seen[1:3] == ["640", "root"]
    assert sum(map(int, seen[::3])) < 700_000


async def test_one_that_goes_into_the_background(node: NodeProcess) -> None:
    spec = await node.create(
        start=sh("(sleep 0.5; touch /tmp/up) & exit 0", command="test -e /tmp/up")
    )
    assert await node.state(spec.sandbox_id) == "running"


@pytest.mark.parametrize(
    ("start", "code", "words"),
    [
        (sh("echo no luck >&2; exit 7", port=1), "sandbox_start_failed", ["status 7", "no luck"]),
        (sh("kill -9 $$", command="false"), "sandbox_start_failed", ["signal 9"]),
        (sh("tail /dev/zero; exit $?", port=1), "sandbox_start_failed", ["137", "at the limit of"]),
        (sh("echo hm; sleep 99", port=1, timeout_s=1), "start_timeout", ["1 s", "port 1", "hm"]),
        (
            server(url="http://localhost:8123/sick", timeout_s=2),
            "start_timeout",
            ["answers 503"],
        ),
        (
            sh("sleep 99", command="echo not yet; false", timeout_s=1),
            "start_timeout",
            ["not yet"],
        ),
        (StartCommand(argv=("/no/such",)), "sandbox_start_failed", ["/no/such"]),
        (StartCommand(argv=("true",), user="nobody1"), "sandbox_start_failed", ["nobody1"]),
        (sh("true", port=99_999), "invalid_request", ["ready.port"]),
        (sh("true", url="http://example.com/"), "invalid_request", ["ready.url"]),
        (sh("true", port=1, command="true"), "invalid_request", ["one of"]),
    ],
)
async def test_what_does_not_come_up(
    node: NodeProcess, start: StartCommand, code: str, words: list[str]
) -> None:
    with pytest.raises(CallError) as error:
        await node.create(start=start)
    assert error.value.code == code
    for word in words:
        assert word in str(error.value)
    assert await node.call("list") == []


async def test_a_kill_does_not_wait_for_it(node: NodeProcess) -> None:
    spec = small_spec(start=sh("sleep 999", port=1, timeout_s=300))
    creating = asyncio.create_task(node.call("create", spec))
    log = node.config.state_path / "pool/sandboxes" / spec.sandbox_id / "upper"
    while not log.exists():
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await node.call("kill", spec.sandbox_id)
    assert time.monotonic() - began < 30
    with pytest.raises(CallError) as error:
        await creating
    assert error.value.code == "sandbox_state_conflict"


async def test_others_start_meanwhile(node: NodeProcess) -> None:
    slow = [sh("sleep 999", port=1, timeout_s=60) for _ in range(12)]
    waiting = [asyncio.create_task(node.create(start=start)) for start in slow]
    await node.create()
    for status in await node.call("list"):
        await node.call("kill", status["sandbox_id"])
    refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert [error.code for error in refused if isinstance(error, CallError)] == [
        "sandbox_state_conflict"
    ] * len(slow)


async def test_pause_resume_and_fork(node: NodeProcess) -> None:
    runs = "echo run >> /tmp/runs; exec sleep 77"
    spec = await node.create(start=sh(runs, command="test -e /tmp/runs"))
    await node.call("pause", spec.sandbox_id)
    await resume(node, spec)
    assert (await node.exec(spec, "cat /tmp/runs; pgrep -fc '^sleep 77'"))[1] == "run\n1\n"
    await node.call("pause", spec.sandbox_id, mode="filesystem")
    await resume(node, spec)
    assert (await node.exec(spec, "cat /tmp/runs; pgrep -fc '^sleep 77'"))[1] == "run\nrun\n1\n"
    saved = await snapshot(node, spec)
    child = await node.create(snapshot_id=saved["snapshot_id"])
    assert (await node.exec(child, "pgrep -fc '^sleep 77'"))[1] == "1\n"


async def test_a_resume_that_fails_stays_paused(node: NodeProcess) -> None:
    script = "test ! -e /tmp/broken && exec sleep 77"
    spec = await node.create(start=sh(script, command="test ! -e /tmp/broken"))
    await node.exec(spec, "touch /tmp/broken")
    await node.call("pause", spec.sandbox_id, mode="filesystem")
    with pytest.raises(CallError) as error:
        await resume(node, spec)
    assert error.value.code == "resume_failed"
    assert "status 1" in str(error.value)
    assert await node.state(spec.sandbox_id) == "paused"

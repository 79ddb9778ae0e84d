# SPDX-License-Identifier: AGPL-3.0-only
"""Pause, resume, snapshot and fork of containers on a real node."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.node import SandboxSpec

from .conftest import MakeNode
from .machine import CallError, NodeProcess, first_process
from .test_restart import again

pytestmark = pytest.mark.node


def later(seconds: float = 600) -> float:
    return time.time() + seconds


async def resume(node: NodeProcess, spec: SandboxSpec, **options: Any) -> dict[str, Any]:
    status: dict[str, Any] = await node.call("resume", spec.sandbox_id, end_at=later(), **options)
    return status


async def snapshot(node: NodeProcess, spec: SandboxSpec, **options: Any) -> dict[str, Any]:
    options.setdefault("mode", "filesystem")
    saved: dict[str, Any] = await node.call(
        "snapshot", spec.sandbox_id, random_chars(20), **options
    )
    return saved


def code_of(error: pytest.ExceptionInfo[CallError]) -> str:
    return error.value.code


async def test_full_pause_keeps_processes(node: NodeProcess) -> None:
    spec = await node.create()
    _code, pid = await node.exec(
        spec, "(while sleep 0.01; do echo >>/tmp/beat; done) >/dev/null & echo $!"
    )
    report = await node.call("pause", spec.sandbox_id)
    assert report["status"]["state"] == "paused"
    assert report["status"]["pause_mode"] == "full"
    assert report["memory_before_bytes"] > 0
    beat = Path(node.config.state_path / "pool/sandboxes" / spec.sandbox_id / "upper/tmp/beat")
    frozen_at = beat.stat().st_size
    await asyncio.sleep(0.2)
    assert beat.stat().st_size == frozen_at
    with pytest.raises(CallError) as error:
        await node.call("pause", spec.sandbox_id)
    assert code_of(error) == "already_paused"
    with pytest.raises(CallError) as error:
        await node.call("route", spec.sandbox_id)
    assert code_of(error) == "sandbox_state_conflict"
    status = await resume(node, spec)
    assert (status["state"], status.get("pause_mode")) == ("running", None)
    assert (await node.exec(spec, f"kill -0 {pid.strip()} && echo lives"))[1] == "lives\n"
    await asyncio.sleep(0.2)
    assert beat.stat().st_size > frozen_at


async def test_filesystem_pause_keeps_the_disk(node: NodeProcess) -> None:
    spec = await node.create()
    await node.exec(spec, "echo kept > ~/file; sleep 1000 >/dev/null 2>&1 & exit 0")
    report = await node.call("pause", spec.sandbox_id, mode="filesystem")
    assert report["status"]["pause_mode"] == "filesystem"
    assert report["memory_freed_bytes"] == report["memory_before_bytes"] > 0
    await resume(node, spec)
    assert (await node.exec(spec, "cat ~/file; pgrep sleep || echo none"))[1] == "kept\nnone\n"


async def test_reboot_of_a_full_pause(node: NodeProcess) -> None:
    spec = await node.create()
    await node.exec(spec, "echo kept > ~/file; sleep 1000 >/dev/null 2>&1 & exit 0")
    await node.call("pause", spec.sandbox_id)
    await resume(node, spec, reboot=True)
    assert (await node.exec(spec, "cat ~/file; pgrep sleep || echo none"))[1] == "kept\nnone\n"


@pytest.mark.parametrize("mode", ["full", "filesystem"])
async def test_twenty_pauses_lose_nothing(node: NodeProcess, mode: str) -> None:
    spec = await node.create()
    for turn in range(20):
        await node.exec(spec, f"echo {turn} >> ~/turns")
        await node.call("pause", spec.sandbox_id, mode=mode)
        await resume(node, spec)
    turns = "".join(f"{turn}\n" for turn in range(20))
    assert (await node.exec(spec, "cat ~/turns"))[1] == turns


async def test_kill_of_a_paused_one(node: NodeProcess) -> None:
    for mode in ("full", "filesystem"):
        spec = await node.create()
        await node.call("pause", spec.sandbox_id, mode=mode)
        assert (await node.call("kill", spec.sandbox_id))["state"] == "ended"


async def test_no_end_while_paused(node: NodeProcess) -> None:
    spec = await node.create(end_at=later(1.5))
    await node.call("pause", spec.sandbox_id)
    await asyncio.sleep(2)
    assert await node.state(spec.sandbox_id) == "paused"
    await node.call("resume", spec.sandbox_id, end_at=later(1))
    assert (await node.wait_state(spec.sandbox_id, "ended"))["reason"] == "timeout"


@pytest.mark.parametrize("mode", ["full", "filesystem"])
async def test_pause_at_the_end_time(node: NodeProcess, mode: str) -> None:
    spec = await node.create(end_at=later(1), on_timeout="pause", pause_mode=mode)
    status = await node.wait_state(spec.sandbox_id, "paused")
    assert status["pause_mode"] == mode
    await resume(node, spec)
    await node.call("set_end_at", spec.sandbox_id, time.time())
    await node.wait_state(spec.sandbox_id, "paused")


async def test_snapshot_starts_others(node: NodeProcess) -> None:
    spec = await node.create()
    await node.exec(spec, "echo one > ~/file; echo evil > /tmp/x")
    saved = await snapshot(node, spec)
    assert saved["disk_bytes"] > 0
    await node.exec(spec, "echo two > ~/file")
    assert [s["snapshot_id"] for s in await node.call("snapshots")] == [saved["snapshot_id"]]
    child = await node.create(snapshot_id=saved["snapshot_id"])
    assert (await node.exec(child, "cat ~/file; hostname; cat /etc/hostname"))[1] == (
        f"one\n{child.sandbox_id}\n{child.sandbox_id}\n"
    )
    assert (await node.exec(spec, "cat ~/file"))[1] == "two\n"
    assert await node.call("delete_snapshot", saved["snapshot_id"]) is True
    assert await node.call("delete_snapshot", saved["snapshot_id"]) is False
    assert (await node.exec(child, "cat ~/file"))[1] == "one\n"
    with pytest.raises(CallError) as error:
        await node.create(snapshot_id=saved["snapshot_id"])
    assert code_of(error) == "snapshot_not_found"


async def test_chain_of_forks(node: NodeProcess) -> None:
    spec = await node.create()
    for depth in range(6):
        await node.exec(spec, f"echo {depth} >> ~/depth")
        saved = await snapshot(node, spec, ephemeral=True)
        child = await node.create(snapshot_id=saved["snapshot_id"])
        await node.call("delete_snapshot", saved["snapshot_id"])
        await node.call("kill", spec.sandbox_id)
        spec = child
    assert (await node.exec(spec, "cat ~/depth"))[1] == "0\n1\n2\n3\n4\n5\n"
    assert await node.call("snapshots") == []


async def test_snapshot_of_a_paused_one(node: NodeProcess) -> None:
    spec = await node.create()
    await node.exec(spec, "echo kept > ~/file")
    for mode in ("full", "filesystem"):
        await node.call("pause", spec.sandbox_id, mode=mode)
        saved = await snapshot(node, spec)
        assert await node.state(spec.sandbox_id) == "paused"
        child = await node.create(snapshot_id=saved["snapshot_id"])
        assert (await node.exec(child, "cat ~/file"))[1] == "kept\n"
        await resume(node, spec)


async def test_memory_of_a_container_is_refused(node: NodeProcess) -> None:
    spec = await node.create()
    with pytest.raises(CallError) as error:
        await snapshot(node, spec, mode="full")
    assert code_of(error) == "not_supported"
    assert await node.state(spec.sandbox_id) == "running"


async def test_hostile_disk_is_copied_harmlessly(node: NodeProcess) -> None:
    spec = await node.create()
    await node.exec(
        spec,
        f"rm /etc/hosts; ln -s /etc/shadow /etc/hosts; rm /etc/hostname; mkfifo /etc/hostname;"
        f"echo {spec.sandbox_id} > /etc/other; chmod 4755 /etc/other",
        user="root",
    )
    saved = await snapshot(node, spec)
    child = await node.create(snapshot_id=saved["snapshot_id"])
    assert (await node.exec(child, "readlink /etc/hosts; stat -c %F /etc/hostname"))[1] == (
        "/etc/shadow\nfifo\n"
    )
    moved = await node.create()
    await node.exec(moved, "mv /etc /old; ln -s /root /etc", user="root")
    saved = await snapshot(node, moved)
    await node.call("kill", moved.sandbox_id)
    assert (await node.call("snapshots"))[-1]["snapshot_id"] == saved["snapshot_id"]


@pytest.mark.parametrize("mode", ["full", "filesystem"])
async def test_paused_ones_survive_the_daemon(node: NodeProcess, mode: str) -> None:
    spec = await node.create()
    await node.exec(spec, "echo kept > ~/file")
    saved = await snapshot(node, spec)
    passing = await snapshot(node, spec, ephemeral=True)
    await node.call("pause", spec.sandbox_id, mode=mode)
    await node.kill9()
    await again(node)
    assert await node.state(spec.sandbox_id) == "paused"
    assert [s["snapshot_id"] for s in await node.call("snapshots")] == [saved["snapshot_id"]]
    with pytest.raises(CallError):
        await node.create(snapshot_id=passing["snapshot_id"])
    await resume(node, spec)
    assert (await node.exec(spec, "cat ~/file"))[1] == "kept\n"


@pytest.mark.parametrize("while_down", [False, True])
async def test_frozen_processes_lost(node: NodeProcess, while_down: bool) -> None:
    """What an out-of-memory killer or a reboot does to frozen processes: the disk is kept."""
    spec = await node.create()
    await node.exec(spec, "echo kept > ~/file")
    await node.call("pause", spec.sandbox_id)
    pid = first_process(node.config, spec.sandbox_id)
    if while_down:
        await node.kill9()
    groups = f"**/opendsec-{node.config.instance}/{spec.sandbox_id}"
    freezer = list(Path("/sys/fs/cgroup").glob(groups))
    os.kill(pid, signal.SIGKILL)
    for group in freezer:
        if (group / "freezer.state").exists():
            (group / "freezer.state").write_text("THAWED")
    if while_down:
        await again(node)
    deadline = time.monotonic() + 10
    while (status := await node.call("get", spec.sandbox_id))["pause_mode"] != "filesystem":
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.05)
    assert "its memory was lost" in status["message"]
    await resume(node, spec)
    assert (await node.exec(spec, "cat ~/file"))[1] == "kept\n"


@pytest.mark.parametrize(
    ("mode", "point"),
    [
        ("full", "pause:begun"),
        ("full", "pause:frozen"),
        ("full", "pause:done"),
        ("filesystem", "pause:begun"),
        ("filesystem", "pause:run ended"),
        ("filesystem", "pause:done"),
    ],
)
async def test_killed_while_pausing(make_node: MakeNode, point: str, mode: str) -> None:
    node = make_node()
    await node.start(OPENDSEC_CRASH_AT=point)
    spec = await node.create()
    await node.exec(spec, "echo kept > ~/file")
    with pytest.raises(ConnectionError):
        await node.call("pause", spec.sandbox_id, mode=mode)
    await node.wait()
    await again(node)
    state = await node.state(spec.sandbox_id)
    assert state in ("running", "paused")
    if state == "paused":
        await resume(node, spec)
    assert (await node.exec(spec, "cat ~/file"))[1] == "kept\n"


@pytest.mark.parametrize("point", ["resume:begun", "resume:runs"])
@pytest.mark.parametrize("mode", ["full", "filesystem"])
async def test_killed_while_resuming(make_node: MakeNode, point: str, mode: str) -> None:
    node = make_node()
    await node.start(OPENDSEC_CRASH_AT=point)
    spec = await node.create()
    await node.exec(spec, "echo kept > ~/file")
    await node.call("pause", spec.sandbox_id, mode=mode)
    with pytest.raises(ConnectionError):
        await resume(node, spec)
    await node.wait()
    await again(node)
    if await node.state(spec.sandbox_id) == "paused":
        await resume(node, spec)
    assert (await node.exec(spec, "cat ~/file"))[1] == "kept\n"


@pytest.mark.parametrize(
    "point", ["snapshot:begun", "snapshot:frozen", "snapshot:made", "snapshot:done"]
)
async def test_killed_while_saving(make_node: MakeNode, point: str) -> None:
    node = make_node()
    await node.start(OPENDSEC_CRASH_AT=point)
    spec = await node.create()
    await node.exec(spec, "echo kept > ~/file")
    with pytest.raises(ConnectionError):
        await snapshot(node, spec)
    await node.wait()
    await again(node)
    assert await node.state(spec.sandbox_id) == "running"
    assert (await node.exec(spec, "cat ~/file"))[1] == "kept\n"
    saved = await node.call("snapshots")
    assert len(saved) == (1 if point == "snapshot:done" else 0)
    left = list((node.config.state_path / "pool/snapshots").iterdir())
    assert len(left) == len(saved)


async def test_one_winner(node: NodeProcess) -> None:
    """Everything at once: each call gets its result or a typed answer, and nothing is lost."""
    typed = {"already_paused", "sandbox_state_conflict", "sandbox_not_found"}
    for turn in range(8):
        spec = await node.create()
        await node.exec(spec, "echo kept > ~/file")
        calls = [
            node.call("pause", spec.sandbox_id),
            node.call("pause", spec.sandbox_id, mode="filesystem"),
            resume(node, spec),
            snapshot(node, spec),
            node.exec(spec, "true"),
            *([node.call("kill", spec.sandbox_id)] if turn % 2 else []),
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, CallError):
                assert result.code in typed, result
            elif isinstance(result, Exception):
                assert isinstance(result, OSError), result  # the exec of one that went away
        if turn % 2:
            assert await node.state(spec.sandbox_id) == "ended"
            continue
        state = await node.state(spec.sandbox_id)
        assert state in ("running", "paused")
        if state == "paused":
            await resume(node, spec)
        assert (await node.exec(spec, "cat ~/file"))[1] == "kept\n"

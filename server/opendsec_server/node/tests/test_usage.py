# SPDX-License-Identifier: AGPL-3.0-only
"""What sandboxes have used: counted over pauses, restarts and runs, and kept after their end."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from opendsec_server.config import ConfigError
from opendsec_server.contract.node import SandboxSpec
from opendsec_server.node.cgroups.base import Usage
from opendsec_server.node.journal import _TO_2, Journal, Meter
from opendsec_server.node.usage import _advanced, read_links
from opendsec_server.node.vmm.qemu.program import find_qemu

from .conftest import MakeNode
from .machine import NodeProcess
from .test_restart import again
from .test_suspend import resume

MIB = 1 << 20


def cpu(seconds: float, memory_mb: int = 0) -> Usage:
    return Usage(cpu_us=int(seconds * 1e6), memory_bytes=memory_mb * MIB, cache_bytes=0)


def test_runs_add_up() -> None:
    meter = _advanced(Meter(), "a", cpu(1), (100, 10), 5, 1_000)
    meter = _advanced(meter, "a", cpu(3), (150, 10), 6, 1_001)
    assert (meter.cpu_us, meter.egress_bytes, meter.ingress_bytes) == (3_000_000, 150, 10)
    # Another run: the kernel's counters begin at zero.
    meter = _advanced(meter, "b", cpu(1), (20, 5), 7, 1_002)
    assert (meter.cpu_us, meter.egress_bytes, meter.ingress_bytes) == (4_000_000, 170, 15)
    assert meter.disk_bytes == 7


def test_what_cannot_be_read_keeps_its_value() -> None:
    meter = _advanced(Meter(), "a", cpu(2, 10), (100, 10), 5, 1_000)
    again = _advanced(meter, "a", None, None, None, 1_010)
    assert (again.cpu_us, again.egress_bytes, again.disk_bytes) == (2_000_000, 100, 5)
    # A counter never takes back what it has said.
    assert _advanced(again, "a", cpu(1), (90, 9), 5, 1_020).cpu_us == 2_000_000


def test_memory_is_counted_over_time() -> None:
    meter = _advanced(Meter(), "a", cpu(0, 100), None, None, 1_000)
    meter = _advanced(meter, "a", cpu(0, 100), None, None, 1_010)
    assert meter.memory_mb_seconds == 1_000
    meter = _advanced(meter, "a", cpu(0, 0), None, None, 1_020)
    assert meter.memory_mb_seconds == 1_500
    # A clock that was set back counts as no time, and a gap between two runs as none either.
    meter = _advanced(meter, "a", cpu(0, 100), None, None, 500)
    meter = _advanced(meter, "b", cpu(0, 100), None, None, 9_000)
    assert meter.memory_mb_seconds == 1_500


def test_links_are_read_as_the_kernel_writes_them() -> None:
    text = (
        "Inter-|   Receive                   |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n"
        "    lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n"
        "od-12:1234 5 0 0 0 0 0 0 987 6 0 0 0 0 0 0\n"
    )
    assert read_links(text) == {"lo": (9, 9), "od-12": (1234, 987)}
    assert read_links("") == {}


async def test_older_journals_get_meters(tmp_path: Path) -> None:
    # Schema 1, of which the later columns were not there yet.
    db = sqlite3.connect(tmp_path / "node.db")
    db.executescript(
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;"
        "CREATE TABLE sandbox (sandbox_id TEXT PRIMARY KEY, spec BLOB NOT NULL, state TEXT NOT"
        " NULL, slot INTEGER, pid INTEGER, pid_ticks INTEGER, boot_id TEXT, started_at REAL,"
        " end_at REAL NOT NULL, ended_at REAL, reason TEXT, message TEXT) STRICT;"
        f"{_TO_2} PRAGMA user_version = 2;"
    )
    db.close()
    journal = Journal(tmp_path / "node.db", tmp_path / "lock")
    assert await journal.live() == []
    await journal.save_meters({"nobody": Meter(cpu_us=1)})
    assert await journal.ended_meters(["nobody"]) == {}
    await journal.close()


async def usage(node: NodeProcess, spec: SandboxSpec) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = await node.call("usage", [spec.sandbox_id])
    return found[spec.sandbox_id]


@pytest.mark.node
async def test_a_sandbox_is_counted_over_its_whole_life(make_node: MakeNode) -> None:
    node = make_node()
    await node.start()
    spec = await node.create()
    await node.exec(
        spec,
        "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; "
        "head -c 3000000 /dev/urandom > ~/written; head -c 200000 /dev/zero | tr '\\0' a",
    )
    first = await usage(node, spec)
    assert first["cpu_seconds"] > 0.1
    assert first["egress_bytes"] > 200_000  # what it printed left it on its link
    assert first["ingress_bytes"] > 0
    # The daemon is killed: nothing that was counted is lost, and counting goes on.
    await node.kill9()
    await again(node)
    second = await usage(node, spec)
    for name in ("cpu_seconds", "egress_bytes"):
        assert second[name] >= first[name]
    # Memory that the daemon did not see is taken to have grown evenly: a peak is not known.
    assert second["memory_mb_seconds"] > 0
    # A pause and a new run (from the disk) add to what there was.
    await node.call("pause", spec.sandbox_id, mode="filesystem")
    paused = await usage(node, spec)
    assert paused["cpu_seconds"] >= second["cpu_seconds"]
    await asyncio.sleep(1.1)
    assert (await usage(node, spec))["cpu_seconds"] == paused["cpu_seconds"]
    await resume(node, spec)
    await node.exec(spec, "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done")
    status = await node.call("kill", spec.sandbox_id)
    total = status["usage"]
    assert total["cpu_seconds"] > paused["cpu_seconds"] + 0.1
    assert total["memory_mb_seconds"] > paused["memory_mb_seconds"]
    assert total["disk_bytes"] > 3_000_000
    # It can be asked for after the end, also after a restart.
    assert await usage(node, spec) == total
    await node.kill9()
    await again(node)
    assert (await usage(node, spec))["cpu_seconds"] == total["cpu_seconds"]
    assert await node.call("usage", ["inobodyxxxxxxxxxxxxx"]) == {}


@pytest.mark.node
async def test_a_machine_is_counted_by_its_vmm(make_node: MakeNode) -> None:
    try:
        find_qemu(None)
    except ConfigError as exc:
        pytest.skip(f"no microVMs: {exc}")
    node = make_node()
    await node.start()
    spec = await node.create(backend="microvm", memory_mb=256, disk_mb=512)
    await node.exec(spec, "head -c 300000 /dev/zero | tr '\\0' a")
    first = await usage(node, spec)
    assert first["cpu_seconds"] > 0.05
    assert first["egress_bytes"] > 300_000
    # Its memory is the guest's: it counts until the pause has ended the VMM, and not after.
    await node.call("pause", spec.sandbox_id)
    paused = await usage(node, spec)
    assert paused["memory_mb_seconds"] > 10
    await asyncio.sleep(1.2)
    assert await usage(node, spec) == paused
    # The restored machine is another process with counters of its own.
    await resume(node, spec)
    await node.exec(spec, "head -c 300000 /dev/zero | tr '\\0' a")
    again_running = await usage(node, spec)
    assert again_running["egress_bytes"] > paused["egress_bytes"] + 300_000
    assert again_running["cpu_seconds"] > paused["cpu_seconds"]
    status = await node.call("kill", spec.sandbox_id)
    assert status["usage"]["cpu_seconds"] >= again_running["cpu_seconds"]

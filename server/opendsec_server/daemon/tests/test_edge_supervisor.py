# SPDX-License-Identifier: AGPL-3.0-only
"""The supervisor adopts, replaces and restarts the edge. A script stands for the binary here;
the real edge is tested end to end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path

import pytest

from opendsec_server.config import Config
from opendsec_server.daemon import edge_supervisor
from opendsec_server.daemon.edge_supervisor import EdgeSupervisor
from opendsec_server.daemon.process import is_alive, read_identity


@pytest.fixture
def config(tmp_path: Path) -> Config:
    # A copy of sleep takes any argument list: the program must be a real executable, since
    # adoption compares /proc/<pid>/exe with it.
    source = tmp_path / "edge.c"
    source.write_text("#include <unistd.h>\nint main(void) { for (;;) pause(); }\n")
    assert os.system(f"cc -o {tmp_path}/edge {source}") == 0
    return Config(run_dir=str(tmp_path), state_dir=str(tmp_path), edge_path=f"{tmp_path}/edge")


async def until_pid_changes(supervisor: EdgeSupervisor, old: int | None) -> int:
    for _ in range(500):
        if supervisor.pid not in (None, old):
            assert supervisor.pid is not None
            return supervisor.pid
        await asyncio.sleep(0.01)
    raise AssertionError("no new edge")


async def test_start_and_stop(config: Config) -> None:
    supervisor = EdgeSupervisor(config)
    await supervisor.start()
    identity = read_identity(config.run_path / "edge.pid")
    assert identity is not None and identity.pid == supervisor.pid
    await supervisor.stop()
    assert not is_alive(identity)
    assert not (config.run_path / "edge.pid").exists()


async def test_an_edge_whose_pid_cannot_be_written_does_not_stay(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    supervisor = EdgeSupervisor(config)
    monkeypatch.setattr(edge_supervisor, "write_identity", full)
    with pytest.raises(OSError, match="no space"):
        await supervisor.start()
    assert supervisor._child is not None
    assert supervisor._child.returncode is not None


async def test_a_dead_edge_is_started_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_supervisor, "RESTART_PAUSE_S_MIN", 0.01)
    supervisor = EdgeSupervisor(config)
    await supervisor.start()
    first = supervisor.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    second = await until_pid_changes(supervisor, first)
    assert second != first
    await supervisor.stop()


async def test_a_running_edge_is_adopted(config: Config) -> None:
    first = EdgeSupervisor(config)
    await first.start()
    second = EdgeSupervisor(config)
    await second.start()
    assert second.pid == first.pid
    await first.stop()
    await second.stop()


async def test_an_edge_with_other_settings_is_replaced(config: Config) -> None:
    first = EdgeSupervisor(config)
    await first.start()
    old = first.pid
    import msgspec

    second = EdgeSupervisor(msgspec.structs.replace(config, domain="other.test"))
    await second.start()
    assert second.pid != old
    await second.stop()
    await first.stop()

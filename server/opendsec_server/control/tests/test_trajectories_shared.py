# SPDX-License-Identifier: AGPL-3.0-only
"""Two gateways on one database: what one runs, the other does not call unknown.

With ``OPENDSEC_TEST_POSTGRES_URL`` on PostgreSQL too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from opendsec_server.contract.errors import FileNotFound, StateConflict
from opendsec_server.control.trajectories import runner, service

from .fake_node import FakeNode
from .test_batches_shared import DATABASES, Two, database
from .test_trajectories import make, until, write

pytestmark = pytest.mark.asyncio


def lease(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long the other one waits."""
    for module in (runner, service):
        monkeypatch.setattr(module, "LEASE_S", seconds)


@pytest_asyncio.fixture(params=DATABASES)
async def two(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Two]:
    lease(monkeypatch, 100.0)
    monkeypatch.setattr(runner, "RENEW_INTERVAL_S", 0.05)
    monkeypatch.setattr(runner, "RESOLVE_PATIENCE_S", 0.05)
    monkeypatch.setattr(runner, "PATIENCE_S", 0.1)
    monkeypatch.setattr(runner, "RETRY_FIRST_S", 0.01)
    two = Two(tmp_path, await database(request.param, tmp_path))
    await two.start("one")
    yield two
    for services in two.servers:
        await services.stop()


class SlowWrites:
    """Files are written when it is said, and until then there are none."""

    def __init__(self, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.looked = 0
        """How often somebody looked whether the file is there."""
        true = node.write_file

        async def write_file(
            sandbox_id: str, path: str, data: bytes, *, user: str | None = None
        ) -> None:
            self.begun.set()
            await self.gate.wait()
            await true(sandbox_id, path, data, user=user)

        async def read_file(
            sandbox_id: str, path: str, *, user: str | None = None, bytes_max: int
        ) -> bytes:
            self.looked += 1
            raise FileNotFound(f"no file {path}")

        monkeypatch.setattr(node, "write_file", write_file)
        monkeypatch.setattr(node, "read_file", read_file)


async def test_a_slow_write_of_one_is_not_called_unknown_by_the_other(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, caller = two.servers[0], two.callers[0]
    box = await make(one, caller)
    slow = SlowWrites(two.node, monkeypatch)
    params = write("w", "/f", b"content")
    acting = asyncio.create_task(one.trajectories.act(caller, box, params, wait_s=60))
    await slow.begun.wait()
    # The other one starts while it runs, and both look after what is theirs several times.
    await two.start("two")
    other, another = two.servers[1], two.callers[1]
    leases: set[float] = set()
    async with asyncio.timeout(60):
        while len(leases) < 4:
            found = await other.trajectories.get(another, box, "w", wait_s=0.1)
            assert (found.state, found.owner) == ("running", one.trajectories._runner.owner)
            leases.add(found.lease_until)
    for stated in (None, "not_run"):
        try:
            found = await other.trajectories.resolve(another, box, "w", state=stated)
        except StateConflict as exc:
            assert exc.details["state"] == "running"
        assert found.state == "running"
    assert slow.looked == 0, "the other one has looked after what is not its own"
    slow.gate.set()
    assert (await acting).action.state == "done"
    told = await other.trajectories.act(another, box, params, wait_s=10)
    assert (told.replayed, told.action.state, told.action.cause) == (True, "done", "ok")


async def test_the_other_one_finds_out_about_what_a_dead_one_has_left(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease(monkeypatch, 0.5)
    one, caller = two.servers[0], two.callers[0]
    box = await make(one, caller)
    await two.start("two")
    other, another = two.servers[1], two.callers[1]
    slow = SlowWrites(two.node, monkeypatch)
    params = write("w", "/f", b"content")
    acting = asyncio.create_task(one.trajectories.act(caller, box, params, wait_s=60))
    await slow.begun.wait()
    # It is killed: nothing is given back.
    running = one.trajectories._runner
    tasks = [acting, *running._by_action.values()]
    assert running._keeping is not None
    for task in (running._keeping, *tasks):
        task.cancel()
    await asyncio.gather(running._keeping, *tasks, return_exceptions=True)
    # Nobody asks for it, and it is found out all the same.
    await until(lambda: slow.looked > 0)
    found = await other.trajectories.get(another, box, "w", wait_s=10)
    assert (found.state, found.cause, found.owner) == ("unknown", "file_differs", None)


async def test_what_is_left_by_a_stop_is_taken_at_once(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, caller = two.servers[0], two.callers[0]
    box = await make(one, caller)
    await two.start("two")
    other, another = two.servers[1], two.callers[1]
    slow = SlowWrites(two.node, monkeypatch)
    params = write("w", "/f", b"content")
    asked = await one.trajectories.act(caller, box, params, wait_s=0.01)
    assert asked.action.state == "running"
    await two.servers.pop(0).stop()
    found = await other.trajectories.get(another, box, "w", wait_s=50)
    assert found.state == "unknown" and slow.looked

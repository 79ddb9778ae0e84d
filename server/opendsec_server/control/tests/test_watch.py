# SPDX-License-Identifier: AGPL-3.0-only
"""Comparing with nodes that are listed twice, gone before the start, or broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from opendsec_server.config import Config
from opendsec_server.contract.errors import Conflict, NotFound, PlatformError
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control import watch
from opendsec_server.control.nodes import Fleet, NodeNotReached, NodeSource
from opendsec_server.control.nodes import connection as connections
from opendsec_server.control.nodes.connection import Address, Connection, Connections
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store import sandboxes

from .conftest import first_caller
from .fake_node import FakeNode


@asynccontextmanager
async def plane_of(config: Config, **nodes: FakeNode) -> AsyncIterator[Services]:
    """A control plane over named nodes."""
    sources = [NodeSource(name=name, client=node) for name, node in nodes.items()]
    services = await Services.start(config, Fleet(sources, interval_s=0.01))
    try:
        yield services
    finally:
        await services.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture
def hasty(config: Config) -> Config:
    """What is away is given up at once."""
    return msgspec.structs.replace(config, node_lost_after_s=0.0)


async def test_the_second_entry_of_a_node_takes_nothing_from_it(
    hasty: Config, node: FakeNode
) -> None:
    async with plane_of(hasty, one=node, again=node) as services:
        caller = await first_caller(services)
        made = (await services.creates.create(caller, CreateParams())).record
        first, second = services.fleet.members
        if services.fleet.find(node.node_id) is second:
            first, second = second, first
        await until(lambda: second.node_id is not None)
        assert (first.up, second.down) == (True, True)
        await services.watcher.reconcile()
        assert (await services.lifecycle.get(caller, made.sandbox_id)).state is State.RUNNING
        for name in (node.node_id, second.name):
            with pytest.raises(Conflict):
                await services.nodes.forget(caller, name)
        assert await services.nodes.get(caller, node.node_id) is first
        assert (await services.lifecycle.get(caller, made.sandbox_id)).state is State.RUNNING


@pytest.mark.parametrize("listed", [True, False])
async def test_a_node_that_is_gone_before_the_start_is_given_up(
    config: Config, hasty: Config, listed: bool
) -> None:
    """One that is still listed. What is paused waits for an operator, and so does all of a node
    that is not listed: perhaps it is well, and another gateway's."""
    gone, there = FakeNode(node_id="gone"), FakeNode(node_id="here")
    async with plane_of(config, first=gone) as services:
        caller = await first_caller(services)
        running, paused = [
            (await services.creates.create(caller, CreateParams())).record.sandbox_id
            for _ in range(2)
        ]
        await services.lifecycle.pause(caller, paused, "filesystem")
    gone.unreachable = NodeNotReached("no route to it")
    nodes = {"first": gone, "second": there} if listed else {"second": there}
    async with plane_of(config, **nodes) as services:
        await services.watcher.reconcile()
        assert (await services.lifecycle.get(caller, running)).state is State.RUNNING
    async with plane_of(hasty, **nodes) as services:
        await services.watcher.reconcile()
        lost = await services.lifecycle.get(caller, running)
        assert lost.end_reason is (EndReason.LOST if listed else None)
        assert (await services.lifecycle.get(caller, paused)).state is State.PAUSED
        assert await services.nodes.forget(caller, gone.node_id) == (1 if listed else 2)
        assert (await services.lifecycle.get(caller, paused)).end_reason is EndReason.LOST
        with pytest.raises(NotFound):
            await services.nodes.forget(caller, gone.node_id)
        gone.unreachable = None
        if listed:
            # It comes back, and has nothing that counts.
            await until(lambda: services.fleet.find(gone.node_id) is not None)
            await services.watcher.reconcile()
            assert {gone.statuses[name].state for name in (running, paused)} == {State.ENDED}


@pytest.mark.parametrize(
    "failure", [PlatformError("its journal cannot be read"), RuntimeError("a defect")]
)
async def test_a_node_that_fails_holds_back_no_other(config: Config, failure: Exception) -> None:
    async def fail() -> Any:
        raise failure

    nodes = [FakeNode(node_id=f"n{n}de") for n in range(2)]
    async with plane_of(config, one=nodes[0], two=nodes[1]) as services:
        caller = await first_caller(services)
        made = (await services.creates.create(caller, CreateParams())).record
        bad, good = sorted(nodes, key=lambda node: node.node_id == made.node_id)
        # The bad one is asked first.
        services.fleet.members.sort(key=lambda member: member.node_id != bad.node_id)
        good.forget(made.sandbox_id)
        bad.list = fail  # type: ignore[method-assign]
        with pytest.raises(type(failure)):
            await services.watcher.reconcile()
        assert (await services.lifecycle.get(caller, made.sandbox_id)).state is State.ENDED


async def test_a_node_that_hangs_puts_off_no_comparison(
    config: Config, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plane_of(config, one=node) as services:
        watcher, clock = services.watcher, [0.0]
        faked = SimpleNamespace(monotonic=lambda: time.monotonic() + clock[0], time=time.time)
        monkeypatch.setattr(watch, "time", faked)

        async def slow() -> Any:
            clock[0] += 4.0
            return []

        async def hanging() -> Any:
            clock[0] += 15.0
            raise NodeNotReached("nothing was heard of it")

        node.list = slow  # type: ignore[method-assign]
        await watcher.reconcile()
        assert 80.0 <= watcher._pause_s() < 100.0
        node.list = hanging  # type: ignore[method-assign]
        with pytest.raises(NodeNotReached):
            await watcher.reconcile()
        assert watcher._pause_s() == watch.RECONCILE_INTERVAL_S
        watcher._worked_s = 1_000.0
        assert watcher._pause_s() == watch.RECONCILE_INTERVAL_MAX_S


async def test_defects_end_neither_comparing_nor_polling(
    config: Config, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("a defect")

    async with plane_of(config, one=node) as services:
        monkeypatch.setattr(sandboxes, "prune", fail)
        await services.watcher._prune()
        node.images.all = fail  # type: ignore[method-assign]
        await services.fleet._watch._images(services.fleet.members[0])


async def test_a_look_that_comes_late_gives_up_nothing() -> None:
    """This process was held up, and has not read yet what the node sent."""
    node = Connections(Address("http://127.0.0.1:1"), b"secret")
    silent = Connection()
    silent.heard_at = float("-inf")
    node._busy.add(silent)
    node._look_at = time.monotonic() - 2 * connections.WATCH_INTERVAL_S
    given_up = []
    for _ in range(2):
        node._look()
        given_up.append(silent.closed)
    node.close()
    assert given_up == [False, True]


async def test_a_gateway_starts_while_no_node_can_be_reached(config: Config) -> None:
    gone = FakeNode(node_id="gone")
    async with plane_of(config, first=gone):
        pass
    gone.unreachable = NodeNotReached("no route to it")
    async with plane_of(config, first=gone) as services:
        caller = await first_caller(services)
        with pytest.raises(NodeNotReached):
            await services.creates.create(caller, CreateParams())
        gone.unreachable = None
        await until(lambda: services.fleet.members[0].up)
        assert (await services.creates.create(caller, CreateParams())).record.state is State.RUNNING

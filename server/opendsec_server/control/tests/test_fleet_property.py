# SPDX-License-Identifier: AGPL-3.0-only
"""Property: with nodes that refuse, vanish and lose answers in any order, over restarts of the
gateway, one key never makes two sandboxes, and every sandbox has a record on its own node."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendsec_server.config import Config
from opendsec_server.contract.errors import NodeFull, NodeUnavailable, OpendsecError
from opendsec_server.contract.ids import node_id_of
from opendsec_server.contract.states import TERMINAL
from opendsec_server.control.creates import Created
from opendsec_server.control.nodes import Fleet, NodeNotReached, NodeSource
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store import sandboxes

from .conftest import first_caller
from .fake_node import FakeNode
from .seed import seeded
from .store_faults import broken_store

pytestmark = pytest.mark.timeout(600)
"""Many schedules in one test; each has a limit of its own."""

PARAMS = CreateParams(metadata={"run": "1"})
KEYS = ("k0", "k1", "k2")
NODES = 3
STUCK_S = 120
TROUBLES = ("full", "gone", "breaks after", "well")

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.sampled_from(KEYS)),
        st.tuples(st.just("call"), st.sampled_from(KEYS)),
        st.tuples(st.sampled_from([*TROUBLES, "well"]), st.integers(0, NODES - 1)),
        st.tuples(st.sampled_from(["yield", "reconcile", "store breaks", "restart"]), st.none()),
    ),
    min_size=3,
    max_size=16,
)


class World:
    """Three nodes, and one gateway after the other."""

    def __init__(self, state_dir: Path, seed: int) -> None:
        self.config = Config(state_dir=str(state_dir))
        self.nodes = [FakeNode(node_id=f"n{n}de") for n in range(NODES)]
        self.random = random.Random(seed)
        self.calls: list[tuple[str, asyncio.Task[Created]]] = []
        self.made: dict[str, set[str]] = {key: set() for key in KEYS}

    async def start(self) -> None:
        sources = [NodeSource(name=node.node_id, client=node) for node in self.nodes]
        fleet = Fleet(sources, interval_s=0.01, rng=self.random)
        self.services = await Services.start(self.config, fleet)
        self.caller = await first_caller(self.services)

    async def step(self, name: str, what: object) -> None:
        if name == "call":
            assert isinstance(what, str)
            work = self.services.creates.create(self.caller, PARAMS, key=what)
            self.calls.append((what, asyncio.create_task(work)))
        elif name == "yield":
            await asyncio.sleep(0.01)
        elif name == "reconcile":
            await self.services.watcher._reconcile_or_log()
        elif name == "store breaks":
            with broken_store(self.services):
                await asyncio.sleep(0.002)
        elif name == "restart":
            for _, task in self.calls:
                task.cancel()
            for task in self.services.creates.attempts.tasks:
                task.cancel()
            await self.collect()
            await self.services.watcher.stop()
            await self.services.fleet.stop()
            await self.services.store.close()
            await self.start()
        else:
            assert isinstance(what, int)
            node = self.nodes[what]
            node.fail_with = NodeFull("full") if name == "full" else None
            node.fail_after = NodeUnavailable("broken pipe") if name == "breaks after" else None
            node.unreachable = NodeNotReached("no route to it") if name == "gone" else None

    async def collect(self) -> None:
        results = await asyncio.gather(*(task for _, task in self.calls), return_exceptions=True)
        for (key, _), result in zip(self.calls, results, strict=True):
            if isinstance(result, Created):
                self.made[key].add(result.record.sandbox_id)
            else:
                assert isinstance(result, OpendsecError | asyncio.CancelledError), result
        self.calls.clear()

    async def finish(self) -> None:
        await self.collect()
        for node in self.nodes:
            node.fail_with = node.fail_after = node.unreachable = None
        while not all(member.up for member in self.services.fleet.members):
            await asyncio.sleep(0.005)
        await self.services.watcher.reconcile()
        for key in KEYS:
            final = await self.services.creates.create(self.caller, PARAMS, key=key)
            self.made[key].add(final.record.sandbox_id)
            assert len(self.made[key]) == 1, "success named different sandboxes"
        await self.services.watcher.reconcile()
        live = {
            name: node.node_id
            for node in self.nodes
            for name, status in node.statuses.items()
            if status.state not in TERMINAL
        }
        assert set(live) == {name for names in self.made.values() for name in names}, "an orphan"
        assert all(node_id_of(name) == node_id for name, node_id in live.items())
        for node in self.nodes:
            records = await sandboxes.live_sandboxes(self.services.store, node.node_id)
            assert {r.sandbox_id for r in records} == {
                name for name, node_id in live.items() if node_id == node.node_id
            }
        await self.services.stop()


@given(st.tuples(*[st.sampled_from(TROUBLES)] * NODES), STEPS, st.integers(0, 3))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_key_one_sandbox_on_one_node(
    troubles: tuple[str, ...], steps: list[tuple[str, object]], seed: int
) -> None:
    async def live(world: World) -> None:
        async with asyncio.timeout(STUCK_S):
            await world.start()
            for number, trouble in enumerate(troubles):
                await world.step(trouble, number)
            for name, what in steps:
                await world.step(name, what)
            await world.finish()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(live(World(seeded(Path(directory)), seed)))

# SPDX-License-Identifier: AGPL-3.0-only
"""Property: whatever interleaving of retries, failures, crashes and a second server that takes
over, an item is one sandbox or one error, and nothing else lives."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    IdempotencyMismatch,
    NodeFull,
    NodeUnavailable,
    OpendsecError,
)
from opendsec_server.contract.states import TERMINAL
from opendsec_server.control.batches import dispatcher, outcomes
from opendsec_server.control.services import Services
from opendsec_server.store.batches import Batch

from . import batch_kit
from .batch_kit import crash, many, started
from .conftest import first_caller
from .fake_node import FakeNode
from .seed import seeded
from .store_faults import broken_store

pytestmark = pytest.mark.timeout(600)
"""Many schedules in one test; each has a limit of its own."""

ITEMS = 14

STEPS = st.lists(
    st.sampled_from(
        [
            "ask", "ask", "yield", "yield", "yield", "open gate", "close gate", "node full",
            "node breaks after", "node well", "store breaks", "crash", "second server",
            "reconcile", "cancel", "other params", "single with the key",
        ]
    ),
    min_size=3,
    max_size=14,
)  # fmt: skip


class World:
    """One life of one key. Of two servers the later one answers; both work."""

    def __init__(self, state_dir: Path) -> None:
        self.config = Config(state_dir=str(state_dir))
        self.node = FakeNode()
        self.gate = asyncio.Event()
        self.gate.set()
        self.node.gate = self.gate
        self.servers: list[Services] = []
        self.background: list[set[asyncio.Task[Any]]] = []
        self.calls: list[asyncio.Task[Batch]] = []
        self.found: set[str] = set()

    async def start(self) -> None:
        services, background = await started(self.config, self.node)
        self.servers.append(services)
        self.background.append(background)
        self.caller = await first_caller(self.servers[-1])

    @property
    def services(self) -> Services:
        return self.servers[-1]

    async def step(self, name: str) -> None:
        match name:
            case "ask":
                work = self.services.batches.create(self.caller, many(ITEMS), key="k")
                self.calls.append(asyncio.create_task(work))
            case "yield":
                await asyncio.sleep(0.003)
            case "open gate":
                self.gate.set()
            case "close gate":
                self.gate.clear()
            case "node full":
                self.node.fail_with = NodeFull("full")
            case "node breaks after":
                self.node.fail_after = NodeUnavailable("broken pipe")
            case "node well":
                self.node.fail_with = self.node.fail_after = None
            case "store breaks":
                with broken_store(self.services):
                    await asyncio.sleep(0.003)
            case "crash":
                await self.collect(cancel=True)
                await crash(self.servers.pop(), self.background.pop())
                if not self.servers:
                    await self.start()
            case "second server" if len(self.servers) == 1:
                await self.start()
            case "reconcile" if self.gate.is_set():
                await self.services.watcher._reconcile_or_log()
            case "cancel":
                for batch_id in self.found:
                    await self.services.batches.cancel(self.caller, batch_id)
            case "other params" | "single with the key":
                await self.mismatch(name)

    async def mismatch(self, name: str) -> None:
        """A key that a batch is tied to is never taken by anything else."""
        if not self.found:
            return
        try:
            if name == "other params":
                await self.services.batches.create(self.caller, many(ITEMS + 1), key="k")
            else:
                await self.services.creates.create(self.caller, many(1).common, key="k")
        except IdempotencyMismatch:
            return
        raise AssertionError("something else was accepted")

    async def collect(self, *, cancel: bool = False) -> None:
        for call in self.calls if cancel else ():
            call.cancel()
        results = await asyncio.gather(*self.calls, return_exceptions=True)
        self.calls.clear()
        for result in results:
            if isinstance(result, Batch):
                self.found.add(result.batch_id)
            else:
                assert isinstance(result, OpendsecError | asyncio.CancelledError), result

    async def finish(self) -> None:
        self.node.fail_with = self.node.fail_after = None
        self.gate.set()
        await self.collect()
        final = await self.services.batches.create(self.caller, many(ITEMS), key="k")
        self.found.add(final.batch_id)
        assert len(self.found) == 1, "one key stands for different batches"
        batch, items = await batch_kit.outcomes(self.services, self.caller, final.batch_id)
        # What was given up may still be on the node, until it is compared.
        await self.services.watcher.reconcile()
        made = {item.sandbox_id for item in items if item.error is None}
        live = {s.sandbox_id for s in self.node.statuses.values() if s.state not in TERMINAL}
        assert sorted(item.index for item in items) == list(range(ITEMS))
        assert [item.seq for item in items] == list(range(1, ITEMS + 1))
        assert batch.made == len(made) and batch.made + batch.failed == ITEMS
        assert live == made, "an orphan runs, or one is lost"
        for server in self.servers:
            await server.stop()


@given(STEPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_item_is_one_sandbox_or_one_error(steps: list[str]) -> None:
    async def live(world: World) -> None:
        async with asyncio.timeout(batch_kit.STUCK_S):
            await world.start()
            for name in steps:
                await world.step(name)
            await world.finish()

    kept = dispatcher.UNKNOWN_RETRY_S, dispatcher.STORE_RETRY_S, outcomes.RETRY_S
    dispatcher.UNKNOWN_RETRY_S = (0.002, 0.005, 0.01)
    dispatcher.STORE_RETRY_S = outcomes.RETRY_S = 0.002
    try:
        with tempfile.TemporaryDirectory() as state_dir:
            asyncio.run(live(World(seeded(Path(state_dir)))))
    finally:
        dispatcher.UNKNOWN_RETRY_S, dispatcher.STORE_RETRY_S, outcomes.RETRY_S = kept

# SPDX-License-Identifier: AGPL-3.0-only
"""Property: whatever interleaving of calls, failures and restarts, one key never makes two
sandboxes that live, and every answer with success names the same one."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

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
from opendsec_server.control.creates import Created
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services

from .conftest import first_caller
from .fake_node import FakeNode
from .seed import seeded
from .store_faults import broken_store

pytestmark = pytest.mark.timeout(600)
"""Many schedules in one test; each has a limit of its own."""

PARAMS = CreateParams(metadata={"run": "1"})
OTHER = CreateParams(metadata={"run": "2"})

STUCK_S = 120
"""An example that takes longer waits for something that never comes."""

STEPS = st.lists(
    st.sampled_from(
        [
            "call", "call", "call", "yield", "yield", "open gate", "close gate", "node full",
            "node breaks after", "node well", "store breaks", "restart", "other params",
            "reconcile",
        ]
    ),
    min_size=3,
    max_size=14,
)  # fmt: skip


class World:
    """One life of one key."""

    def __init__(self, state_dir: Path) -> None:
        self.config = Config(state_dir=str(state_dir))
        self.node = FakeNode()
        self.gate = asyncio.Event()
        self.gate.set()
        self.node.gate = self.gate
        self.calls: list[asyncio.Task[Created]] = []
        self.made: set[str] = set()

    async def start(self) -> None:
        self.services = await Services.start(self.config, self.node)
        self.caller = await first_caller(self.services)

    async def step(self, name: str) -> None:
        if name == "call":
            work = self.services.creates.create(self.caller, PARAMS, key="k")
            self.calls.append(asyncio.create_task(work))
        elif name == "yield":
            await asyncio.sleep(0.002)
        elif name == "open gate":
            self.gate.set()
        elif name == "close gate":
            self.gate.clear()
        elif name == "node full":
            self.node.fail_with = NodeFull("full")
        elif name == "node breaks after":
            self.node.fail_after = NodeUnavailable("broken pipe")
        elif name == "node well":
            self.node.fail_with = self.node.fail_after = None
        elif name == "store breaks":
            with broken_store(self.services):
                await asyncio.sleep(0.002)
        elif name == "restart":
            await self.crash()
            await self.start()
        elif name == "reconcile" and self.gate.is_set():
            await self.services.watcher._reconcile_or_log()
        elif name == "other params":
            await self.other_params()

    async def other_params(self) -> None:
        """A key that a create is tied to is never taken by other parameters."""
        if not self.made:
            return
        try:
            await self.services.creates.create(self.caller, OTHER, key="k")
        except IdempotencyMismatch:
            return
        raise AssertionError("other parameters were accepted")

    async def crash(self) -> None:
        """The process is gone: nothing is finished, nothing is undone."""
        for task in (*self.calls, *self.services.creates.attempts.tasks):
            task.cancel()
        await self.collect()
        # Of what else there is nothing is at work.
        await self.services.stop()
        # A start that was cut off is finished by the node, which lives on.
        self.gate.set()

    async def collect(self) -> None:
        results = await asyncio.gather(*self.calls, return_exceptions=True)
        self.calls.clear()
        for result in results:
            if isinstance(result, Created):
                self.made.add(result.record.sandbox_id)
            else:
                assert isinstance(result, OpendsecError | asyncio.CancelledError), result

    async def finish(self) -> None:
        self.node.fail_with = self.node.fail_after = None
        self.gate.set()
        await self.collect()
        final = await self.services.creates.create(self.caller, PARAMS, key="k")
        self.made.add(final.record.sandbox_id)
        live = [s for s in self.node.statuses.values() if s.state not in TERMINAL]
        assert len(self.made) == 1, "success named different sandboxes"
        assert [status.sandbox_id for status in live] == list(self.made), "an orphan runs"
        await self.services.stop()


@given(STEPS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_key_one_sandbox(steps: list[str]) -> None:
    async def live(world: World) -> None:
        async with asyncio.timeout(STUCK_S):
            await world.start()
            for name in steps:
                await world.step(name)
            await world.finish()

    with tempfile.TemporaryDirectory() as state_dir:
        asyncio.run(live(World(seeded(Path(state_dir)))))

# SPDX-License-Identifier: AGPL-3.0-only
"""Property: whatever interleaving of calls, lost answers, delayed requests, crashes of the server
and new guest agents, an action takes effect once at most; `done` means that it did, `not_run`
that it did not."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendsec_server.config import Config
from opendsec_server.contract.errors import AgentUnresponsive, NodeFull, OpendsecError
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.control.trajectories import ActionParams, runner
from opendsec_server.control.trajectories.service import Acted

from .conftest import first_caller
from .fake_node import FakeNode
from .seed import seeded
from .store_faults import broken_store

pytestmark = pytest.mark.timeout(600)
"""Many schedules in one test; each has a limit of its own."""

PARAMS = ActionParams(action_id="a", kind="exec", argv=("sh", "-c", "append /n x"))
STUCK_S = 120
"""An example that takes longer waits for something that never comes."""

STEPS = st.lists(
    st.sampled_from(
        [
            "call", "call", "call", "yield", "yield", "hold", "release", "lose answers",
            "delay starts", "deliver", "no room", "silence", "node well", "store breaks",
            "restart", "restart", "new agent", "resolve",
        ]
    ),
    min_size=3,
    max_size=14,
)  # fmt: skip


class World:
    """One life of one action."""

    def __init__(self, state_dir: Path) -> None:
        self.config = Config(state_dir=str(state_dir))
        self.node = FakeNode()
        self.calls: list[asyncio.Task[Acted]] = []

    async def start(self) -> None:
        self.services = await Services.start(self.config, self.node)
        self.caller = await first_caller(self.services)

    async def make(self) -> None:
        created = await self.services.creates.create(self.caller, CreateParams())
        self.box = created.record.sandbox_id

    @property
    def effects(self) -> int:
        return self.node.contents[self.box].disk.get("/n", "").count("x")

    async def step(self, name: str) -> None:
        node = self.node
        if name == "call":
            work = self.services.trajectories.act(self.caller, self.box, PARAMS, wait_s=0.05)
            self.calls.append(asyncio.create_task(work))
        elif name == "yield":
            await asyncio.sleep(0.002)
        elif name == "hold":
            node.kept_gate = asyncio.Event()
        elif name == "release":
            self.release()
        elif name == "lose answers":
            node.lose_answer["start_kept"] = AgentUnresponsive("broken pipe")
        elif name == "delay starts":
            node.delay_starts = True
        elif name == "deliver":
            node.deliver()
        elif name == "no room":
            node.fail["start_kept"] = NodeFull("full")
        elif name == "silence":
            node.fail["kept"] = AgentUnresponsive("silence")
        elif name == "node well":
            self.well()
        elif name == "store breaks":
            with broken_store(self.services):
                await asyncio.sleep(0.002)
        elif name == "restart":
            await self.crash()
            await self.start()
        elif name == "new agent":
            node.new_agent(self.box)
        elif name == "resolve":
            with contextlib.suppress(OpendsecError):
                await self.services.trajectories.resolve(self.caller, self.box, "a")
        assert self.effects <= 1, f"after {name} it had happened twice"

    def release(self) -> None:
        if self.node.kept_gate is not None:
            self.node.kept_gate.set()
            self.node.kept_gate = None

    def well(self) -> None:
        self.node.delay_starts = False
        self.node.fail.clear()
        self.node.lose_answer.clear()

    async def crash(self) -> None:
        """The process is gone: nothing is finished, nothing is undone."""
        for task in self.calls:
            task.cancel()
        # What it was at is cut off wherever it waited; of the other services nothing is at work.
        await self.services.trajectories.stop()
        await self.collect()
        await self.services.stop()

    async def collect(self) -> None:
        results = await asyncio.gather(*self.calls, return_exceptions=True)
        self.calls.clear()
        for result in results:
            if not isinstance(result, Acted):
                assert isinstance(result, OpendsecError | asyncio.CancelledError), result

    async def finish(self) -> None:
        self.well()
        self.release()
        await self.collect()
        self.node.deliver()
        action = (await self.last_word()).action
        if action.state == "not_run":
            assert self.effects == 0, "what was said not to have run has run"
            action = (await self.last_word()).action
        assert action.state in ("done", "unknown")
        assert self.effects == 1 if action.state == "done" else self.effects <= 1
        await self.services.stop()

    async def last_word(self) -> Acted:
        acted = await self.services.trajectories.act(self.caller, self.box, PARAMS, wait_s=10)
        if acted.action.state != "unknown":
            return acted
        action = await self.services.trajectories.resolve(self.caller, self.box, "a")
        return Acted(action=action, replayed=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PATIENCE_S", 0.02)
    monkeypatch.setattr(runner, "RESOLVE_PATIENCE_S", 0.01)
    monkeypatch.setattr(runner, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(runner, "STORE_RETRY_S", 0.005)


@given(STEPS)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_an_action_happens_once_at_most(steps: list[str]) -> None:
    async def live(world: World) -> None:
        async with asyncio.timeout(STUCK_S):
            await world.start()
            await world.make()
            for name in steps:
                await world.step(name)
            await world.finish()

    with tempfile.TemporaryDirectory() as state_dir:
        asyncio.run(live(World(seeded(Path(state_dir)))))

# SPDX-License-Identifier: AGPL-3.0-only
"""Operations, creates, ends and restarts of the server at once, in drawn orders: whatever came
before, the last operation is what the task ends in, and the counts are those of its records."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec_server.config import Config
from opendsec_server.contract.errors import OpendsecError
from opendsec_server.contract.states import TERMINAL, EndReason, State
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.control.tasks import TaskLimits
from opendsec_server.store.task_operations import OperationParams, operations_of

from .conftest import first_caller
from .fake_node import FakeNode
from .seed import seeded

pytestmark = pytest.mark.timeout(600)
"""Many schedules in one test; each has a limit of its own."""

TASK = "t"
PAUSE = OperationParams(mode="filesystem")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["pause", "resume", "create", "create", "end", "restart"]),
        st.integers(0, 3),
    ),
    min_size=2,
    max_size=10,
)


class _World:
    """A server that can be started anew over the same node."""

    def __init__(self, config: Config, node: FakeNode) -> None:
        self.config = config
        self.node = node
        self.services: Services
        self.caller: Caller

    async def start(self) -> None:
        self.services = await Services.start(self.config, self.node)
        self.caller = await first_caller(self.services)

    async def restart(self) -> None:
        await self.services.stop()
        await self.start()

    async def step(self, what: str) -> None:
        """What fails is an answer; what the server's stop cuts off is the next one's work."""
        services = self.services
        with contextlib.suppress(OpendsecError, asyncio.CancelledError):
            if what == "create":
                await services.creates.create(self.caller, CreateParams(task_id=TASK))
            elif what == "end":
                alive = [n for n, s in self.node.statuses.items() if s.state not in TERMINAL]
                if alive:
                    self.node.end(alive[0], EndReason.EXITED)
            else:
                params = PAUSE if what == "pause" else OperationParams()
                await services.tasks.operate(self.caller, TASK, what, params)  # type: ignore[arg-type]

    async def finish(self, kind: str) -> None:
        params = PAUSE if kind == "pause" else OperationParams()
        operation, _ = await self.services.tasks.operate(self.caller, TASK, kind, params)  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            async for now, _ in self.services.tasks.follow(operation):
                operation = now
        assert operation.superseded_by is None
        assert (operation.done, operation.failed) == (operation.asked, 0)


@settings(max_examples=12, deadline=None)
@given(steps=STEPS, last=st.sampled_from(["pause", "resume", "kill"]))
def test_the_last_operation_holds(steps: list[tuple[str, int]], last: str) -> None:
    with tempfile.TemporaryDirectory() as text:
        config = Config(state_dir=str(seeded(Path(text))))
        asyncio.run(_play(_World(config, FakeNode()), steps, last))


async def _play(world: _World, steps: list[tuple[str, int]], last: str) -> None:
    await world.start()
    try:
        await world.services.tasks.make(world.caller, TASK, TaskLimits())
        running: list[asyncio.Task[None]] = []
        for what, pauses in steps:
            if what == "restart":
                await world.restart()
            else:
                running.append(asyncio.create_task(world.step(what)))
            for _ in range(pauses):
                await asyncio.sleep(0.002)
        await asyncio.gather(*running, return_exceptions=True)
        await world.services.watcher.reconcile()
        await world.finish(last)
        await world.services.watcher.reconcile()
        await _check(world, last)
    finally:
        await world.services.stop()


async def _check(world: _World, last: str) -> None:
    view = await world.services.tasks.get(world.caller, TASK)
    wanted = {"pause": State.PAUSED, "resume": State.RUNNING, "kill": None}[last]
    on_node = [s.state for s in world.node.statuses.values() if s.state not in TERMINAL]
    recorded = {count.state: count.count for count in view.counts if count.state not in TERMINAL}
    assert set(on_node) <= {wanted}
    assert recorded == ({wanted: len(on_node)} if on_node else {})
    failed = sum(count.count for count in view.counts if count.state is State.FAILED)
    assert view.task.made == sum(count.count for count in view.counts) - failed
    for operation in await operations_of(
        world.services.store, world.caller.project_id, TASK, limit=100
    ):
        assert operation.finished_at is not None
        assert operation.done + operation.failed <= operation.asked

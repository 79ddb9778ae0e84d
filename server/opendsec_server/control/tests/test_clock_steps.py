# SPDX-License-Identifier: AGPL-3.0-only
"""The wall clock is set by an hour, either way, while work on a task or a batch is under way."""

from __future__ import annotations

import asyncio
import time

import pytest
import sqlalchemy as sa

from opendsec_server.contract.states import State
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store.store import Store
from opendsec_server.store.tables import BATCHES, TASK_OPERATIONS
from opendsec_server.store.task_operations import OperationKind, OperationParams, TaskItem

from .batch_kit import check, many, outcomes
from .fake_node import FakeNode

HOUR_S = 3_600.0
TASK = "train-7"
COUNT = 12


def step(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """From now on the clock says so much more."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + by_s)


async def make(services: Services, caller: Caller) -> list[str]:
    made = [await services.creates.create(caller, CreateParams(task_id=TASK)) for _ in range(COUNT)]
    return [one.record.sandbox_id for one in made]


@pytest.mark.parametrize("by_s", [-HOUR_S, HOUR_S])
@pytest.mark.parametrize(
    ("kind", "state"),
    [("pause", State.PAUSED), ("resume", State.RUNNING), ("kill", State.ENDED)],
)
async def test_an_operation_on_a_task_goes_on(
    services: Services,
    caller: Caller,
    node: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    kind: OperationKind,
    state: State,
    by_s: float,
) -> None:
    names = await make(services, caller)
    if kind == "resume":
        before, _ = await services.tasks.operate(caller, TASK, "pause", OperationParams())
        async with asyncio.timeout(60):
            async for _ in services.tasks.follow(before):
                pass
    operation, _ = await services.tasks.operate(caller, TASK, kind, OperationParams())
    seen: list[TaskItem] = []
    async with asyncio.timeout(60):
        async for now, items in services.tasks.follow(operation):
            if not seen:
                step(monkeypatch, by_s)
                await services.tasks._operations._claim(alone=False)
                await services.task_keeper.look_at_deadlines()
                await services.task_keeper.end_the_rest()
            operation = now
            seen += items
    assert (operation.done, operation.failed) == (COUNT, 0)
    assert sorted(item.sandbox_id for item in seen) == sorted(names)
    assert {node.statuses[name].state for name in names} == {state}


@pytest.mark.parametrize("by_s", [-HOUR_S, HOUR_S])
async def test_a_batch_goes_on_and_ends_nothing(
    services: Services,
    caller: Caller,
    node: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    by_s: float,
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(40, wait_s=600), key="k")
    await node.admitted.wait()
    step(monkeypatch, by_s)
    await services.batches._renew()
    await services.batches._take(await services.batches._claim(None))
    await services.watcher.reconcile()
    node.gate.set()
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == node.created == 40


async def leased_elsewhere(store: Store, table: sa.Table, until: float) -> None:
    """What is unfinished belongs to a process that is gone."""
    values = {"owner": "elsewhere", "lease_until": until}
    await store.write(
        lambda connection: connection.execute(
            sa.update(table).where(table.c.finished_at.is_(None)).values(**values)
        )
    )


async def test_work_that_was_left_before_the_clock_was_set_back_is_taken_up(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    """Its lease ends in an hour; whoever held it is dead."""
    until = time.time() + HOUR_S
    names = await make(services, caller)
    operations = services.tasks._operations
    go_on = asyncio.Event()

    async def stuck(_name: str) -> None:
        await go_on.wait()

    node.between = stuck
    operation, _ = await services.tasks.operate(caller, TASK, "pause", OperationParams())
    await leased_elsewhere(services.store, TASK_OPERATIONS, until)
    running = list(operations._running.values())
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    node.between = None
    go_on.set()
    await operations._claim(alone=False)
    async with asyncio.timeout(60):
        async for now, _ in services.tasks.follow(operation):
            operation = now
    assert (operation.done, operation.failed) == (len(names), 0)


async def test_a_batch_that_was_left_before_the_clock_was_set_back_is_taken_up(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(40), key=None)
    await node.admitted.wait()
    await leased_elsewhere(services.store, BATCHES, time.time() + HOUR_S)
    services.batches._queue.drop(asked.batch_id)
    await services.batches._take(await services.batches._claim(None))
    assert asked.batch_id in services.batches._queue.batches
    node.gate.set()
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == 40

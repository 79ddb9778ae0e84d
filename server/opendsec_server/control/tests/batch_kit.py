# SPDX-License-Identifier: AGPL-3.0-only
"""What tests of batches share. Tests only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import Any

from opendsec_server.config import Config
from opendsec_server.contract.states import TERMINAL
from opendsec_server.control.batches import BatchParams
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store.batches import Batch, Item

from .fake_node import FakeNode

STUCK_S = 120


def many(count: int, *, wait_s: int = 3_600, common: CreateParams | None = None) -> BatchParams:
    """A batch of items that are alike."""
    return BatchParams.of(common or CreateParams(), None, count=count, wait_s=wait_s)


async def outcomes(services: Services, caller: Caller, batch_id: str) -> tuple[Batch, list[Item]]:
    """The batch at its end, and every outcome in order."""
    async with asyncio.timeout(STUCK_S):
        items: list[Item] = []
        async with contextlib.aclosing(services.batches.watch(caller, batch_id)) as news:
            async for watched in news:
                items += [item for item, _ in watched.outcomes]
        return watched.batch, items


async def started(config: Config, node: FakeNode) -> tuple[Services, set[asyncio.Task[Any]]]:
    """A server, and what it does in the background."""
    before = asyncio.all_tasks()
    services = await Services.start(config, node)
    return services, asyncio.all_tasks() - before


async def crash(services: Services, background: Collection[asyncio.Task[Any]] = ()) -> None:
    """The process is gone: nothing is finished, nothing is undone."""
    batches = services.batches
    tasks = [
        *background,
        batches._keeping,
        batches._queue._task,
        batches._writer._task,
        *batches._queue._items,
        *services.creates.attempts.tasks,
    ]
    for task in tasks:
        if task is not None:
            task.cancel()
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
    # What is only in memory, and would be told to the test's own interpreter.
    for running in list(batches._queue.batches.values()):
        await running.close()
    batches._queue._batches.clear()
    await services.watcher.stop()
    await services.store.close()


def check(batch: Batch, items: list[Item], node: FakeNode) -> None:
    """Asked = made + errors; nothing is there twice, and nothing that nobody was told of."""
    assert sorted(item.index for item in items) == list(range(batch.asked))
    assert [item.seq for item in items] == list(range(1, batch.asked + 1))
    made = [item.sandbox_id for item in items if item.error is None]
    assert batch.made == len(made) == len(set(made))
    assert batch.made + batch.failed == batch.asked
    assert batch.finished_at is not None
    live = {s.sandbox_id for s in node.statuses.values() if s.state not in TERMINAL}
    assert live == set(made), "orphans or losses"

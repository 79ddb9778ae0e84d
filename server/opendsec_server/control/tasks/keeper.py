# SPDX-License-Identifier: AGPL-3.0-only
"""Ends tasks at their deadline or with their budget, and reads what sandboxes use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from opendsec_server.contract.errors import OpendsecError
from opendsec_server.contract.limits import ENDED_RECORDS_KEPT_S
from opendsec_server.contract.states import EndReason
from opendsec_server.control.task_deadlines import TaskDeadlines
from opendsec_server.store import task_operations as operation_rows
from opendsec_server.store import tasks as rows
from opendsec_server.store.store import Store
from opendsec_server.store.tasks import Task

from .ends import Ends
from .operations import Operations
from .service import Tasks, kill_params

log = structlog.get_logger(__name__)

LIMITS_S = 1.0
"""How often deadlines and budgets are looked at; a deadline is this late at most."""
METER_S = 30.0
"""How often what all sandboxes use is read."""
REST_S = 30.0
"""How often it is seen to that nothing of an ended task is left."""
PRUNE_S = 3_600.0
OPERATIONS_KEPT_S = 7 * 24 * 3_600
RESTS_KEPT_S = 300
"""Of those that end what is left of a task: they come again and again while a node is away."""
BUSY_SHARE = 20
"""Looking takes at most one in so many seconds of the time, with many records: it comes less often
then, up to a pause of ``BUSY_PAUSE_S_MAX``, as looking may also have waited for nodes."""
BUSY_PAUSE_S_MAX = 5.0


class TaskKeeper:
    """Background tasks of tasks."""

    def __init__(
        self,
        store: Store,
        tasks: Tasks,
        operations: Operations,
        ends: Ends,
        deadlines: TaskDeadlines,
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._operations = operations
        self._ends = ends
        self._deadlines = deadlines
        self._running: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Go on with operations that were left half-way, and look after tasks from now on."""
        await self._operations.start()
        self._running = [
            asyncio.create_task(_repeat(what, every_s), name=f"tasks-{name}")
            for name, what, every_s in (
                ("deadlines", self.look_at_deadlines, LIMITS_S),
                ("ends", self.look_at_ends, LIMITS_S),
                ("budgets", self.look_at_budgets, LIMITS_S),
                ("rest", self.end_the_rest, REST_S),
                ("meter", self.meter_all, METER_S),
                ("prune", self.prune, PRUNE_S),
            )
        ]

    async def stop(self) -> None:
        """End the background tasks."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._operations.stop()

    async def look_at_deadlines(self) -> None:
        """End the tasks whose time is over. Waits for no node.

        Raises:
            StoreUnavailable: not now.
        """
        as_of = self._deadlines.changes
        tasks = await rows.limited_tasks(self._store)
        self._deadlines.replace(
            {
                (task.project_id, task.task_id): task.deadline_at
                for task in tasks
                if task.deadline_at is not None
            },
            as_of=as_of,
        )
        now = time.time()
        for task in tasks:
            if task.deadline_at is not None and task.deadline_at <= now:
                await self._end(task, EndReason.TASK_DEADLINE)

    async def look_at_ends(self) -> None:
        """Have nodes end the sandboxes of tasks with a deadline by themselves, should this process
        not be there then.

        Raises:
            StoreUnavailable: not now.
        """
        for task in await rows.limited_tasks(self._store):
            await self._ends.shorten(task.project_id, task.task_id, task.deadline_at)

    async def look_at_budgets(self) -> None:
        """End the tasks whose budget is used up.

        Raises:
            StoreUnavailable: not now.
        """
        for task in await rows.limited_tasks(self._store):
            if task.cpu_seconds_max is None:
                continue
            await self._tasks.refresh_usage(task.project_id, task.task_id)
            used = await self._tasks.used(task)
            if used.cpu_seconds >= task.cpu_seconds_max:
                await self._end(task, EndReason.TASK_BUDGET)

    async def _end(self, task: Task, reason: EndReason) -> None:
        await self._tasks.begin(task.project_id, task.task_id, "kill", kill_params(reason))

    async def end_the_rest(self) -> None:
        """End what is left of tasks that have ended: its node was away, and may be back.

        Raises:
            StoreUnavailable: not now.
        """
        left = await rows.ended_with_living(self._store)
        if left:
            await self._prune_operations(RESTS_KEPT_S, rests_only=True)
        for task in left:
            params = kill_params(task.end_reason or EndReason.KILLED)
            await self._tasks.begin(task.project_id, task.task_id, "kill", params, rest=True)

    async def meter_all(self) -> None:
        """Read what every sandbox has used, so that a lost node takes little of it along.

        Raises:
            StoreUnavailable, NodeUnavailable: not now.
        """
        await self._tasks.meter(await rows.ids_to_meter(self._store))

    async def prune(self) -> None:
        """Remove old operations, and tasks of which nothing is left.

        Raises:
            StoreUnavailable: not now.
        """
        await self._prune_operations(OPERATIONS_KEPT_S)
        await rows.prune_tasks(self._store, unused_since=time.time() - ENDED_RECORDS_KEPT_S)

    async def _prune_operations(self, kept_s: float, *, rests_only: bool = False) -> None:
        finished_before = time.time() - kept_s
        removed = operation_rows.PRUNE_BATCH
        while removed >= operation_rows.PRUNE_BATCH:
            removed = await operation_rows.prune_operations(
                self._store, finished_before=finished_before, rests_only=rests_only
            )


async def _repeat(what: Callable[[], Awaitable[None]], every_s: float) -> None:
    while True:
        began = time.monotonic()
        try:
            await what()
        except OpendsecError as exc:
            log.warning("tasks not looked after", why=exc.message)
        except Exception:
            log.exception("tasks not looked after")
        busy_s = min(BUSY_SHARE * (time.monotonic() - began), BUSY_PAUSE_S_MAX)
        await asyncio.sleep(max(every_s, busy_s))

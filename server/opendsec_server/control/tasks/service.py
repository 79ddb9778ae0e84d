# SPDX-License-Identifier: AGPL-3.0-only
"""What a caller can do with tasks.

Every call looks only into the caller's project: a foreign task is answered like one that does not
exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import msgspec
import structlog

from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    Conflict,
    InvalidRequest,
    OpendsecError,
    TaskExists,
    TaskNotFound,
    TaskOperationNotFound,
)
from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.node import NodeClient, SandboxUsage
from opendsec_server.contract.states import TERMINAL, EndReason, State
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import check_text, check_timeout
from opendsec_server.control.task_deadlines import TaskDeadlines
from opendsec_server.store import task_operations as operation_rows
from opendsec_server.store import tasks as rows
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.store import Store
from opendsec_server.store.task_operations import (
    OperationKind,
    OperationParams,
    TaskItem,
    TaskOperation,
)
from opendsec_server.store.tasks import Task, TaskCount, TaskState, TaskSum
from opendsec_server.store.usage import get_usage, note_usage

from .ends import Ends
from .operations import Operations

log = structlog.get_logger(__name__)

WaitFor = Literal["ended", "running", "paused", "idle"]
"""``ended``: no sandbox is left. ``running``, ``paused``: every one that is left is. ``idle``: none
is between two states."""
OPERATIONS_SHOWN_MAX = 100
METER_AT_ONCE = 1_000
WAIT_LOOK_S = 0.5
_MOVING = frozenset({State.PENDING, State.STARTING, State.PAUSING, State.RESUMING, State.STOPPING})


class TaskLimits(msgspec.Struct, kw_only=True, frozen=True):
    """What ends a task, or keeps it from growing. None: nothing does."""

    deadline_at: float | None = None
    sandboxes_max: int | None = None
    cpu_seconds_max: float | None = None


class TaskView(msgspec.Struct, kw_only=True, frozen=True):
    """A task with what happens in it."""

    task: Task
    counts: list[TaskCount]
    usage: TaskSum
    operation: TaskOperation | None = None
    """The newest."""


class Tasks:
    """Tasks of projects, and operations on whole ones."""

    def __init__(
        self,
        store: Store,
        node: NodeClient,
        operations: Operations,
        ends: Ends,
        deadlines: TaskDeadlines,
    ) -> None:
        self._store = store
        self._node = node
        self._operations = operations
        self._ends = ends
        self._deadlines = deadlines

    # --- tasks --------------------------------------------------------------

    async def make(self, caller: Caller, task_id: str, wanted: TaskLimits) -> tuple[TaskView, bool]:
        """Make a task with limits; a task without any is made by its first use.

        Returns:
            The task, and whether it is new: asking twice for the same is one task.

        Raises:
            InvalidRequest: the id, or a limit, is none.
            TaskExists: it is there, with other limits.
        """
        check_task_id(task_id)
        now = time.time()
        _check(wanted, now)
        task, new = await rows.make_task(
            self._store,
            Task(
                project_id=caller.project_id,
                task_id=task_id,
                created_at=now,
                used_at=now,
                **msgspec.structs.asdict(wanted),
            ),
        )
        if not new and _limits_of(task) != wanted:
            raise TaskExists(
                f"task `{task_id}` exists, with other limits", details={"task_id": task_id}
            )
        self._deadlines.note(caller.project_id, task_id, task.deadline_at)
        return (await self._views(caller, [task]))[0], new

    async def get(self, caller: Caller, task_id: str) -> TaskView:
        """A task, with what its sandboxes have used until now.

        Raises:
            TaskNotFound: not one of the caller's.
        """
        task = await self._task(caller, task_id)
        await self.refresh_usage(caller.project_id, task_id)
        view = (await self._views(caller, [task]))[0]
        newest = await operation_rows.operations_of(
            self._store, caller.project_id, task_id, limit=1
        )
        return msgspec.structs.replace(view, operation=newest[0] if newest else None)

    async def check(self, caller: Caller, task_id: str) -> None:
        """Whether there is such a task.

        Raises:
            TaskNotFound: not one of the caller's.
        """
        await self._task(caller, task_id)

    async def page(
        self,
        caller: Caller,
        *,
        states: Sequence[TaskState] = (),
        after: tuple[float, str] | None = None,
        limit: int,
    ) -> tuple[list[TaskView], bool]:
        """Tasks of the caller's project, newest first; and whether there are more. Their use is
        that of the last readings."""
        found = await rows.list_tasks(
            self._store, caller.project_id, states=states, after=after, limit=limit + 1
        )
        return await self._views(caller, found[:limit]), len(found) > limit

    async def set_limits(
        self, caller: Caller, task_id: str, wanted: TaskLimits, *, reopen: bool = False
    ) -> TaskView:
        """Give a task other limits.

        Args:
            caller: Whose it is.
            task_id: Which.
            wanted: All of its limits from now on.
            reopen: Let one that has ended take sandboxes again.

        Raises:
            TaskNotFound: not one of the caller's.
            Conflict: it has ended, and is not to be reopened.
        """
        now = time.time()
        _check(wanted, now)
        task = await self._task(caller, task_id)
        values = msgspec.structs.asdict(wanted)
        if task.state == "ended":
            if not reopen:
                raise Conflict(
                    f"task `{task_id}` has ended ({task.end_reason})",
                    remediation="Reopen it, or use another task id.",
                    details={"task_id": task_id, "end_reason": task.end_reason},
                )
            values |= {"state": "open", "ended_at": None, "end_reason": None}
        changed = await rows.set_task(
            self._store, caller.project_id, task_id, values, only_in=(task.state,)
        )
        if changed is None:
            raise Conflict(f"task `{task_id}` changed meanwhile", remediation="Try again.")
        cut_at = self._deadlines.last_end(caller.project_id, task_id)
        self._deadlines.note(caller.project_id, task_id, changed.deadline_at)
        if cut_at is not None:
            await self._ends.lengthen(caller.project_id, task_id, cut_at)
        await self._ends.shorten(caller.project_id, task_id, changed.deadline_at)
        return (await self._views(caller, [changed]))[0]

    # --- operations ---------------------------------------------------------

    async def operate(
        self,
        caller: Caller,
        task_id: str,
        kind: OperationKind,
        params: OperationParams,
        *,
        key: str | None = None,
    ) -> tuple[TaskOperation, bool]:
        """Begin to pause, resume or kill all sandboxes of a task. It goes on when the caller goes
        away, and after a restart of the server.

        Returns:
            The operation, and whether it is new: one that runs already, or one with the same key,
            is the same.

        Raises:
            TaskNotFound: not one of the caller's.
            TaskEnded: it has ended, and is not to be killed.
            IdempotencyMismatch: the key was used for something else.
        """
        await self._task(caller, task_id)
        if params.timeout_s is not None:
            check_timeout(params.timeout_s)
        return await self.begin(caller.project_id, task_id, kind, params, key=key)

    async def begin(
        self,
        project_id: str,
        task_id: str,
        kind: OperationKind,
        params: OperationParams,
        *,
        key: str | None = None,
        rest: bool = False,
    ) -> tuple[TaskOperation, bool]:
        """``operate`` of the server itself: at a deadline, or when a budget is used up. ``rest``:
        it is repeated until nothing is left, and not kept for long."""
        prefix = operation_rows.REST_PREFIX if rest else "o"
        operation, new = await self._operations.begin(
            TaskOperation(
                operation_id=f"{prefix}{random_chars(19)}",
                project_id=project_id,
                task_id=task_id,
                kind=kind,
                params=params,
                key=key,
                created_at=time.time(),
            )
        )
        if new:
            log.info(
                "operation on a task begins",
                operation_id=operation.operation_id,
                task_id=task_id,
                kind=kind,
                reason=params.reason if kind == "kill" else None,
                sandboxes=operation.asked,
            )
        return operation, new

    async def operations(self, caller: Caller, task_id: str) -> list[TaskOperation]:
        """Operations on a task, newest first.

        Raises:
            TaskNotFound: not one of the caller's.
        """
        await self._task(caller, task_id)
        return await operation_rows.operations_of(
            self._store, caller.project_id, task_id, limit=OPERATIONS_SHOWN_MAX
        )

    async def operation(self, caller: Caller, task_id: str, operation_id: str) -> TaskOperation:
        """One operation on a task.

        Raises:
            TaskOperationNotFound: the task has none of this id.
        """
        found, _ = await operation_rows.outcomes_after(self._store, operation_id[:64], 0, 0)
        if found is None or (found.project_id, found.task_id) != (caller.project_id, task_id):
            raise TaskOperationNotFound("there is no such operation on this task")
        return found

    def follow(
        self, operation: TaskOperation, after: int = 0
    ) -> AsyncIterator[tuple[TaskOperation, list[TaskItem]]]:
        """An operation and its outcomes as they come, from the one after ``after`` on."""
        return self._operations.follow(operation.operation_id, after)

    async def wait(
        self, caller: Caller, task_id: str, wanted: WaitFor, timeout_s: float
    ) -> AsyncIterator[tuple[list[TaskCount], bool]]:
        """The task's sandboxes each time their counts change, and whether what is waited for is
        so; ends when it is, or after the time.

        Raises:
            TaskNotFound: not one of the caller's.
        """
        until = time.monotonic() + timeout_s
        before: list[TaskCount] | None = None
        while True:
            began = time.monotonic()
            counts = (await rows.counts_of(self._store, caller.project_id, [task_id]))[task_id]
            took_s = time.monotonic() - began
            reached = _is(wanted, counts)
            late = time.monotonic() >= until
            if counts != before or reached or late:
                before = counts
                yield counts, reached
            if reached or late:
                return
            # However many there are, looking is a small part of the time.
            pause_s = max(WAIT_LOOK_S, 20 * took_s)
            await asyncio.sleep(max(0.0, min(pause_s, until - time.monotonic())))

    # --- usage --------------------------------------------------------------

    async def refresh_usage(self, project_id: str, task_id: str) -> None:
        """Ask nodes what the task's sandboxes have used. What cannot be asked now keeps its last
        reading."""
        try:
            await self.meter(await rows.live_ids(self._store, project_id, task_id))
        except OpendsecError as exc:
            log.warning("use of a task not read now", task_id=task_id, why=exc.message)

    async def usage_of(self, record: SandboxRecord) -> SandboxUsage | None:
        """What one sandbox has used; of one whose node cannot be asked, by the last reading. None:
        it was never read."""
        name = record.sandbox_id
        if not record.terminal:
            with contextlib.suppress(OpendsecError):
                found = (await self._node.usage([name])).get(name)
                if found is not None:
                    return found
        return (await get_usage(self._store, [name])).get(name)

    async def meter(self, sandbox_ids: Sequence[str]) -> None:
        """Read what sandboxes have used, and keep it.

        Raises:
            NodeUnavailable, StoreUnavailable: not now.
        """
        for start in range(0, len(sandbox_ids), METER_AT_ONCE):
            these = sandbox_ids[start : start + METER_AT_ONCE]
            await note_usage(self._store, await self._node.usage(these), now=time.time())

    async def used(self, task: Task) -> TaskSum:
        """What a task has used in all, by the last readings."""
        sums = await rows.sum_of(self._store, task.project_id, [task.task_id])
        return _with_past(task, sums.get(task.task_id))

    # --- helpers ------------------------------------------------------------

    async def _task(self, caller: Caller, task_id: str) -> Task:
        task = await rows.get_task(self._store, caller.project_id, task_id)
        if task is None:
            raise TaskNotFound(f"there is no task `{task_id[:64]}`")
        return task

    async def _views(self, caller: Caller, tasks: Sequence[Task]) -> list[TaskView]:
        if not tasks:
            return []
        names = [task.task_id for task in tasks]
        counts = await rows.counts_of(self._store, caller.project_id, names)
        sums = await rows.sum_of(self._store, caller.project_id, names)
        return [
            TaskView(
                task=task,
                counts=counts[task.task_id],
                usage=_with_past(task, sums.get(task.task_id)),
            )
            for task in tasks
        ]


def check_task_id(task_id: str) -> None:
    """Refuse what is no task id.

    Raises:
        InvalidRequest: empty, too long, or with NUL.
    """
    check_text("task_id", task_id, limits.TASK_ID_CHARS_MAX)


def _check(wanted: TaskLimits, now: float) -> None:
    if wanted.deadline_at is not None and wanted.deadline_at <= now:
        raise InvalidRequest("the deadline is in the past")
    if wanted.sandboxes_max is not None and wanted.sandboxes_max < 1:
        raise InvalidRequest("the budget of sandboxes: at least 1")
    if wanted.cpu_seconds_max is not None and not wanted.cpu_seconds_max > 0:
        raise InvalidRequest("the budget of CPU seconds: more than 0")


def _limits_of(task: Task) -> TaskLimits:
    return TaskLimits(
        deadline_at=task.deadline_at,
        sandboxes_max=task.sandboxes_max,
        cpu_seconds_max=task.cpu_seconds_max,
    )


def _with_past(task: Task, kept: TaskSum | None) -> TaskSum:
    kept = kept or TaskSum()
    return TaskSum(
        cpu_seconds=round(kept.cpu_seconds + task.past_cpu_seconds, 6),
        memory_mb_seconds=round(kept.memory_mb_seconds + task.past_memory_mb_seconds, 3),
        disk_bytes=kept.disk_bytes,
        egress_bytes=kept.egress_bytes + task.past_egress_bytes,
        ingress_bytes=kept.ingress_bytes + task.past_ingress_bytes,
    )


def _is(wanted: WaitFor, counts: Sequence[TaskCount]) -> bool:
    live = {count.state for count in counts if count.state not in TERMINAL}
    if wanted == "ended":
        return not live
    if wanted == "idle":
        return not live & _MOVING
    return live <= {State(wanted)}


def kill_params(reason: EndReason) -> OperationParams:
    """What sandboxes of a task are told that the server ends."""
    return OperationParams(reason=reason)

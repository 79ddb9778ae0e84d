# SPDX-License-Identifier: AGPL-3.0-only
"""Tasks: the caller's jobs, with their limits and what happened in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from opendsec_server.contract.errors import (
    OpendsecError,
    TaskBudgetReached,
    TaskEnded,
    TaskPaused,
)
from opendsec_server.contract.states import EndReason, State

from .packing import struct_of
from .store import Store
from .tables import SANDBOX_USAGE, SANDBOXES, TASK_OPERATIONS, TASKS

TaskState = Literal["open", "paused", "ended"]


class Task(msgspec.Struct, kw_only=True, frozen=True):
    """One task of a project."""

    project_id: str
    task_id: str
    state: TaskState = "open"
    created_at: float
    used_at: float
    """When a sandbox was last made in it."""
    deadline_at: float | None = None
    sandboxes_max: int | None = None
    cpu_seconds_max: float | None = None
    made: int = 0
    """Sandboxes made so far; those whose start failed do not count."""
    ended_at: float | None = None
    end_reason: EndReason | None = None
    past_cpu_seconds: float = 0.0
    past_memory_mb_seconds: float = 0.0
    past_egress_bytes: int = 0
    past_ingress_bytes: int = 0


class TaskCount(msgspec.Struct, kw_only=True, frozen=True):
    """How many sandboxes of a task are alike."""

    state: State
    backend: str
    reason: str | None
    fault: str | None
    count: int


class TaskSum(msgspec.Struct, kw_only=True, frozen=True):
    """What the sandboxes of a task used, all that were ever in it."""

    cpu_seconds: float = 0.0
    memory_mb_seconds: float = 0.0
    disk_bytes: int = 0
    """Of those that have not ended: the disk of an ended one is free again."""
    egress_bytes: int = 0
    ingress_bytes: int = 0


class MemberEnd(msgspec.Struct, kw_only=True, frozen=True):
    """When a running sandbox of a task ends by itself."""

    sandbox_id: str
    node_id: str
    timeout_s: float


class Entered(msgspec.Struct, kw_only=True, frozen=True):
    """How many of the sandboxes that were wanted may be made in a task."""

    count: int
    refusal: OpendsecError | None
    """Why the first that may not may not. None: all may."""


# Statements are built once: building them costs more than running them.
_THIS_TASK = (TASKS.c.project_id == sa.bindparam("in_project")) & (
    TASKS.c.task_id == sa.bindparam("this_task")
)
_ENTER = (
    sa.update(TASKS)
    .where(
        _THIS_TASK,
        TASKS.c.state == "open",
        TASKS.c.sandboxes_max.is_(None)
        | (TASKS.c.made + sa.bindparam("more") <= TASKS.c.sandboxes_max),
        TASKS.c.deadline_at.is_(None) | (TASKS.c.deadline_at > sa.bindparam("now")),
    )
    .values(made=TASKS.c.made + sa.bindparam("more"), used_at=sa.bindparam("now"))
)
_SELECT = sa.select(TASKS).where(_THIS_TASK)
_LEAVE = sa.update(TASKS).where(_THIS_TASK, TASKS.c.made > 0).values(made=TASKS.c.made - 1)


def enter(
    connection: sa.Connection, project_id: str, task_id: str, more: int, *, now: float
) -> Entered:
    """Count sandboxes that are about to be made in a task; its first use makes it.

    The caller inserts the records of exactly so many sandboxes in the same transaction.
    """
    names = {"in_project": project_id, "this_task": task_id, "now": now}
    if _try(connection, names, more):
        return Entered(count=more, refusal=None)
    row = connection.execute(_SELECT, names).mappings().first()
    if row is None:
        _insert(
            connection, Task(project_id=project_id, task_id=task_id, created_at=now, used_at=now)
        )
        if _try(connection, names, more):
            return Entered(count=more, refusal=None)
        row = connection.execute(_SELECT, names).mappings().one()
    task = struct_of(row, Task)
    refusal = _refusal(task, now)
    if refusal is not None:
        return Entered(count=0, refusal=refusal)
    assert task.sandboxes_max is not None
    fit = max(0, task.sandboxes_max - task.made)
    if fit and not _try(connection, names, fit):
        fit = 0  # another process was quicker
    return Entered(
        count=fit,
        refusal=TaskBudgetReached(
            f"task `{task_id}` may have {task.sandboxes_max} sandboxes made in it, and has had "
            f"{task.made + fit}",
            details={"task_id": task_id, "limit": task.sandboxes_max, "made": task.made + fit},
        ),
    )


def enter_one(connection: sa.Connection, project_id: str, task_id: str, *, now: float) -> None:
    """``enter`` of one sandbox.

    Raises:
        TaskEnded, TaskPaused, TaskBudgetReached: it may not be made.
    """
    entered = enter(connection, project_id, task_id, 1, now=now)
    if entered.refusal is not None:
        raise entered.refusal


def enter_many(
    connection: sa.Connection, project_id: str, task_ids: Sequence[str | None], *, now: float
) -> list[OpendsecError | None]:
    """``enter`` of a sandbox for each, in order: why it may not be made. None: it may."""
    refusals: list[OpendsecError | None] = [None] * len(task_ids)
    for task_id, more in Counter(task_id for task_id in task_ids if task_id is not None).items():
        entered = enter(connection, project_id, task_id, more, now=now)
        if entered.refusal is not None:
            its = [at for at, other in enumerate(task_ids) if other == task_id]
            for at in its[entered.count :]:
                refusals[at] = entered.refusal
    return refusals


def leave(connection: sa.Connection, gone: Sequence[tuple[str, str]]) -> None:
    """Sandboxes of these projects and tasks were not made after all: they do not count."""
    if not gone:
        return
    connection.execute(
        _LEAVE, [{"in_project": project, "this_task": task} for project, task in gone]
    )


def _try(connection: sa.Connection, names: dict[str, Any], more: int) -> bool:
    return connection.execute(_ENTER, {**names, "more": more}).rowcount == 1


def _refusal(task: Task, now: float) -> OpendsecError | None:
    details = {"task_id": task.task_id, "state": task.state, "end_reason": task.end_reason}
    if task.state == "ended":
        return TaskEnded(f"task `{task.task_id}` has ended ({task.end_reason})", details=details)
    if task.deadline_at is not None and task.deadline_at <= now:
        return TaskEnded(f"the deadline of task `{task.task_id}` is over", details=details)
    if task.state == "paused":
        return TaskPaused(f"task `{task.task_id}` is paused", details=details)
    return None


def _insert(connection: sa.Connection, task: Task) -> bool:
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = insert(TASKS).values(msgspec.structs.asdict(task)).on_conflict_do_nothing()
    return connection.execute(statement).rowcount == 1


async def make_task(store: Store, task: Task) -> tuple[Task, bool]:
    """Record a task. Returns the one that is kept, and whether it is new."""

    def work(connection: sa.Connection) -> tuple[Task, bool]:
        new = _insert(connection, task)
        names = {"in_project": task.project_id, "this_task": task.task_id}
        return struct_of(connection.execute(_SELECT, names).mappings().one(), Task), new

    return await store.write(work)


async def get_task(store: Store, project_id: str, task_id: str) -> Task | None:
    """One task."""

    def work(connection: sa.Connection) -> Task | None:
        names = {"in_project": project_id, "this_task": task_id}
        row = connection.execute(_SELECT, names).mappings().first()
        return None if row is None else struct_of(row, Task)

    return await store.read(work)


async def list_tasks(
    store: Store,
    project_id: str,
    *,
    states: Sequence[TaskState] = (),
    after: tuple[float, str] | None = None,
    limit: int,
) -> list[Task]:
    """Tasks of a project, newest first."""
    column = TASKS.c
    query = sa.select(TASKS).where(column.project_id == project_id)
    if states:
        query = query.where(column.state.in_(states))
    if after is not None:
        last = sa.tuple_(sa.literal(after[0], sa.Double), sa.literal(after[1]))
        query = query.where(sa.tuple_(column.created_at, column.task_id) < last)
    query = query.order_by(column.created_at.desc(), column.task_id.desc()).limit(limit)

    def work(connection: sa.Connection) -> list[Task]:
        return [struct_of(row, Task) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def limited_tasks(store: Store) -> list[Task]:
    """Tasks of all projects that have not ended, and that a deadline or budget may end."""
    query = sa.select(TASKS).where(
        TASKS.c.ended_at.is_(None),
        TASKS.c.deadline_at.is_not(None) | TASKS.c.cpu_seconds_max.is_not(None),
    )

    def work(connection: sa.Connection) -> list[Task]:
        return [struct_of(row, Task) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def ended_with_living(store: Store) -> list[Task]:
    """Tasks of all projects that have ended, and of which a sandbox has not: its node could not be
    asked. Those that something is being done to are left out."""
    living = sa.exists().where(
        SANDBOXES.c.project_id == TASKS.c.project_id,
        SANDBOXES.c.task_id == TASKS.c.task_id,
        SANDBOXES.c.ended_at.is_(None),
    )
    busy = sa.exists().where(
        TASK_OPERATIONS.c.project_id == TASKS.c.project_id,
        TASK_OPERATIONS.c.task_id == TASKS.c.task_id,
        TASK_OPERATIONS.c.finished_at.is_(None),
    )
    query = sa.select(TASKS).where(TASKS.c.state == "ended", living, ~busy)

    def work(connection: sa.Connection) -> list[Task]:
        return [struct_of(row, Task) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def set_task(
    store: Store,
    project_id: str,
    task_id: str,
    values: dict[str, Any],
    *,
    only_in: Sequence[str] = (),
) -> Task | None:
    """Change a task; None when there is none, or it is in none of the states ``only_in``."""
    this = (TASKS.c.project_id == project_id) & (TASKS.c.task_id == task_id)
    if only_in:
        this &= TASKS.c.state.in_(only_in)

    def work(connection: sa.Connection) -> Task | None:
        if connection.execute(sa.update(TASKS).where(this).values(**values)).rowcount != 1:
            return None
        names = {"in_project": project_id, "this_task": task_id}
        return struct_of(connection.execute(_SELECT, names).mappings().one(), Task)

    return await store.write(work)


async def counts_of(
    store: Store, project_id: str, task_ids: Sequence[str]
) -> dict[str, list[TaskCount]]:
    """The sandboxes of tasks, counted by what is known of them."""
    column = SANDBOXES.c
    alike = (column.task_id, column.state, column.backend, column.end_reason, column.fault)
    query = (
        sa.select(*alike, sa.func.count().label("count"))
        .where(column.project_id == project_id, column.task_id.in_(task_ids))
        .group_by(*alike)
    )

    def work(connection: sa.Connection) -> dict[str, list[TaskCount]]:
        found: dict[str, list[TaskCount]] = {task_id: [] for task_id in task_ids}
        for row in connection.execute(query):
            found[row.task_id].append(
                TaskCount(
                    state=State(row.state),
                    backend=row.backend,
                    reason=row.end_reason,
                    fault=row.fault,
                    count=row[-1],
                )
            )
        return found

    return await store.read(work)


async def sum_of(store: Store, project_id: str, task_ids: Sequence[str]) -> dict[str, TaskSum]:
    """What the kept sandboxes of tasks used, by the last readings."""
    column = SANDBOX_USAGE.c
    alive = sa.case((SANDBOXES.c.ended_at.is_(None), column.disk_bytes), else_=0)
    query = (
        sa.select(
            column.task_id,
            sa.func.sum(column.cpu_seconds).label("cpu_seconds"),
            sa.func.sum(column.memory_mb_seconds).label("memory_mb_seconds"),
            sa.cast(sa.func.sum(alive), sa.BigInteger).label("disk_bytes"),
            sa.cast(sa.func.sum(column.egress_bytes), sa.BigInteger).label("egress_bytes"),
            sa.cast(sa.func.sum(column.ingress_bytes), sa.BigInteger).label("ingress_bytes"),
        )
        .join(SANDBOXES, SANDBOXES.c.sandbox_id == column.sandbox_id)
        .where(column.project_id == project_id, column.task_id.in_(task_ids))
        .group_by(column.task_id)
    )

    def work(connection: sa.Connection) -> dict[str, TaskSum]:
        return {
            row["task_id"]: struct_of(row, TaskSum) for row in connection.execute(query).mappings()
        }

    return await store.read(work)


async def live_ids(store: Store, project_id: str, task_id: str) -> list[str]:
    """The sandboxes of a task that have not ended."""

    def work(connection: sa.Connection) -> list[str]:
        query = sa.select(SANDBOXES.c.sandbox_id).where(
            SANDBOXES.c.project_id == project_id,
            SANDBOXES.c.task_id == task_id,
            SANDBOXES.c.ended_at.is_(None),
        )
        return list(connection.execute(query).scalars())

    return await store.read(work)


async def ends_within(
    store: Store, project_id: str, task_id: str, *, after: float, before: float | None
) -> list[MemberEnd]:
    """The running sandboxes of a task that end by themselves in a span. Unix seconds; ``before``
    None: however late."""
    query = sa.select(SANDBOXES.c.sandbox_id, SANDBOXES.c.node_id, SANDBOXES.c.timeout_s).where(
        SANDBOXES.c.project_id == project_id,
        SANDBOXES.c.task_id == task_id,
        SANDBOXES.c.state == State.RUNNING,
        SANDBOXES.c.end_at > after,
    )
    if before is not None:
        query = query.where(SANDBOXES.c.end_at < before)

    def work(connection: sa.Connection) -> list[MemberEnd]:
        return [MemberEnd(**row) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def ids_to_meter(store: Store) -> list[str]:
    """Every sandbox that has not ended, of whatever project."""

    def work(connection: sa.Connection) -> list[str]:
        query = sa.select(SANDBOXES.c.sandbox_id).where(SANDBOXES.c.ended_at.is_(None))
        return list(connection.execute(query).scalars())

    return await store.read(work)


def fold_past(connection: sa.Connection, sandbox_ids: Sequence[str]) -> None:
    """The records of these sandboxes are about to be removed: their tasks keep what they used."""
    column = SANDBOX_USAGE.c
    query = (
        sa.select(
            column.project_id,
            column.task_id,
            sa.func.sum(column.cpu_seconds).label("cpu_seconds"),
            sa.func.sum(column.memory_mb_seconds).label("memory_mb_seconds"),
            sa.cast(sa.func.sum(column.egress_bytes), sa.BigInteger).label("egress_bytes"),
            sa.cast(sa.func.sum(column.ingress_bytes), sa.BigInteger).label("ingress_bytes"),
        )
        .where(column.sandbox_id.in_(sandbox_ids), column.task_id.is_not(None))
        .group_by(column.project_id, column.task_id)
    )
    for row in connection.execute(query).mappings().all():
        connection.execute(
            sa.update(TASKS)
            .where(TASKS.c.project_id == row["project_id"], TASKS.c.task_id == row["task_id"])
            .values(
                {
                    TASKS.c[f"past_{name}"]: TASKS.c[f"past_{name}"] + row[name]
                    for name in (
                        "cpu_seconds",
                        "memory_mb_seconds",
                        "egress_bytes",
                        "ingress_bytes",
                    )
                }
            )
        )


async def prune_tasks(store: Store, *, unused_since: float) -> int:
    """Remove tasks that were not used for long and of which no sandbox's record is left."""
    kept = sa.exists().where(
        SANDBOXES.c.project_id == TASKS.c.project_id, SANDBOXES.c.task_id == TASKS.c.task_id
    )

    def work(connection: sa.Connection) -> int:
        gone = sa.delete(TASKS).where(
            TASKS.c.used_at < unused_since,
            ~kept,
            # One that is given a time to come is wanted.
            TASKS.c.deadline_at.is_(None) | (TASKS.c.deadline_at < unused_since),
        )
        return int(connection.execute(gone).rowcount)

    return await store.write(work)

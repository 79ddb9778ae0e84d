# SPDX-License-Identifier: AGPL-3.0-only
"""What is done to a whole task: one row for the operation, one for each sandbox of it.

The rows are written before anything is done, so that another process can go on where one has
stopped. An outcome is written once, in the order in which outcomes came.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.errors import IdempotencyMismatch, TaskEnded, TaskNotFound
from opendsec_server.contract.node import StateMode
from opendsec_server.contract.states import EndReason

from .leases import is_over
from .packing import plain, struct_of
from .store import Store
from .tables import SANDBOXES, TASK_ITEMS, TASK_OPERATIONS, TASKS
from .tasks import Task

OperationKind = Literal["pause", "resume", "kill"]
Outcome = Literal["done", "already", "gone", "error"]
"""``already``: it was so before. ``gone``: it had ended meanwhile."""
PRUNE_BATCH = 20
REST_PREFIX = "r"
"""Of the ids of operations that the server repeats by itself, to end what is left of a task."""


class OperationParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What each sandbox is told."""

    mode: StateMode = "full"
    """Of a pause."""
    timeout_s: float | None = None
    """Of a resume. None: what each was created with."""
    reason: EndReason = EndReason.KILLED
    """Of a kill."""
    end: bool = True
    """Of a kill: the task ends with it, and takes no more sandboxes."""


class TaskOperation(msgspec.Struct, kw_only=True, frozen=True):
    """A pause, resume or kill of a whole task."""

    operation_id: str
    project_id: str
    task_id: str
    kind: OperationKind
    params: OperationParams
    key: str | None = None
    created_at: float
    finished_at: float | None = None
    superseded_by: str | None = None
    """A later operation took its place before it was finished."""
    asked: int = 0
    done: int = 0
    failed: int = 0
    memory_freed_bytes: int = 0
    owner: str | None = None
    lease_until: float = 0.0


class TaskItem(msgspec.Struct, kw_only=True, frozen=True):
    """What became of one sandbox."""

    sandbox_id: str
    seq: int
    outcome: Outcome
    error: str | None = None
    """JSON, as ``OpendsecError.to_dict`` gives it."""
    memory_freed_bytes: int = 0


class Noted(msgspec.Struct, kw_only=True, frozen=True):
    """An outcome to be written."""

    sandbox_id: str
    outcome: Outcome
    error: str | None = None
    memory_freed_bytes: int = 0


# Statements are built once: building them costs more than running them.
_THIS = TASK_OPERATIONS.c.operation_id == sa.bindparam("this_operation")
_SELECT = sa.select(TASK_OPERATIONS).where(_THIS)
_NOTE = (
    sa.update(TASK_ITEMS)
    .where(
        TASK_ITEMS.c.operation_id == sa.bindparam("this_operation"),
        TASK_ITEMS.c.sandbox_id == sa.bindparam("this_sandbox"),
    )
    .values(
        seq=sa.bindparam("its_seq"),
        outcome=sa.bindparam("its_outcome"),
        error=sa.bindparam("its_error", type_=sa.Text),
        memory_freed_bytes=sa.bindparam("its_freed"),
    )
)
_RUNNING = TASK_OPERATIONS.c.finished_at.is_(None)


def _operation_of(row: sa.RowMapping) -> TaskOperation:
    values = plain(row)
    values["params"] = msgspec.json.decode(values["params"])
    return msgspec.convert(values, TaskOperation)


async def begin_operation(
    store: Store, wanted: TaskOperation, *, now: float
) -> tuple[TaskOperation, bool]:
    """Record an operation on the sandboxes that the task has at this moment.

    The task takes no more sandboxes from then on, or takes some again: so none slips through. An
    operation that runs is joined if it is the same, and ends if it is another.

    Returns:
        The operation, and whether it is new.

    Raises:
        TaskNotFound: the project has no such task.
        TaskEnded: it has ended, and is not to be killed.
        IdempotencyMismatch: the key was used for something else.
    """

    def work(connection: sa.Connection) -> tuple[TaskOperation, bool]:
        return _begin(connection, wanted, now)

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process took the key between our look and our insert.
        return await store.write(work)


def _begin(
    connection: sa.Connection, wanted: TaskOperation, now: float
) -> tuple[TaskOperation, bool]:
    earlier = _earlier(connection, wanted)
    if earlier is not None:
        return earlier, False
    task = _lock_task(connection, wanted)
    if task.state == "ended" and wanted.kind != "kill":
        raise TaskEnded(
            f"task `{task.task_id}` has ended ({task.end_reason})",
            details={"task_id": task.task_id, "end_reason": task.end_reason},
        )
    column = TASK_OPERATIONS.c
    running = connection.execute(
        sa.select(TASK_OPERATIONS).where(
            column.project_id == wanted.project_id, column.task_id == wanted.task_id, _RUNNING
        )
    ).mappings()
    for other in [_operation_of(row) for row in running]:
        if (other.kind, other.params) == (wanted.kind, wanted.params):
            return other, False
        connection.execute(
            sa.update(TASK_OPERATIONS)
            .where(column.operation_id == other.operation_id)
            .values(finished_at=now, superseded_by=wanted.operation_id)
        )
    _set_task(connection, task, wanted, now)
    return _insert(connection, wanted, now), True


def _earlier(connection: sa.Connection, wanted: TaskOperation) -> TaskOperation | None:
    if wanted.key is None:
        return None
    column = TASK_OPERATIONS.c
    row = (
        connection.execute(
            sa.select(TASK_OPERATIONS).where(
                column.project_id == wanted.project_id, column.key == wanted.key
            )
        )
        .mappings()
        .first()
    )
    if row is None:
        return None
    earlier = _operation_of(row)
    same = (earlier.task_id, earlier.kind, earlier.params)
    if same != (wanted.task_id, wanted.kind, wanted.params):
        raise IdempotencyMismatch("this idempotency key was used before with other parameters")
    return earlier


def _lock_task(connection: sa.Connection, wanted: TaskOperation) -> Task:
    query = sa.select(TASKS).where(
        TASKS.c.project_id == wanted.project_id, TASKS.c.task_id == wanted.task_id
    )
    if connection.dialect.name != "sqlite":
        # Creates that have entered the task are committed before its sandboxes are listed.
        query = query.with_for_update()
    row = connection.execute(query).mappings().first()
    if row is None:
        raise TaskNotFound(f"there is no task `{wanted.task_id}`")
    return struct_of(row, Task)


def _set_task(connection: sa.Connection, task: Task, wanted: TaskOperation, now: float) -> None:
    values: dict[str, Any] = {}
    if wanted.kind == "pause":
        values = {"state": "paused"}
    elif wanted.kind == "resume":
        values = {"state": "open"}
    elif wanted.params.end and task.state != "ended":
        values = {"state": "ended", "ended_at": now, "end_reason": wanted.params.reason}
    if values:
        connection.execute(
            sa.update(TASKS)
            .where(TASKS.c.project_id == task.project_id, TASKS.c.task_id == task.task_id)
            .values(**values)
        )


def _insert(connection: sa.Connection, wanted: TaskOperation, now: float) -> TaskOperation:
    live = sa.select(sa.literal(wanted.operation_id), SANDBOXES.c.sandbox_id).where(
        SANDBOXES.c.project_id == wanted.project_id,
        SANDBOXES.c.task_id == wanted.task_id,
        SANDBOXES.c.ended_at.is_(None),
    )
    row = msgspec.structs.asdict(wanted)
    row["params"] = msgspec.json.encode(wanted.params).decode()
    connection.execute(sa.insert(TASK_OPERATIONS), row)
    connection.execute(sa.insert(TASK_ITEMS).from_select(["operation_id", "sandbox_id"], live))
    asked = connection.execute(
        sa.select(sa.func.count())
        .select_from(TASK_ITEMS)
        .where(TASK_ITEMS.c.operation_id == wanted.operation_id)
    ).scalar_one()
    made = msgspec.structs.replace(wanted, asked=asked, finished_at=None if asked else now)
    connection.execute(
        sa.update(TASK_OPERATIONS)
        .where(TASK_OPERATIONS.c.operation_id == wanted.operation_id)
        .values(asked=made.asked, finished_at=made.finished_at)
    )
    return made


async def note_outcomes(
    store: Store,
    operation_id: str,
    owner: str,
    outcomes: Sequence[Noted],
    *,
    now: float,
    lease_until: float,
) -> TaskOperation | None:
    """Write outcomes, and hold on to the operation.

    Returns:
        The operation; finished, if none is missing any more. None: it is another process's now, or
        over; nothing was written.
    """

    def work(connection: sa.Connection) -> TaskOperation | None:
        query = _SELECT if store.is_sqlite else _SELECT.with_for_update()
        row = connection.execute(query, {"this_operation": operation_id}).mappings().first()
        operation = None if row is None else _operation_of(row)
        if operation is None or operation.owner != owner or operation.finished_at is not None:
            return None
        first = operation.done + operation.failed + 1
        rows = [
            {
                "this_operation": operation_id,
                "this_sandbox": noted.sandbox_id,
                "its_seq": seq,
                "its_outcome": noted.outcome,
                "its_error": noted.error,
                "its_freed": noted.memory_freed_bytes,
            }
            for seq, noted in enumerate(outcomes, first)
        ]
        if rows:
            connection.execute(_NOTE, rows)
        failed = sum(noted.outcome == "error" for noted in outcomes)
        after = msgspec.structs.replace(
            operation,
            done=operation.done + len(outcomes) - failed,
            failed=operation.failed + failed,
            memory_freed_bytes=operation.memory_freed_bytes
            + sum(noted.memory_freed_bytes for noted in outcomes),
            lease_until=lease_until,
        )
        if after.done + after.failed >= after.asked:
            after = msgspec.structs.replace(after, asked=after.asked + _sweep(connection, after))
        if after.done + after.failed >= after.asked:
            after = msgspec.structs.replace(after, finished_at=now)
        connection.execute(
            sa.update(TASK_OPERATIONS).where(_THIS).values(
                {
                    name: getattr(after, name)
                    for name in (
                        "asked", "done", "failed", "memory_freed_bytes", "lease_until",
                        "finished_at",
                    )
                }
            ),
            {"this_operation": operation_id},
        )  # fmt: skip
        return after

    return await store.write(work)


def _sweep(connection: sa.Connection, operation: TaskOperation) -> int:
    """Add what came into the task by other ways than a create: one whose create went to another
    node has another id since. How many."""
    if operation.kind == "resume" or (operation.kind == "kill" and not operation.params.end):
        return 0
    known = sa.select(TASK_ITEMS.c.sandbox_id).where(
        TASK_ITEMS.c.operation_id == operation.operation_id
    )
    column = SANDBOXES.c
    more = sa.select(sa.literal(operation.operation_id), column.sandbox_id).where(
        column.project_id == operation.project_id,
        column.task_id == operation.task_id,
        column.ended_at.is_(None),
        column.sandbox_id.not_in(known),
    )
    added = sa.insert(TASK_ITEMS).from_select(["operation_id", "sandbox_id"], more)
    return int(connection.execute(added).rowcount)


async def claim_operations(
    store: Store,
    owner: str,
    *,
    held: Collection[str] = (),
    now: float,
    lease_until: float,
    alone: bool,
) -> list[TaskOperation]:
    """Take over operations that nobody works on.

    Args:
        store: Where.
        owner: The process that takes them.
        held: Those that it works on already.
        now: A lease that ends before it counts no more.
        lease_until: Of the new leases.
        alone: No other process can be at work: leases of others count for nothing.
    """
    column = TASK_OPERATIONS.c
    free = sa.true() if alone else is_over(column.lease_until, now)

    def work(connection: sa.Connection) -> list[TaskOperation]:
        # It may own one without knowing: whoever asked for it went away too early.
        query = sa.select(TASK_OPERATIONS).where(
            _RUNNING, free, column.operation_id.not_in(list(held))
        )
        if not store.is_sqlite:
            query = query.with_for_update(skip_locked=True)
        found = [_operation_of(row) for row in connection.execute(query).mappings()]
        for operation in found:
            connection.execute(
                sa.update(TASK_OPERATIONS)
                .where(column.operation_id == operation.operation_id)
                .values(owner=owner, lease_until=lease_until)
            )
        return found

    return await store.write(work)


async def missing_of(store: Store, operation_id: str) -> list[str]:
    """Sandboxes of an operation that have no outcome yet; none, if another has taken its place."""

    def work(connection: sa.Connection) -> list[str]:
        query = sa.select(TASK_ITEMS.c.sandbox_id).where(
            TASK_ITEMS.c.operation_id == operation_id,
            TASK_ITEMS.c.seq.is_(None),
            sa.exists().where(TASK_OPERATIONS.c.operation_id == operation_id, _RUNNING),
        )
        return list(connection.execute(query).scalars())

    return await store.read(work)


async def outcomes_after(
    store: Store, operation_id: str, seq: int, limit: int
) -> tuple[TaskOperation | None, list[TaskItem]]:
    """An operation, and its next outcomes in order: of the same instant."""

    def work(connection: sa.Connection) -> tuple[TaskOperation | None, list[TaskItem]]:
        # The operation first: what it has counted is there to be read afterwards.
        row = connection.execute(_SELECT, {"this_operation": operation_id}).mappings().first()
        column = TASK_ITEMS.c
        query = (
            sa.select(
                column.sandbox_id,
                column.seq,
                column.outcome,
                column.error,
                column.memory_freed_bytes,
            )
            .where(column.operation_id == operation_id, column.seq > seq)
            .order_by(column.seq)
            .limit(limit)
        )
        items = [struct_of(item, TaskItem) for item in connection.execute(query).mappings()]
        return None if row is None else _operation_of(row), items

    return await store.read(work)


async def operations_of(
    store: Store, project_id: str, task_id: str, *, limit: int
) -> list[TaskOperation]:
    """The operations of a task, newest first."""
    column = TASK_OPERATIONS.c

    def work(connection: sa.Connection) -> list[TaskOperation]:
        query = (
            sa.select(TASK_OPERATIONS)
            .where(column.project_id == project_id, column.task_id == task_id)
            .order_by(column.created_at.desc(), column.operation_id.desc())
            .limit(limit)
        )
        return [_operation_of(row) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def prune_operations(
    store: Store, *, finished_before: float, rests_only: bool = False
) -> int:
    """Remove operations that finished before a time; how many. At ``PRUNE_BATCH``, call again.

    Args:
        store: Where.
        finished_before: Unix seconds.
        rests_only: Only those whose ids begin with ``REST_PREFIX``.
    """
    column = TASK_OPERATIONS.c
    old = sa.select(column.operation_id).where(column.finished_at < finished_before)
    if rests_only:
        old = old.where(column.operation_id.startswith(REST_PREFIX, autoescape=True))
    old = old.limit(PRUNE_BATCH)

    def work(connection: sa.Connection) -> int:
        removed = connection.execute(
            sa.delete(TASK_OPERATIONS).where(
                TASK_OPERATIONS.c.operation_id.in_(old.scalar_subquery())
            )
        )
        return int(removed.rowcount)

    return await store.write(work)

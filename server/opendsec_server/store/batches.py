# SPDX-License-Identifier: AGPL-3.0-only
"""Batches: what was asked for, what became of each item, and who works on it.

An item has a row from the moment it begins, with the id of its sandbox; below ``next_index`` each
has one, from it on none has. So a batch and an index name one sandbox at most, whoever dies when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.errors import Fault, Forbidden, TaskPaused

from .keys import find_key, settle_key, take_key
from .leases import is_over
from .packing import struct_of
from .quotas import admit, wanted_of
from .records import IdempotencyClaim, Project, SandboxRecord
from .sandboxes import record_of, row_of
from .store import Store, Work
from .tables import BATCH_ITEMS, BATCHES, PROJECTS, SANDBOXES
from .tasks import enter_many, leave

ErrorBody = dict[str, Any]
"""An error as ``OpendsecError.to_dict`` gives it."""

_RATE = "creates_per_s"
"""A limit that passes by itself: items wait for it instead of failing."""
PAUSED_WAIT_S = 2
"""After which items whose task is paused are looked at again."""
PRUNE_BATCH = 20

# Statements are built once: building them costs more than running them.
_THIS = BATCHES.c.batch_id == sa.bindparam("this_batch")
_SELECT = sa.select(BATCHES).where(_THIS)
_LOCK = (
    sa.select(BATCHES.c.batch_id)
    .where(BATCHES.c.batch_id.in_(sa.bindparam("these", expanding=True)))
    .order_by(BATCHES.c.batch_id)
    .with_for_update()
)
_INSERT = sa.insert(BATCHES)
_INSERT_ITEMS = sa.insert(BATCH_ITEMS)
_INSERT_SANDBOXES = sa.insert(SANDBOXES)
_CLOSED = sa.select(PROJECTS.c.closed_at).where(PROJECTS.c.project_id == sa.bindparam("in_project"))
_COUNT = (
    sa.update(BATCHES)
    .where(_THIS)
    .values({name: sa.bindparam(name) for name in ("next_index", "made", "failed")})
)
_FINISH = (
    sa.update(BATCHES)
    .where(_THIS, BATCHES.c.finished_at.is_(None))
    .values(finished_at=sa.bindparam("finished_at"), owner=None)
)
_OPEN_AMONG = sa.select(BATCH_ITEMS.c.idx).where(
    BATCH_ITEMS.c.batch_id == sa.bindparam("this_batch"),
    BATCH_ITEMS.c.seq.is_(None),
    BATCH_ITEMS.c.idx.in_(sa.bindparam("these", expanding=True)),
)
_SETTLE_ITEM = (
    sa.update(BATCH_ITEMS)
    .where(
        BATCH_ITEMS.c.batch_id == sa.bindparam("this_batch"),
        BATCH_ITEMS.c.idx == sa.bindparam("this_index"),
    )
    .values(seq=sa.bindparam("new_seq"), error=sa.bindparam("new_error", type_=sa.Text))
)
_BEGUN = (
    sa.select(BATCH_ITEMS.c.idx, SANDBOXES)
    .select_from(BATCH_ITEMS)
    .join(SANDBOXES, SANDBOXES.c.sandbox_id == BATCH_ITEMS.c.sandbox_id)
    .where(BATCH_ITEMS.c.batch_id == sa.bindparam("this_batch"), BATCH_ITEMS.c.seq.is_(None))
    .order_by(BATCH_ITEMS.c.idx)
)
_AFTER = (
    sa.select(BATCH_ITEMS)
    .where(
        BATCH_ITEMS.c.batch_id == sa.bindparam("this_batch"),
        BATCH_ITEMS.c.seq > sa.bindparam("after_seq"),
    )
    .order_by(BATCH_ITEMS.c.seq)
    .limit(sa.bindparam("at_most"))
)
_RECORDS = sa.select(SANDBOXES).where(
    SANDBOXES.c.sandbox_id.in_(sa.bindparam("these", expanding=True))
)


class Batch(msgspec.Struct, kw_only=True, frozen=True):
    """Many creates asked for in one call."""

    batch_id: str
    project_id: str
    params: str
    asked: int
    next_index: int = 0
    made: int = 0
    failed: int = 0
    created_at: float
    begin_until: float
    cancelled_at: float | None = None
    finished_at: float | None = None
    owner: str | None = None
    lease_until: float = 0.0

    @property
    def outcomes(self) -> int:
        """Items of which is known what became of them; also the last one's ``seq``."""
        return self.made + self.failed


class Item(msgspec.Struct, kw_only=True, frozen=True):
    """What became of one item."""

    index: int
    seq: int
    sandbox_id: str | None
    error: ErrorBody | None


class Outcome(msgspec.Struct, kw_only=True, frozen=True):
    """What became of one item, to be noted."""

    batch_id: str
    index: int
    error: ErrorBody | None = None
    """None: it was made."""


class _Cause(msgspec.Struct):
    """Of an item's error, what is counted."""

    code: str
    fault: Fault


_cause_of = msgspec.json.Decoder(_Cause).decode


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """How many items of a batch failed for the same cause."""

    code: str
    fault: Fault
    count: int


class Beginning(msgspec.Struct, kw_only=True, frozen=True):
    """The next items of a batch, in order, that are to begin."""

    batch_id: str
    first: int
    """Index of the first of them."""
    items: Sequence[SandboxRecord | ErrorBody]
    """What each is to be; or why it cannot be, which needs no node to find out."""


class Begun(msgspec.Struct, kw_only=True, frozen=True):
    """What became of a ``Beginning``."""

    batch: Batch | None
    """As it is now. None: it does not exist."""
    taken: int
    """So many of the items are settled or begin, from the first on. 0 with no ``wait_s``: somebody
    else has moved the batch on."""
    records: Sequence[tuple[int, SandboxRecord]] = ()
    """Those that begin, with their index."""
    wait_s: int | None = None
    """The next one may begin after so many seconds."""


async def insert_batch(store: Store, batch: Batch, claim: IdempotencyClaim | None) -> str:
    """Record what is asked for, and tie the key to it.

    Returns:
        Id of the batch that the key stands for: this one's, or an earlier one's; then nothing
        was written.

    Raises:
        IdempotencyMismatch: the key was used with other parameters.
        StoreUnavailable: nothing was written, or it is not known.
    """

    def work(connection: sa.Connection) -> str:
        renew = False
        if claim is not None:
            earlier, renew = find_key(connection, batch.project_id, claim, batch.created_at)
            if earlier is not None:
                return earlier.sandbox_id
        connection.execute(_INSERT, msgspec.structs.asdict(batch))
        if claim is not None:
            take_key(
                connection,
                batch.project_id,
                claim,
                batch.batch_id,
                now=batch.created_at,
                renew=renew,
            )
        return batch.batch_id

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process took the key between our look and our insert.
        return await store.write(work)


async def find_batch(
    store: Store, project_id: str, claim: IdempotencyClaim, now: float
) -> str | None:
    """Id of the batch that a key stands for.

    Raises:
        IdempotencyMismatch: the key was used with other parameters.
        StoreUnavailable: not known.
    """
    row, _ = await store.read(lambda c: find_key(c, project_id, claim, now))
    return None if row is None else row.sandbox_id


async def get_batch(store: Store, batch_id: str) -> Batch | None:
    """One batch."""
    return await store.read(lambda connection: _get(connection, batch_id))


async def failures_of(store: Store, batch_id: str) -> list[Failure]:
    """The failed items of a batch by cause, most frequent first."""
    query = (
        sa.select(BATCH_ITEMS.c.error, sa.func.count())
        .where(BATCH_ITEMS.c.batch_id == batch_id, BATCH_ITEMS.c.error.is_not(None))
        .group_by(BATCH_ITEMS.c.error)
    )

    def work(connection: sa.Connection) -> list[Failure]:
        found: Counter[tuple[str, Fault]] = Counter()
        for error, count in connection.execute(query):
            cause = _cause_of(error)
            found[cause.code, cause.fault] += count
        return [
            Failure(code=code, fault=fault, count=count)
            for (code, fault), count in found.most_common()
        ]

    return await store.read(work)


async def project_of(store: Store, batch: Batch) -> Project | None:
    """The project in whose name a batch was asked for."""
    query = sa.select(PROJECTS).where(PROJECTS.c.project_id == batch.project_id)

    def work(connection: sa.Connection) -> Project | None:
        row = connection.execute(query).mappings().first()
        return None if row is None else struct_of(row, Project)

    return await store.read(work)


async def list_batches(
    store: Store, project_id: str, *, after: tuple[float, str] | None, limit: int
) -> list[Batch]:
    """A project's batches, newest first; those before ``after``."""
    query = sa.select(BATCHES).where(BATCHES.c.project_id == project_id)
    if after is not None:
        last = sa.tuple_(sa.literal(after[0], sa.Double), sa.literal(after[1]))
        query = query.where(sa.tuple_(BATCHES.c.created_at, BATCHES.c.batch_id) < last)
    query = query.order_by(BATCHES.c.created_at.desc(), BATCHES.c.batch_id.desc()).limit(limit)

    def work(connection: sa.Connection) -> list[Batch]:
        return [struct_of(row, Batch) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def outcomes_after(
    store: Store, batch_id: str, seq: int, limit: int
) -> tuple[Batch | None, list[Item], dict[str, SandboxRecord]]:
    """The batch, the next outcomes in their order, and the sandboxes they name.

    With fewer than ``limit`` of them, these are all that the returned batch counts, at least.
    """

    def work(
        connection: sa.Connection,
    ) -> tuple[Batch | None, list[Item], dict[str, SandboxRecord]]:
        batch = _get(connection, batch_id)
        values = {"this_batch": batch_id, "after_seq": seq, "at_most": limit}
        items = [_item(row) for row in connection.execute(_AFTER, values).mappings()]
        names = [item.sandbox_id for item in items if item.sandbox_id and item.error is None]
        if not names:
            return batch, items, {}
        rows = connection.execute(_RECORDS, {"these": names}).mappings().all()
        return batch, items, {row["sandbox_id"]: record_of(row) for row in rows}

    return await store.read(work)


async def cancel_batch(store: Store, batch_id: str, now: float) -> Batch | None:
    """Let no more items begin. What was cancelled before stays as it was."""

    def work(connection: sa.Connection) -> Batch | None:
        connection.execute(
            sa.update(BATCHES)
            .where(
                BATCHES.c.batch_id == batch_id,
                BATCHES.c.finished_at.is_(None),
                BATCHES.c.cancelled_at.is_(None),
            )
            .values(cancelled_at=now)
        )
        return _get(connection, batch_id)

    return await store.write(work)


async def claim_batches(
    store: Store,
    owner: str,
    *,
    held: Collection[str] = (),
    seat: str | None,
    now: float,
    lease_until: float,
) -> list[Batch]:
    """Take over unfinished batches that nobody works on, oldest first.

    Args:
        store: Where.
        owner: Who takes them.
        held: Those that it works on already.
        seat: Beginning of the owners' names that are dead for sure: those of this place's earlier
            processes. None: wait until their leases are over.
        now: Unix seconds.
        lease_until: Until when others leave them alone.
    """
    # It may own one without knowing: the answer to its insert was lost.
    free = is_over(BATCHES.c.lease_until, now) | (BATCHES.c.owner == owner)
    if seat is not None:
        free = free | BATCHES.c.owner.startswith(seat, autoescape=True)
    query = (
        sa.select(BATCHES)
        .where(
            BATCHES.c.finished_at.is_(None),
            free,
            BATCHES.c.batch_id.not_in(list(held)),
        )
        .order_by(BATCHES.c.created_at, BATCHES.c.batch_id)
        .with_for_update(skip_locked=True)
    )

    def work(connection: sa.Connection) -> list[Batch]:
        found = [struct_of(row, Batch) for row in connection.execute(query).mappings()]
        if found:
            connection.execute(
                sa.update(BATCHES)
                .where(BATCHES.c.batch_id.in_([batch.batch_id for batch in found]))
                .values(owner=owner, lease_until=lease_until)
            )
        return [
            msgspec.structs.replace(batch, owner=owner, lease_until=lease_until) for batch in found
        ]

    return await store.write(work)


async def renew_batches(
    store: Store, owner: str, batch_ids: Collection[str], lease_until: float
) -> list[Batch]:
    """Keep batches for longer. Those that come back are the owner's still, as they are now."""

    def work(connection: sa.Connection) -> list[Batch]:
        _lock(connection, store, batch_ids)
        mine = (BATCHES.c.owner == owner) & BATCHES.c.batch_id.in_(list(batch_ids))
        connection.execute(sa.update(BATCHES).where(mine).values(lease_until=lease_until))
        rows = connection.execute(sa.select(BATCHES).where(mine)).mappings()
        return [struct_of(row, Batch) for row in rows]

    return await store.write(work) if batch_ids else []


async def begun_items(store: Store, batch_id: str) -> list[tuple[int, SandboxRecord]]:
    """Items that have begun and whose outcome is not known, with their sandboxes' records."""

    def work(connection: sa.Connection) -> list[tuple[int, SandboxRecord]]:
        rows = connection.execute(_BEGUN, {"this_batch": batch_id}).mappings()
        return [(row["idx"], record_of(row)) for row in rows]

    return await store.read(work)


async def begun_record(store: Store, batch_id: str, index: int) -> SandboxRecord | None:
    """The sandbox of an item now: its create may have gone to another node, with another id."""
    query = _BEGUN.where(BATCH_ITEMS.c.idx == index)

    def work(connection: sa.Connection) -> SandboxRecord | None:
        row = connection.execute(query, {"this_batch": batch_id}).mappings().first()
        return None if row is None else record_of(row)

    return await store.read(work)


async def begin_items(
    store: Store, owner: str, beginnings: Sequence[Beginning], *, now: float
) -> list[Begun]:
    """Let the next items of several batches begin, in one transaction.

    Each takes its place in its project's quota. One for which there is none is settled with that
    refusal; the rate of creates is waited for.

    Raises:
        StoreUnavailable: none begins, or it is not known whether.
    """
    ordered = sorted(range(len(beginnings)), key=lambda at: beginnings[at].batch_id)

    def work(connection: sa.Connection) -> list[Begun]:
        done: dict[int, Begun] = {}
        _lock(connection, store, [one.batch_id for one in beginnings])
        for at in ordered:
            done[at] = _begin(connection, owner, beginnings[at], now)
        return [done[at] for at in range(len(beginnings))]

    return await store.write(work)


def noting(store: Store, outcomes: Sequence[Outcome], *, now: float) -> Work:
    """Part of a transaction that settles items. One that is settled stays as it is."""
    return lambda connection: _note(connection, store, outcomes, now)


def _note(connection: sa.Connection, store: Store, outcomes: Sequence[Outcome], now: float) -> None:
    by_batch: dict[str, dict[int, ErrorBody | None]] = {}
    for outcome in outcomes:
        by_batch.setdefault(outcome.batch_id, {}).setdefault(outcome.index, outcome.error)
    _lock(connection, store, by_batch)
    for batch_id in sorted(by_batch):
        batch = _get(connection, batch_id)
        if batch is None:
            continue
        told = by_batch[batch_id]
        values = {"this_batch": batch_id, "these": list(told)}
        still = set(connection.execute(_OPEN_AMONG, values).scalars())
        news = [(index, error) for index, error in told.items() if index in still]
        if not news:
            continue
        rows = [
            {
                "this_batch": batch_id,
                "this_index": index,
                "new_seq": batch.outcomes + number,
                "new_error": None if error is None else _encode(error),
            }
            for number, (index, error) in enumerate(news, 1)
        ]
        connection.execute(_SETTLE_ITEM, rows)
        made = sum(error is None for _, error in news)
        _count(connection, batch, made=made, failed=len(news) - made, now=now)


async def settle_begun(store: Store, batch_id: str, error: ErrorBody, *, now: float) -> None:
    """Settle all items of a batch that have begun and have no outcome, with an error."""
    query = sa.select(BATCH_ITEMS.c.idx).where(
        BATCH_ITEMS.c.batch_id == batch_id, BATCH_ITEMS.c.seq.is_(None)
    )

    def work(connection: sa.Connection) -> None:
        _lock(connection, store, [batch_id])
        left = connection.execute(query).scalars().all()
        outcomes = [Outcome(batch_id=batch_id, index=index, error=error) for index in left]
        _note(connection, store, outcomes, now)

    await store.write(work)


async def prune_batches(store: Store, *, finished_before: float) -> int:
    """Remove batches that finished before a time; how many. At ``PRUNE_BATCH``, call again."""
    old = (
        sa.select(BATCHES.c.batch_id)
        .where(BATCHES.c.finished_at < finished_before)
        .limit(PRUNE_BATCH)
    )

    def work(connection: sa.Connection) -> int:
        removed = connection.execute(
            sa.delete(BATCHES).where(BATCHES.c.batch_id.in_(old.scalar_subquery()))
        )
        return int(removed.rowcount)

    return await store.write(work)


def _begin(connection: sa.Connection, owner: str, beginning: Beginning, now: float) -> Begun:
    batch = _get(connection, beginning.batch_id)
    if (
        batch is None
        or batch.owner != owner
        or batch.finished_at is not None
        or batch.next_index != beginning.first
        or (batch.cancelled_at is not None and _any_record(beginning.items))
    ):
        return Begun(batch=batch, taken=0)
    wanted: Sequence[SandboxRecord | ErrorBody] = beginning.items
    if connection.execute(_CLOSED, {"in_project": batch.project_id}).scalar() is not None:
        closed = Forbidden("the project was closed before this item's turn came").to_dict()
        wanted = [closed if isinstance(item, SandboxRecord) else item for item in wanted]
    entered = _enter_tasks(connection, batch.project_id, wanted, now)
    # What is paused goes on later.
    until = next((at for at, item in enumerate(entered) if _is_paused(item)), len(entered))
    items, wait_s = _take_places(connection, batch.project_id, entered[:until], now)
    if until < len(entered) and wait_s is None:
        wait_s = PAUSED_WAIT_S
    _leave_tasks(connection, batch.project_id, entered, items)
    records, rows, failed = [], [], 0
    for index, item in enumerate(items, beginning.first):
        row: dict[str, Any] = {"batch_id": batch.batch_id, "idx": index, "sandbox_id": None}
        if isinstance(item, SandboxRecord):
            records.append((index, item))
            row |= {"sandbox_id": item.sandbox_id, "seq": None, "error": None}
        else:
            failed += 1
            row |= {"seq": batch.outcomes + failed, "error": _encode(item)}
        rows.append(row)
    if rows:
        connection.execute(_INSERT_ITEMS, rows)
        batch = _count(connection, batch, failed=failed, begun=len(rows), now=now)
    return Begun(batch=batch, taken=len(rows), records=records, wait_s=wait_s)


def _is_paused(item: SandboxRecord | ErrorBody) -> bool:
    return not isinstance(item, SandboxRecord) and item["code"] == TaskPaused.code


def _any_record(items: Iterable[SandboxRecord | ErrorBody]) -> bool:
    return any(isinstance(item, SandboxRecord) for item in items)


def _enter_tasks(
    connection: sa.Connection,
    project_id: str,
    items: Sequence[SandboxRecord | ErrorBody],
    now: float,
) -> list[SandboxRecord | ErrorBody]:
    """Count the sandboxes in their tasks, and put refusals in the places of those that a task
    does not take."""
    task_ids = [item.task_id if isinstance(item, SandboxRecord) else None for item in items]
    refusals = enter_many(connection, project_id, task_ids, now=now)
    return [
        item if refusal is None else refusal.to_dict()
        for item, refusal in zip(items, refusals, strict=True)
    ]


def _leave_tasks(
    connection: sa.Connection,
    project_id: str,
    entered: Sequence[SandboxRecord | ErrorBody],
    taken: Sequence[SandboxRecord | ErrorBody],
) -> None:
    """Those that found no place afterwards do not count in their tasks."""
    gone = [
        (project_id, item.task_id)
        for at, item in enumerate(entered)
        if isinstance(item, SandboxRecord)
        and item.task_id is not None
        and not (at < len(taken) and isinstance(taken[at], SandboxRecord))
    ]
    leave(connection, gone)


def _take_places(
    connection: sa.Connection,
    project_id: str,
    items: Sequence[SandboxRecord | ErrorBody],
    now: float,
) -> tuple[list[SandboxRecord | ErrorBody], int | None]:
    """Record the sandboxes that fit, and put refusals in the places of the others; cut before the
    first that has to wait, with the time."""
    result = list(items)
    left = [at for at, item in enumerate(items) if isinstance(item, SandboxRecord)]
    while left:
        records = [_record(result[at]) for at in left]
        wanted = [wanted_of(record) for record in records]
        admitted = admit(connection, project_id, wanted, now=now)
        if admitted.count:
            rows = [row_of(record) for record in records[: admitted.count]]
            connection.execute(_INSERT_SANDBOXES, rows)
        if admitted.refusal is None:
            break
        left, wanted = left[admitted.count :], wanted[admitted.count :]
        if admitted.refusal.details.get("dimension") == _RATE:
            return result[: left[0]], admitted.refusal.retry_after_s or 1
        # What takes as much does not fit either: these are not asked about one by one.
        refused = {at for at, one in zip(left, wanted, strict=True) if one == wanted[0]}
        for at in refused:
            result[at] = admitted.refusal.to_dict()
        left = [at for at in left if at not in refused]
    return result, None


def _count(
    connection: sa.Connection,
    batch: Batch,
    *,
    made: int = 0,
    failed: int = 0,
    begun: int = 0,
    now: float,
) -> Batch:
    batch = msgspec.structs.replace(
        batch,
        next_index=batch.next_index + begun,
        made=batch.made + made,
        failed=batch.failed + failed,
    )
    values = {
        "this_batch": batch.batch_id,
        "next_index": batch.next_index,
        "made": batch.made,
        "failed": batch.failed,
    }
    connection.execute(_COUNT, values)
    if batch.outcomes < batch.asked:
        return batch
    connection.execute(_FINISH, {"this_batch": batch.batch_id, "finished_at": now})
    settle_key(connection, batch.batch_id, "done")
    return msgspec.structs.replace(batch, finished_at=now, owner=None)


def _lock(connection: sa.Connection, store: Store, batch_ids: Iterable[str]) -> None:
    """Before anything else, all at once and in order, so that two transactions never wait for each
    other. SQLite has one writer at a time."""
    if not store.is_sqlite:
        connection.execute(_LOCK, {"these": list(batch_ids)})


def _get(connection: sa.Connection, batch_id: str) -> Batch | None:
    row = connection.execute(_SELECT, {"this_batch": batch_id}).mappings().first()
    return None if row is None else struct_of(row, Batch)


def _item(row: sa.RowMapping) -> Item:
    error = row["error"]
    return Item(
        index=row["idx"],
        seq=row["seq"],
        sandbox_id=row["sandbox_id"],
        error=None if error is None else msgspec.json.decode(error),
    )


def _encode(error: ErrorBody) -> str:
    return msgspec.json.encode(error).decode()


def _record(item: SandboxRecord | ErrorBody) -> SandboxRecord:
    assert isinstance(item, SandboxRecord)
    return item

# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on snapshots. Each function is one round of reading, or one transaction.

A snapshot's row is there before the node makes it, and as long as the node may hold anything of
it, so that nothing is left behind whatever happens in between.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from .keys import find_key, settle_key, take_key
from .packing import plain, struct_of
from .records import IdempotencyClaim, IdempotencyRow, KeyOutcome, Snapshot
from .store import Store
from .tables import IDEMPOTENCY, SNAPSHOTS

_versions = msgspec.json.Decoder(dict[str, str])
_COLUMN = SNAPSHOTS.c


class SnapshotFilter(msgspec.Struct, kw_only=True, frozen=True):
    """Which snapshots of a project to list, newest first, and from where on."""

    project_id: str
    source_id: str | None = None
    name: str | None = None
    """Name or id."""
    tag: str | None = None
    after: tuple[float, str] | None = None
    """``created_at`` and id of the last snapshot of the page before."""
    limit: int


def _row_of(snapshot: Snapshot) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.structs.asdict(snapshot)
    row["versions"] = msgspec.json.encode(snapshot.versions).decode()
    return row


def _snapshot_of(row: sa.RowMapping) -> Snapshot:
    values = plain(row)
    values["versions"] = _versions.decode(values["versions"])
    return msgspec.convert(values, Snapshot)


async def begin_snapshot(
    store: Store, snapshot: Snapshot, claim: IdempotencyClaim | None, result: str | None = None
) -> IdempotencyRow | None:
    """Record a snapshot that is about to be made, and tie the key to it.

    Args:
        store: Where.
        snapshot: In state ``making``.
        claim: The caller's key. None: there is none.
        result: What the key of a fork is to remember.

    Returns:
        None: recorded. Else what the key already stands for; then nothing was written.

    Raises:
        IdempotencyMismatch: the key was used with other parameters.
        StoreUnavailable: nothing was written.
    """

    def work(connection: sa.Connection) -> IdempotencyRow | None:
        project_id, now, renew = snapshot.project_id, snapshot.created_at, False
        if claim is not None:
            earlier, renew = find_key(connection, project_id, claim, now)
            if earlier is not None:
                return earlier
        connection.execute(sa.insert(SNAPSHOTS), _row_of(snapshot))
        if claim is not None:
            take_key(
                connection,
                project_id,
                claim,
                snapshot.snapshot_id,
                now=now,
                renew=renew,
                result=result,
            )
        return None

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process took the key between our look and our insert.
        return await store.write(work)


async def find_request(
    store: Store, project_id: str, claim: IdempotencyClaim, now: float
) -> IdempotencyRow | None:
    """What a key stands for. None: nothing, or an attempt that failed.

    Raises:
        IdempotencyMismatch: the key was used with other parameters.
    """

    def work(connection: sa.Connection) -> IdempotencyRow | None:
        return find_key(connection, project_id, claim, now)[0]

    return await store.read(work)


async def finish_snapshot(store: Store, snapshot: Snapshot) -> bool:
    """Record that a snapshot is there. Its name goes over to it from an older one.

    Returns:
        False: its row is gone.

    Raises:
        StoreUnavailable: nothing was written.
    """

    def work(connection: sa.Connection) -> bool:
        this = _COLUMN.snapshot_id == snapshot.snapshot_id
        if snapshot.name is not None:
            connection.execute(
                sa.update(SNAPSHOTS)
                .where(
                    _COLUMN.project_id == snapshot.project_id,
                    _COLUMN.name == snapshot.name,
                    _COLUMN.tag == snapshot.tag,
                    _COLUMN.state == "ready",
                    ~this,
                )
                .values(name=None)
            )
        changed = connection.execute(
            sa.update(SNAPSHOTS)
            .where(this, _COLUMN.state != "deleting")
            .values(
                state="ready",
                disk_bytes=snapshot.disk_bytes,
                memory_bytes=snapshot.memory_bytes,
                versions=msgspec.json.encode(snapshot.versions).decode(),
            )
        )
        if not snapshot.ephemeral:
            settle_key(connection, snapshot.snapshot_id, "done")
        return bool(changed.rowcount)

    return await store.write(work)


async def settle_request(
    store: Store, snapshot_id: str, outcome: KeyOutcome, result: str | None = None
) -> None:
    """Note how the request went for which a snapshot was made."""

    def work(connection: sa.Connection) -> None:
        settle_key(connection, snapshot_id, outcome, result)

    await store.write(work)


async def key_of(store: Store, snapshot_id: str) -> IdempotencyRow | None:
    """The key of the request for which a snapshot was made, if it had one."""

    def work(connection: sa.Connection) -> IdempotencyRow | None:
        query = sa.select(IDEMPOTENCY).where(IDEMPOTENCY.c.sandbox_id == snapshot_id)
        row = connection.execute(query).mappings().first()
        return None if row is None else struct_of(row, IdempotencyRow)

    return await store.read(work)


async def drop_snapshot(store: Store, snapshot_id: str) -> None:
    """Remove the row of a snapshot of which the node holds nothing. A key that still waits for it
    is free again: settle the key of a fork that made something before this."""

    def work(connection: sa.Connection) -> None:
        settle_key(connection, snapshot_id, "failed")
        connection.execute(sa.delete(SNAPSHOTS).where(_COLUMN.snapshot_id == snapshot_id))

    await store.write(work)


async def mark_deleting(store: Store, snapshot_id: str) -> bool:
    """From now on nobody finds it. False: it was not there to be found."""

    def work(connection: sa.Connection) -> bool:
        changed = connection.execute(
            sa.update(SNAPSHOTS)
            .where(_COLUMN.snapshot_id == snapshot_id, _COLUMN.state == "ready")
            .values(state="deleting", name=None)
        )
        return bool(changed.rowcount)

    return await store.write(work)


async def give_up(store: Store, snapshot_id: str) -> None:
    """Nobody finds it from now on, and a key that waits for it is free. Its row stays, for as long
    as the node may come to hold it."""

    def work(connection: sa.Connection) -> None:
        settle_key(connection, snapshot_id, "failed")
        connection.execute(
            sa.update(SNAPSHOTS)
            .where(_COLUMN.snapshot_id == snapshot_id)
            .values(state="deleting", name=None)
        )

    await store.write(work)


async def get_snapshot(store: Store, snapshot_id: str) -> Snapshot | None:
    """One snapshot, whatever its state."""

    def work(connection: sa.Connection) -> Snapshot | None:
        query = sa.select(SNAPSHOTS).where(_COLUMN.snapshot_id == snapshot_id)
        row = connection.execute(query).mappings().first()
        return None if row is None else _snapshot_of(row)

    return await store.read(work)


async def list_snapshots(store: Store, wanted: SnapshotFilter) -> list[Snapshot]:
    """At most ``wanted.limit`` snapshots that are there, newest first."""
    query = sa.select(SNAPSHOTS).where(
        _COLUMN.project_id == wanted.project_id,
        _COLUMN.state == "ready",
        _COLUMN.ephemeral.is_(False),
    )
    if wanted.source_id is not None:
        query = query.where(_COLUMN.source_id == wanted.source_id)
    if wanted.name is not None:
        query = query.where(sa.or_(_COLUMN.name == wanted.name, _COLUMN.snapshot_id == wanted.name))
    if wanted.tag is not None:
        query = query.where(_COLUMN.tag == wanted.tag)
    if wanted.after is not None:
        last = sa.tuple_(sa.literal(wanted.after[0], sa.Double), sa.literal(wanted.after[1]))
        query = query.where(sa.tuple_(_COLUMN.created_at, _COLUMN.snapshot_id) < last)
    query = query.order_by(_COLUMN.created_at.desc(), _COLUMN.snapshot_id.desc())

    def work(connection: sa.Connection) -> list[Snapshot]:
        rows = connection.execute(query.limit(wanted.limit)).mappings().all()
        return [_snapshot_of(row) for row in rows]

    return await store.read(work)


async def unfinished_snapshots(store: Store, node_id: str) -> list[Snapshot]:
    """Those of a node that are being made or deleted, or belong to a fork."""

    def work(connection: sa.Connection) -> list[Snapshot]:
        query = sa.select(SNAPSHOTS).where(
            _COLUMN.node_id == node_id,
            sa.or_(_COLUMN.state != "ready", _COLUMN.ephemeral.is_(True)),
        )
        rows = connection.execute(query).mappings().all()
        return [_snapshot_of(row) for row in rows]

    return await store.read(work)


async def ids_of_ready(store: Store, node_id: str) -> set[str]:
    """Ids of the snapshots that a node must hold."""

    def work(connection: sa.Connection) -> set[str]:
        query = sa.select(_COLUMN.snapshot_id).where(
            _COLUMN.node_id == node_id,
            _COLUMN.state == "ready",
            _COLUMN.ephemeral.is_(False),
        )
        return set(connection.execute(query).scalars())

    return await store.read(work)

# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on function pools and their workers. Each function is one round of reading, or one
transaction."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.node import Backend

from .store import Store
from .tables import FUNCTION_POOLS, FUNCTION_WORKERS, IDEMPOTENCY


class PoolSpec(msgspec.Struct, kw_only=True, frozen=True):
    """What a pool's workers are."""

    template: str = "base"
    backend: Backend | None = None
    """None: ``container`` where the template allows it."""
    cpu: float = 1.0
    memory_mb: int = 512
    disk_mb: int = 512
    env: dict[str, str] = {}
    internet: bool = True
    modules: dict[str, str] = {}
    """Name → source of modules that calls can import, though the template has them not."""
    preload: tuple[str, ...] = ()
    """Modules that workers import before the first call."""
    workers_min: int = 0
    """Kept ready, whether there are calls or not."""
    workers_max: int = 4
    idle_s: float = 120.0
    """A worker above ``workers_min`` that had nothing to do for so long is ended."""
    calls_max: int = 10_000
    """A worker is replaced after so many calls."""


class PoolRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A pool of one project."""

    pool_id: str
    project_id: str
    name: str
    spec: PoolSpec
    created_at: float
    version: int = 0
    """Of the spec: one more with each change."""


class PoolMark(NamedTuple):
    """What is recorded of a pool, without its spec, which may be long."""

    pool_id: str
    version: int


class WorkerRow(msgspec.Struct, kw_only=True, frozen=True):
    """A worker that somebody made, or was about to make."""

    worker_id: str
    project_id: str
    owner: str
    """The server that made it; the same after a restart."""
    created_at: float


_spec = msgspec.json.Decoder(PoolSpec)
_POOL = FUNCTION_POOLS.c
_WORKER = FUNCTION_WORKERS.c


def worker_key(worker_id: str) -> str:
    """The idempotency key of a worker's sandbox. Nobody can guess it."""
    return f"function-worker.{worker_id}"


def _record(row: sa.RowMapping) -> PoolRecord:
    return PoolRecord(
        pool_id=row["pool_id"],
        project_id=row["project_id"],
        name=row["name"],
        spec=_spec.decode(row["spec"]),
        created_at=row["created_at"],
        version=row["version"],
    )


async def put_pool(store: Store, record: PoolRecord, *, pools_max: int) -> PoolRecord | None:
    """Record a pool, or give the one of its name a new spec (and keep its id).

    Returns:
        What is recorded now. None: the project has ``pools_max`` others already.
    """
    text = msgspec.json.encode(record.spec).decode()
    mine = _POOL.project_id == record.project_id

    def work(connection: sa.Connection) -> PoolRecord | None:
        query = sa.select(FUNCTION_POOLS).where(mine, _POOL.name == record.name)
        row = connection.execute(query).mappings().first()
        if row is not None:
            found = _record(row)
            changed = msgspec.structs.replace(found, spec=record.spec, version=found.version + 1)
            connection.execute(
                sa.update(FUNCTION_POOLS)
                .where(_POOL.pool_id == found.pool_id)
                .values(spec=text, version=changed.version)
            )
            return changed
        count = sa.select(sa.func.count()).select_from(FUNCTION_POOLS).where(mine)
        if connection.execute(count).scalar_one() >= pools_max:
            return None
        values = {**msgspec.structs.asdict(record), "spec": text}
        connection.execute(sa.insert(FUNCTION_POOLS), values)
        return record

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process made it between our look and our insert.
        return await store.write(work)


async def get_pool(store: Store, project_id: str, name: str) -> PoolRecord | None:
    """One pool of a project, by name."""

    def work(connection: sa.Connection) -> PoolRecord | None:
        query = sa.select(FUNCTION_POOLS).where(_POOL.project_id == project_id, _POOL.name == name)
        row = connection.execute(query).mappings().first()
        return None if row is None else _record(row)

    return await store.read(work)


async def list_pools(store: Store, project_id: str) -> list[PoolRecord]:
    """The pools of a project, by name."""

    def work(connection: sa.Connection) -> list[PoolRecord]:
        query = sa.select(FUNCTION_POOLS).where(_POOL.project_id == project_id)
        rows = connection.execute(query.order_by(_POOL.name)).mappings().all()
        return [_record(row) for row in rows]

    return await store.read(work)


async def pool_marks(store: Store) -> dict[tuple[str, str], PoolMark]:
    """The pools of every project, by project and name."""
    query = sa.select(_POOL.project_id, _POOL.name, _POOL.pool_id, _POOL.version)

    def work(connection: sa.Connection) -> dict[tuple[str, str], PoolMark]:
        rows = connection.execute(query).all()
        return {(row.project_id, row.name): PoolMark(row.pool_id, row.version) for row in rows}

    return await store.read(work)


async def all_pools(store: Store) -> list[PoolRecord]:
    """The pools of every project, the oldest first."""

    def work(connection: sa.Connection) -> list[PoolRecord]:
        query = sa.select(FUNCTION_POOLS).order_by(_POOL.created_at, _POOL.pool_id)
        return [_record(row) for row in connection.execute(query).mappings().all()]

    return await store.read(work)


async def delete_pool(store: Store, pool_id: str) -> bool:
    """Forget a pool. False: it was not there."""

    def work(connection: sa.Connection) -> bool:
        gone = connection.execute(sa.delete(FUNCTION_POOLS).where(_POOL.pool_id == pool_id))
        return bool(gone.rowcount)

    return await store.write(work)


async def add_worker(store: Store, row: WorkerRow) -> None:
    """Note a worker, before its sandbox is asked for."""
    values = msgspec.structs.asdict(row)
    await store.write(lambda c: c.execute(sa.insert(FUNCTION_WORKERS), values))


async def drop_worker(store: Store, worker_id: str) -> None:
    """Forget a worker whose sandbox has ended, or never was."""

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.delete(FUNCTION_WORKERS).where(_WORKER.worker_id == worker_id))

    await store.write(work)


async def workers_of(store: Store, owner: str) -> list[tuple[WorkerRow, str | None]]:
    """Workers that a server has made, with their sandboxes. None: none was asked for."""
    query = (
        sa.select(FUNCTION_WORKERS, IDEMPOTENCY.c.sandbox_id)
        .select_from(
            FUNCTION_WORKERS.outerjoin(
                IDEMPOTENCY,
                sa.and_(
                    IDEMPOTENCY.c.project_id == _WORKER.project_id,
                    IDEMPOTENCY.c.key == sa.literal(worker_key("")).concat(_WORKER.worker_id),
                ),
            )
        )
        .where(_WORKER.owner == owner)
    )

    def work(connection: sa.Connection) -> list[tuple[WorkerRow, str | None]]:
        found = []
        for row in connection.execute(query).mappings().all():
            values = dict(row)
            sandbox_id = values.pop("sandbox_id")
            found.append((WorkerRow(**values), sandbox_id))
        return found

    return await store.read(work)

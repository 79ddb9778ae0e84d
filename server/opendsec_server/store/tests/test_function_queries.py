# SPDX-License-Identifier: AGPL-3.0-only
"""Function pools and workers in the store."""

from __future__ import annotations

import asyncio

import msgspec
import sqlalchemy as sa

from opendsec_server.store import accounts, functions
from opendsec_server.store.functions import PoolRecord, PoolSpec, WorkerRow
from opendsec_server.store.records import Project
from opendsec_server.store.store import Store
from opendsec_server.store.tables import IDEMPOTENCY

from .test_queries import key_of, store

__all__ = ["store"]

SPEC = PoolSpec(preload=("json",), modules={"a.b": "x = 'é'"}, env={"A": "1"})


def record(number: int, name: str = "pool", project: str = "p") -> PoolRecord:
    return PoolRecord(
        pool_id=f"f{number}", project_id=project, name=name, spec=SPEC, created_at=float(number)
    )


async def other_project(store: Store) -> None:
    other = Project(project_id="q", name="q", sandboxes_max=1, created_at=0.0)
    await accounts.insert_project(
        store, other, msgspec.structs.replace(key_of("kq"), project_id="q")
    )


async def test_a_pool_keeps_its_id_and_takes_the_new_spec(store: Store) -> None:
    await other_project(store)
    assert await functions.put_pool(store, record(1), pools_max=1) == record(1)
    assert await functions.get_pool(store, "p", "pool") == record(1)
    changed = msgspec.structs.replace(record(2), spec=PoolSpec())
    found = await functions.put_pool(store, changed, pools_max=1)
    assert found == msgspec.structs.replace(record(1), spec=PoolSpec(), version=1)
    assert await functions.put_pool(store, record(3, "more"), pools_max=1) is None
    assert await functions.put_pool(store, record(4, project="q"), pools_max=1) is not None
    assert [pool.pool_id for pool in await functions.list_pools(store, "p")] == ["f1"]
    assert [pool.pool_id for pool in await functions.all_pools(store)] == ["f1", "f4"]
    assert await functions.get_pool(store, "q", "more") is None
    assert await functions.delete_pool(store, "f1")
    assert not await functions.delete_pool(store, "f1")
    assert await functions.get_pool(store, "p", "pool") is None


async def test_pools_of_one_name_at_once_are_one(store: Store) -> None:
    made = await asyncio.gather(
        *(functions.put_pool(store, record(number), pools_max=5) for number in range(6))
    )
    assert len({pool.pool_id for pool in made if pool is not None}) == 1
    assert len(await functions.list_pools(store, "p")) == 1


async def test_workers_are_found_with_their_sandboxes(store: Store) -> None:
    for number, owner in enumerate(("me", "me", "other")):
        row = WorkerRow(worker_id=f"w{number}", project_id="p", owner=owner, created_at=1.0)
        await functions.add_worker(store, row)
    values = {
        "project_id": "p", "key": functions.worker_key("w1"), "params_sha256": "",
        "sandbox_id": "isandbox", "outcome": "pending", "expires_at": 1.0,
    }  # fmt: skip
    await store.write(lambda c: c.execute(sa.insert(IDEMPOTENCY), values) and None)
    found = {row.worker_id: name for row, name in await functions.workers_of(store, "me")}
    assert found == {"w0": None, "w1": "isandbox"}
    await functions.drop_worker(store, "w0")
    await functions.drop_worker(store, "w0")
    assert len(await functions.workers_of(store, "me")) == 1

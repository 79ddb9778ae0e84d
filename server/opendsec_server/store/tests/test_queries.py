# SPDX-License-Identifier: AGPL-3.0-only
"""Filters, pages, changes of state and pruning."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from opendsec_server.config import Config
from opendsec_server.contract.errors import Conflict, IdempotencyMismatch, QuotaExceeded
from opendsec_server.contract.states import (
    TERMINAL,
    TRANSITIONS_KEPT_MAX,
    EndReason,
    State,
    can_move,
)
from opendsec_server.store import accounts, packing, sandboxes
from opendsec_server.store.changes import apply_changes, steps
from opendsec_server.store.creates import begin_create
from opendsec_server.store.records import (
    ApiKey,
    IdempotencyClaim,
    Project,
    SandboxRecord,
    StateChange,
)
from opendsec_server.store.sandboxes import SandboxFilter
from opendsec_server.store.store import Store

PROJECT = Project(project_id="p", name="p", sandboxes_max=1_000, created_at=0.0)
DATABASES = ["sqlite"]
if "OPENDSEC_TEST_POSTGRES_URL" in os.environ:
    DATABASES.append("postgres")


@pytest_asyncio.fixture(params=DATABASES)
async def store(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    url = os.environ["OPENDSEC_TEST_POSTGRES_URL"] if request.param == "postgres" else None
    opened = await Store.open(Config(state_dir=str(tmp_path), database_url=url))
    if url is not None:
        await empty(opened)
    await accounts.insert_project(opened, PROJECT, key_of("k1"))
    yield opened
    await opened.close()


async def empty(store: Store) -> None:
    from opendsec_server.store.tables import METADATA

    def work(connection: object) -> None:
        for table in reversed(METADATA.sorted_tables):
            connection.execute(table.delete())  # type: ignore[attr-defined]

    await store.write(work)


def key_of(name: str) -> ApiKey:
    return ApiKey(key_id=name, project_id="p", name=name, sha256=name, hint="", created_at=0.0)


def record_of(number: int, **fields: object) -> SandboxRecord:
    values = {
        "sandbox_id": f"in0de{number:015d}",
        "project_id": "p",
        "node_id": "n0de",
        "template_id": "t",
        "template": "base",
        "backend": "container",
        "state": State.PENDING,
        "cpu": 2.0,
        "memory_mb": 1024,
        "disk_mb": 1024,
        "env": {"A": "b\0c"},
        "metadata": {},
        "labels": [],
        "task_id": None,
        "created_at": float(number),
        "end_at": 1e10,
        **fields,
    }
    return SandboxRecord(**values)  # type: ignore[arg-type]


async def ids(store: Store, **wanted: object) -> list[int]:
    found = await sandboxes.list_sandboxes(
        store,
        SandboxFilter(**{"project_id": "p", "limit": 100, **wanted}),  # type: ignore[arg-type]
    )
    return [int(record.sandbox_id[5:]) for record in found]


async def test_record_survives_the_database(store: Store) -> None:
    record = record_of(1, metadata={'a"': "\\"}, labels=["x"], task_id="t")
    await begin_create(store, record, None)
    assert await sandboxes.get_sandbox(store, record.sandbox_id) == record


async def test_filters(store: Store) -> None:
    await begin_create(store, record_of(1, metadata={"k": "v", "K": "V"}, task_id="t"), None)
    await begin_create(store, record_of(2, metadata={'x"k': "v"}, labels=["a", "b"]), None)
    await begin_create(store, record_of(3, metadata={"k": "v2", ',"k': "v"}), None)
    assert await ids(store) == [3, 2, 1]
    assert await ids(store, ascending=True) == [1, 2, 3]
    assert await ids(store, metadata=(("k", "v"),)) == [1]
    assert await ids(store, metadata=(("k", "V"),)) == []
    assert await ids(store, metadata=(("k", "v"), ("K", "V"))) == [1]
    assert await ids(store, labels=("b",)) == [2]
    assert await ids(store, task_id="t") == [1]
    assert await ids(store, started_after=2.0) == [3, 2]
    assert await ids(store, states=(State.RUNNING,)) == []
    assert await ids(store, project_id="other") == []
    assert await ids(store, template_id="") == []


async def test_pages_join_without_gap(store: Store) -> None:
    for number in range(7):
        await begin_create(store, record_of(number, created_at=float(number // 3)), None)
    for ascending in (False, True):
        seen: list[int] = []
        after = None
        for _ in range(4):
            page = await sandboxes.list_sandboxes(
                store, SandboxFilter(project_id="p", limit=2, after=after, ascending=ascending)
            )
            seen += [int(r.sandbox_id[5:]) for r in page]
            after = (page[-1].created_at, page[-1].sandbox_id)
        assert seen == sorted(range(7), reverse=not ascending)


async def test_quota_counts_live_ones(store: Store) -> None:
    await store.write(
        lambda c: c.exec_driver_sql("UPDATE projects SET sandboxes_max = 1 WHERE project_id = 'p'")
    )
    await begin_create(store, record_of(1), None)
    with pytest.raises(QuotaExceeded):
        await begin_create(store, record_of(2), None)
    await apply_changes(store, [change(1, State.ENDED, reason=EndReason.KILLED)])
    await begin_create(store, record_of(2), None)


def change(number: int, state: State, **fields: object) -> StateChange:
    return StateChange(
        sandbox_id=f"in0de{number:015d}",
        state=state,
        at=5.0,
        cause="node",
        **fields,  # type: ignore[arg-type]
    )


async def test_key_life(store: Store) -> None:
    claim = IdempotencyClaim(key="k", params_sha256="a")
    assert await begin_create(store, record_of(1), claim) is None
    earlier = await begin_create(store, record_of(2), claim)
    assert earlier is not None
    assert (earlier.outcome, earlier.sandbox_id) == ("pending", record_of(1).sandbox_id)
    with pytest.raises(IdempotencyMismatch):
        await begin_create(store, record_of(2), IdempotencyClaim(key="k", params_sha256="b"))
    await apply_changes(store, [change(1, State.FAILED, reason=EndReason.START_FAILED)])
    assert await begin_create(store, record_of(2), claim) is None
    await apply_changes(store, [change(2, State.RUNNING)])
    await apply_changes(store, [change(2, State.ENDED, reason=EndReason.KILLED)])
    done = await begin_create(store, record_of(3), claim)
    assert done is not None
    assert (done.outcome, done.sandbox_id) == ("done", record_of(2).sandbox_id)
    late = record_of(4, created_at=time.time() * 2)
    assert await begin_create(store, late, claim) is None, "expired keys are free"


async def test_changes_follow_the_table(store: Store) -> None:
    await begin_create(store, record_of(1), None)
    changes = [
        change(1, State.RUNNING, started_at=4.0),
        change(1, State.RUNNING),
        change(1, State.ENDED, reason=EndReason.OOM, message="at 1 GiB", fault="user"),
        change(1, State.RUNNING),
        change(9, State.ENDED),
    ]
    applied = await apply_changes(store, changes)
    assert applied == [changes[0], changes[2]]
    record = await sandboxes.get_sandbox(store, changes[0].sandbox_id)
    assert record is not None
    assert (record.state, record.end_reason, record.ended_at) == (State.ENDED, EndReason.OOM, 5.0)
    assert (record.message, record.fault, record.started_at) == ("at 1 GiB", "user", 4.0)
    kept = await sandboxes.transitions_of(store, record.sandbox_id)
    assert [t.to_state for t in kept] == [State.STARTING, State.RUNNING, State.ENDED]
    assert kept[0].from_state is State.PENDING
    assert await apply_changes(store, []) == []


async def test_only_the_last_transitions_are_kept(store: Store) -> None:
    await begin_create(store, record_of(1), None)
    for _ in range(30):
        await apply_changes(store, [change(1, State.RUNNING), change(1, State.PAUSED)])
    kept = await sandboxes.transitions_of(store, record_of(1).sandbox_id)
    assert len(kept) == TRANSITIONS_KEPT_MAX
    assert kept[-1].to_state is State.PAUSED


async def test_prune_removes_old_ends_only(store: Store) -> None:
    for number in (1, 2, 3):
        await begin_create(store, record_of(number), None)
    await apply_changes(store, [change(1, State.ENDED)])
    await apply_changes(store, [msgspec.structs.replace(change(2, State.ENDED), at=50.0)])
    assert await sandboxes.prune(store, ended_before=10.0, now=0.0) == 1
    assert await ids(store) == [3, 2]
    assert await sandboxes.transitions_of(store, record_of(1).sandbox_id) == []


async def test_last_key_stays(store: Store) -> None:
    with pytest.raises(Conflict):
        await accounts.delete_key(store, "p", "k1")
    await accounts.insert_key(store, key_of("k2"))
    assert await accounts.delete_key(store, "p", "nope") is None
    assert await accounts.delete_key(store, "other", "k1") is None
    assert await accounts.delete_key(store, "p", "k1") is not None


@pytest.mark.parametrize("source", list(State))
@pytest.mark.parametrize("target", list(State))
def test_steps_are_allowed_ones(source: State, target: State) -> None:
    way = (source, *steps(source, target))
    for before, after in itertools.pairwise(way):
        assert can_move(before, after)
    if len(way) > 1:
        assert way[-1] is target
        assert not TERMINAL.intersection(way[:-1])


def test_steps_into_running() -> None:
    assert steps(State.PENDING, State.RUNNING) == (State.STARTING, State.RUNNING)
    assert steps(State.PAUSED, State.RUNNING) == (State.RESUMING, State.RUNNING)
    assert steps(State.ENDED, State.RUNNING) == ()


texts = st.text(max_size=6) | st.text(alphabet='",:\\ak', max_size=8)


@given(st.dictionaries(texts, texts, max_size=4), texts, texts)
def test_packed_maps_contain_their_entries_only(
    values: dict[str, str], key: str, value: str
) -> None:
    packed = packing.pack_map(values)
    assert packing.unpack_map(packed) == values
    assert (packing.map_entry(key, value) in packed) == (values.get(key) == value)


@given(st.lists(texts, max_size=4), texts)
def test_packed_lists_contain_their_entries_only(values: list[str], value: str) -> None:
    packed = packing.pack_list(values)
    assert packing.unpack_list(packed) == values
    assert (packing.list_entry(value) in packed) == (value in values)

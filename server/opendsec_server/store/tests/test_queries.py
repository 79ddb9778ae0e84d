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
from opendsec_server.store import accounts, packing, sandboxes, snapshots
from opendsec_server.store.changes import apply_changes, steps
from opendsec_server.store.creates import begin_create
from opendsec_server.store.places import end_places, give_back_places, hold_places
from opendsec_server.store.records import (
    ApiKey,
    IdempotencyClaim,
    Project,
    SandboxRecord,
    Snapshot,
    StateChange,
)
from opendsec_server.store.sandboxes import SandboxFilter
from opendsec_server.store.snapshots import SnapshotFilter
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


async def test_reports_are_ordered_by_the_nodes_count(store: Store) -> None:
    await begin_create(store, record_of(1), None)
    name = record_of(1).sandbox_id

    async def applied(*changes: StateChange) -> list[bool]:
        done = await apply_changes(store, changes)
        return [change in done for change in changes]

    async def state() -> tuple[State, int, str | None]:
        record = await sandboxes.get_sandbox(store, name)
        assert record is not None
        return record.state, record.node_seq, record.paused_mode

    running = change(1, State.RUNNING, seq=2, started_at=4.0, accelerator="kvm", vmm="v 1")
    paused = change(1, State.PAUSED, seq=4, paused_mode="full")
    assert await applied(running, paused) == [True, True]
    assert await state() == (State.PAUSED, 4, "full")
    late = [change(1, State.PAUSING, seq=3), change(1, State.RUNNING, seq=2), paused]
    assert await applied(*late) == [False] * 3
    assert await state() == (State.PAUSED, 4, "full")
    # Seen in the same state, a pause later: what it tells is newer all the same.
    again = change(1, State.PAUSED, seq=8, paused_mode="filesystem", end_at=7.0)
    assert await applied(again) == [False]
    assert await state() == (State.PAUSED, 8, "filesystem")
    starting = change(1, State.RUNNING, while_in=(State.PENDING, State.STARTING))
    assert await applied(starting) == [False]
    assert await applied(change(1, State.RUNNING, seq=10, started_at=9.0)) == [True]
    assert await state() == (State.RUNNING, 10, None)
    record = await sandboxes.get_sandbox(store, name)
    assert record is not None
    assert (record.started_at, record.end_at) == (4.0, 7.0), "a resume is no start"
    assert (record.accelerator, record.vmm) == ("kvm", "v 1")
    assert await applied(change(1, State.ENDED)) == [True], "reports without a count are believed"
    assert await applied(change(1, State.RUNNING, seq=99)) == [False]


async def test_paused_ones_leave_their_place(store: Store) -> None:
    await store.write(
        lambda c: c.exec_driver_sql("UPDATE projects SET sandboxes_max = 1 WHERE project_id = 'p'")
    )
    await begin_create(store, record_of(1, state=State.PAUSED, auto_resume=True), None)
    await begin_create(store, record_of(3, state=State.PAUSED), None)
    first, third = record_of(1).sandbox_id, record_of(3).sandbox_id
    assert await hold_places(store, [first], now=1.0) == {}
    assert await hold_places(store, [first], now=1.0) == {}, "it has one"
    assert list(await hold_places(store, [third], now=1.0)) == [third]
    with pytest.raises(QuotaExceeded):
        await begin_create(store, record_of(2), None)
    assert await sandboxes.ids_to_wake(store) == [first]
    await give_back_places(store, [first, "nobody"])
    await begin_create(store, record_of(2), None)
    assert list(await hold_places(store, [first, third], now=1.0)) == [first, third]
    assert await hold_places(store, [record_of(2).sandbox_id, "nobody"], now=1.0) == {}


async def test_a_place_goes_when_the_record_says_how_it_went(store: Store) -> None:
    await store.write(
        lambda c: c.exec_driver_sql("UPDATE projects SET sandboxes_max = 1 WHERE project_id = 'p'")
    )
    name = record_of(1).sandbox_id
    await begin_create(store, record_of(1, state=State.PAUSED, node_seq=4), None)
    assert await hold_places(store, [name], now=1.0) == {}
    await apply_changes(store, [change(1, State.RESUMING, seq=5)])
    await apply_changes(store, [change(1, State.PAUSED, seq=6)])
    await begin_create(store, record_of(2, state=State.PAUSED), None)
    await begin_create(store, record_of(3), None)
    await apply_changes(store, [change(3, State.ENDED, reason=EndReason.KILLED)])
    assert await hold_places(store, [name], now=1.0) == {}
    # A late word of the pause does not take the place away.
    await apply_changes(store, [change(1, State.PAUSED, seq=6)])
    with pytest.raises(QuotaExceeded):
        await begin_create(store, record_of(4), None)
    await apply_changes(store, [change(1, State.RUNNING, seq=8)])
    with pytest.raises(QuotaExceeded):
        await begin_create(store, record_of(4), None)
    await apply_changes(store, [change(1, State.PAUSED, seq=10)])
    await begin_create(store, record_of(4), None)


async def test_a_place_that_nobody_gives_back_has_its_time(store: Store) -> None:
    await store.write(
        lambda c: c.exec_driver_sql("UPDATE projects SET sandboxes_max = 1 WHERE project_id = 'p'")
    )
    await begin_create(store, record_of(1, state=State.PAUSED), None)
    assert await hold_places(store, [record_of(1).sandbox_id], now=100.0) == {}
    assert await end_places(store, now=101.0) == 0
    with pytest.raises(QuotaExceeded):
        await begin_create(store, record_of(2), None)
    assert await end_places(store, now=1e6) == 1
    await begin_create(store, record_of(2), None)


def snapshot_of(number: int, **fields: object) -> Snapshot:
    values: dict[str, object] = {
        "snapshot_id": f"s{number:019d}",
        "project_id": "p",
        "node_id": "n0de",
        "source_id": "i1",
        "name": None,
        "tag": "default",
        "state": "making",
        "ephemeral": False,
        "keyed": True,
        "backend": "microvm",
        "mode": "full",
        "template_id": "t",
        "template": "base",
        "image": "base",
        "cpu": 2.0,
        "memory_mb": 1024,
        "disk_mb": 1024,
        "default_user": "user",
        "default_workdir": None,
        "created_at": float(number),
        "versions": {"vmm": "x"},
        **fields,
    }
    return Snapshot(**values)  # type: ignore[arg-type]


async def test_snapshots_and_their_names(store: Store) -> None:
    wanted = SnapshotFilter(project_id="p", limit=10)
    first, second = (snapshot_of(number, name="n") for number in (1, 2))
    for each in (first, second):
        assert await snapshots.begin_snapshot(store, each, None) is None
    assert await snapshots.list_snapshots(store, wanted) == []
    assert len(await snapshots.unfinished_snapshots(store, "n0de")) == 2
    assert await snapshots.finish_snapshot(
        store, msgspec.structs.replace(first, disk_bytes=1 << 40, memory_bytes=5)
    )
    found = await snapshots.get_snapshot(store, first.snapshot_id)
    assert found is not None
    assert (found.state, found.disk_bytes, found.versions) == ("ready", 1 << 40, {"vmm": "x"})
    assert await snapshots.finish_snapshot(store, second)
    assert [(s.snapshot_id, s.name) for s in await snapshots.list_snapshots(store, wanted)] == [
        (second.snapshot_id, "n"),
        (first.snapshot_id, None),
    ]
    page = msgspec.structs.replace(wanted, after=(second.created_at, second.snapshot_id))
    assert len(await snapshots.list_snapshots(store, page)) == 1
    assert await snapshots.mark_deleting(store, second.snapshot_id)
    assert not await snapshots.mark_deleting(store, second.snapshot_id)
    assert not await snapshots.finish_snapshot(store, second), "it is being deleted"
    assert await snapshots.ids_of_ready(store, "n0de") == {first.snapshot_id}
    await snapshots.drop_snapshot(store, second.snapshot_id)
    assert await snapshots.get_snapshot(store, second.snapshot_id) is None


async def test_keys_of_snapshots_and_forks(store: Store) -> None:
    claim = IdempotencyClaim(key="k", params_sha256="a")
    first, second = snapshot_of(1), snapshot_of(2, ephemeral=True)
    assert await snapshots.begin_snapshot(store, first, claim) is None
    earlier = await snapshots.begin_snapshot(store, second, claim)
    assert earlier is not None
    assert (earlier.sandbox_id, earlier.outcome) == (first.snapshot_id, "pending")
    with pytest.raises(IdempotencyMismatch):
        other = IdempotencyClaim(key="k", params_sha256="b")
        await snapshots.begin_snapshot(store, second, other)
    with pytest.raises(IdempotencyMismatch):
        await begin_create(store, record_of(1), IdempotencyClaim(key="k", params_sha256="b"))
    await snapshots.drop_snapshot(store, first.snapshot_id)
    assert await snapshots.begin_snapshot(store, second, claim, "[1]") is None
    assert await snapshots.finish_snapshot(store, second)
    row = await snapshots.key_of(store, second.snapshot_id)
    assert row is not None
    assert (row.outcome, row.result) == ("pending", "[1]"), "a fork is not over with its snapshot"
    await snapshots.settle_request(store, second.snapshot_id, "done", "[2]")
    await snapshots.drop_snapshot(store, second.snapshot_id)
    row = await snapshots.key_of(store, second.snapshot_id)
    assert row is not None
    assert (row.outcome, row.result) == ("done", "[2]")
    assert await snapshots.key_of(store, "none") is None


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

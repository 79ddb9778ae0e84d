# SPDX-License-Identifier: AGPL-3.0-only
"""Tasks, operations on them, and what sandboxes used, in the database."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec_server.contract.errors import (
    IdempotencyMismatch,
    OpendsecError,
    QuotaExceeded,
    TaskBudgetReached,
    TaskEnded,
    TaskNotFound,
    TaskPaused,
)
from opendsec_server.contract.node import SandboxUsage
from opendsec_server.contract.states import EndReason, State
from opendsec_server.store import accounts, migrate, sandboxes, tasks
from opendsec_server.store.changes import apply_changes
from opendsec_server.store.creates import begin_create
from opendsec_server.store.places import give_back_places, hold_places
from opendsec_server.store.records import StateChange
from opendsec_server.store.store import Store
from opendsec_server.store.tables import PROJECT_USE, PROJECTS
from opendsec_server.store.task_operations import (
    Noted,
    OperationParams,
    TaskOperation,
    begin_operation,
    claim_operations,
    missing_of,
    note_outcomes,
    operations_of,
    outcomes_after,
    prune_operations,
)
from opendsec_server.store.tasks import Task
from opendsec_server.store.usage import get_usage, note_usage

from .test_open import config_at, make
from .test_queries import PROJECT, key_of, record_of, store

__all__ = ["store"]
NOW = 1_000.0


async def put(store: Store, number: int, **fields: object) -> str:
    record = record_of(number, **{"task_id": "t", "created_at": NOW, **fields})
    await begin_create(store, record, None)
    return record.sandbox_id


async def move(store: Store, sandbox_id: str, state: State, **fields: Any) -> None:
    values = {"at": NOW, "cause": "test", **fields}
    await apply_changes(store, [StateChange(sandbox_id=sandbox_id, state=state, **values)])


async def task_of(store: Store) -> Task:
    found = await tasks.get_task(store, "p", "t")
    assert found is not None
    return found


def operation(name: str, kind: str = "pause", **fields: Any) -> TaskOperation:
    values = {"project_id": "p", "task_id": "t", "params": OperationParams(), **fields}
    values = {"created_at": NOW, "owner": "me", "lease_until": NOW + 10, **values}
    return TaskOperation(operation_id=name, kind=kind, **values)  # type: ignore[arg-type]


async def test_limits_are_held_where_sandboxes_are_recorded(store: Store) -> None:
    await tasks.make_task(
        store, Task(project_id="p", task_id="t", created_at=1, used_at=1, sandboxes_max=2)
    )
    first = await put(store, 1)
    await put(store, 2)
    with pytest.raises(TaskBudgetReached):
        await put(store, 3)
    assert await sandboxes.get_sandbox(store, "in0de000000000000003") is None
    # A start that failed gives its place back.
    await move(store, first, State.FAILED, reason=EndReason.START_FAILED)
    await put(store, 4)
    assert (await task_of(store)).made == 2
    await tasks.set_task(store, "p", "t", {"sandboxes_max": None, "state": "paused"})
    with pytest.raises(TaskPaused):
        await put(store, 5)
    await tasks.set_task(store, "p", "t", {"state": "ended", "end_reason": "killed"})
    with pytest.raises(TaskEnded):
        await put(store, 5)
    assert (await task_of(store)).made == 2


async def test_a_create_that_is_refused_counts_nowhere(store: Store) -> None:
    await store.write(lambda c: c.execute(sa.update(PROJECTS).values(sandboxes_max=1)) and None)
    await put(store, 1)
    with pytest.raises(QuotaExceeded):
        await put(store, 2)
    assert (await task_of(store)).made == 1


async def test_creates_at_once_never_pass_a_budget(store: Store) -> None:
    await tasks.make_task(
        store, Task(project_id="p", task_id="t", created_at=1, used_at=1, sandboxes_max=7)
    )
    results = await asyncio.gather(
        *(put(store, number) for number in range(20)), return_exceptions=True
    )
    made = [one for one in results if isinstance(one, str)]
    refused = [one for one in results if isinstance(one, TaskBudgetReached)]
    assert (len(made), len(refused)) == (7, 13)
    assert (await task_of(store)).made == 7


async def test_many_enter_as_far_as_they_may(store: Store) -> None:
    await tasks.make_task(
        store, Task(project_id="p", task_id="t", created_at=1, used_at=1, sandboxes_max=2)
    )

    def work(connection: sa.Connection) -> list[OpendsecError | None]:
        names = ["t", None, "t", "other", "t", "t"]
        return tasks.enter_many(connection, "p", names, now=NOW)

    refusals = await store.write(work)
    assert [type(refusal) for refusal in refusals] == [
        type(None),
        type(None),
        type(None),
        type(None),
        TaskBudgetReached,
        TaskBudgetReached,
    ]
    assert (await task_of(store)).made == 2


async def test_an_operation_from_begin_to_end(store: Store) -> None:
    with pytest.raises(TaskNotFound):
        await begin_operation(store, operation("a"), now=NOW)
    names = [await put(store, number) for number in range(3)]
    await put(store, 7, task_id="other")
    for name in names:
        await move(store, name, State.RUNNING)
    begun, new = await begin_operation(store, operation("a", key="k"), now=NOW)
    assert (begun.asked, begun.finished_at, new) == (3, None, True)
    assert (await task_of(store)).state == "paused"
    assert sorted(await missing_of(store, "a")) == names
    # The same is joined, by key or without; another use of the key is refused.
    assert await begin_operation(store, operation("b"), now=NOW) == (begun, False)
    assert await begin_operation(store, operation("b", key="k"), now=NOW) == (begun, False)
    with pytest.raises(IdempotencyMismatch):
        await begin_operation(store, operation("b", "kill", key="k"), now=NOW)
    outcomes = [
        Noted(sandbox_id=names[2], outcome="done", memory_freed_bytes=5),
        Noted(sandbox_id=names[0], outcome="error", error='{"code": "x"}'),
    ]
    half = await note_outcomes(store, "a", "me", outcomes, now=NOW, lease_until=NOW + 20)
    assert half is not None
    assert (half.done, half.failed, half.memory_freed_bytes, half.finished_at) == (1, 1, 5, None)
    assert await missing_of(store, "a") == [names[1]]
    last = [Noted(sandbox_id=names[1], outcome="gone")]
    # Only its owner writes.
    assert await note_outcomes(store, "a", "you", last, now=NOW, lease_until=NOW) is None
    whole = await note_outcomes(store, "a", "me", last, now=NOW + 1, lease_until=NOW + 20)
    assert whole is not None
    assert (whole.done, whole.failed, whole.finished_at) == (2, 1, NOW + 1)
    assert await note_outcomes(store, "a", "me", [], now=NOW, lease_until=NOW) is None
    found, items = await outcomes_after(store, "a", 1, 10)
    assert found == whole
    assert [(item.seq, item.sandbox_id, item.outcome) for item in items] == [
        (2, names[0], "error"),
        (3, names[1], "gone"),
    ]
    assert await prune_operations(store, finished_before=NOW) == 0
    assert await prune_operations(store, finished_before=NOW + 2) == 1
    assert await operations_of(store, "p", "t", limit=10) == []


async def test_a_kill_ends_the_task_and_takes_what_came_by_other_ways(store: Store) -> None:
    name = await put(store, 1)
    await move(store, name, State.RUNNING)
    await begin_operation(store, operation("a"), now=NOW)
    await begin_operation(store, operation("b", "kill"), now=NOW + 1)
    paused, _ = await outcomes_after(store, "a", 0, 1)
    assert paused is not None
    assert (paused.superseded_by, paused.finished_at) == ("b", NOW + 1)
    ended = await task_of(store)
    assert (ended.state, ended.end_reason, ended.ended_at) == ("ended", "killed", NOW + 1)
    with pytest.raises(TaskEnded):
        await begin_operation(store, operation("c", "resume"), now=NOW)
    # A create that went to another node has another id since.
    await sandboxes.insert_adopted(store, record_of(2, task_id="t", state=State.RUNNING))
    first = [Noted(sandbox_id=name, outcome="done")]
    await move(store, name, State.ENDED)
    after = await note_outcomes(store, "b", "me", first, now=NOW, lease_until=NOW)
    assert after is not None
    assert (after.asked, after.finished_at) == (2, None)
    assert await missing_of(store, "b") == ["in0de000000000000002"]


async def test_operations_of_a_dead_process_are_taken_over_once(store: Store) -> None:
    await put(store, 1)
    await begin_operation(store, operation("a"), now=NOW)
    claims: dict[str, Any] = {"now": NOW + 5, "lease_until": NOW + 15, "alone": False}
    assert await claim_operations(store, "you", **claims) == []
    claims["now"] = NOW + 11
    assert [one.operation_id for one in await claim_operations(store, "you", **claims)] == ["a"]
    assert await claim_operations(store, "third", **claims) == []
    claims["alone"] = True
    assert [one.operation_id for one in await claim_operations(store, "third", **claims)] == ["a"]


async def test_use_is_kept_in_order_and_counts_for_quotas(store: Store) -> None:
    name = await put(store, 1)
    await move(store, name, State.RUNNING)
    late = SandboxUsage(cpu_seconds=5, egress_bytes=700, disk_bytes=3, at=20)
    today = time.time()
    await note_usage(store, {name: late, "nobody": late}, now=today)
    await note_usage(store, {name: SandboxUsage(cpu_seconds=4, at=10)}, now=today)
    assert await get_usage(store, [name, "nobody"]) == {name: late}
    end = SandboxUsage(cpu_seconds=6, egress_bytes=1_000, disk_bytes=3, at=30)
    await move(store, name, State.ENDED, reason=EndReason.KILLED, usage=end)
    assert await get_usage(store, [name]) == {name: end}
    sent = await store.read(lambda c: c.execute(sa.select(PROJECT_USE.c.egress_bytes)).scalar())
    assert sent == 1_000
    second = await put(store, 2)
    await note_usage(
        store, {second: SandboxUsage(memory_mb_seconds=2, disk_bytes=9, at=1)}, now=NOW
    )
    total = (await tasks.sum_of(store, "p", ["t"]))["t"]
    assert (total.cpu_seconds, total.memory_mb_seconds) == (6, 2)
    assert (total.egress_bytes, total.disk_bytes) == (1_000, 9)
    # Records go after a while; what their tasks have used does not.
    assert await sandboxes.prune(store, ended_before=NOW + 1, now=NOW) == 1
    assert await get_usage(store, [name]) == {}
    kept = await task_of(store)
    assert (kept.past_cpu_seconds, kept.past_egress_bytes) == (6, 1_000)
    counts = (await tasks.counts_of(store, "p", ["t"]))["t"]
    assert [(count.state, count.count) for count in counts] == [(State.PENDING, 1)]


async def test_tasks_of_which_nothing_is_left_go(store: Store) -> None:
    await put(store, 1)
    old = Task(project_id="p", task_id="old", created_at=1, used_at=1)
    wanted = Task(project_id="p", task_id="wanted", created_at=1, used_at=1, deadline_at=NOW * 2)
    for one in (old, wanted):
        await tasks.make_task(store, one)
    assert [task.task_id for task in await tasks.limited_tasks(store)] == ["wanted"]
    assert await tasks.prune_tasks(store, unused_since=NOW + 1) == 1
    listed = await tasks.list_tasks(store, "p", limit=10)
    assert [task.task_id for task in listed] == ["t", "wanted"]


async def test_places_are_given_in_order(store: Store) -> None:
    names = [await put(store, number) for number in range(4)]
    for name in names:
        await move(store, name, State.PAUSED)
    await store.write(lambda c: c.execute(sa.update(PROJECTS).values(sandboxes_max=3)) and None)
    assert list(await hold_places(store, names, now=1.0)) == names[3:]
    await give_back_places(store, names)
    assert await hold_places(store, names[3:], now=1.0) == {}
    assert list(await hold_places(store, names[:3], now=1.0)) == [names[2]]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["done", "error"]), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_outcomes_are_numbered_without_gaps(plan: list[tuple[str, int, bool]]) -> None:
    """However outcomes come together, and whoever works on it: each once, in one order."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as text:
            shutil.copytree(_empty_state().name, text, dirs_exist_ok=True)
            opened = await Store.open(config_at(Path(text)))
            try:
                await _numbered(opened, plan)
            finally:
                await opened.close()

    asyncio.run(run())


@cache
def _empty_state() -> tempfile.TemporaryDirectory[str]:
    """A state directory to copy: migrations cost more than the test."""
    directory = tempfile.TemporaryDirectory(prefix="opendsec-empty-")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(make(Path(directory.name)))).result()
    return directory


async def _numbered(store: Store, plan: list[tuple[str, int, bool]]) -> None:
    await accounts.insert_project(store, PROJECT, key_of("k1"))
    names = [await put(store, number) for number in range(len(plan))]
    await begin_operation(store, operation("a"), now=NOW)
    owner = "me"
    group: list[Noted] = []
    for name, (outcome, _size, taken_over) in zip(names, plan, strict=True):
        if taken_over:
            owner = f"{owner}+"
            group = []  # what was not written is lost with its process
            await claim_operations(store, owner, now=NOW, lease_until=NOW, alone=True)
        group.append(Noted(sandbox_id=name, outcome=outcome))  # type: ignore[arg-type]
        if len(group) > _size:
            await note_outcomes(store, "a", owner, group, now=NOW, lease_until=NOW)
            group = []
    missing = await missing_of(store, "a")
    if missing:
        rest = [Noted(sandbox_id=name, outcome="done") for name in missing]
        await note_outcomes(store, "a", owner, rest, now=NOW, lease_until=NOW)
    found, items = await outcomes_after(store, "a", 0, 100)
    assert found is not None
    assert found.finished_at is not None
    assert found.done + found.failed == found.asked == len(plan)
    assert [item.seq for item in items] == list(range(1, len(plan) + 1))
    assert sorted(item.sandbox_id for item in items) == sorted(names)


async def test_tasks_of_the_release_before_are_found(tmp_path: Path) -> None:
    """A database of schema 0003 with sandboxes that name tasks."""
    database = await make(tmp_path)
    database.unlink()
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        config = AlembicConfig()
        config.set_main_option("script_location", str(migrate.MIGRATIONS))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")
        connection.exec_driver_sql("INSERT INTO projects VALUES ('p', 'p', 10, 0)")
        values = {
            **{"project_id": "p", "node_id": "n", "template_id": "t", "template": "base"},
            **{"backend": "container", "cpu": 2, "memory_mb": 64, "disk_mb": 64, "env": "{}"},
            **{"metadata": ",", "labels": ",", "end_at": 2, "on_timeout": "kill"},
            **{"network": "{}", "extra": "{}", "transitions": 2},
        }
        names = ", ".join([*values, "sandbox_id", "state", "task_id", "created_at"])
        marks = ", ".join(f":{name}" for name in names.split(", "))
        for number, (state, task_id) in enumerate(
            [("running", "t"), ("ended", "t"), ("failed", "t"), ("running", None)], 1
        ):
            one = {"sandbox_id": f"i{number}", "state": state, "task_id": task_id}
            connection.execute(
                sa.text(f"INSERT INTO sandboxes ({names}) VALUES ({marks})"),
                {**values, **one, "created_at": number},
            )
    engine.dispose()
    store = await Store.open(config_at(tmp_path))
    (task,) = await tasks.list_tasks(store, "p", limit=10)
    assert (task.task_id, task.state, task.made) == ("t", "open", 2)
    assert (task.created_at, task.used_at) == (1, 3)
    assert time.time() > task.used_at
    await store.close()

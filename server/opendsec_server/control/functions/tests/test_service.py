# SPDX-License-Identifier: AGPL-3.0-only
"""Queues, shares and replacement, with workers that only pretend to work."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import msgspec
import pytest

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    FunctionCancelled,
    FunctionPoolNotFound,
    FunctionPoolUnusable,
    FunctionQueueFull,
    FunctionWorkerLost,
    InvalidRequest,
    NodeFull,
    OpendsecError,
    QuotaExceeded,
    StoreUnavailable,
)
from opendsec_server.control.functions import model, service
from opendsec_server.control.functions.model import Code, Limits, Outcome
from opendsec_server.control.functions.service import Functions
from opendsec_server.control.iam import Caller
from opendsec_server.store import accounts
from opendsec_server.store import functions as store_functions
from opendsec_server.store.functions import PoolSpec
from opendsec_server.store.records import ApiKey, Project
from opendsec_server.store.store import Store

CODE = Code.of({"kind": "source"})
LIMITS = Limits()
WORKERS_MAX = 3


class PretendedWorker:
    """In place of ``Worker``. What it does is set on the class."""

    alive_now: ClassVar[set[PretendedWorker]] = set()
    most: ClassVar[int] = 0
    refusal: ClassVar[OpendsecError | None] = None
    dies: Callable[[bytes], bool] = staticmethod(lambda item: False)
    call_s: ClassVar[float] = 0.0
    breaks: ClassVar[str | None] = None
    """Where a defect of ours shows: ``start`` or ``settle``."""

    def __init__(self, *, worker_id: str, node: Any, spec: PoolSpec) -> None:
        self.worker_id, self.spec = worker_id, spec
        self.sandbox_id: str | None = None
        self.python, self.calls, self.alive = "3.11.2", 0, True
        self.started_at = self.idle_since = time.monotonic()
        self.cancelled = asyncio.Event()

    async def start(self, caller: Caller, pool: Any, creates: Any) -> None:
        await asyncio.sleep(0)
        if PretendedWorker.refusal is not None:
            raise PretendedWorker.refusal
        if PretendedWorker.breaks == "start":
            raise RecursionError
        self.sandbox_id = self.worker_id
        self.project_id = caller.project_id
        PretendedWorker.alive_now.add(self)
        PretendedWorker.most = max(PretendedWorker.most, len(PretendedWorker.alive_now))

    async def call(self, code: Code, item: bytes, limits: Limits) -> Outcome:
        self.calls += 1
        assert self.alive, "a call on a worker that was given up"
        project = item.split(b":")[0].decode()
        assert project == self.project_id, "a worker of another project"
        with_time = asyncio.create_task(self.cancelled.wait())
        await asyncio.wait({with_time}, timeout=PretendedWorker.call_s)
        cancelled = with_time.done()
        with_time.cancel()
        if cancelled:
            return Outcome(error=FunctionCancelled("killed"))
        if PretendedWorker.dies(item):
            self.alive = False
            raise FunctionWorkerLost("gone")
        return Outcome(value=msgspec.Raw(item), worker=self.sandbox_id)

    async def settle(self) -> bool:
        await asyncio.sleep(0)
        if PretendedWorker.breaks == "settle":
            raise RecursionError
        self.idle_since = time.monotonic()
        return self.alive and self.calls < self.spec.calls_max

    def cancel(self) -> None:
        self.cancelled.set()

    async def prolong(self) -> bool:
        return self.alive

    async def end(self) -> bool:
        await asyncio.sleep(0)
        PretendedWorker.alive_now.discard(self)
        return True


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with two projects. Made once: its schema takes longer than the tests."""
    folder = tmp_path_factory.mktemp("store")
    asyncio.run(_make_store(folder))
    return folder


async def _make_store(folder: Path) -> None:
    store = await Store.open(Config(state_dir=str(folder)))
    for name in ("pa", "pb"):
        project = Project(project_id=name, name=name, sandboxes_max=10, created_at=1.0)
        key = ApiKey(
            key_id=f"k{name}", project_id=name, name="k", sha256=name, hint="h", created_at=1.0
        )
        await accounts.insert_project(store, project, key)
    await store.close()


@pytest.fixture
async def store(empty_store: Path, tmp_path: Path) -> AsyncIterator[Store]:
    shutil.copytree(empty_store, tmp_path, dirs_exist_ok=True)
    store = await Store.open(Config(state_dir=str(tmp_path)))
    yield store
    await store.close()


@pytest.fixture
async def functions(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Functions]:
    monkeypatch.setattr(service, "Worker", PretendedWorker)
    monkeypatch.setattr(service, "HOLD_S", 0.0)
    monkeypatch.setattr(service, "TICK_S", 0.02)
    for name, value in (
        ("alive_now", set()), ("most", 0), ("refusal", None), ("call_s", 0.0),
        ("dies", staticmethod(lambda item: False)), ("breaks", None),
    ):  # fmt: skip
        monkeypatch.setattr(PretendedWorker, name, value)
    config = Config(function_workers_max=WORKERS_MAX)
    functions = Functions(config=config, store=store, node=None, creates=None)  # type: ignore[arg-type]
    await functions.start()
    yield functions
    await functions.stop()
    assert not PretendedWorker.alive_now
    assert await store_functions.workers_of(store, functions._owner) == []


def caller(name: str) -> Caller:
    project = Project(project_id=name, name=name, sandboxes_max=10, created_at=1.0)
    return Caller(project=project, key_id=f"k{name}")


async def mapped(
    functions: Functions, project: str, count: int, pool: str = "default"
) -> dict[int, Outcome]:
    items = [f"{project}:{number}".encode() for number in range(count)]
    found: dict[int, Outcome] = {}
    outcomes = await functions.map(caller(project), pool, CODE, items, LIMITS)
    async for index, outcome in outcomes:
        assert index not in found, "told twice"
        found[index] = outcome
    return found


async def test_each_call_has_its_own_outcome_once(
    functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    monkeypatch.setattr(PretendedWorker, "dies", staticmethod(lambda item: rng.random() < 0.1))
    await functions.put_pool(caller("pb"), "small", PoolSpec(calls_max=7))
    everything = await asyncio.gather(
        mapped(functions, "pa", 120),
        mapped(functions, "pa", 40),
        mapped(functions, "pb", 80),
        mapped(functions, "pb", 30, "small"),
    )
    lost = 0
    for project, found in zip(("pa", "pa", "pb", "pb"), everything, strict=True):
        assert sorted(found) == list(range(len(found)))
        for index, outcome in found.items():
            if outcome.error is None:
                assert outcome.value is not None
                assert bytes(outcome.value).decode() == f"{project}:{index}"
            else:
                assert isinstance(outcome.error, FunctionWorkerLost)
                lost += 1
    assert 0 < lost < 100
    assert PretendedWorker.most <= WORKERS_MAX


async def test_a_project_does_not_wait_for_anothers_end(
    functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PretendedWorker, "call_s", 0.01)
    greedy = asyncio.create_task(mapped(functions, "pa", 300))
    while PretendedWorker.most < WORKERS_MAX:
        await asyncio.sleep(0.01)
    assert len(await mapped(functions, "pb", 5)) == 5
    assert not greedy.done()
    greedy.cancel()
    await asyncio.gather(greedy, return_exceptions=True)


async def test_one_call_does_not_wait_for_the_end_of_a_map(
    functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PretendedWorker, "call_s", 0.01)
    many = asyncio.create_task(mapped(functions, "pa", 300))
    await asyncio.sleep(0.05)
    await functions.call(caller("pa"), "default", CODE, b"pa:0", LIMITS)
    assert not many.done()
    many.cancel()
    await asyncio.gather(many, return_exceptions=True)


async def test_what_nobody_waits_for_is_dropped(
    functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PretendedWorker, "call_s", 60.0)
    many = asyncio.create_task(mapped(functions, "pa", 50))
    while not (await functions.pool(caller("pa"), "default")).busy:
        await asyncio.sleep(0.01)
    many.cancel()
    await asyncio.gather(many, return_exceptions=True)
    for _ in range(2_000):
        state = await functions.pool(caller("pa"), "default")
        if state.queued == state.busy == 0:
            break
        await asyncio.sleep(0.01)
    assert state.queued == state.busy == 0
    assert functions._queued_bytes["pa"] == 0


@pytest.mark.parametrize(
    ("refusal", "at_once"),
    [
        (FunctionPoolUnusable("no python3"), True),
        (QuotaExceeded("full"), False),
        (NodeFull("full"), False),
    ],
)
async def test_calls_fail_with_what_hinders_their_workers(
    functions: Functions,
    monkeypatch: pytest.MonkeyPatch,
    refusal: OpendsecError,
    at_once: bool,
) -> None:
    monkeypatch.setattr(PretendedWorker, "refusal", refusal)
    if not at_once:
        # It may pass: they wait, but not for ever.
        monkeypatch.setattr("opendsec_server.control.functions.pool.PATIENCE_S", 0.1)
    found = await mapped(functions, "pa", 3)
    assert [outcome.error for outcome in found.values()] == [refusal] * 3
    monkeypatch.setattr(PretendedWorker, "refusal", None)
    monkeypatch.setattr("opendsec_server.control.functions.pool.PATIENCE_S", 60.0)
    assert (await mapped(functions, "pa", 1))[0].error is None


@pytest.mark.parametrize("place", ["start", "settle"])
async def test_a_defect_costs_no_place_for_ever(
    functions: Functions, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr("opendsec_server.control.functions.pool.PATIENCE_S", 0.1)
    monkeypatch.setattr("opendsec_server.control.functions.pool.RETRY_BASE_S", 0.01)
    monkeypatch.setattr(PretendedWorker, "breaks", place)
    for _ in range(3 * WORKERS_MAX):
        error = (await mapped(functions, "pa", 1))[0].error
        assert (error is None) == (place == "settle")
    monkeypatch.setattr(PretendedWorker, "breaks", None)
    monkeypatch.setattr("opendsec_server.control.functions.pool.PATIENCE_S", 60.0)
    async with asyncio.timeout(30):
        assert len(await mapped(functions, "pb", 5)) == 5


async def test_queues_have_bounds(functions: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "QUEUED_CALLS_MAX", 10)
    with pytest.raises(FunctionQueueFull):
        await functions.map(caller("pa"), "default", CODE, [b"pa:0"] * 11, LIMITS)
    assert len(await mapped(functions, "pa", 10)) == 10
    monkeypatch.setattr(service, "QUEUED_BYTES_MAX", len(CODE.text) + 8)
    with pytest.raises(FunctionQueueFull):
        await functions.map(caller("pa"), "default", CODE, [b"pa:0"] * 3, LIMITS)


async def test_pools_are_a_projects_own(
    functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await functions.put_pool(caller("pa"), "mine", PoolSpec())
    with pytest.raises(FunctionPoolNotFound):
        await functions.pool(caller("pb"), "mine")
    with pytest.raises(FunctionPoolNotFound):
        await mapped(functions, "pb", 1, "mine")
    assert [state.record.name for state in await functions.pools(caller("pb"))] == []
    for name in ("", "a b", "../x", "x" * 65):
        with pytest.raises(InvalidRequest):
            await functions.put_pool(caller("pa"), name, PoolSpec())
    monkeypatch.setattr(service, "POOLS_MAX", 2)
    await functions.put_pool(caller("pa"), "second", PoolSpec())
    with pytest.raises(QuotaExceeded):
        await functions.put_pool(caller("pa"), "third", PoolSpec())
    await functions.delete_pool(caller("pa"), "second")
    await functions.put_pool(caller("pa"), "third", PoolSpec())


async def test_a_changed_pool_gets_new_workers(functions: Functions) -> None:
    first = await functions.put_pool(caller("pa"), "p", PoolSpec(workers_max=1))
    before = (await mapped(functions, "pa", 2, "p"))[1].worker
    changed = await functions.put_pool(caller("pa"), "p", PoolSpec(workers_max=1, memory_mb=64))
    assert changed.record.pool_id == first.record.pool_id
    after = (await mapped(functions, "pa", 2, "p"))[1].worker
    assert after != before


@pytest.fixture
async def other(
    functions: Functions, store: Store, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Functions]:
    """A second gateway on the same store."""
    monkeypatch.setattr(service, "LOOK_S", 0.05)
    config = Config(function_workers_max=WORKERS_MAX, instance="other")
    other = Functions(config=config, store=store, node=None, creates=None)  # type: ignore[arg-type]
    await other.start()
    yield other
    await other.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


async def test_what_one_gateway_changes_another_sees(
    functions: Functions, other: Functions
) -> None:
    first = await functions.put_pool(caller("pa"), "p", PoolSpec(workers_max=1))
    before = (await mapped(other, "pa", 2, "p"))[1].worker
    await functions.put_pool(caller("pa"), "p", PoolSpec(workers_max=1, memory_mb=64))
    pool = other._pools["pa", "p"]
    # Also if nobody calls.
    await until(lambda: pool.record.spec.memory_mb == 64)
    await until(lambda: not [w for w in other._workers if w.spec.memory_mb != 64])
    after = (await mapped(other, "pa", 2, "p"))[1].worker
    assert after != before
    assert (await other.pool(caller("pa"), "p")).record.pool_id == first.record.pool_id

    await functions.delete_pool(caller("pa"), "p")
    await until(lambda: pool.deleted)
    await until(lambda: not other._workers)
    with pytest.raises(FunctionPoolNotFound):
        await mapped(other, "pa", 1, "p")
    # Another pool of the same name.
    await functions.put_pool(caller("pa"), "p", PoolSpec(workers_max=1, memory_mb=128))
    assert len(await mapped(other, "pa", 2, "p")) == 2
    assert other._pools["pa", "p"].record.spec.memory_mb == 128


async def test_calls_of_a_pool_that_another_gateway_deletes_end(
    functions: Functions, other: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await functions.put_pool(caller("pa"), "p", PoolSpec(workers_max=1))
    monkeypatch.setattr(PretendedWorker, "call_s", 3_600.0)
    calls = asyncio.create_task(mapped(other, "pa", 3, "p"))
    await until(lambda: ("pa", "p") in other._pools and bool(other._pools["pa", "p"].busy))
    await functions.delete_pool(caller("pa"), "p")
    async with asyncio.timeout(30):
        found = await calls
    assert [type(outcome.error) for outcome in found.values()] == [FunctionCancelled] * 3


async def test_the_pool_that_nobody_asked_for_may_be_changed_elsewhere(
    functions: Functions, other: Functions
) -> None:
    await mapped(other, "pa", 1)
    pool = other._pools["pa", "default"]
    looked = other._looked_at
    await until(lambda: other._looked_at > looked)
    assert other._pools["pa", "default"] is pool, "it is in no store, and is not gone"
    await functions.put_pool(caller("pa"), "default", PoolSpec(workers_min=1, memory_mb=64))
    await until(lambda: pool.record.spec.memory_mb == 64)
    # The one that asked for workers at any time has them at every gateway.
    await until(lambda: bool(pool.idle))


async def test_a_pool_that_is_to_be_ready_is_so_at_gateways_that_learn_of_it(
    functions: Functions, other: Functions
) -> None:
    await functions.put_pool(caller("pb"), "ready", PoolSpec(workers_min=1))
    await until(lambda: ("pb", "ready") in other._pools)
    await until(lambda: bool(other._pools["pb", "ready"].idle))


async def test_pools_go_on_while_the_store_is_away(
    functions: Functions, other: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await functions.put_pool(caller("pa"), "p", PoolSpec(workers_max=1))
    assert len(await mapped(other, "pa", 2, "p")) == 2
    away = AsyncMock(side_effect=StoreUnavailable("away"))
    with monkeypatch.context() as patch:
        patch.setattr(store_functions, "pool_marks", away)
        await until(lambda: away.await_count > 2)
        assert len(await mapped(other, "pa", 2, "p")) == 2
    await functions.put_pool(caller("pa"), "p", PoolSpec(workers_max=1, memory_mb=64))
    await until(lambda: other._pools["pa", "p"].record.spec.memory_mb == 64)


async def test_workers_are_kept_ready_and_idle_ones_end(functions: Functions) -> None:
    spec = PoolSpec(workers_min=1, workers_max=3, idle_s=0.05)
    await functions.put_pool(caller("pa"), "p", spec)
    await mapped(functions, "pa", 30, "p")
    for _ in range(2_000):
        state = await functions.pool(caller("pa"), "p")
        if (state.idle, state.busy, state.starting) == (1, 0, 0):
            break
        await asyncio.sleep(0.02)
    assert (state.idle, state.busy, state.starting) == (1, 0, 0)


def test_defaults_are_said_once() -> None:
    spec = PoolSpec()
    assert (spec.workers_max, spec.idle_s, spec.calls_max) == (
        model.POOL_WORKERS_DEFAULT, model.POOL_IDLE_S_DEFAULT, model.POOL_CALLS_DEFAULT,
    )  # fmt: skip

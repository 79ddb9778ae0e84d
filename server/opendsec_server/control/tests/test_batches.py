# SPDX-License-Identifier: AGPL-3.0-only
"""Many creates in one call: each item exactly once, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import msgspec
import pytest
import sqlalchemy as sa

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    BatchNotFound,
    IdempotencyMismatch,
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    TemplateNotFound,
)
from opendsec_server.contract.states import TERMINAL, State
from opendsec_server.control.batches import BatchParams, dispatcher
from opendsec_server.control.iam import Caller
from opendsec_server.control.nodes import Fleet, NodeNotReached, NodeSource
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store import batches as rows
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store
from opendsec_server.store.tables import BATCHES, PROJECTS

from .batch_kit import STUCK_S, check, crash, many, outcomes
from .conftest import first_caller
from .fake_node import FakeNode
from .store_faults import broken_store


async def limit(services: Services, name: str, value: float) -> None:
    """Set a limit of every project."""
    await services.store.write(
        lambda c: c.execute(sa.update(PROJECTS).values({name: value})) and None
    )


async def test_all_are_made_and_told(services: Services, node: FakeNode, caller: Caller) -> None:
    asked = await services.batches.create(caller, many(300), key=None)
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == node.created == 300
    record = await get_sandbox(services.store, items[0].sandbox_id or "")
    assert record is not None and record.state is State.RUNNING and record.started_at
    assert not services.batches._queue.batches, "nothing is left to do"


async def test_items_that_differ(services: Services, node: FakeNode, caller: Caller) -> None:
    common = CreateParams(env={"A": "1"}, memory_mb=128)
    own = [common, CreateParams(env={"A": "2"}, memory_mb=256), common]
    params = BatchParams.of(common, own, count=0, wait_s=60)
    assert params.differing == {"1": {"env": {"A": "2"}, "memory_mb": 256}}
    assert BatchParams.unpack(params.pack()) == params
    asked = await services.batches.create(caller, params, key="k")
    again = await services.batches.create(caller, params, key="k")
    assert again.batch_id == asked.batch_id
    _, items = await outcomes(services, caller, asked.batch_id)
    specs = {item.index: node.specs[item.sandbox_id or ""] for item in items}
    assert [specs[index].memory_mb for index in range(3)] == [128, 256, 128]
    assert specs[1].env == {"A": "2"}


@pytest.mark.parametrize(
    ("items", "count"), [(None, 0), (None, 32_769), ([], 0), ([CreateParams(labels=["\0"])], 0)]
)
def test_what_cannot_be_asked_for(items: list[CreateParams] | None, count: int) -> None:
    with pytest.raises(InvalidRequest):
        BatchParams.of(CreateParams(), items, count=count, wait_s=60)


async def test_what_none_can_start_from_is_said_at_once(services: Services, caller: Caller) -> None:
    with pytest.raises(TemplateNotFound):
        await services.batches.create(
            caller, many(5, common=CreateParams(template="nothing")), key=None
        )


async def test_one_item_without_a_template_is_one_error(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    common = CreateParams()
    own = [common, CreateParams(template="nothing"), common]
    params = BatchParams.of(common, own, count=0, wait_s=60)
    asked = await services.batches.create(caller, params, key=None)
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    errors = {item.index: item.error["code"] for item in items if item.error}
    assert errors == {1: "template_not_found"}


async def test_the_same_key_is_the_same_batch(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    calls = [services.batches.create(caller, many(20), key="k") for _ in range(5)]
    found = {batch.batch_id for batch in await asyncio.gather(*calls)}
    assert len(found) == 1
    await outcomes(services, caller, found.pop())
    assert node.created == 20
    with pytest.raises(IdempotencyMismatch):
        await services.batches.create(caller, many(21), key="k")
    with pytest.raises(IdempotencyMismatch):
        await services.creates.create(caller, CreateParams(), key="k")


async def test_others_batches_are_not_there(services: Services, caller: Caller) -> None:
    for name in ("b" + "0" * 19, "nonsense", "b\0"):
        with pytest.raises(BatchNotFound):
            await services.batches.get(caller, name)
        with pytest.raises(BatchNotFound):
            await services.batches.cancel(caller, name)


async def test_the_quota_is_reached_in_the_middle(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    await limit(services, "sandboxes_max", 30)
    asked = await services.batches.create(caller, many(100), key=None)
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == 30
    assert {item.error["code"] for item in items if item.error} == {"quota_exceeded"}


async def test_the_rate_of_creates_is_waited_for(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    await limit(services, "creates_per_s_max", 10)
    started = time.monotonic()
    asked = await services.batches.create(caller, many(15), key=None)
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == 15 and time.monotonic() - started > 0.3


async def test_cancel_ends_what_waits_and_keeps_what_began(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(100), key=None)
    await node.admitted.wait()
    waiting, starting = services.batches.load()
    assert waiting + starting == 100 and 0 < starting < 20
    shown = (await services.render_metrics()).decode()
    assert f'opendsec_batch_items{{state="waiting"}} {float(waiting)}' in shown
    await services.batches.cancel(caller, asked.batch_id)
    node.gate.set()
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert 0 < batch.made < 20
    assert {item.error["code"] for item in items if item.error} == {"batch_cancelled"}
    again = await services.batches.cancel(caller, asked.batch_id)
    assert again == batch


async def test_items_wait_only_as_long_as_was_said(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(50, wait_s=60), key=None)
    await node.admitted.wait()
    running = services.batches._queue.batches[asked.batch_id]
    running.begin_until = asyncio.get_running_loop().time()
    services.batches._queue.wake()
    async with asyncio.timeout(STUCK_S):
        while running.waiting:
            await asyncio.sleep(0.01)
    node.gate.set()
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    codes = [item.error["code"] for item in items if item.error]
    assert 0 < batch.made < 50 and set(codes) == {"start_timeout"}


async def test_a_node_that_is_full_is_an_error_of_each(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.fail_with = NodeFull("full")
    asked = await services.batches.create(caller, many(20), key=None)
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.failed == 20
    assert all(i.error and i.error["fault"] == "capacity" and i.error["retryable"] for i in items)


async def test_an_answer_that_is_lost_makes_no_second(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "UNKNOWN_RETRY_S", (0.05,) * 20)
    node.fail_after = NodeUnavailable("broken pipe")
    asked = await services.batches.create(caller, many(10), key=None)
    await asyncio.sleep(0.2)
    node.fail_after = None
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == node.created == 10


async def test_what_is_given_up_does_not_live_on(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "UNKNOWN_RETRY_S", (0.01, 0.01))
    node.fail_after = NodeUnavailable("broken pipe")
    asked = await services.batches.create(caller, many(5), key=None)
    batch, items = await outcomes(services, caller, asked.batch_id)
    assert batch.failed == 5
    node.fail_after = None
    await services.watcher.reconcile()
    check(batch, items, node)


async def test_a_store_that_is_down_for_a_while(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(60), key=None)
    await node.admitted.wait()
    with broken_store(services):
        node.gate.set()
        await asyncio.sleep(1.2)
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == 60


async def test_a_killed_server_goes_on_after_its_restart(
    config: Config, node: FakeNode, services: Services, caller: Caller
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(40), key="k")
    await node.admitted.wait()
    await crash(services)
    node.gate.set()
    again = await Services.start(config, node)
    try:
        caller = await first_caller(again)
        same = await again.batches.create(caller, many(40), key="k")
        assert same.batch_id == asked.batch_id
        batch, items = await outcomes(again, caller, asked.batch_id)
        check(batch, items, node)
        assert batch.made == node.created == 40
    finally:
        await again.stop()


async def test_a_reader_goes_on_where_it_was(services: Services, caller: Caller) -> None:
    asked = await services.batches.create(caller, many(30), key=None)
    _, items = await outcomes(services, caller, asked.batch_id)
    rest = []
    async for news in services.batches.watch(caller, asked.batch_id, after=12):
        rest += [item for item, _ in news.outcomes]
    assert rest == items[12:]


async def test_a_small_batch_does_not_wait_for_a_large_one(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    """Within a project, too."""
    large = await services.batches.create(caller, many(400), key=None)
    small = await services.batches.create(caller, many(5), key=None)
    await outcomes(services, caller, small.batch_id)
    assert (await services.batches.get(caller, large.batch_id)).outcomes < 100
    batch, _ = await outcomes(services, caller, large.batch_id)
    assert batch.made == 400
    assert not [s for s in node.statuses.values() if s.state in TERMINAL]


async def test_nothing_is_made_in_a_project_that_was_closed(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(50), key=None)
    await node.admitted.wait()
    await limit(services, "closed_at", time.time())
    node.gate.set()
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert 0 < batch.made < 20
    assert {item.error["code"] for item in items if item.error} == {"forbidden"}


@pytest.mark.parametrize("step_s", [-86_400, 86_400])
async def test_steps_of_the_clock_change_nothing(
    services: Services,
    node: FakeNode,
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
    step_s: float,
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(60), key="k")
    await node.admitted.wait()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    await services.batches._renew()
    node.gate.set()
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == node.created == 60


async def test_items_wait_while_no_node_can_be_reached(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "NODES_RETRY_S", 0.05)
    chosen = services.fleet.choose

    def unreached(*args: object, **kwargs: object) -> object:
        raise NodeNotReached("no node can be reached now")

    monkeypatch.setattr(services.fleet, "choose", unreached)
    asked = await services.batches.create(caller, many(10), key=None)
    await asyncio.sleep(0.2)
    assert node.created == 0
    monkeypatch.setattr(services.fleet, "choose", chosen)
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == 10


@contextlib.asynccontextmanager
async def one_full_of_two(config: Config) -> AsyncIterator[tuple[Services, FakeNode, Caller]]:
    """A server over two nodes, of which the first refuses everything; the second one."""
    full, other = FakeNode(node_id="n0de"), FakeNode(node_id="n1de")
    full.fail_with = NodeFull("full")
    sources = [NodeSource(name=node.node_id, client=node) for node in (full, other)]
    services = await Services.start(config, Fleet(sources, rng=random.Random(1)))
    try:
        yield services, other, await first_caller(services)
    finally:
        await services.stop()


async def test_what_is_given_up_on_a_second_node_does_not_live_on(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "UNKNOWN_RETRY_S", (0.01, 0.01))
    async with one_full_of_two(config) as (services, other, caller):
        other.fail_after = NodeUnavailable("broken pipe")
        asked = await services.batches.create(caller, many(8), key=None)
        batch, items = await outcomes(services, caller, asked.batch_id)
        assert batch.failed == 8 and other.created == 8
        other.fail_after = None
        await services.watcher.reconcile()
        check(batch, items, other)
        records = [await get_sandbox(services.store, name) for name in other.statuses]
        assert {record and record.state for record in records} == {State.FAILED}
        assert not services.creates._unsettled and not services.creates._in_flight


async def test_a_comparison_leaves_a_create_on_a_second_node_alone(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "UNKNOWN_RETRY_S", (0.1,) * 50)
    async with one_full_of_two(config) as (services, other, caller):
        other.fail_with = NodeUnavailable("broken pipe")
        asked = await services.batches.create(caller, many(8), key=None)
        await asyncio.sleep(0.3)
        await services.watcher.reconcile()
        other.fail_with = None
        batch, items = await outcomes(services, caller, asked.batch_id)
        check(batch, items, other)
        records = [await get_sandbox(services.store, name) for name in other.statuses]
        assert batch.made == 8 and {r and r.state for r in records} == {State.RUNNING}


@pytest.mark.parametrize("begun_too", [False, True])
async def test_a_batch_that_cannot_be_read_ends_and_holds_up_no_other(
    config: Config,
    node: FakeNode,
    services: Services,
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
    begun_too: bool,
) -> None:
    """What has begun is made, if at least that can be read."""
    monkeypatch.setattr(dispatcher, "SETTLED_TOGETHER_MAX", 30)
    node.gate = asyncio.Event()
    bad = await services.batches.create(caller, many(200), key=None)
    good = await services.batches.create(caller, many(10), key=None)
    await node.admitted.wait()
    damage = sa.update(BATCHES).where(BATCHES.c.batch_id == bad.batch_id).values(params="{}")
    await services.store.write(lambda c: c.execute(damage) and None)
    await crash(services)
    node.gate.set()
    true = rows.begun_items

    async def begun_items(store: Store, batch_id: str) -> list[tuple[int, SandboxRecord]]:
        if begun_too and batch_id == bad.batch_id:
            raise ValueError("a record that cannot be read")
        return await true(store, batch_id)

    monkeypatch.setattr(rows, "begun_items", begun_items)
    again = await Services.start(config, node)
    try:
        who = await first_caller(again)
        batch, _ = await outcomes(again, who, good.batch_id)
        assert batch.made == 10
        batch, items = await outcomes(again, who, bad.batch_id)
        assert sorted(item.index for item in items) == list(range(200))
        assert batch.made + batch.failed == 200 and batch.finished_at is not None
        begun = [item for item in items if item.sandbox_id is not None]
        assert begun
        assert len([item for item in begun if item.error is None]) == batch.made
        assert batch.made == (0 if begun_too else len(begun))
        errors = [item.error for item in items if item.error is not None]
        assert {error["code"] for error in errors} == {"internal"}
        assert {error["fault"] for error in errors} == {"platform"}
        assert all("cannot be read" in error["message"] for error in errors)
        assert not await again.batches._claim(None), "nothing is left to take over"
    finally:
        await again.stop()


async def test_an_item_that_cannot_be_read_is_one_error(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    common = CreateParams(memory_mb=128)
    own = [common, CreateParams(memory_mb=256), common]
    params = BatchParams.of(common, own, count=0, wait_s=60)
    params = msgspec.structs.replace(params, differing={"1": {"memory_mb": "much"}})
    asked = await services.batches.create(caller, params, key=None)
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    failed = [(item.index, item.error) for item in items if item.error is not None]
    assert [index for index, _ in failed] == [1]
    assert failed[0][1] is not None and failed[0][1]["code"] == "internal"


async def test_a_batch_that_is_at_work_is_not_taken_over_from_itself(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(30), key=None)
    await node.admitted.wait()
    running = services.batches._queue.batches[asked.batch_id]
    # As if it had been claimed between its insert and the answer to that.
    await services.batches._take([asked])
    assert services.batches._queue.batches[asked.batch_id] is running
    node.gate.set()
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == node.created == 30


async def test_an_item_left_by_a_defect_is_taken_up_again(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.gate = asyncio.Event()
    asked = await services.batches.create(caller, many(3), key=None)
    await node.admitted.wait()
    with monkeypatch.context() as broken:
        broken.setattr(services.batches._writer._ledger, "apply", AsyncMock(side_effect=KeyError))
        node.gate.set()
        async with asyncio.timeout(STUCK_S):
            while services.batches._queue.batches:
                await asyncio.sleep(0.01)
    await services.batches._take(await services.batches._claim(None))
    batch, items = await outcomes(services, caller, asked.batch_id)
    check(batch, items, node)
    assert batch.made == node.created == 3


async def test_failures_are_counted_by_cause(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    """Whatever their messages say: each names figures of its own."""
    await limit(services, "sandboxes_max", 3)
    own = [CreateParams()] * 6 + [CreateParams(template=f"nothing-{n}") for n in range(2)]
    params = BatchParams.of(CreateParams(), own, count=0, wait_s=60)
    asked = await services.batches.create(caller, params, key=None)
    batch, _ = await outcomes(services, caller, asked.batch_id)
    assert (batch.made, batch.failed) == (3, 5)
    found = await services.batches.failures(batch)
    assert [(one.code, one.fault, one.count) for one in found] == [
        ("quota_exceeded", "capacity", 3),
        ("template_not_found", "user", 2),
    ]

# SPDX-License-Identifier: AGPL-3.0-only
"""One thing done to many sandboxes: it is done, whether somebody reads of it or not."""

from __future__ import annotations

import asyncio

import pytest

from opendsec_server.contract.errors import Conflict, InvalidRequest, NodeUnavailable
from opendsec_server.contract.states import TERMINAL, State
from opendsec_server.control import bulk
from opendsec_server.control.bulk import Command
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.selection import Selection
from opendsec_server.control.services import Services

from .batch_kit import many, outcomes
from .fake_node import FakeNode

TASK = Selection(task_id="t")
COMMAND = Command(
    command="block", user=None, workdir=None, env={}, timeout_s=60, output_bytes=1_000
)


async def make(services: Services, caller: Caller, count: int) -> list[str]:
    common = CreateParams(task_id="t", labels=["a"])
    asked = await services.batches.create(caller, many(count, common=common), key=None)
    _, items = await outcomes(services, caller, asked.batch_id)
    return [item.sandbox_id for item in items if item.sandbox_id is not None]


def live(node: FakeNode) -> int:
    return sum(status.state not in TERMINAL for status in node.statuses.values())


async def until_none_lives(node: FakeNode) -> None:
    async with asyncio.timeout(20):
        while live(node):
            await asyncio.sleep(0.01)


async def test_a_reader_that_goes_away_stops_nothing(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    await make(services, caller, 150)
    results = await services.bulk.kill(caller, TASK)
    await anext(results)
    await results.aclose()
    await until_none_lives(node)


async def test_nobody_needs_to_read_at_all(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "READER_STALLED_S", 0.05)
    await make(services, caller, 150)
    results = await services.bulk.kill(caller, TASK)
    await until_none_lives(node)
    await asyncio.sleep(0.2)
    with pytest.raises(Conflict):
        async for _ in results:
            pass


async def test_each_fails_by_itself(services: Services, node: FakeNode, caller: Caller) -> None:
    names = await make(services, caller, 5)
    await services.lifecycle.kill(caller, names[0])
    results = await services.bulk.kill(caller, Selection(ids=(*names, names[1], "no")))
    told = {one.sandbox_id: one async for one in results}
    assert set(told) == {*names, "no"}
    assert [n for n, one in told.items() if one.error is not None] == ["no"]
    node.unreachable = NodeUnavailable("away")
    results = await services.bulk.set_timeout(caller, Selection(ids=tuple(names)), 60)
    assert all([one.error is not None async for one in results])
    node.unreachable = None


async def test_what_fits_all_words_is_selected(services: Services, caller: Caller) -> None:
    names = await make(services, caller, 3)
    other = await services.creates.create(caller, CreateParams(task_id="t", labels=["b"]))
    for words, count in (
        (Selection(task_id="t"), 4),
        (Selection(task_id="t", labels=("a",)), 3),
        (Selection(labels=("a", "b")), 0),
        (Selection(batch_id="b" + "0" * 19), 0),
    ):
        results = await services.bulk.set_timeout(caller, words, 60)
        assert len([one async for one in results]) == count, words
    assert other.record.sandbox_id not in names
    with pytest.raises(InvalidRequest):
        await services.bulk.kill(caller, Selection())


async def test_what_is_killed_meanwhile_ends_its_command(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    names = await make(services, caller, 2)
    results = await services.bulk.exec(caller, TASK, COMMAND, 8)
    told = asyncio.create_task(_all(results))
    await asyncio.sleep(0.1)
    assert not told.done()
    for name in names:
        await services.lifecycle.kill(caller, name)
    async with asyncio.timeout(10):
        assert {one.sandbox_id for one in await told} == set(names)
    record = await services.lifecycle.get(caller, names[0])
    assert record.state is State.ENDED


async def _all(results: object) -> list[bulk.Done]:
    return [one async for one in results]  # type: ignore[attr-defined]

# SPDX-License-Identifier: AGPL-3.0-only
"""Pause, resume, pauses by time-out, and the automatic resume by traffic."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
import pytest
import sqlalchemy as sa

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    AlreadyPaused,
    Forbidden,
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    NotSupported,
    QuotaExceeded,
    ResumeFailed,
    SandboxNotFound,
    SnapshotFailed,
    StateConflict,
    Unauthenticated,
)
from opendsec_server.contract.node import NetworkPolicy
from opendsec_server.contract.signatures import file_signature
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.iam import Caller
from opendsec_server.control.services import Services
from opendsec_server.store.records import SandboxExtra
from opendsec_server.store.tables import PROJECTS

from .conftest import first_caller
from .fake_node import FakeNode
from .store_faults import broken_store
from .test_lifecycle import make, other_caller, reached

AGENT = 49_983
T = TypeVar("T")


async def shown(services: Services, caller: Caller, name: str) -> list[str]:
    """The states that the record went through."""
    await services.watcher.reconcile()
    _, kept = await services.lifecycle.transitions(caller, name)
    for before, after in itertools.pairwise(kept):
        assert before.to_state is after.from_state, "a gap in the transitions"
    return [str(transition.to_state) for transition in kept]


async def test_pause_and_resume(services: Services, node: FakeNode, caller: Caller) -> None:
    name = await make(services, caller, timeout_s=70)
    started_at = (await services.lifecycle.get(caller, name)).started_at
    paused = await services.lifecycle.pause(caller, name, "full")
    assert paused.report.memory_freed_bytes > 0
    assert (paused.record.state, paused.record.paused_mode) == (State.PAUSED, "full")
    record = await services.lifecycle.get(caller, name)
    assert (record.state, record.paused_mode) == (State.PAUSED, "full")
    with pytest.raises(AlreadyPaused):
        await services.lifecycle.pause(caller, name, "full")

    resumed = await services.lifecycle.connect(caller, name, None)
    assert resumed.resumed
    assert resumed.record.end_at == pytest.approx(time.time() + 70, abs=5)
    record = await services.lifecycle.get(caller, name)
    assert (record.state, record.paused_mode) == (State.RUNNING, None)
    assert record.started_at == started_at, "a resume is no start"
    assert record.end_at == resumed.record.end_at
    again = await services.lifecycle.connect(caller, name, None)
    assert not again.resumed
    assert await shown(services, caller, name) == [
        "starting", "running", "pausing", "paused", "resuming", "running",
    ]  # fmt: skip


async def test_resume_straight_after_a_pause_is_not_lost(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    for _ in range(20):
        await services.lifecycle.pause(caller, name, "full")
        connected = await services.lifecycle.connect(caller, name, 60)
        assert connected.resumed
        assert node.statuses[name].state is State.RUNNING
    assert len(await shown(services, caller, name)) == 2 + 20 * 4
    assert (await services.lifecycle.get(caller, name)).state is State.RUNNING


async def test_filesystem_pause_and_reboot(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    node.contents[name].disk["file"] = node.contents[name].memory["process"] = "x"
    await services.lifecycle.pause(caller, name, "filesystem")
    assert (await services.lifecycle.get(caller, name)).paused_mode == "filesystem"
    await services.lifecycle.connect(caller, name, 60)
    assert (node.contents[name].disk, node.contents[name].memory) == ({"file": "x"}, {})
    node.contents[name].memory["process"] = "y"
    await services.lifecycle.pause(caller, name, "full")
    await services.lifecycle.connect(caller, name, 60, reboot=True)
    assert node.contents[name].memory == {}


async def test_calls_at_the_same_time_share_one_pause_and_one_resume(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    opened = asyncio.Event()

    async def wait(_: str) -> None:
        await opened.wait()

    async def at_once(calls: list[Awaitable[T]]) -> list[T]:
        opened.clear()
        asyncio.get_running_loop().call_later(0.1, opened.set)
        return await asyncio.gather(*calls)

    node.between = wait
    await at_once([services.lifecycle.pause(caller, name, "full") for _ in range(3)])
    assert node.statuses[name].seq == 4, "it was paused once"
    seq = node.statuses[name].seq
    resumes = await at_once([services.lifecycle.connect(caller, name, 60) for _ in range(3)])
    assert all(connected.resumed for connected in resumes)
    assert node.statuses[name].seq == seq + 2, "it was resumed once"


async def test_failures_are_typed_and_lose_nothing(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    node.fail["pause"] = SnapshotFailed("the disk is full")
    with pytest.raises(SnapshotFailed):
        await services.lifecycle.pause(caller, name, "full")
    assert (await services.lifecycle.get(caller, name)).state is State.RUNNING
    del node.fail["pause"]
    await services.lifecycle.pause(caller, name, "full")
    for failure in (ResumeFailed("no"), NodeFull("no room")):
        node.fail["resume"] = failure
        with pytest.raises(type(failure)):
            await services.lifecycle.connect(caller, name, 60)
        record = await services.lifecycle.get(caller, name)
        assert (record.state, record.paused_mode) == (State.PAUSED, "full")
    del node.fail["resume"]
    assert (await services.lifecycle.connect(caller, name, 60)).resumed


async def test_lost_answers_can_be_repeated(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    node.lose_answer = {"pause": NodeUnavailable("gone"), "resume": NodeUnavailable("gone")}
    with pytest.raises(NodeUnavailable):
        await services.lifecycle.pause(caller, name, "full")
    await reached(services, caller, name, State.PAUSED)
    with pytest.raises(AlreadyPaused):
        await services.lifecycle.pause(caller, name, "full")
    with pytest.raises(NodeUnavailable):
        await services.lifecycle.connect(caller, name, 60)
    await reached(services, caller, name, State.RUNNING)
    node.lose_answer = {}
    assert not (await services.lifecycle.connect(caller, name, 60)).resumed


async def test_pause_goes_on_when_its_caller_goes_away(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    call = asyncio.create_task(services.lifecycle.pause(caller, name, "full"))
    while "pause" not in node.calls:
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await reached(services, caller, name, State.PAUSED)


async def test_foreign_and_ended(services: Services, node: FakeNode, caller: Caller) -> None:
    name = await make(services, caller)
    foreign = await other_caller(services)
    with pytest.raises(SandboxNotFound):
        await services.lifecycle.pause(foreign, name, "full")
    await services.lifecycle.pause(caller, name, "full")
    with pytest.raises(SandboxNotFound):
        await services.lifecycle.connect(foreign, name, 60)
    with pytest.raises(SandboxNotFound):
        await services.lifecycle.state_now(foreign, name)
    assert node.statuses[name].state is State.PAUSED
    record, was_alive = await services.lifecycle.kill(caller, name)
    assert was_alive
    assert (record.end_reason, record.paused_mode) == (EndReason.KILLED, None)
    for call in (
        services.lifecycle.pause(caller, name, "full"),
        services.lifecycle.connect(caller, name, 60),
    ):
        with pytest.raises(SandboxNotFound):
            await call


async def test_what_a_paused_sandbox_refuses(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    node.sample(name, time.time())
    await services.lifecycle.pause(caller, name, "full")
    with pytest.raises(StateConflict):
        await services.lifecycle.set_timeout(caller, name, 60)
    with pytest.raises(StateConflict):
        await services.lifecycle.connect(caller, name, 60, resume=False)
    with pytest.raises(StateConflict):
        await services.lifecycle.set_network(caller, name, NetworkPolicy(), SandboxExtra())
    assert await services.lifecycle.metrics(caller, name, 0.0, time.time()), "they are kept"
    assert node.statuses[name].state is State.PAUSED


async def test_pause_by_timeout(services: Services, node: FakeNode, caller: Caller) -> None:
    full = await make(services, caller, on_timeout="pause")
    disk = await make(services, caller, on_timeout="pause", pause_mode="filesystem")
    assert (node.specs[disk].on_timeout, node.specs[disk].pause_mode) == ("pause", "filesystem")
    node.expire(full)
    await services.lifecycle.set_timeout(caller, disk, 0)
    record = await reached(services, caller, full, State.PAUSED)
    await reached(services, caller, disk, State.PAUSED)
    await services.watcher.reconcile()
    assert (await services.lifecycle.get(caller, disk)).paused_mode == "filesystem"
    assert record.end_reason is None
    assert (await services.lifecycle.connect(caller, full, 60)).resumed
    with pytest.raises(InvalidRequest):
        await make(services, caller, pause_mode="filesystem", auto_resume=True)


async def limit(services: Services, count: int) -> None:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.update(PROJECTS).values(sandboxes_max=count))

    await services.store.write(work)


async def test_quota(services: Services, node: FakeNode, caller: Caller) -> None:
    await limit(services, 2)
    names = [await make(services, caller) for _ in range(2)]
    with pytest.raises(QuotaExceeded):
        await make(services, caller)
    for name in names:
        await services.lifecycle.pause(caller, name, "full")
    names += [await make(services, caller) for _ in range(2)]
    with pytest.raises(QuotaExceeded):
        await services.lifecycle.connect(caller, names[0], 60)
    assert node.statuses[names[0]].state is State.PAUSED
    await services.lifecycle.kill(caller, names[3])
    # One place, two that want it at the same time.
    answers = await asyncio.gather(
        *(services.lifecycle.connect(caller, name, 60) for name in names[:2]),
        return_exceptions=True,
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["Connected", "QuotaExceeded"]


@pytest.mark.parametrize("error", [NodeFull("full"), NodeUnavailable("away"), RuntimeError("bug")])
async def test_a_resume_that_waits_for_its_node_has_its_place(
    services: Services,
    node: FakeNode,
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    await limit(services, 1)
    name = await make(services, caller)
    await services.lifecycle.pause(caller, name, "full")
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def resume(*_: object, **__: object) -> None:
        begun.set()
        await go_on.wait()
        raise error

    monkeypatch.setattr(node, "resume", resume)
    waiting = asyncio.create_task(services.lifecycle.connect(caller, name, 60))
    await begun.wait()
    with pytest.raises(QuotaExceeded):
        await make(services, caller)
    go_on.set()
    with pytest.raises(type(error)):
        await waiting
    if isinstance(error, NodeUnavailable):
        # It may run by now: the place is given back when its time is over.
        await services.watcher.reconcile()
        with pytest.raises(QuotaExceeded):
            await make(services, caller)
        monkeypatch.setattr("opendsec_server.control.watch.time.time", lambda: 1e12)
        await services.watcher.reconcile()
        monkeypatch.undo()
    await make(services, caller)


async def test_a_resume_that_is_cut_off_gives_its_place_back(
    services: Services, caller: Caller
) -> None:
    await limit(services, 1)
    name = await make(services, caller)
    record = (await services.lifecycle.pause(caller, name, "full")).record
    begun = asyncio.Event()

    async def resume() -> None:
        assert await services.lifecycle.take_places([record]) == [None]
        async with services.lifecycle.place_of(name):
            begun.set()
            await asyncio.Event().wait()

    for other in (False, True):
        begun.clear()
        task = asyncio.create_task(resume())
        await begun.wait()
        if other:
            # Two for one sandbox: it has its place until the last has gone.
            assert await services.lifecycle.take_places([record]) == [None]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*services.lifecycle._left.tasks)
        if not other:
            await services.lifecycle.kill(caller, await make(services, caller))
    with pytest.raises(QuotaExceeded):
        await make(services, caller)
    services.lifecycle.leave_place(name)
    await asyncio.gather(*services.lifecycle._left.tasks)
    await make(services, caller)


async def test_places_of_a_killed_server_are_free_at_the_next_start(
    config: Config, node: FakeNode
) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    await limit(services, 1)
    name = await make(services, caller)
    record = (await services.lifecycle.pause(caller, name, "full")).record
    assert await services.lifecycle.take_places([record]) == [None]
    await services.stop()
    services = await Services.start(config, node)
    try:
        await make(services, await first_caller(services))
    finally:
        await services.stop()


async def test_store_down_while_pausing(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec_server.control.watch.RETRY_S", 0.01)
    name = await make(services, caller)
    record = await services.lifecycle.get(caller, name)
    with broken_store(services):
        paused = await services.lifecycle._pause(record, "full")
        assert paused.record.state is State.PAUSED
    await reached(services, caller, name, State.PAUSED)


async def test_missed_events(config: Config, node: FakeNode) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    paused, resumed, looped = [await make(services, caller) for _ in range(3)]
    await services.lifecycle.pause(caller, resumed, "full")
    await services.stop()
    await node.pause(paused, "filesystem")
    await node.resume(resumed, end_at=time.time() + 999)
    await node.pause(looped)
    await node.resume(looped, end_at=time.time() + 999)
    services = await Services.start(config, node)
    caller = await first_caller(services)
    record = await services.lifecycle.get(caller, paused)
    assert (record.state, record.paused_mode) == (State.PAUSED, "filesystem")
    record = await services.lifecycle.get(caller, resumed)
    assert (record.state, record.end_at) == (State.RUNNING, node.statuses[resumed].end_at)
    record = await services.lifecycle.get(caller, looped)
    assert (record.state, record.node_seq) == (State.RUNNING, node.statuses[looped].seq)
    assert record.end_at == node.statuses[looped].end_at
    await services.stop()


async def test_memory_lost_while_paused(services: Services, node: FakeNode, caller: Caller) -> None:
    name = await make(services, caller)
    await services.lifecycle.pause(caller, name, "full")
    node.statuses[name] = msgspec.structs.replace(node.statuses[name], pause_mode="filesystem")
    await services.watcher.reconcile()
    record = await services.lifecycle.get(caller, name)
    assert (record.state, record.paused_mode) == (State.PAUSED, "filesystem")


async def test_late_events_change_nothing(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    """Events that come after the answers of the calls which they tell of."""
    name = await make(services, caller)
    (listener,) = node._listeners
    node._listeners.clear()
    held: asyncio.Queue[object] = asyncio.Queue()
    node._listeners.add(held)  # type: ignore[arg-type]
    await services.lifecycle.pause(caller, name, "full")
    await services.lifecycle.connect(caller, name, 60)
    states = set()
    while not held.empty():
        listener.put_nowait(held.get_nowait())  # type: ignore[arg-type]
        for _ in range(5):
            await asyncio.sleep(0.002)
            states.add((await services.lifecycle.get(caller, name)).state)
    assert states == {State.RUNNING}


# --- traffic ------------------------------------------------------------------


async def route(services: Services, name: str, port: int | None, **tokens: str | None) -> str:
    found = await services.routes.find(
        name, port=port, **({"access_token": None, "traffic_token": None} | tokens)
    )
    return found.sandbox_id


async def test_traffic_wakes_with_the_right_token_only(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(
        services,
        caller,
        auto_resume=True,
        timeout_s=20,
        network=NetworkPolicy(allow_public_traffic=False),
    )
    access, traffic = services.mint.access(name), services.mint.traffic(name)
    await services.lifecycle.pause(caller, name, "full")
    for port in (AGENT, None):
        for token in (None, "", "wrong", traffic):
            with pytest.raises(Unauthenticated):
                await route(services, name, port, access_token=token, traffic_token=traffic)
    for token in (None, "wrong", access, "é"):
        with pytest.raises(Forbidden):
            await route(services, name, 3000, access_token=access, traffic_token=token)
    assert node.statuses[name].state is State.PAUSED
    assert await route(services, name, 3000, traffic_token=traffic) == name
    record = await services.lifecycle.get(caller, name)
    assert record.state is State.RUNNING
    assert record.end_at == pytest.approx(time.time() + 300, abs=5), "at least five minutes"
    await services.lifecycle.pause(caller, name, "full")
    assert await route(services, name, AGENT, access_token=access) == name


async def test_public_ports_wake_without_a_token_and_keep_long_lives(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller, auto_resume=True, timeout_s=5_000)
    await services.lifecycle.pause(caller, name, "full")
    answers = await asyncio.gather(*(route(services, name, 8000) for _ in range(10)))
    assert answers == [name] * 10
    assert node.calls.count("resume") == 1, "requests share one resume"
    assert node.statuses[name].end_at == pytest.approx(time.time() + 5_000, abs=5)


async def test_what_traffic_does_not_wake(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    never = await make(services, caller)
    disk = await make(services, caller, auto_resume=True)
    full = await make(services, caller, auto_resume=True)
    await services.lifecycle.pause(caller, never, "full")
    await services.lifecycle.pause(caller, disk, "filesystem")
    await services.lifecycle.pause(caller, full, "full")
    for name in (never, disk):
        token = services.mint.access(name)
        with pytest.raises(StateConflict):
            await route(services, name, AGENT, access_token=token)
        with pytest.raises(StateConflict):
            await route(services, name, 80)
    await limit(services, 0)
    with pytest.raises(QuotaExceeded):
        await route(services, full, 80)
    await services.lifecycle.kill(caller, full)
    with pytest.raises(SandboxNotFound):
        await route(services, full, 80)


async def test_routes_of_what_runs_need_no_store(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    with broken_store(services):
        assert await route(services, name, 80) == name


async def test_signed_urls_wake(services: Services, node: FakeNode, caller: Caller) -> None:
    name = await make(services, caller, auto_resume=True)
    other = await make(services, caller)
    for each in (name, other):
        await services.lifecycle.pause(caller, each, "full")

    async def ask(sandbox_id: str, expiration: str | None) -> str:
        token = services.mint.access(sandbox_id)
        found = await services.routes.find_by_signature(
            path="/a",
            operation="read",
            username="",
            signature=file_signature("/a", "read", "", token, expiration),
            expiration=expiration,
        )
        return found.sandbox_id

    later, past = str(int(time.time()) + 60), str(int(time.time()) - 60)
    with pytest.raises(SandboxNotFound):
        await ask(other, None)
    for expired in (past, "x", "9" * 5_000, "-1", "²"):
        with pytest.raises(SandboxNotFound):
            await ask(name, expired)
    assert node.statuses[name].state is State.PAUSED
    assert await ask(name, later) == name
    assert await ask(name, None) == name, "now it runs"
    assert node.statuses[other].state is State.PAUSED


async def test_edges_are_told(services: Services, node: FakeNode, caller: Caller) -> None:
    name = await make(services, caller)
    told: list[str | None] = []

    async def listen() -> None:
        nonlocal told
        async for line in services.invalidations.subscribe():
            told += [line.sandbox_id]

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0.01)
    await services.lifecycle.pause(caller, name, "full")
    while not (paused := told.count(name)):
        await asyncio.sleep(0.01)
    await services.lifecycle.connect(caller, name, 60)
    while told.count(name) <= paused:
        await asyncio.sleep(0.01)
    listening.cancel()


async def test_not_supported_pause_passes_through(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    node.fail["pause"] = NotSupported("this backend cannot keep memory")
    with pytest.raises(NotSupported):
        await services.lifecycle.pause(caller, name, "full")
    assert node.statuses[name].state is State.RUNNING

# SPDX-License-Identifier: AGPL-3.0-only
"""Tasks over a fake node: limits, and operations that survive what happens to the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    Conflict,
    IdempotencyMismatch,
    InvalidRequest,
    NodeUnavailable,
    SandboxStartFailed,
    SnapshotFailed,
    TaskBudgetReached,
    TaskEnded,
    TaskExists,
    TaskNotFound,
    TaskOperationNotFound,
    TaskPaused,
)
from opendsec_server.contract.node import SandboxUsage
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.control.task_deadlines import SLACK_S
from opendsec_server.control.tasks import TaskLimits, keeper, operations, work
from opendsec_server.control.tasks.operations import Operations
from opendsec_server.store.task_operations import OperationParams, TaskItem, TaskOperation

from .conftest import first_caller
from .fake_node import FakeNode

TASK = "train-7"
PAUSE = OperationParams(mode="filesystem")


async def create(services: Services, caller: Caller, count: int, task_id: str = TASK) -> list[str]:
    made = [
        await services.creates.create(caller, CreateParams(task_id=task_id)) for _ in range(count)
    ]
    return [one.record.sandbox_id for one in made]


async def end_of(
    services: Services, operation: TaskOperation
) -> tuple[TaskOperation, list[TaskItem]]:
    items: list[TaskItem] = []
    async with asyncio.timeout(10):
        async for now, more in services.tasks.follow(operation):
            operation = now
            items += more
    assert operation.finished_at is not None
    return operation, items


async def operate(
    services: Services, caller: Caller, kind: str, params: OperationParams = PAUSE
) -> tuple[TaskOperation, list[TaskItem]]:
    operation, _ = await services.tasks.operate(caller, TASK, kind, params)  # type: ignore[arg-type]
    return await end_of(services, operation)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.01)


async def counts(services: Services, caller: Caller) -> dict[str, int]:
    view = await services.tasks.get(caller, TASK)
    return {str(count.state): count.count for count in view.counts}


async def test_the_first_use_makes_a_task(services: Services, caller: Caller) -> None:
    with pytest.raises(TaskNotFound):
        await services.tasks.get(caller, TASK)
    await create(services, caller, 2)
    view = await services.tasks.get(caller, TASK)
    assert (view.task.state, view.task.made) == ("open", 2)
    assert [(c.state, c.backend, c.count) for c in view.counts] == [(State.RUNNING, "container", 2)]


async def test_a_start_that_failed_does_not_count(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    await services.tasks.make(caller, TASK, TaskLimits(sandboxes_max=1))
    node.fail_with = SandboxStartFailed("no")
    with pytest.raises(SandboxStartFailed):
        await create(services, caller, 1)
    node.fail_with = None
    await create(services, caller, 1)
    with pytest.raises(TaskBudgetReached) as error:
        await create(services, caller, 1)
    assert error.value.details == {"task_id": TASK, "limit": 1, "made": 1}
    view = await services.tasks.get(caller, TASK)
    assert {(c.state, c.reason, c.fault) for c in view.counts} == {
        (State.RUNNING, None, None),
        (State.FAILED, "start_failed", "platform"),
    }


async def test_making_a_task_twice_is_one_task(services: Services, caller: Caller) -> None:
    wanted = TaskLimits(sandboxes_max=5)
    assert (await services.tasks.make(caller, TASK, wanted))[1]
    assert not (await services.tasks.make(caller, TASK, wanted))[1]
    with pytest.raises(TaskExists):
        await services.tasks.make(caller, TASK, TaskLimits())
    for bad in (
        TaskLimits(deadline_at=time.time() - 1),
        TaskLimits(sandboxes_max=0),
        TaskLimits(cpu_seconds_max=0),
        TaskLimits(cpu_seconds_max=float("nan")),
    ):
        with pytest.raises(InvalidRequest):
            await services.tasks.make(caller, "other", bad)


async def test_pause_resume_and_kill_as_one(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    names = await create(services, caller, 5)
    await create(services, caller, 1, "another")
    operation, items = await operate(services, caller, "pause")
    assert (operation.asked, operation.done, operation.failed) == (5, 5, 0)
    assert operation.memory_freed_bytes == sum(item.memory_freed_bytes for item in items) > 0
    assert sorted(item.sandbox_id for item in items) == sorted(names)
    assert [item.seq for item in items] == [1, 2, 3, 4, 5]
    assert await counts(services, caller) == {"paused": 5}
    # Nothing is started in a task that is paused.
    with pytest.raises(TaskPaused):
        await create(services, caller, 1)
    # Again: every one is so already.
    _, items = await operate(services, caller, "pause")
    assert {item.outcome for item in items} == {"already"}
    await operate(services, caller, "resume", OperationParams())
    assert await counts(services, caller) == {"running": 5}
    await operate(services, caller, "kill", OperationParams())
    assert await counts(services, caller) == {"ended": 5}
    assert node.statuses[names[0]].reason is EndReason.KILLED
    with pytest.raises(TaskEnded):
        await create(services, caller, 1)
    with pytest.raises(TaskEnded):
        await services.tasks.operate(caller, TASK, "resume", OperationParams())
    assert (await operate(services, caller, "kill", OperationParams()))[0].asked == 0
    assert (await services.tasks.get(caller, "another")).counts[0].state is State.RUNNING


async def test_a_failure_is_that_of_one_sandbox(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    await create(services, caller, 3)
    node.fail["pause"] = SnapshotFailed("the disk is full")
    operation, items = await operate(services, caller, "pause")
    assert (operation.done, operation.failed) == (0, 3)
    assert all(item.error is not None and '"snapshot_failed"' in item.error for item in items)
    assert await counts(services, caller) == {"running": 3}


async def test_what_ends_meanwhile_is_gone(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    names = await create(services, caller, 3)

    async def end_one(_name: str) -> None:
        if node.statuses[names[1]].state is not State.ENDED:
            node.end(names[1], EndReason.EXITED)

    node.between = end_one
    _, items = await operate(services, caller, "pause")
    assert {item.sandbox_id: item.outcome for item in items} == {
        names[0]: "done",
        names[1]: "gone",
        names[2]: "done",
    }


async def test_a_node_that_is_away_for_a_moment_is_asked_again(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    await create(services, caller, 2)
    node.unreachable = NodeUnavailable("away")
    operation, _ = await services.tasks.operate(caller, TASK, "pause", PAUSE)
    await asyncio.sleep(0.05)
    node.unreachable = None
    operation, _ = await end_of(services, operation)
    assert (operation.done, operation.failed) == (2, 0)


async def test_the_same_operation_is_joined_and_another_takes_its_place(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    await create(services, caller, 30)
    gate = asyncio.Event()

    async def wait(_name: str) -> None:
        await gate.wait()

    node.between = wait
    first, new = await services.tasks.operate(caller, TASK, "pause", PAUSE)
    assert new
    again, new = await services.tasks.operate(caller, TASK, "pause", PAUSE)
    assert (again.operation_id, new) == (first.operation_id, False)
    last, new = await services.tasks.operate(caller, TASK, "resume", OperationParams())
    assert new
    gate.set()
    node.between = None
    first, _ = await end_of(services, first)
    assert first.superseded_by == last.operation_id
    last, _ = await end_of(services, last)
    assert (last.asked, last.done, last.failed) == (30, 30, 0)
    assert await counts(services, caller) == {"running": 30}


async def test_one_that_is_superseded_while_it_begins_does_nothing(
    services: Services, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(services, caller, 3)
    begun, gate = asyncio.Event(), asyncio.Event()
    end_others = Operations._end_others

    async def late(self: Operations, operation: TaskOperation) -> None:
        if operation.kind == "pause":
            begun.set()
            await gate.wait()
        await end_others(self, operation)

    monkeypatch.setattr(Operations, "_end_others", late)
    pausing = asyncio.create_task(services.tasks.operate(caller, TASK, "pause", PAUSE))
    await begun.wait()
    resuming = asyncio.create_task(
        services.tasks.operate(caller, TASK, "resume", OperationParams())
    )
    await asyncio.sleep(0.2)
    gate.set()
    first, _ = await pausing
    last, _ = await resuming
    await end_of(services, first)
    last, _ = await end_of(services, last)
    assert (last.done, last.failed) == (3, 0)
    assert await counts(services, caller) == {"running": 3}


async def test_one_that_was_recorded_and_not_begun_is_taken_up(
    services: Services, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(services, caller, 2)
    monkeypatch.setattr(operations, "LEASE_S", -1.0)
    with monkeypatch.context() as patch:
        # Its caller went away between its record and its work.
        patch.setattr(Operations, "_spawn", lambda *_: None)
        operation, _ = await services.tasks.operate(caller, TASK, "pause", PAUSE)
    await services.task_keeper._operations._claim(alone=False)
    operation, _ = await end_of(services, operation)
    assert operation.done == 2


async def test_what_ends_the_rest_of_a_task_is_not_kept_for_long(
    services: Services, caller: Caller, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "TRIES", 1)
    await create(services, caller, 1)
    node.unreachable = NodeUnavailable("away")
    first, _ = await operate(services, caller, "kill", OperationParams())
    assert first.failed == 1
    now = time.time()
    for round_ in range(1, 6):
        monkeypatch.setattr(time, "time", lambda at=now + 200 * round_: at)
        await services.task_keeper.end_the_rest()
        newest = (await services.tasks.operations(caller, TASK))[0]
        await end_of(services, newest)
    kept = await services.tasks.operations(caller, TASK)
    assert len(kept) == 3
    assert kept[-1].operation_id == first.operation_id
    node.unreachable = None
    await services.task_keeper.end_the_rest()
    await until(lambda: _no_live(services, caller))


async def test_a_key_is_one_operation(services: Services, caller: Caller) -> None:
    await create(services, caller, 2)
    first, _ = await services.tasks.operate(caller, TASK, "kill", OperationParams(), key="k")
    await end_of(services, first)
    again, new = await services.tasks.operate(caller, TASK, "kill", OperationParams(), key="k")
    assert (again.operation_id, again.done, new) == (first.operation_id, 2, False)
    with pytest.raises(IdempotencyMismatch):
        await services.tasks.operate(caller, TASK, "pause", PAUSE, key="k")
    with pytest.raises(TaskOperationNotFound):
        await services.tasks.operation(caller, "other", first.operation_id)


async def test_a_kill_ends_what_is_being_made(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    node.gate = asyncio.Event()
    making = asyncio.create_task(create(services, caller, 1))
    await node.admitted.wait()
    operation, _ = await services.tasks.operate(caller, TASK, "kill", OperationParams())
    node.gate.set()
    operation, _ = await end_of(services, operation)
    assert operation.asked == 1
    await asyncio.gather(making, return_exceptions=True)
    await until(lambda: _no_live(services, caller))
    assert all(status.state is State.ENDED for status in node.statuses.values())


async def _no_live(services: Services, caller: Caller) -> bool:
    view = await services.tasks.get(caller, TASK)
    return all(count.state in (State.ENDED, State.FAILED) for count in view.counts)


@pytest.mark.parametrize("kind", ["pause", "resume", "kill"])
async def test_a_server_that_stops_half_way_goes_on(
    config: Config, node: FakeNode, kind: str
) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    await create(services, caller, 40)
    if kind == "resume":
        await operate(services, caller, "pause")
    # Half of it is done, then everything of this process is gone.
    done = 0
    stuck = asyncio.Event()

    async def some(_name: str) -> None:
        nonlocal done
        done += 1
        if done > 20:
            await stuck.wait()

    node.between = some
    if kind == "kill":
        kill, count = node.kill, 0

        async def slow_kill(*arguments: object) -> object:
            nonlocal count
            count += 1
            if count > 20:
                await stuck.wait()
            return await kill(*arguments)  # type: ignore[arg-type]

        node.kill = slow_kill  # type: ignore[method-assign,assignment]
    params = PAUSE if kind == "pause" else OperationParams()
    operation, _ = await services.tasks.operate(caller, TASK, kind, params)  # type: ignore[arg-type]

    async def half() -> bool:
        return (await services.tasks.operation(caller, TASK, operation.operation_id)).done >= 20

    await until(half)
    await services.stop()
    stuck.set()
    node.between = None

    services = await Services.start(config, node)
    operation, items = await end_of(services, operation)
    assert (operation.asked, operation.done, operation.failed) == (40, 40, 0)
    assert len({item.sandbox_id for item in items}) == 40
    wanted = {"pause": "paused", "resume": "running", "kill": "ended"}[kind]
    assert await counts(services, await first_caller(services)) == {wanted: 40}
    await services.stop()


async def test_a_deadline_ends_a_task_with_its_reason(
    services: Services, caller: Caller, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline_at = time.time() + 600
    await services.tasks.make(caller, TASK, TaskLimits(deadline_at=deadline_at))
    names = await create(services, caller, 2)
    await services.task_keeper.look_at_deadlines()
    assert await counts(services, caller) == {"running": 2}
    monkeypatch.setattr(time, "time", lambda: deadline_at + 1)
    with pytest.raises(TaskEnded):
        await create(services, caller, 1)
    await services.task_keeper.look_at_deadlines()
    await until(lambda: _no_live(services, caller))
    view = await services.tasks.get(caller, TASK)
    assert (view.task.state, view.task.end_reason) == ("ended", EndReason.TASK_DEADLINE)
    assert node.statuses[names[0]].reason is EndReason.TASK_DEADLINE
    assert {(c.reason, c.fault) for c in view.counts} == {("task_deadline", None)}


async def test_a_deadline_does_not_wait_for_readings_of_use(
    services: Services, caller: Caller, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_names: object) -> dict[str, SandboxUsage]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(node, "usage", hang)
    await services.tasks.make(caller, "budget", TaskLimits(cpu_seconds_max=1))
    await create(services, caller, 1, "budget")
    await services.tasks.make(caller, TASK, TaskLimits(deadline_at=time.time() + 0.3))
    await create(services, caller, 1)

    async def ended() -> bool:
        found = await services.tasks._task(caller, TASK)
        return found.end_reason is EndReason.TASK_DEADLINE

    await until(ended)


async def test_looking_that_waited_long_comes_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    ticks = iter([0.0, 600.0])
    over = asyncio.CancelledError

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise over

    async def nothing() -> None:
        pass

    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(keeper, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(over):
        await keeper._repeat(nothing, 1.0)
    assert slept == [keeper.BUSY_PAUSE_S_MAX]


async def test_a_budget_of_cpu_seconds_ends_a_task(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    await services.tasks.make(caller, TASK, TaskLimits(cpu_seconds_max=10))
    names = await create(services, caller, 2)
    node.used[names[0]] = SandboxUsage(cpu_seconds=9, egress_bytes=7, at=time.time())
    await services.task_keeper.look_at_budgets()
    view = await services.tasks.get(caller, TASK)
    assert (view.task.state, view.usage.cpu_seconds, view.usage.egress_bytes) == ("open", 9, 7)
    # What an ended one used counts on.
    await services.lifecycle.kill(caller, names[0])
    node.used[names[1]] = SandboxUsage(cpu_seconds=1.5, at=time.time())
    await services.task_keeper.look_at_budgets()
    await until(lambda: _no_live(services, caller))
    view = await services.tasks.get(caller, TASK)
    assert view.task.end_reason is EndReason.TASK_BUDGET
    assert view.usage.cpu_seconds == 10.5
    # With a larger budget it can be reopened.
    with pytest.raises(Conflict):
        await services.tasks.set_limits(caller, TASK, TaskLimits(cpu_seconds_max=100))
    await services.tasks.set_limits(caller, TASK, TaskLimits(cpu_seconds_max=100), reopen=True)
    await create(services, caller, 1)


async def test_waiting_tells_of_every_change(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    names = await create(services, caller, 2)
    seen: list[tuple[int, bool]] = []

    async def watch() -> None:
        async for found, reached in services.tasks.wait(caller, TASK, "ended", 10):
            live = sum(c.count for c in found if c.state is State.RUNNING)
            seen.append((live, reached))

    watching = asyncio.create_task(watch())
    await until(lambda: _seen(seen))
    for name in names:
        node.end(name, EndReason.EXITED)
    await watching
    assert seen[0] == (2, False)
    assert seen[-1] == (0, True)
    # A time that is over ends it too.
    await services.tasks.make(caller, "idle", TaskLimits())
    assert [r async for _, r in services.tasks.wait(caller, "idle", "ended", 0)] == [True]


async def _seen(seen: list[tuple[int, bool]]) -> bool:
    return bool(seen)


# --- ends that nodes keep ---------------------------------------------------


async def test_nodes_are_told_no_end_after_the_deadline(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    deadline_at = time.time() + 60
    last = deadline_at + SLACK_S
    await services.tasks.make(caller, TASK, TaskLimits(deadline_at=deadline_at))
    [name, other] = await create(services, caller, 2)
    assert node.statuses[name].end_at == last
    assert (await services.lifecycle.get(caller, name)).end_at == last
    # One that ends before goes on to do so.
    short = await services.creates.create(caller, CreateParams(task_id=TASK, timeout_s=20))
    assert short.record.end_at < deadline_at
    # Neither a new end, nor a longer life, nor a resume of one or of all passes it.
    assert (await services.lifecycle.set_timeout(caller, name, 3_600)).end_at == last
    assert (await services.lifecycle.connect(caller, name, 3_600)).record.end_at == last
    assert (await services.lifecycle.set_timeout(caller, name, 10)).end_at < deadline_at
    await services.lifecycle.pause(caller, other, "filesystem")
    assert (await services.lifecycle.connect(caller, other, 3_600)).record.end_at == last
    await operate(services, caller, "pause")
    await operate(services, caller, "resume")
    assert node.statuses[other].end_at == last
    # Others have nothing to do with it.
    [alone] = await create(services, caller, 1, "another")
    assert node.statuses[alone].end_at > last


async def test_another_deadline_is_another_end(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    [name] = await create(services, caller, 1)
    free = node.statuses[name].end_at

    async def deadline_in(seconds: float | None) -> float:
        at = None if seconds is None else time.time() + seconds
        await services.tasks.set_limits(caller, TASK, TaskLimits(deadline_at=at))
        end_at = node.statuses[name].end_at
        assert (await services.lifecycle.get(caller, name)).end_at == end_at
        return end_at if at is None else end_at - at

    assert await deadline_in(60) == SLACK_S
    assert await deadline_in(30) == SLACK_S
    assert await deadline_in(90) == SLACK_S
    assert await deadline_in(None) >= free
    # One that its caller lets end before keeps that.
    await services.lifecycle.set_timeout(caller, name, 10)
    mine = node.statuses[name].end_at
    await deadline_in(60)
    await deadline_in(None)
    assert node.statuses[name].end_at == mine


async def test_a_node_that_was_away_is_told_an_earlier_end_later(
    services: Services, caller: Caller, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    [name] = await create(services, caller, 1)
    free = node.statuses[name].end_at
    deadline_at = time.time() + 60

    async def away(*_arguments: object, **_more: object) -> None:
        raise NodeUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(node, "set_end_at", away)
        await services.tasks.set_limits(caller, TASK, TaskLimits(deadline_at=deadline_at))
        assert node.statuses[name].end_at == free

    async def told() -> bool:
        return node.statuses[name].end_at == deadline_at + SLACK_S

    await until(told)


async def test_deadlines_are_known_after_a_restart(
    config: Config, services: Services, caller: Caller, node: FakeNode
) -> None:
    deadline_at = time.time() + 60
    await services.tasks.make(caller, TASK, TaskLimits(deadline_at=deadline_at))
    await services.stop()
    again = await Services.start(config, node)
    try:
        await again.task_keeper.look_at_deadlines()
        [name] = await create(again, await first_caller(again), 1)
        assert node.statuses[name].end_at == deadline_at + SLACK_S
    finally:
        await again.stop()

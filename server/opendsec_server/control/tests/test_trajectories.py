# SPDX-License-Identifier: AGPL-3.0-only
"""Actions over a fake node: recorded before they run, run once, and never guessed about."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

import msgspec
import pytest
import sqlalchemy as sa

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    ActionInProgress,
    ActionMismatch,
    ActionNotFound,
    ActionUnknown,
    AgentUnresponsive,
    InvalidRequest,
    NodeFull,
    SandboxEnded,
    SandboxLost,
    SandboxNotFound,
    StateConflict,
    TrajectoryFull,
    TrajectoryNotFound,
)
from opendsec_server.contract.states import EndReason
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.control.trajectories import ActionParams, runner, service
from opendsec_server.control.trajectories.results import (
    ActionResult,
    unpack_error,
    unpack_result,
)
from opendsec_server.store.tables import ACTIONS
from opendsec_server.store.trajectories import Action, Limits

from .conftest import first_caller
from .fake_node import FakeNode

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PATIENCE_S", 0.2)
    monkeypatch.setattr(runner, "RESOLVE_PATIENCE_S", 0.05)
    monkeypatch.setattr(runner, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(runner, "END_RECORDED_WAIT_S", 0.5)


async def make(services: Services, caller: Caller, **params: object) -> str:
    created = await services.creates.create(caller, CreateParams(**params))  # type: ignore[arg-type]
    return created.record.sandbox_id


def run(action_id: str, command: str, **more: object) -> ActionParams:
    return ActionParams(
        action_id=action_id,
        kind="exec",
        argv=("sh", "-c", command),
        **more,  # type: ignore[arg-type]
    )


def write(action_id: str, path: str, data: bytes) -> ActionParams:
    content = base64.b64encode(data).decode()
    return ActionParams(action_id=action_id, kind="write_file", path=path, content=content)


def result_of(action: Action) -> ActionResult:
    result = unpack_result(action.result)
    assert result is not None
    return result


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.01)


async def test_same_id_answers_what_was_recorded_and_runs_nothing(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller, task_id="job")
    act = services.trajectories.act
    params = run("a1", "append /n x && echo hello && warn oops && exit 3", rollout_id="r", step=0)
    first = await act(caller, box, params, wait_s=10)
    assert (first.replayed, first.action.state, first.action.seq) == (False, "done", 1)
    result = result_of(first.action)
    assert result.exit_code == 3
    assert result.stdout is not None and result.stdout.head == "hello\n"
    assert result.stderr is not None and result.stderr.head == "oops\n"
    assert (first.action.cause, first.action.fault) == ("exit_code", "user")
    # Where it stands in a rollout is no part of what it does.
    again = await act(caller, box, run("a1", params.argv[-1], step=7), wait_s=10)
    assert again.replayed and again.action == first.action
    assert node.contents[box].disk["/n"] == "x"
    with pytest.raises(ActionMismatch):
        await act(caller, box, run("a1", "echo other"), wait_s=10)
    # What the agent kept was dropped once it was recorded.
    assert not node.kept_programs
    # Also after the end.
    await services.lifecycle.kill(caller, box)
    late = await act(caller, box, params, wait_s=10)
    assert late.replayed and late.action == first.action
    with pytest.raises(SandboxEnded):
        await act(caller, box, run("a2", "echo"), wait_s=10)


async def test_calls_at_the_same_time_share_one_run(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    params = run("a", "append /n x && echo")
    calls = [services.trajectories.act(caller, box, params, wait_s=10) for _ in range(8)]
    done = await asyncio.gather(*calls)
    assert [acted.replayed for acted in done].count(False) == 1
    assert node.contents[box].disk["/n"] == "x"
    assert len(node.begun) == 1


async def test_a_caller_that_goes_away_changes_nothing(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    node.kept_gate = asyncio.Event()
    params = run("a", "append /n x")
    call = asyncio.create_task(services.trajectories.act(caller, box, params, wait_s=10))
    await until(lambda: bool(node.begun))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    running = await services.trajectories.act(caller, box, params, wait_s=0.01)
    assert running.action.state == "running"
    node.kept_gate.set()
    ended = await services.trajectories.get(caller, box, "a", wait_s=10)
    assert ended.state == "done"
    assert len(node.begun) == 1


async def test_a_server_that_dies_is_followed_by_one_that_asks(
    services: Services, caller: Caller, node: FakeNode, config: Config
) -> None:
    box = await make(services, caller)
    node.kept_gate = asyncio.Event()
    params = run("a", "append /n x && echo out")
    running = await services.trajectories.act(caller, box, params, wait_s=0.01)
    assert running.action.state == "running"
    await services.trajectories.stop()
    node.kept_gate.set()
    later = await Services.start(config, node)
    try:
        ended = await later.trajectories.act(await first_caller(later), box, params, wait_s=10)
        assert ended.replayed and ended.action.state == "done"
        stdout = result_of(ended.action).stdout
        assert stdout is not None and stdout.head == "out\n"
        assert node.contents[box].disk["/n"] == "x"
    finally:
        await later.stop()


async def test_a_start_that_was_never_sent_is_ruled_out_and_may_be_tried_again(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    params = run("a", "append /n x")
    # The request is on its way when the answer is given up.
    node.delay_starts = True
    lost = await services.trajectories.act(caller, box, params, wait_s=10)
    assert (lost.action.state, lost.action.fault) == ("not_run", "platform")
    node.delay_starts = False
    node.deliver()
    assert node.begun == [], "a start that was ruled out must not happen later"
    again = await services.trajectories.act(caller, box, params, wait_s=10)
    assert (again.action.state, again.action.attempt, again.replayed) == ("done", 2, False)
    assert node.contents[box].disk["/n"] == "x"


async def test_a_lost_answer_is_asked_for(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    node.lose_answer["start_kept"] = AgentUnresponsive("broken pipe")
    acted = await services.trajectories.act(caller, box, run("a", "append /n x"), wait_s=10)
    assert acted.action.state == "done"
    assert node.contents[box].disk["/n"] == "x"


async def test_another_agent_means_unknown_until_it_is_stated(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    node.kept_gate = asyncio.Event()
    params = run("a", "append /n x")
    await services.trajectories.act(caller, box, params, wait_s=0.01)
    node.new_agent(box)
    node.kept_gate.set()
    # Asked again, it is another agent.
    acted = await services.trajectories.act(caller, box, params, wait_s=10)
    assert (acted.action.state, acted.action.cause) == ("unknown", "agent_restarted")
    assert acted.action.fault == "platform"
    error = unpack_error(acted.action.error)
    assert error is not None and error.code == "action_unknown"
    # Nothing runs by asking, and asking once more does not know better.
    assert (await services.trajectories.resolve(caller, box, "a")).state == "unknown"
    assert len(node.begun) == 1
    stated = await services.trajectories.resolve(
        caller, box, "a", state="done", result=ActionResult(exit_code=0)
    )
    assert (stated.state, stated.resolved_by, stated.cause) == ("done", "caller", "stated")
    with pytest.raises(StateConflict):
        await services.trajectories.resolve(caller, box, "a", state="not_run")


async def test_an_unknown_outcome_is_resolved_when_the_agent_answers_again(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    node.kept_gate = asyncio.Event()
    params = run("a", "append /n x")
    await services.trajectories.act(caller, box, params, wait_s=0.01)
    node.fail["kept"] = AgentUnresponsive("silence")
    node.kept_gate.set()
    acted = await services.trajectories.act(caller, box, params, wait_s=10)
    assert (acted.action.state, acted.action.cause) == ("unknown", "agent_unresponsive")
    assert (await services.trajectories.resolve(caller, box, "a")).state == "unknown"
    del node.fail["kept"]
    resolved = await services.trajectories.resolve(caller, box, "a")
    assert (resolved.state, resolved.resolved_by, resolved.cause) == ("done", "guest", "ok")
    assert unpack_error(resolved.error) is None
    assert node.contents[box].disk["/n"] == "x"


async def test_what_cannot_be_done_is_recorded_and_what_had_no_room_is_not_run(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    params = ActionParams(action_id="a", kind="exec", argv=("/missing",))
    for _ in range(2):
        acted = await services.trajectories.act(caller, box, params, wait_s=10)
        assert (acted.action.state, acted.action.fault) == ("done", "user")
        error = unpack_error(acted.action.error)
        assert error is not None and error.code == "invalid_request"
    node.fail["start_kept"] = NodeFull("too many programs")
    full = await services.trajectories.act(caller, box, run("b", "append /n x"), wait_s=10)
    assert (full.action.state, full.action.fault, full.action.cause) == (
        "not_run",
        "capacity",
        "no_room",
    )
    del node.fail["start_kept"]
    again = await services.trajectories.act(caller, box, run("b", "append /n x"), wait_s=10)
    assert again.action.state == "done"


@pytest.mark.parametrize(
    ("reason", "error", "fault"),
    [
        (EndReason.LOST, SandboxLost, "platform"),
        (EndReason.VMM_FAILED, SandboxLost, "platform"),
        (EndReason.OOM, SandboxEnded, "user"),
        (EndReason.TIMEOUT, SandboxEnded, "user"),
    ],
)
async def test_the_end_of_a_sandbox_says_whose_it_was(
    services: Services,
    caller: Caller,
    node: FakeNode,
    reason: EndReason,
    error: type[Exception],
    fault: str,
) -> None:
    box = await make(services, caller)
    node.kept_gate = asyncio.Event()
    params = run("a", "append /n x")
    await services.trajectories.act(caller, box, params, wait_s=0.01)
    node.end(box, reason, "evidence")
    acted = await services.trajectories.act(caller, box, params, wait_s=10)
    assert (acted.action.state, acted.action.fault) == ("unknown", fault)
    assert acted.action.evidence is not None
    assert msgspec.json.decode(acted.action.evidence)["end_reason"] == reason
    with pytest.raises(error):
        await services.trajectories.act(caller, box, run("b", "echo"), wait_s=10)


async def test_evidence_of_memory_signals_and_exit_codes(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    act = services.trajectories.act
    killed = (await act(caller, box, run("s", "die 15"), wait_s=10)).action
    assert (killed.cause, killed.fault) == ("signal", "user")
    assert killed.evidence is not None and "SIGTERM" in killed.evidence
    node.kept_gate = asyncio.Event()
    await act(caller, box, run("o", "exit 137"), wait_s=0.01)
    node.oom_kills[box] = 1
    node.kept_gate.set()
    oom = (await act(caller, box, run("o", "exit 137"), wait_s=10)).action
    assert (oom.cause, oom.fault) == ("oom_kill", "user")
    # An earlier kill is no evidence for a later action.
    later = (await act(caller, box, run("l", "exit 137"), wait_s=10)).action
    assert later.cause == "exit_code"


async def test_files_are_written_once_and_compared_when_the_answer_is_lost(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    act = services.trajectories.act
    assert (await act(caller, box, write("w", "/f", b"one"), wait_s=10)).action.state == "done"
    node.contents[box].disk["/f"] = "changed since"
    assert (await act(caller, box, write("w", "/f", b"one"), wait_s=10)).replayed
    assert node.contents[box].disk["/f"] == "changed since"
    node.lose_answer["write_file"] = AgentUnresponsive("broken pipe")
    assert (await act(caller, box, write("w2", "/g", b"two"), wait_s=10)).action.state == "done"
    node.fail["write_file"] = AgentUnresponsive("broken pipe")
    lost = (await act(caller, box, write("w3", "/h", b"three"), wait_s=10)).action
    assert (lost.state, lost.cause) == ("unknown", "file_differs")
    read = ActionParams(action_id="r", kind="read_file", path="/g")
    content = result_of((await act(caller, box, read, wait_s=10)).action).content
    assert content == base64.b64encode(b"two").decode()
    missing = ActionParams(action_id="m", kind="read_file", path="/nothing")
    error = unpack_error((await act(caller, box, missing, wait_s=10)).action.error)
    assert error is not None and (error.code, error.fault) == ("file_not_found", "user")


async def test_a_snapshot_stands_at_a_known_place(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    act = services.trajectories.act
    snap = ActionParams(action_id="snap", kind="snapshot", mode="filesystem")
    node.kept_gate = asyncio.Event()
    await act(caller, box, run("a", "append /n 1"), wait_s=0.01)
    with pytest.raises(ActionInProgress):
        await act(caller, box, snap, wait_s=10)
    node.kept_gate.set()
    await services.trajectories.get(caller, box, "a", wait_s=10)
    node.kept_gate = None
    gate = asyncio.Event()

    async def hold(_: str) -> None:
        await gate.wait()

    node.between = hold
    taking = asyncio.create_task(act(caller, box, snap, wait_s=10))
    await until(lambda: "snapshot" in node.calls)
    with pytest.raises((ActionInProgress, StateConflict)):
        await act(caller, box, run("b", "append /n 2"), wait_s=10)
    gate.set()
    taken = await taking
    first = result_of(taken.action).snapshot_id
    assert result_of((await act(caller, box, snap, wait_s=10)).action).snapshot_id == first
    assert node.calls.count("snapshot") == 1


async def test_fast_forward_from_a_snapshot_and_from_nothing(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    act = services.trajectories.act
    await act(caller, box, run("a", "append /n 1"), wait_s=10)
    await act(caller, box, run("pay", "append /bill x", once=True), wait_s=10)
    snap = ActionParams(action_id="snap", kind="snapshot", mode="filesystem")
    snapshot = result_of((await act(caller, box, snap, wait_s=10)).action).snapshot_id
    await act(caller, box, run("b", "append /n 2 && exit 4"), wait_s=10)
    await act(caller, box, write("c", "/f", b"text"), wait_s=10)
    await services.lifecycle.kill(caller, box)
    assert snapshot is not None
    restored = await make(services, caller, template=snapshot)

    async def forward(target: str, **more: object) -> list[tuple[str, str, bool]]:
        lines = await services.trajectories.fast_forward(
            caller,
            target,
            source_id=box,
            **more,  # type: ignore[arg-type]
        )
        return [(line.action_id, line.how, line.diverged) async for line in lines]

    done = await forward(restored)
    assert done == [
        ("a", "copied", False),
        ("pay", "copied", False),
        ("snap", "copied", False),
        ("b", "ran", False),
        ("c", "ran", False),
    ]
    assert node.contents[restored].disk["/n"] == "12"
    assert node.contents[restored].disk["/f"] == "text"
    # Again: nothing runs twice, and the client goes on with its own ids.
    assert await forward(restored) == done
    assert node.contents[restored].disk["/n"] == "12"
    copied = await act(caller, restored, run("a", "append /n 1"), wait_s=10)
    assert copied.replayed and copied.action.origin == box and not copied.action.replayed
    page = await services.trajectories.page(caller, restored, after=0, limit=10)
    assert [a.action_id for a in page.actions] == ["a", "pay", "snap", "b", "c"]
    assert page.actions[3].replayed
    # From nothing, and only up to a step: what reaches outside is not done again.
    fresh = await make(services, caller)
    assert [how for _, how, _ in await forward(fresh, through="b")] == [
        "ran", "copied", "copied", "ran",
    ]  # fmt: skip
    assert node.contents[fresh].disk["/n"] == "12"
    assert "/bill" not in node.contents[fresh].disk
    with pytest.raises(InvalidRequest):
        await forward(fresh, through="nothing")


async def test_fast_forwards_at_once_are_one(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    await services.trajectories.act(caller, box, run("a", "append /n 1"), wait_s=10)
    target = await make(services, caller)

    async def forward() -> list[str]:
        lines = await services.trajectories.fast_forward(caller, target, source_id=box)
        return [line.how async for line in lines]

    async with asyncio.timeout(10):
        assert await asyncio.gather(*(forward() for _ in range(4))) == [["ran"]] * 4
    assert node.contents[target].disk["/n"] == "1"
    assert services.trajectories._forwarding == {}
    assert len(node.begun) == 2
    # Two that want different things: one of them is told so.
    target = await make(services, caller)
    node.kept_gate = asyncio.Event()

    async def through(action_id: str | None) -> list[str]:
        lines = await services.trajectories.fast_forward(
            caller, target, source_id=box, through=action_id
        )
        return [line.how async for line in lines]

    calls = {asyncio.create_task(through(None)), asyncio.create_task(through("a"))}
    refused, going = await asyncio.wait(calls, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    node.kept_gate.set()
    assert [type(call.exception()) for call in refused] == [ActionInProgress]
    assert [await call for call in going] == [["ran"]]


async def test_an_action_that_nobody_does_anything_about_is_found_out_about(
    services: Services, caller: Caller, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await make(services, caller)
    params = run("a", "append /n x")

    class Gone(Exception):
        pass

    def go(*_: object) -> None:
        raise Gone

    with monkeypatch.context() as patch:
        # The caller goes away between the record and the work.
        patch.setattr(services.trajectories._runner, "run", go)
        with pytest.raises(Gone):
            await services.trajectories.act(caller, box, params, wait_s=10)
    assert (await services.trajectories.get(caller, box, "a", wait_s=0.5)).state == "running"
    # Its process is heard of no more.
    over = sa.update(ACTIONS).values(lease_until=0.0)
    await services.store.write(lambda c: c.execute(over) and None)
    assert (await services.trajectories.get(caller, box, "a", wait_s=10)).state == "not_run"
    again = await services.trajectories.act(caller, box, params, wait_s=10)
    assert (again.action.state, again.action.attempt) == ("done", 2)


async def test_fast_forward_does_not_guess(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller)
    act = services.trajectories.act
    await act(caller, box, run("a", "append /n 1"), wait_s=10)
    node.kept_gate = asyncio.Event()
    await act(caller, box, run("b", "append /n 2"), wait_s=0.01)
    target = await make(services, caller)
    with pytest.raises(ActionUnknown):
        await services.trajectories.fast_forward(caller, target, source_id=box)
    node.new_agent(box)
    node.kept_gate.set()
    assert (await services.trajectories.get(caller, box, "b", wait_s=10)).state == "unknown"
    node.kept_gate = None
    with pytest.raises(ActionUnknown):
        await services.trajectories.fast_forward(caller, target, source_id=box)
    assert "/n" not in node.contents[target].disk
    lines = await services.trajectories.fast_forward(
        caller, target, source_id=box, of_unknown="run"
    )
    assert [line.how async for line in lines] == ["ran", "ran"]
    assert node.contents[target].disk["/n"] == "12"


async def test_limits_other_projects_and_bad_input(
    services: Services, caller: Caller, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await make(services, caller)
    act = services.trajectories.act
    monkeypatch.setattr(service, "TRAJECTORY", Limits(actions=2, bytes=100_000))
    await act(caller, box, run("a", "echo"), wait_s=10)
    await act(caller, box, run("b", "echo"), wait_s=10)
    with pytest.raises(TrajectoryFull):
        await act(caller, box, run("c", "append /n x"), wait_s=10)
    assert "/n" not in node.contents[box].disk
    other = await make(services, caller)
    with pytest.raises(TrajectoryFull):
        await act(caller, other, write("w", "/f", b"x" * 90_000), wait_s=10)
    foreign = msgspec.structs.replace(
        caller, project=msgspec.structs.replace(caller.project, project_id="pother")
    )
    for call in (
        act(foreign, box, run("a", "echo"), wait_s=1),
        services.trajectories.get(foreign, box, "a"),
        services.trajectories.page(foreign, box, after=0, limit=1),
        services.trajectories.resolve(foreign, box, "a", state="not_run"),
        services.trajectories.fast_forward(foreign, other, source_id=box),
    ):
        with pytest.raises(SandboxNotFound):
            await call
    with pytest.raises(TrajectoryNotFound):
        await services.trajectories.export_rollout(foreign, "r")
    with pytest.raises(ActionNotFound):
        await services.trajectories.get(caller, box, "nothing")
    bad = [
        run("a b", "echo"),
        run("", "echo"),
        run("x" * 129, "echo"),
        run("a", "echo", step=-1),
        run("a", "echo", timeout_s=0.0),
        run("a", "echo", output_bytes=1 << 30),
        run("a", "nul\0"),
        run("a", "echo", env={"A=B": "c"}),
        run("a", "x" * 200_000),
        ActionParams(action_id="a", kind="exec"),
        ActionParams(action_id="a", kind="write_file", path="/f", content="no base64"),
        ActionParams(action_id="a", kind="read_file"),
        ActionParams(action_id="a", kind="read_file", path="/\0"),
    ]
    for params in bad:
        with pytest.raises(InvalidRequest):
            await act(caller, box, params, wait_s=1)


async def test_an_action_wakes_only_a_sandbox_that_requests_wake(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    asleep = await make(services, caller)
    await services.lifecycle.pause(caller, asleep, "full")
    with pytest.raises(StateConflict):
        await services.trajectories.act(caller, asleep, run("a", "append /n x"), wait_s=10)
    page = await services.trajectories.page(caller, asleep, after=0, limit=10)
    assert page.actions == [], "what was refused leaves no trace"
    waking = await make(services, caller, auto_resume=True)
    await services.lifecycle.pause(caller, waking, "full")
    acted = await services.trajectories.act(caller, waking, run("a", "append /n x"), wait_s=10)
    assert acted.action.state == "done"
    assert node.contents[waking].disk["/n"] == "x"


async def test_a_task_is_summed_up_by_cause(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    box = await make(services, caller, task_id="job")
    await services.trajectories.act(caller, box, run("a", "exit 1"), wait_s=10)
    await services.trajectories.act(caller, box, run("b", "echo"), wait_s=10)
    node.end(box, EndReason.LOST)
    await services.watcher.reconcile()
    summed = await services.trajectories.outcomes(caller, "job")
    assert {(c.cause, c.fault): c.count for c in summed.actions} == {
        ("exit_code", "user"): 1,
        ("ok", None): 1,
    }
    assert [(c.cause, c.fault, c.count) for c in summed.sandboxes] == [("lost", "platform", 1)]

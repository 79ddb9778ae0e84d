# SPDX-License-Identifier: Apache-2.0
"""Actions as both halves of the SDK see them; a scripted server."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from opendsec import (
    Action,
    ActionMismatch,
    ActionUnknown,
    ConnectionFailed,
    FileNotFound,
    InvalidRequest,
    NodeFull,
    SandboxEnded,
    StateConflict,
)
from opendsec._limits import ACTION_WAIT_S

from .fake_server import SANDBOX_ID, Answer, FakeServer, error, sandbox
from .kits import collect, done

ONE = f"/v1/sandboxes/{SANDBOX_ID}"
ACTIONS = f"{ONE}/actions"


def action(**changes: Any) -> dict[str, Any]:
    output = {"head": "", "tail": "", "bytes": 0, "cut_bytes": 0, "encoding": "utf-8"}
    record = {
        "sandbox_id": SANDBOX_ID,
        "action_id": "a",
        "seq": 1,
        "kind": "exec",
        "state": "done",
        "asked": {"argv": ["true"]},
        "recorded_at": "2026-12-01T10:00:00.000000Z",
        "ended_at": "2026-12-01T10:00:01.000000Z",
        "result": {"exit_code": 0, "stdout": {**output, "head": "out\n"}, "stderr": output},
        "error": None,
        "fault": None,
        "cause": "ok",
        "evidence": {},
        "a_field_of_a_later_version": 1,
    }
    return {**record, **changes}


def not_run(code: str, **changes: Any) -> dict[str, Any]:
    return action(state="not_run", result=None, error=error(code, **changes)["error"])


UNKNOWN = action(
    state="unknown", result=None, fault="platform", cause="agent_restarted",
    error=error("action_unknown", fault="platform")["error"],
)  # fmt: skip


def lines(*values: Any) -> Answer:
    return Answer(200, raw=[json.dumps(value).encode() + b"\n" for value in values])


async def test_a_command_is_sent_whole_and_waited_for(box: Any, server: FakeServer) -> None:
    server.on("POST", ACTIONS, Answer(200, action(state="running")), Answer(200, action()))
    result = await done(box.actions.exec("a", "echo $A", env={"A": "b"}, rollout_id="r", step=3))
    assert isinstance(result, Action)
    assert (result.ok, result.exit_code, result.stdout, result.truncated) == (
        True, 0, "out\n", False,
    )  # fmt: skip
    first, second = (asked.json for asked in server.of("POST", ACTIONS))
    assert first == second
    assert first["argv"] == ["/bin/bash", "-l", "-c", "echo $A"]
    assert (first["env"], first["rollout_id"], first["step"]) == ({"A": "b"}, "r", 3)
    assert first["wait_s"] == ACTION_WAIT_S


async def test_lost_answers_and_what_was_not_run_are_tried_again(
    box: Any, server: FakeServer
) -> None:
    server.on(
        "POST",
        ACTIONS,
        Answer(drop=True),
        Answer(200, not_run("node_unavailable", fault="platform", retryable=True)),
        Answer(409, error("action_in_progress", retryable=True)),
        Answer(200, action()),
    )
    assert (await done(box.actions.exec("a", ["true"]))).ok
    assert len({asked.body for asked in server.of("POST", ACTIONS)}) == 1


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (Answer(200, not_run("sandbox_state_conflict")), StateConflict),
        (Answer(200, not_run("node_full", fault="capacity", retryable=True)), NodeFull),
        (Answer(409, error("action_mismatch")), ActionMismatch),
        (Answer(410, error("sandbox_ended")), SandboxEnded),
        (Answer(200, action(error=error("invalid_request")["error"])), InvalidRequest),
        (Answer(200, action(error=error("file_not_found")["error"])), FileNotFound),
        (Answer(drop=True), ConnectionFailed),
    ],
)
async def test_what_was_not_done_is_raised(
    box: Any, server: FakeServer, answer: Answer, raised: type[Exception]
) -> None:
    server.on("POST", ACTIONS, *[answer] * 6)
    with pytest.raises(raised):
        await done(box.actions.exec("a", ["true"]))


async def test_an_unknown_outcome_is_asked_for_once_and_then_raised(
    box: Any, server: FakeServer
) -> None:
    server.on("POST", ACTIONS, Answer(200, UNKNOWN), Answer(200, UNKNOWN), Answer(200, UNKNOWN))
    resolve = f"{ACTIONS}/a/resolve"
    server.on("POST", resolve, Answer(200, UNKNOWN), Answer(200, action(resolved_by="guest")))
    with pytest.raises(ActionUnknown) as failure:
        await done(box.actions.exec("a", ["true"]))
    assert (failure.value.fault, failure.value.details["cause"]) == ("platform", "agent_restarted")
    assert (await done(box.actions.exec("a", ["true"]))).resolved_by == "guest"
    # The program ended its own sandbox: that is its own doing.
    own = {**UNKNOWN, "fault": "user", "cause": "sandbox_ended"}
    server.on("POST", resolve, Answer(200, own))
    with pytest.raises(SandboxEnded):
        await done(box.actions.exec("a", ["true"]))
    server.on("POST", resolve, Answer(200, action()))
    await done(box.actions.resolve("a", happened=True, exit_code=0))
    assert server.of("POST", resolve)[-1].json == {"state": "done", "exit_code": 0}


async def test_output_that_was_cut_says_so(box: Any, server: FakeServer) -> None:
    cut = {"head": "ab", "tail": "yz", "bytes": 26, "cut_bytes": 22, "encoding": "utf-8"}
    raw = {"head": base64.b64encode(b"\xff").decode(), "bytes": 1, "encoding": "base64"}
    server.on("POST", ACTIONS, Answer(200, action(result={"stdout": cut, "stderr": raw})))
    result = await done(box.actions.exec("a", ["true"]))
    assert result.truncated
    assert result.stdout == "ab\n[… 22 bytes cut …]\nyz"
    assert result.stderr == "\ufffd"
    assert result.exit_code is None


async def test_files_and_snapshots(box: Any, server: FakeServer) -> None:
    content = base64.b64encode(b"text").decode()
    server.on(
        "POST",
        ACTIONS,
        Answer(200, action(kind="write_file", result={"bytes": 4})),
        Answer(200, action(kind="read_file", result={"content": content})),
        Answer(200, action(kind="snapshot", result={"snapshot_id": "s1"})),
    )
    await done(box.actions.write_file("w", "f", "text"))
    assert (await done(box.actions.read_file("r", "f"))).content == b"text"
    assert (await done(box.actions.snapshot("s"))).snapshot_id == "s1"
    assert server.of("POST", ACTIONS)[0].json["content"] == content


async def test_logs_by_pages_and_lines(client: Any, box: Any, server: FakeServer) -> None:
    server.on(
        "GET",
        ACTIONS,
        Answer(200, {"actions": [action(seq=1)], "next_after": 1}),
        Answer(200, {"actions": [action(seq=2)], "next_after": None}),
    )
    assert [a.seq for a in await collect(box.actions.list())] == [1, 2]
    assert server.of("GET", ACTIONS)[1].query == {"after": ["1"]}
    path = "/v1/trajectories/r%2F1"
    server.on("GET", path, lines(action(), {"done": {"actions": 1}}))
    assert [a.action_id for a in await collect(client.trajectories.export("r/1"))] == ["a"]
    server.on("GET", path, lines(action()))
    with pytest.raises(ConnectionFailed):
        await collect(client.trajectories.export("r/1"))
    step = {"index": 0, "of": 1, "action_id": "a", "how": "ran", "diverged": True}
    server.on(
        "POST",
        f"{ONE}/fast-forward",
        lines(step, {"done": {}}),
        lines({"failed": error("action_unknown", fault="platform")["error"]}),
    )
    (shown,) = await collect(box.actions.fast_forward("iother", through="a"))
    assert (shown.how, shown.diverged) == ("ran", True)
    with pytest.raises(ActionUnknown):
        await collect(box.actions.fast_forward("iother"))
    with pytest.raises(InvalidRequest):
        client.trajectories.of("")


async def test_a_branch_that_failed_leaves_no_sandbox(client: Any, server: FakeServer) -> None:
    snapshot = action(kind="snapshot", result={"snapshot_id": "s1"})
    server.on("GET", "/v1/sandboxes/iother/actions/snap", Answer(200, snapshot))
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    failed = {"failed": error("action_unknown", fault="platform")["error"]}
    server.on("POST", f"{ONE}/fast-forward", lines(failed), lines({"done": {}}))
    server.on("DELETE", ONE, Answer(503, error("node_unavailable")), Answer(204))
    first, second = await done(client.trajectories.branch("iother", "snap", 2))
    assert isinstance(first, ActionUnknown)
    assert second.sandbox_id == SANDBOX_ID
    assert len(server.of("DELETE", ONE)) >= 1


async def test_outcomes(client: Any, server: FakeServer) -> None:
    counts = {"total": 3, "user": 1, "platform": 1, "capacity": 0, "none": 1, "unknown": 0}
    by_cause = [{"state": "ended", "cause": "lost", "fault": "platform", "count": 1}]
    body = {"task_id": "t", "sandboxes": {**counts, "by_cause": by_cause}, "actions": counts}
    server.on("GET", "/v1/tasks/t/outcomes", Answer(200, body))
    found = await done(client.trajectories.outcomes("t"))
    assert (found.sandboxes.platform, found.sandboxes.by_cause[0].cause) == (1, "lost")

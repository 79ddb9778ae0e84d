# SPDX-License-Identifier: AGPL-3.0-only
"""Trajectories in the database: order, limits, one winner, and their end."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
import sqlalchemy as sa

from opendsec_server.contract.states import EndReason, State
from opendsec_server.store import sandboxes
from opendsec_server.store import trajectories as rows
from opendsec_server.store.changes import apply_changes
from opendsec_server.store.creates import begin_create
from opendsec_server.store.records import StateChange
from opendsec_server.store.store import Store
from opendsec_server.store.tables import ACTIONS, TRAJECTORIES
from opendsec_server.store.trajectories import Action, Begun, Ending, Limits

from .test_queries import record_of, store

__all__ = ["store"]
LIMITS = Limits(actions=100, bytes=10_000)
BOX = "in0de000000000000001"


def action(name: str, **changes: object) -> Action:
    made = Action(
        sandbox_id=BOX,
        action_id=name,
        project_id="p",
        task_id="t",
        rollout_id="r",
        step=None,
        kind="exec",
        params="{}",
        params_sha256="digest",
        recorded_at=time.time(),
    )
    return msgspec.structs.replace(made, **changes)


async def test_many_at_once_have_an_order_and_each_id_one_owner(store: Store) -> None:
    await begin_create(store, record_of(1), None)
    wanted = [action(f"a{number % 5}") for number in range(20)]
    begun = await asyncio.gather(*(rows.begin_action(store, one, LIMITS) for one in wanted))
    assert sorted(one.action.action_id for one in begun if one.new) == [
        "a0",
        "a1",
        "a2",
        "a3",
        "a4",
    ]
    log = await rows.actions_of(store, BOX, limit=100)
    assert [one.seq for one in log] == [1, 2, 3, 4, 5]
    claimed = await rows.claim_actions(store, "me", seat=None, now=time.time(), lease_until=1.0)
    assert len(claimed) == 5


async def test_rollouts_and_outcomes(store: Store) -> None:
    await begin_create(store, record_of(1, task_id="t"), None)
    for number in range(3):
        begun = await rows.begin_action(store, action(f"a{number}", step=number), LIMITS)
        if number:
            ending = Ending(state="done", cause="exit_code", fault="user")
            await rows.end_action(store, begun.action, ending)
    (rollout,) = await rows.rollouts(store, "p", task_id="t", sandbox_id=None, after=None, limit=10)
    assert (rollout.actions, rollout.open, rollout.last_step, rollout.sandboxes) == (3, 1, 2, 1)
    assert not await rows.rollouts(store, "p", task_id=None, sandbox_id=None, after="r", limit=10)
    first = await rows.actions_of_rollout(store, "p", "r", limit=2)
    after = (first[-1].recorded_at, BOX, first[-1].seq)
    rest = await rows.actions_of_rollout(store, "p", "r", after=after, limit=2)
    assert [one.action_id for one in (*first, *rest)] == ["a0", "a1", "a2"]
    boxes, actions = await rows.outcomes(store, "p", "t")
    assert [(one.state, one.count) for one in boxes] == [("pending", 1)]
    assert {(one.state, one.cause, one.fault): one.count for one in actions} == {
        ("running", None, None): 1,
        ("done", "exit_code", "user"): 2,
    }


async def test_of_two_endings_one_wins(store: Store) -> None:
    await begin_create(store, record_of(1), None)
    begun = (await rows.begin_action(store, action("a"), LIMITS)).action
    done = Ending(state="done", result='{"exit_code":0}', cause="ok")
    ended = await asyncio.gather(
        rows.end_action(store, begun, done),
        rows.end_action(store, begun, Ending(state="not_run", cause="not_begun")),
    )
    assert ended[0] == ended[1]
    # An unknown one can become known; a known one stays.
    other = (await rows.begin_action(store, action("b"), LIMITS)).action
    assert (await rows.end_action(store, other, Ending(state="unknown"))).state == "unknown"
    assert (await rows.end_action(store, other, done)).state == "done"
    assert (await rows.end_action(store, other, Ending(state="unknown"))).state == "done"


async def test_another_attempt_only_after_it_was_not_run(store: Store) -> None:
    await begin_create(store, record_of(1), None)
    first = (await rows.begin_action(store, action("a"), LIMITS)).action
    await rows.end_action(store, first, Ending(state="not_run"))
    other = await rows.begin_action(store, action("a", params_sha256="else"), LIMITS)
    assert not other.new
    second = await rows.begin_action(store, action("a"), LIMITS)
    assert second.new and (second.action.attempt, second.action.seq) == (2, 2)
    # What comes late of the first attempt says nothing of the second.
    late = await rows.end_action(store, first, Ending(state="done"))
    assert (late.state, late.attempt) == ("running", 2)


async def test_snapshots_stand_alone(store: Store) -> None:
    await begin_create(store, record_of(1), None)
    running = (await rows.begin_action(store, action("a"), LIMITS)).action
    snap = action("s", kind="snapshot")
    assert (await rows.begin_action(store, snap, LIMITS)).busy == "a"
    await rows.end_action(store, running, Ending(state="done"))
    assert (await rows.begin_action(store, snap, LIMITS)).new
    assert (await rows.begin_action(store, action("b"), LIMITS)).busy == "s"


async def test_bytes_are_counted_and_bounded_and_all_goes_with_the_record(store: Store) -> None:
    await begin_create(store, record_of(1), None)

    async def begin(name: str, size: int) -> Begun:
        return await rows.begin_action(store, action(name, params="x" * size), LIMITS)

    first = (await begin("a", 4_000)).action
    await rows.end_action(store, first, Ending(state="done", result="y" * 4_000))
    assert (await begin("b", 3_000)).full
    assert (await begin("c", 1_000)).new
    held = await store.read(lambda c: c.execute(sa.select(TRAJECTORIES.c.bytes)).scalar_one())
    assert held == 9_000
    now = time.time()
    end = StateChange(
        sandbox_id=BOX, state=State.ENDED, at=now, cause="api", reason=EndReason.KILLED
    )
    await apply_changes(store, [end])
    assert await sandboxes.prune(store, ended_before=now + 1, now=now) == 1

    def left(connection: sa.Connection) -> list[int]:
        return [
            int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())
            for table in (ACTIONS, TRAJECTORIES)
        ]

    assert await store.read(left) == [0, 0]
    # Its end comes after all: nothing is there to note it at.
    assert (await rows.end_action(store, first, Ending(state="done"))) == first


async def test_a_running_action_is_one_processs_until_its_lease_is_over(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LEASED_AT_ONCE", 2)
    await begin_create(store, record_of(1), None)
    names = [f"a{number}" for number in range(5)]
    theirs = [action(name, owner="one:x", lease_until=100.0) for name in names]
    begun = [(await rows.begin_action(store, one, LIMITS)).action for one in theirs]

    async def claim(owner: str, now: float, seat: str | None = None) -> list[str]:
        found = await rows.claim_actions(store, owner, seat=seat, now=now, lease_until=now + 10)
        assert {(one.owner, one.lease_until) for one in found} <= {(owner, now + 10)}
        return [one.action_id for one in found]

    assert await claim("two:x", 99.0) == []
    await rows.renew_actions(store, "one:x", begun, 200.0)
    assert await claim("two:x", 150.0, "two:") == []
    assert await claim("two:x", 201.0) == names
    # It is not the first one's any more.
    await rows.renew_actions(store, "one:x", begun, 300.0)
    assert await claim("three:x", 212.0) == names
    # The successor in the same place need not wait; what has ended is nobody's.
    ended = await rows.end_action(store, begun[0], Ending(state="done"))
    assert (ended.owner, ended.lease_until) == (None, 0.0)
    assert await claim("three:y", 213.0, "three:") == names[1:]
    await rows.renew_actions(store, "three:y", begun, 0.0)
    assert await claim("one:x", 214.0) == names[1:]
    # The clock was set back: no lease is given for so long.
    assert await claim("two:x", 215.0 - 3_600.0) == names[1:]

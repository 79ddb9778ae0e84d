# SPDX-License-Identifier: AGPL-3.0-only
"""Move sandboxes from state to state, and keep the transitions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa

from opendsec_server.contract.node import SandboxUsage
from opendsec_server.contract.states import (
    TERMINAL,
    TRANSITIONS,
    TRANSITIONS_KEPT_MAX,
    State,
    can_move,
)

from .records import KeyOutcome, StateChange
from .store import Store, Work
from .tables import IDEMPOTENCY, SANDBOX_TRANSITIONS, SANDBOXES
from .tasks import leave
from .usage import put_usage


@cache
def steps(source: State, target: State) -> tuple[State, ...]:
    """The shortest allowed way from ``source`` to ``target``; empty if there is none.

    Reports can be missed (a restart, a full queue), so that a sandbox is next seen several
    states further on. The states in between were passed all the same.
    """
    if source is target:
        return ()
    if can_move(source, target):
        return (target,)
    ways: deque[tuple[State, ...]] = deque(
        (state,) for state in TRANSITIONS[source] if state not in TERMINAL
    )
    seen = {source}
    while ways:
        way = ways.popleft()
        if way[-1] in seen:
            continue
        seen.add(way[-1])
        if can_move(way[-1], target):
            return (*way, target)
        for state in TRANSITIONS[way[-1]] - TERMINAL:
            ways.append((*way, state))
    return ()


async def apply_changes(
    store: Store,
    changes: Sequence[StateChange],
    *,
    first: Work | None = None,
) -> list[StateChange]:
    """Apply changes in order, in one transaction.

    What is no change, or leads out of a terminal state, is left out: reports may come twice
    and late.

    Args:
        store: Where.
        changes: What is known.
        first: What else the transaction is to do, before.

    Returns:
        The changes that were applied.
    """
    if not changes and first is None:
        return []

    def work(connection: sa.Connection) -> list[StateChange]:
        if first is not None:
            first(connection)
        rows = _rows_for_update(connection, store, {c.sandbox_id for c in changes})
        transitions: list[dict[str, Any]] = []
        applied = [change for change in changes if _apply(rows, change, transitions)]
        _write(connection, [row for row in rows.values() if row.changed], transitions)
        return applied

    return await store.write(work)


class _Row:
    """One sandbox while changes are applied to it."""

    def __init__(self, found: Any) -> None:
        self.state = State(found.state)
        self.changed = False
        self.values: dict[str, Any] = {
            "this_sandbox": found.sandbox_id,
            "state": self.state,
            "transitions": found.transitions,
            "node_seq": found.node_seq,
            "paused_mode": found.paused_mode,
            "gives_back": False,
            **dict.fromkeys(_KEPT_UNLESS_SET),
        }
        self.project_id: str = found.project_id
        self.task_id: str | None = found.task_id
        self.usage: SandboxUsage | None = None
        """All that it used, of one that has ended now."""
        self.outcome: KeyOutcome | None = None
        """What the create's idempotency key stands for from now on."""


_BEFORE_START = frozenset({State.PENDING, State.STARTING})
_KEPT_UNLESS_SET = (
    "started_at",
    "end_at",
    "ended_at",
    "end_reason",
    "message",
    "fault",
    "accelerator",
    "vmm",
)
# Statements are built once: building them costs more than running them.
_THIS_SANDBOX: sa.BindParameter[str] = sa.bindparam("this_sandbox")
_SELECT = sa.select(
    SANDBOXES.c.sandbox_id,
    SANDBOXES.c.state,
    SANDBOXES.c.transitions,
    SANDBOXES.c.node_seq,
    SANDBOXES.c.paused_mode,
    SANDBOXES.c.project_id,
    SANDBOXES.c.task_id,
).where(SANDBOXES.c.sandbox_id.in_(sa.bindparam("these", expanding=True)))
# Always in the same order, so that two transactions never wait for each other.
_SELECT_FOR_UPDATE = _SELECT.order_by(SANDBOXES.c.sandbox_id).with_for_update()
_UPDATE = (
    sa.update(SANDBOXES)
    .where(SANDBOXES.c.sandbox_id == _THIS_SANDBOX)
    .values(
        state=sa.bindparam("state"),
        transitions=sa.bindparam("transitions"),
        node_seq=sa.bindparam("node_seq"),
        paused_mode=sa.bindparam("paused_mode", type_=sa.Text),
        place_until=sa.case(
            (sa.bindparam("gives_back", type_=sa.Boolean), sa.null()),
            else_=SANDBOXES.c.place_until,
        ),
        **{
            name: sa.func.coalesce(
                sa.bindparam(name, type_=SANDBOXES.c[name].type), SANDBOXES.c[name]
            )
            for name in _KEPT_UNLESS_SET
        },
    )
)
_INSERT_TRANSITION = sa.insert(SANDBOX_TRANSITIONS)
_TRIM = sa.delete(SANDBOX_TRANSITIONS).where(
    SANDBOX_TRANSITIONS.c.sandbox_id == _THIS_SANDBOX,
    SANDBOX_TRANSITIONS.c.seq <= sa.bindparam("transitions") - TRANSITIONS_KEPT_MAX,
)
# The create's key is settled in the same transaction as the state that settles it. Most sandboxes
# of batches have none: one look for many.
_SETTLE_KEYS = (
    sa.update(IDEMPOTENCY)
    .where(
        IDEMPOTENCY.c.sandbox_id.in_(sa.bindparam("these", expanding=True)),
        IDEMPOTENCY.c.outcome == "pending",
    )
    .values(outcome=sa.bindparam("settled_as"))
)


def _rows_for_update(
    connection: sa.Connection, store: Store, sandbox_ids: set[str]
) -> dict[str, _Row]:
    query = _SELECT if store.is_sqlite else _SELECT_FOR_UPDATE
    rows = connection.execute(query, {"these": list(sandbox_ids)}).all()
    return {row.sandbox_id: _Row(row) for row in rows}


def _apply(rows: dict[str, _Row], change: StateChange, transitions: list[dict[str, Any]]) -> bool:
    row = rows.get(change.sandbox_id)
    if row is None or (change.while_in and row.state not in change.while_in):
        return False
    values = row.values
    if change.seq and change.seq <= values["node_seq"]:
        # States recur: a late report of an earlier one would look like news.
        return False
    starts = row.state in _BEFORE_START
    way = steps(row.state, change.state)
    if change.seq and change.state is row.state:
        # Nothing moved as far as anyone saw, but what the report tells is newer.
        values["node_seq"] = change.seq
        _tell(row, change, starts=False)
        return False
    if not way:
        return False
    values["node_seq"] = change.seq or values["node_seq"]
    for state in way:
        last = state is change.state
        values["transitions"] += 1
        transitions.append(
            {
                "sandbox_id": change.sandbox_id,
                "seq": values["transitions"],
                "from_state": row.state,
                "to_state": state,
                "at": change.at,
                "reason": change.reason if last else None,
                "message": change.message if last else None,
                "cause": change.cause,
            }
        )
        if row.state is State.RESUMING and state is State.PAUSED:
            # The resume that held a place has failed.
            values["gives_back"] = True
        row.state = values["state"] = state
        if state is State.RUNNING:
            row.outcome = "done"
    _tell(row, change, starts=starts)
    if change.state in TERMINAL:
        values["ended_at"] = change.at
        values["end_reason"] = change.reason
        values["message"] = change.message
        values["fault"] = change.fault
        row.outcome = row.outcome or "failed"
        row.usage = change.usage
    return True


def _tell(row: _Row, change: StateChange, *, starts: bool) -> None:
    """Take over what a change says beside the state."""
    values = row.values
    if starts and change.started_at is not None:
        values["started_at"] = change.started_at
    for name in ("end_at", "accelerator", "vmm"):
        if getattr(change, name) is not None:
            values[name] = getattr(change, name)
    if row.state is State.RUNNING:
        # It counts by itself now.
        values["gives_back"] = True
    paused = row.state in (State.PAUSED, State.RESUMING)
    values["paused_mode"] = (change.paused_mode or values["paused_mode"]) if paused else None
    row.changed = True


def _write(connection: sa.Connection, rows: list[_Row], transitions: list[dict[str, Any]]) -> None:
    if not rows:
        return
    connection.execute(_UPDATE, [row.values for row in rows])
    if transitions:
        connection.execute(_INSERT_TRANSITION, transitions)
    used = {row.values["this_sandbox"]: row.usage for row in rows if row.usage is not None}
    if used:
        put_usage(connection, used, now=time.time())
    failed = [
        (row.project_id, row.task_id)
        for row in rows
        if row.state is State.FAILED and row.task_id is not None
    ]
    leave(connection, failed)
    for outcome in ("done", "failed"):
        settled = [row.values["this_sandbox"] for row in rows if row.outcome == outcome]
        if settled:
            connection.execute(_SETTLE_KEYS, {"these": settled, "settled_as": outcome})
    long = [
        {"this_sandbox": row.values["this_sandbox"], "transitions": row.values["transitions"]}
        for row in rows
        if row.values["transitions"] > TRANSITIONS_KEPT_MAX
    ]
    if long:
        connection.execute(_TRIM, long)

# SPDX-License-Identifier: AGPL-3.0-only
"""Move sandboxes from state to state, and keep the transitions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa

from opendsec_server.contract.states import (
    TERMINAL,
    TRANSITIONS,
    TRANSITIONS_KEPT_MAX,
    State,
    can_move,
)

from .records import KeyOutcome, StateChange
from .store import Store
from .tables import IDEMPOTENCY, SANDBOX_TRANSITIONS, SANDBOXES


@cache
def steps(source: State, target: State) -> tuple[State, ...]:
    """The shortest allowed way from ``source`` to ``target``; empty if there is none.

    Reports can be missed (a restart, a full queue), so that a sandbox is next seen several
    states further on. The states in between were passed all the same.
    """
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


async def apply_changes(store: Store, changes: Sequence[StateChange]) -> list[StateChange]:
    """Apply changes in order, in one transaction.

    What is no change, or leads out of a terminal state, is left out: reports may come twice
    and late.

    Returns:
        The changes that were applied.
    """
    if not changes:
        return []

    def work(connection: sa.Connection) -> list[StateChange]:
        rows = _rows_for_update(connection, store, {c.sandbox_id for c in changes})
        applied = [change for change in changes if _apply(rows, change)]
        for row in rows.values():
            if row.values:
                _write(connection, row)
        return applied

    return await store.write(work)


class _Row:
    """One sandbox while changes are applied to it."""

    def __init__(self, sandbox_id: str, state: State, transitions: int) -> None:
        self.sandbox_id = sandbox_id
        self.state = state
        self.transitions = transitions
        self.values: dict[str, Any] = {}
        self.new: list[dict[str, Any]] = []


def _rows_for_update(
    connection: sa.Connection, store: Store, sandbox_ids: set[str]
) -> dict[str, _Row]:
    query = sa.select(SANDBOXES.c.sandbox_id, SANDBOXES.c.state, SANDBOXES.c.transitions).where(
        SANDBOXES.c.sandbox_id.in_(sandbox_ids)
    )
    if not store.is_sqlite:
        # Always in the same order, so that two transactions never wait for each other.
        query = query.order_by(SANDBOXES.c.sandbox_id).with_for_update()
    rows = connection.execute(query).all()
    return {row.sandbox_id: _Row(row.sandbox_id, State(row.state), row.transitions) for row in rows}


def _apply(rows: dict[str, _Row], change: StateChange) -> bool:
    row = rows.get(change.sandbox_id)
    if row is None:
        return False
    way = steps(row.state, change.state)
    if not way:
        return False
    for state in way:
        last = state is change.state
        row.transitions += 1
        row.new.append(
            {
                "sandbox_id": row.sandbox_id,
                "seq": row.transitions,
                "from_state": row.state,
                "to_state": state,
                "at": change.at,
                "reason": change.reason if last else None,
                "message": change.message if last else None,
                "cause": change.cause,
            }
        )
        row.state = state
    row.values |= {"state": row.state, "transitions": row.transitions}
    if change.started_at is not None:
        row.values["started_at"] = change.started_at
    if change.end_at is not None:
        row.values["end_at"] = change.end_at
    if change.state in TERMINAL:
        row.values |= {
            "ended_at": change.at,
            "end_reason": change.reason,
            "message": change.message,
            "fault": change.fault,
        }
    return True


def _write(connection: sa.Connection, row: _Row) -> None:
    connection.execute(
        sa.update(SANDBOXES).where(SANDBOXES.c.sandbox_id == row.sandbox_id).values(row.values)
    )
    connection.execute(sa.insert(SANDBOX_TRANSITIONS), row.new)
    if row.transitions > TRANSITIONS_KEPT_MAX:
        connection.execute(
            sa.delete(SANDBOX_TRANSITIONS).where(
                SANDBOX_TRANSITIONS.c.sandbox_id == row.sandbox_id,
                SANDBOX_TRANSITIONS.c.seq <= row.transitions - TRANSITIONS_KEPT_MAX,
            )
        )
    outcome: KeyOutcome | None = None
    states = {new["to_state"] for new in row.new}
    # The create's key is settled in the same transaction as the state that settles it.
    if State.RUNNING in states:
        outcome = "done"
    elif row.state in TERMINAL:
        outcome = "failed"
    if outcome is not None:
        connection.execute(
            sa.update(IDEMPOTENCY)
            .where(IDEMPOTENCY.c.sandbox_id == row.sandbox_id, IDEMPOTENCY.c.outcome == "pending")
            .values(outcome=outcome)
        )

# SPDX-License-Identifier: AGPL-3.0-only
"""Places in the quota for paused sandboxes that are about to run again.

A place is written beside the sandbox's record, and counts from then on as if it ran. So creates
and resumes at once never take the same place, whichever process they are in. The record that says
that it runs gives the place back (``changes``), and so does the one that says that it did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from opendsec_server.contract.errors import QuotaExceeded
from opendsec_server.contract.states import State

from .quotas import line_of, no_place, take_from
from .store import Store
from .tables import SANDBOXES

PLACE_HELD_S = 120.0
"""A place whose holder was killed, or has lost sight of the node, is given back after this. A node
that has begun a resume says so long before: its word counts by itself."""

# Statements are built once: building them costs more than running them.
_THESE = (
    sa.select(
        SANDBOXES.c.sandbox_id,
        SANDBOXES.c.project_id,
        SANDBOXES.c.cpu,
        SANDBOXES.c.memory_mb,
        SANDBOXES.c.disk_mb,
        SANDBOXES.c.gpu,
        (
            SANDBOXES.c.ended_at.is_(None)
            & ((SANDBOXES.c.state != State.PAUSED) | SANDBOXES.c.place_until.is_not(None))
        ).label("counted"),
        (SANDBOXES.c.ended_at.is_(None) & (SANDBOXES.c.state == State.PAUSED)).label("paused"),
    )
    .where(SANDBOXES.c.sandbox_id.in_(sa.bindparam("these", expanding=True)))
    # Records first and then projects, as all who change states do; always in the same order.
    .order_by(SANDBOXES.c.sandbox_id)
)
_THESE_LOCKED = _THESE.with_for_update()
_OVER = (
    sa.select(SANDBOXES.c.sandbox_id)
    .where(SANDBOXES.c.place_until < sa.bindparam("at_latest"))
    .order_by(SANDBOXES.c.sandbox_id)
)
# Those that others work on at this moment are found the next time.
_OVER_LOCKED = _OVER.with_for_update(skip_locked=True)
_SET = (
    sa.update(SANDBOXES)
    .where(SANDBOXES.c.sandbox_id.in_(sa.bindparam("these", expanding=True)))
    .values(place_until=sa.bindparam("until", type_=sa.Double))
)


async def hold_places(
    store: Store, sandbox_ids: Sequence[str], *, now: float
) -> dict[str, QuotaExceeded]:
    """Hold places for paused sandboxes, in order, as far as they fit.

    Args:
        store: Where.
        sandbox_ids: Which. One that has a place, or runs, keeps it.
        now: Unix seconds.

    Returns:
        Why those without a place have none.

    Raises:
        StoreUnavailable: none has one.
    """

    def work(connection: sa.Connection) -> dict[str, QuotaExceeded]:
        known = {row.sandbox_id: row for row in _locked(connection, sandbox_ids)}
        lines: dict[str, Sequence[Any]] = {}
        for project_id in sorted({row.project_id for row in known.values()}):
            lines[project_id] = line_of(connection, project_id)
        more: Counter[tuple[str, str]] = Counter()
        refused: dict[str, QuotaExceeded] = {}
        for name in dict.fromkeys(sandbox_ids):
            one = known.get(name)
            if one is None or one.counted:
                continue
            line = lines[one.project_id]
            refusal = no_place(one, line, more)
            if refusal is None:
                take_from(one, line, more)
            else:
                refused[name] = refusal
        # One that runs counts by itself: a place beside it would count once it is paused again.
        held = [name for name, one in known.items() if one.paused and name not in refused]
        if held:
            connection.execute(_SET, {"these": held, "until": now + PLACE_HELD_S})
        return refused

    return await store.write(work)


async def give_back_places(store: Store, sandbox_ids: Collection[str]) -> None:
    """Places that are not needed: their sandboxes stay paused, or their records say that they run.

    Raises:
        StoreUnavailable: they are given back when their time is over.
    """

    def work(connection: sa.Connection) -> None:
        _give_back(connection, [row.sandbox_id for row in _locked(connection, sandbox_ids)])

    await store.write(work)


async def end_places(store: Store, *, now: float) -> int:
    """Give back what was held for too long; how many.

    Args:
        store: Where.
        now: Unix seconds; endless: all that are held.
    """

    def work(connection: sa.Connection) -> int:
        query = _OVER if connection.dialect.name == "sqlite" else _OVER_LOCKED
        over = list(connection.execute(query, {"at_latest": now}).scalars())
        _give_back(connection, over)
        return len(over)

    return await store.write(work)


def _locked(connection: sa.Connection, sandbox_ids: Collection[str]) -> Sequence[Any]:
    query = _THESE if connection.dialect.name == "sqlite" else _THESE_LOCKED
    return connection.execute(query, {"these": sorted(set(sandbox_ids))}).all()


def _give_back(connection: sa.Connection, sandbox_ids: list[str]) -> None:
    if sandbox_ids:
        connection.execute(_SET, {"these": sandbox_ids, "until": None})

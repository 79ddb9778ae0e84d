# SPDX-License-Identifier: AGPL-3.0-only
"""The one transaction before a sandbox is made: quota, idempotency key, record."""

from __future__ import annotations

import time
from collections.abc import Collection

import sqlalchemy as sa

from opendsec_server.contract.errors import QuotaExceeded
from opendsec_server.contract.states import State

from .keys import find_key, take_key
from .records import IdempotencyClaim, IdempotencyRow, SandboxRecord
from .sandboxes import row_of
from .store import Store
from .tables import PROJECTS, SANDBOXES

# Statements are built once: building them costs more than running them.
_IN_PROJECT = PROJECTS.c.project_id == sa.bindparam("in_project")
_INSERT_SANDBOX = sa.insert(SANDBOXES)
_LOCK_PROJECT = sa.select(PROJECTS.c.project_id).where(_IN_PROJECT).with_for_update()
_QUOTA = sa.select(
    PROJECTS.c.sandboxes_max,
    sa.select(sa.func.count())
    .select_from(SANDBOXES)
    .where(
        SANDBOXES.c.project_id == sa.bindparam("in_project"),
        SANDBOXES.c.ended_at.is_(None),
        # A paused one holds no memory. Resuming it takes its place again, if there is one.
        SANDBOXES.c.state != State.PAUSED,
    )
    .scalar_subquery(),
).where(_IN_PROJECT)


async def begin_create(
    store: Store, record: SandboxRecord, claim: IdempotencyClaim | None
) -> IdempotencyRow | None:
    """Record a sandbox that is about to be made, and tie the key to it.

    Returns:
        None: recorded. Else what the key already stands for (``pending`` or ``done``);
        then nothing was written. A key whose create failed is free for a new attempt.

    Raises:
        IdempotencyMismatch: the key was used with other parameters.
        QuotaExceeded: as many of the project's sandboxes run as may.
        StoreUnavailable: nothing was written.
    """

    def work(connection: sa.Connection) -> IdempotencyRow | None:
        return _begin_create(connection, store, record, claim)

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process took the key between our look and our insert.
        return await store.write(work)


async def look_up(store: Store, project_id: str, claim: IdempotencyClaim) -> IdempotencyRow | None:
    """What a key stands for now. None: nothing, so that ``begin_create`` decides.

    Raises:
        IdempotencyMismatch: the key was used with other parameters.
        StoreUnavailable: not known.
    """
    return await store.read(lambda c: find_key(c, project_id, claim, time.time())[0])


def _begin_create(
    connection: sa.Connection,
    store: Store,
    record: SandboxRecord,
    claim: IdempotencyClaim | None,
) -> IdempotencyRow | None:
    now, renew = record.created_at, False
    if claim is not None:
        earlier, renew = find_key(connection, record.project_id, claim, now)
        if earlier is not None:
            return earlier
    check_quota(connection, store, record.project_id)
    connection.execute(_INSERT_SANDBOX, row_of(record))
    if claim is not None:
        take_key(connection, record.project_id, claim, record.sandbox_id, now=now, renew=renew)
    return None


def check_quota(connection: sa.Connection, store: Store, project_id: str) -> None:
    """Refuse one sandbox more than may run at once. Paused ones do not count.

    Raises:
        QuotaExceeded: there is no place left.
    """
    names = {"in_project": project_id}
    if not store.is_sqlite:
        # Creates of one project take turns, or two could both see the last free place.
        connection.execute(_LOCK_PROJECT, names)
    sandboxes_max, live = connection.execute(_QUOTA, names).one()
    _refuse_above(live, sandboxes_max)


async def check_place(
    store: Store, project_id: str, sandbox_id: str, others: Collection[str]
) -> None:
    """Whether one of the project's paused sandboxes may run again.

    Args:
        store: Where.
        project_id: Whose.
        sandbox_id: Which.
        others: That take a place at this moment, whatever their records say.

    Raises:
        QuotaExceeded: there is no place left.
        StoreUnavailable: not known.
    """

    def work(connection: sa.Connection) -> None:
        running = (
            sa.select(sa.func.count())
            .select_from(SANDBOXES)
            .where(
                SANDBOXES.c.project_id == project_id,
                SANDBOXES.c.ended_at.is_(None),
                SANDBOXES.c.state != State.PAUSED,
                SANDBOXES.c.sandbox_id.not_in([sandbox_id, *others]),
            )
        )
        limit = sa.select(PROJECTS.c.sandboxes_max).where(PROJECTS.c.project_id == project_id)
        count = connection.execute(running).scalar_one() + len(others)
        _refuse_above(count, connection.execute(limit).scalar_one())

    await store.read(work)


def _refuse_above(count: int, sandboxes_max: int) -> None:
    if count >= sandboxes_max:
        raise QuotaExceeded(
            f"the project has {count} sandboxes that are not paused, and may have {sandboxes_max}",
            details={"limit": sandboxes_max, "running": count},
            retry_after_s=1,
        )

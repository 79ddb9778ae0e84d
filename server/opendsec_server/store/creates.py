# SPDX-License-Identifier: AGPL-3.0-only
"""The one transaction before a sandbox is made: quota, idempotency key, record."""

from __future__ import annotations

import time

import sqlalchemy as sa

from .keys import find_key, take_key
from .quotas import admit_one
from .records import IdempotencyClaim, IdempotencyRow, SandboxRecord
from .sandboxes import row_of
from .store import Store
from .tables import SANDBOXES
from .tasks import enter_one

# Statements are built once: building them costs more than running them.
_INSERT_SANDBOX = sa.insert(SANDBOXES)


async def begin_create(
    store: Store, record: SandboxRecord, claim: IdempotencyClaim | None
) -> IdempotencyRow | None:
    """Record a sandbox that is about to be made, and tie the key to it.

    Returns:
        None: recorded. Else what the key already stands for (``pending`` or ``done``);
        then nothing was written. A key whose create failed is free for a new attempt.

    Raises:
        IdempotencyMismatch: the key was used with other parameters.
        QuotaExceeded: it does not fit into the project, or one above it.
        TaskEnded, TaskPaused, TaskBudgetReached: its task takes no more.
        StoreUnavailable: nothing was written.
    """

    def work(connection: sa.Connection) -> IdempotencyRow | None:
        return _begin_create(connection, record, claim)

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
    connection: sa.Connection, record: SandboxRecord, claim: IdempotencyClaim | None
) -> IdempotencyRow | None:
    now, renew = record.created_at, False
    if claim is not None:
        earlier, renew = find_key(connection, record.project_id, claim, now)
        if earlier is not None:
            return earlier
    if record.task_id is not None:
        enter_one(connection, record.project_id, record.task_id, now=now)
    admit_one(connection, record)
    connection.execute(_INSERT_SANDBOX, row_of(record))
    if claim is not None:
        take_key(connection, record.project_id, claim, record.sandbox_id, now=now, renew=renew)
    return None

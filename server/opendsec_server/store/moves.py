# SPDX-License-Identifier: AGPL-3.0-only
"""A create that goes to another node: the record gets another id, and keeps its place."""

from __future__ import annotations

import sqlalchemy as sa

from opendsec_server.contract.states import State

from .records import SandboxRecord
from .sandboxes import row_of
from .store import Store
from .tables import BATCH_ITEMS, IDEMPOTENCY, SANDBOX_TRANSITIONS, SANDBOXES

_THIS = SANDBOXES.c.sandbox_id == sa.bindparam("this_sandbox")


async def move_create(store: Store, sandbox_id: str, moved: SandboxRecord) -> bool:
    """Let ``moved`` take the place of a sandbox of which nothing was made, with key and batch.

    The quota is not asked again: one goes, one comes.

    Returns:
        False: it is not pending any more, and nothing has changed.

    Raises:
        StoreUnavailable: nothing has changed.
    """

    def work(connection: sa.Connection) -> bool:
        gone = connection.execute(
            sa.delete(SANDBOXES).where(_THIS, SANDBOXES.c.state == State.PENDING),
            {"this_sandbox": sandbox_id},
        )
        if not gone.rowcount:
            return False
        connection.execute(
            sa.delete(SANDBOX_TRANSITIONS).where(SANDBOX_TRANSITIONS.c.sandbox_id == sandbox_id)
        )
        connection.execute(sa.insert(SANDBOXES), row_of(moved))
        connection.execute(
            sa.update(IDEMPOTENCY)
            .where(IDEMPOTENCY.c.sandbox_id == sandbox_id)
            .values(sandbox_id=moved.sandbox_id)
        )
        connection.execute(
            sa.update(BATCH_ITEMS)
            .where(BATCH_ITEMS.c.sandbox_id == sandbox_id)
            .values(sandbox_id=moved.sandbox_id)
        )
        return True

    return await store.write(work)

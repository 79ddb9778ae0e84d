# SPDX-License-Identifier: AGPL-3.0-only
"""Which sandboxes of a project some words fit."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from .packing import list_entry
from .sandboxes import contains
from .store import Store
from .tables import BATCH_ITEMS, SANDBOXES


async def live_ids(
    store: Store,
    project_id: str,
    *,
    task_id: str | None = None,
    labels: Sequence[str] = (),
    batch_id: str | None = None,
) -> Sequence[str]:
    """Ids of the project's sandboxes that have not ended and fit all that is given, oldest first.

    Raises:
        StoreUnavailable: not known.
    """
    column = SANDBOXES.c
    query = sa.select(column.sandbox_id).where(
        column.project_id == project_id, column.ended_at.is_(None)
    )
    if task_id is not None:
        query = query.where(column.task_id == task_id)
    for label in labels:
        query = query.where(contains(store, column.labels, list_entry(label)))
    if batch_id is not None:
        items = sa.select(BATCH_ITEMS.c.sandbox_id).where(BATCH_ITEMS.c.batch_id == batch_id)
        query = query.where(column.sandbox_id.in_(items))
    query = query.order_by(column.created_at, column.sandbox_id)
    return await store.read(lambda connection: connection.execute(query).scalars().all())

# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of batches: many creates asked for in one call."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

BATCHES = sa.Table(
    "batches",
    METADATA,
    sa.Column("batch_id", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    # What is asked for, as JSON: parameters of all, and where items differ.
    sa.Column("params", sa.Text, nullable=False),
    sa.Column("asked", sa.Integer, nullable=False),
    # Items below it have a row; those from it on wait in the queue.
    sa.Column("next_index", sa.Integer, nullable=False),
    sa.Column("made", sa.Integer, nullable=False),
    sa.Column("failed", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    # Items that have not begun until then do not begin.
    sa.Column("begin_until", sa.Double, nullable=False),
    sa.Column("cancelled_at", sa.Double, nullable=True),
    sa.Column("finished_at", sa.Double, nullable=True),
    # The process that works on it, and until when others leave it alone.
    sa.Column("owner", sa.Text, nullable=True),
    sa.Column("lease_until", sa.Double, nullable=False),
    sa.Index("ix_batches_project_created", "project_id", "created_at", "batch_id"),
)
sa.Index(
    "ix_batches_running",
    BATCHES.c.lease_until,
    sqlite_where=BATCHES.c.finished_at.is_(None),
    postgresql_where=BATCHES.c.finished_at.is_(None),
)

BATCH_ITEMS = sa.Table(
    "batch_items",
    METADATA,
    sa.Column(
        "batch_id",
        sa.Text,
        sa.ForeignKey("batches.batch_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    # From 0 on. With the batch it is the item's idempotency key.
    sa.Column("idx", sa.Integer, primary_key=True, autoincrement=False),
    # None: none was made. No foreign key: the record of an ended one is removed earlier.
    sa.Column("sandbox_id", sa.Text, nullable=True),
    # The order in which outcomes came, from 1 on. None: it is being made.
    sa.Column("seq", sa.Integer, nullable=True),
    # JSON. None: it was made.
    sa.Column("error", sa.Text, nullable=True),
    sa.Index("ix_batch_items_seq", "batch_id", "seq"),
)

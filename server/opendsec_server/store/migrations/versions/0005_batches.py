# SPDX-License-Identifier: AGPL-3.0-only
"""Batches of creates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("asked", sa.Integer, nullable=False),
        sa.Column("next_index", sa.Integer, nullable=False),
        sa.Column("made", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("begin_until", sa.Double, nullable=False),
        sa.Column("cancelled_at", sa.Double, nullable=True),
        sa.Column("finished_at", sa.Double, nullable=True),
        sa.Column("owner", sa.Text, nullable=True),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", name="pk_batches"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_batches_project_id"
        ),
    )
    op.create_index(
        "ix_batches_project_created", "batches", ["project_id", "created_at", "batch_id"]
    )
    running = sa.text("finished_at IS NULL")
    op.create_index(
        "ix_batches_running",
        "batches",
        ["lease_until"],
        sqlite_where=running,
        postgresql_where=running,
    )
    op.create_table(
        "batch_items",
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("idx", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("sandbox_id", sa.Text, nullable=True),
        sa.Column("seq", sa.Integer, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("batch_id", "idx", name="pk_batch_items"),
        sa.ForeignKeyConstraint(
            ["batch_id"],
            ["batches.batch_id"],
            name="fk_batch_items_batch_id",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_batch_items_seq", "batch_items", ["batch_id", "seq"])

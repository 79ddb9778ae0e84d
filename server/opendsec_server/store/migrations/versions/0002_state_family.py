# SPDX-License-Identifier: AGPL-3.0-only
"""Pausing, snapshots and forks: how sandboxes pause and what they started from; snapshots."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("templates", sa.Column("backend", sa.Text, nullable=True))
    op.add_column("idempotency", sa.Column("result", sa.Text, nullable=True))
    for column in (
        sa.Column("timeout_s", sa.Double, nullable=False, server_default="300"),
        sa.Column("pause_mode", sa.Text, nullable=False, server_default="full"),
        sa.Column("auto_resume", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("accelerator", sa.Text, nullable=False, server_default="none"),
        sa.Column("vmm", sa.Text, nullable=True),
        sa.Column("paused_mode", sa.Text, nullable=True),
        sa.Column("node_seq", sa.Integer, nullable=False, server_default="0"),
        sa.Column("snapshot_id", sa.Text, nullable=True),
        sa.Column("image", sa.Text, nullable=True),
        sa.Column("default_user", sa.Text, nullable=True),
        sa.Column("default_workdir", sa.Text, nullable=True),
    ):
        op.add_column("sandboxes", column)
    op.create_table(
        "snapshots",
        sa.Column("snapshot_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("source_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=True),
        sa.Column("tag", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("ephemeral", sa.Boolean, nullable=False),
        sa.Column("keyed", sa.Boolean, nullable=False),
        sa.Column("backend", sa.Text, nullable=False),
        sa.Column("mode", sa.Text, nullable=False),
        sa.Column("template_id", sa.Text, nullable=False),
        sa.Column("template", sa.Text, nullable=False),
        sa.Column("image", sa.Text, nullable=False),
        sa.Column("cpu", sa.Double, nullable=False),
        sa.Column("memory_mb", sa.Integer, nullable=False),
        sa.Column("disk_mb", sa.Integer, nullable=False),
        sa.Column("default_user", sa.Text, nullable=False),
        sa.Column("default_workdir", sa.Text, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("disk_bytes", sa.BigInteger, nullable=False),
        sa.Column("memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("versions", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("snapshot_id", name="pk_snapshots"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_snapshots_project_id"
        ),
    )
    op.create_index(
        "ix_snapshots_project_created", "snapshots", ["project_id", "created_at", "snapshot_id"]
    )
    op.create_index("ix_snapshots_source", "snapshots", ["source_id"])
    ready = sa.text("state = 'ready'")
    op.create_index(
        "uq_snapshots_name",
        "snapshots",
        ["project_id", "name", "tag"],
        unique=True,
        sqlite_where=ready,
        postgresql_where=ready,
    )

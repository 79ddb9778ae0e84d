# SPDX-License-Identifier: AGPL-3.0-only
"""Groups of sandboxes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "groups",
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("node_id", sa.Text, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("end_at", sa.Double, nullable=False),
        sa.Column("ready_at", sa.Double, nullable=True),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.Column("end_reason", sa.Text, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("owner", sa.Text, nullable=True),
        sa.Column("lease_until", sa.Double, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("group_id", name="pk_groups"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_groups_project_id"
        ),
    )
    op.create_index("ix_groups_project_created", "groups", ["project_id", "created_at", "group_id"])
    op.create_index(
        "uq_groups_live_name",
        "groups",
        ["project_id", "name"],
        unique=True,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_table(
        "group_members",
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("message", sa.Text, nullable=True),
        sa.Column("sandbox_id", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("group_id", "name", name="pk_group_members"),
        sa.ForeignKeyConstraint(
            ["group_id"],
            ["groups.group_id"],
            name="fk_group_members_group_id",
            ondelete="CASCADE",
        ),
    )

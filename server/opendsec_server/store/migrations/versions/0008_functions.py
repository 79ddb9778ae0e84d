# SPDX-License-Identifier: AGPL-3.0-only
"""Pools of function workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "function_pools",
        sa.Column("pool_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("pool_id", name="pk_function_pools"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_function_pools_project_id"
        ),
    )
    op.create_index("uq_function_pools_name", "function_pools", ["project_id", "name"], unique=True)
    op.create_table(
        "function_workers",
        sa.Column("worker_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("worker_id", name="pk_function_workers"),
    )

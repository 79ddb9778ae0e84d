# SPDX-License-Identifier: AGPL-3.0-only
"""Trajectories: the ordered actions of sandboxes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "trajectories",
        sa.Column("sandbox_id", sa.Text, nullable=False),
        sa.Column("next_seq", sa.Integer, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("sandbox_id", name="pk_trajectories"),
        sa.ForeignKeyConstraint(
            ["sandbox_id"],
            ["sandboxes.sandbox_id"],
            name="fk_trajectories_sandbox_id",
            ondelete="CASCADE",
        ),
    )
    op.create_table(
        "actions",
        sa.Column("sandbox_id", sa.Text, nullable=False),
        sa.Column("action_id", sa.Text, nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text, nullable=True),
        sa.Column("rollout_id", sa.Text, nullable=True),
        sa.Column("step", sa.Integer, nullable=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("params_sha256", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("instance", sa.Text, nullable=True),
        sa.Column("oom_before", sa.Integer, nullable=False),
        sa.Column("recorded_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.Column("result", sa.Text, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("fault", sa.Text, nullable=True),
        sa.Column("cause", sa.Text, nullable=True),
        sa.Column("evidence", sa.Text, nullable=True),
        sa.Column("origin", sa.Text, nullable=True),
        sa.Column("replayed", sa.Boolean, nullable=False),
        sa.Column("resolved_by", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("sandbox_id", "action_id", name="pk_actions"),
        sa.ForeignKeyConstraint(
            ["sandbox_id"],
            ["trajectories.sandbox_id"],
            name="fk_actions_sandbox_id",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_actions_project_id"
        ),
    )
    op.create_index("ix_actions_seq", "actions", ["sandbox_id", "seq"], unique=True)
    op.create_index("ix_actions_rollout", "actions", ["project_id", "rollout_id", "recorded_at"])
    op.create_index("ix_actions_task", "actions", ["project_id", "task_id"])
    running = sa.text("state = 'running'")
    op.create_index(
        "ix_actions_running",
        "actions",
        ["sandbox_id"],
        sqlite_where=running,
        postgresql_where=running,
    )

# SPDX-License-Identifier: AGPL-3.0-only
"""Tasks and what sandboxes used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _tasks()
    _operations()
    _usage()
    # Every task id that a kept sandbox has names a task.
    op.execute(
        """
        INSERT INTO tasks (project_id, task_id, state, created_at, used_at, made)
        SELECT project_id, task_id, 'open', MIN(created_at), MAX(created_at),
            SUM(CASE WHEN state = 'failed' THEN 0 ELSE 1 END)
        FROM sandboxes WHERE task_id IS NOT NULL
        GROUP BY project_id, task_id
        """
    )


def _tasks() -> None:
    op.create_table(
        "tasks",
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("used_at", sa.Double, nullable=False),
        sa.Column("deadline_at", sa.Double, nullable=True),
        sa.Column("sandboxes_max", sa.Integer, nullable=True),
        sa.Column("cpu_seconds_max", sa.Double, nullable=True),
        sa.Column("made", sa.Integer, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.Column("end_reason", sa.Text, nullable=True),
        sa.Column("past_cpu_seconds", sa.Double, nullable=False, server_default="0"),
        sa.Column("past_memory_mb_seconds", sa.Double, nullable=False, server_default="0"),
        sa.Column("past_egress_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("past_ingress_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("project_id", "task_id", name="pk_tasks"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_tasks_project_id"
        ),
    )
    op.create_index("ix_tasks_project_created", "tasks", ["project_id", "created_at", "task_id"])
    op.create_index("ix_tasks_used", "tasks", ["used_at"])
    limited = sa.text(
        "ended_at IS NULL AND (deadline_at IS NOT NULL OR cpu_seconds_max IS NOT NULL)"
    )
    op.create_index(
        "ix_tasks_limited",
        "tasks",
        ["deadline_at"],
        sqlite_where=limited,
        postgresql_where=limited,
    )


def _operations() -> None:
    op.create_table(
        "task_operations",
        sa.Column("operation_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double, nullable=True),
        sa.Column("superseded_by", sa.Text, nullable=True),
        sa.Column("asked", sa.Integer, nullable=False),
        sa.Column("done", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("memory_freed_bytes", sa.BigInteger, nullable=False),
        sa.Column("owner", sa.Text, nullable=True),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("operation_id", name="pk_task_operations"),
        sa.ForeignKeyConstraint(
            ["project_id", "task_id"],
            ["tasks.project_id", "tasks.task_id"],
            name="fk_task_operations_task",
            ondelete="CASCADE",
        ),
    )
    op.create_index(
        "ix_task_operations_task", "task_operations", ["project_id", "task_id", "created_at"]
    )
    running, keyed = sa.text("finished_at IS NULL"), sa.text("key IS NOT NULL")
    op.create_index(
        "ix_task_operations_running",
        "task_operations",
        ["lease_until"],
        sqlite_where=running,
        postgresql_where=running,
    )
    op.create_index(
        "uq_task_operations_key",
        "task_operations",
        ["project_id", "key"],
        unique=True,
        sqlite_where=keyed,
        postgresql_where=keyed,
    )
    op.create_table(
        "task_items",
        sa.Column("operation_id", sa.Text, nullable=False),
        sa.Column("sandbox_id", sa.Text, nullable=False),
        sa.Column("seq", sa.Integer, nullable=True),
        sa.Column("outcome", sa.Text, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("memory_freed_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("operation_id", "sandbox_id", name="pk_task_items"),
        sa.ForeignKeyConstraint(
            ["operation_id"],
            ["task_operations.operation_id"],
            name="fk_task_items_operation_id",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_task_items_seq", "task_items", ["operation_id", "seq"])


def _usage() -> None:
    op.create_table(
        "sandbox_usage",
        sa.Column("sandbox_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text, nullable=True),
        sa.Column("cpu_seconds", sa.Double, nullable=False),
        sa.Column("memory_mb_seconds", sa.Double, nullable=False),
        sa.Column("disk_bytes", sa.BigInteger, nullable=False),
        sa.Column("egress_bytes", sa.BigInteger, nullable=False),
        sa.Column("ingress_bytes", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("sandbox_id", name="pk_sandbox_usage"),
        sa.ForeignKeyConstraint(
            ["sandbox_id"],
            ["sandboxes.sandbox_id"],
            name="fk_sandbox_usage_sandbox_id",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_sandbox_usage_task", "sandbox_usage", ["project_id", "task_id"])

# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of tasks, of what is done to a whole task, and of what sandboxes used."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

TASKS = sa.Table(
    "tasks",
    METADATA,
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), primary_key=True),
    sa.Column("task_id", sa.Text, primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    # When a sandbox was last made in it.
    sa.Column("used_at", sa.Double, nullable=False),
    sa.Column("deadline_at", sa.Double, nullable=True),
    sa.Column("sandboxes_max", sa.Integer, nullable=True),
    sa.Column("cpu_seconds_max", sa.Double, nullable=True),
    # Sandboxes made so far; those whose start failed do not count.
    sa.Column("made", sa.Integer, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.Column("end_reason", sa.Text, nullable=True),
    # Of sandboxes whose records were removed since.
    sa.Column("past_cpu_seconds", sa.Double, nullable=False, server_default="0"),
    sa.Column("past_memory_mb_seconds", sa.Double, nullable=False, server_default="0"),
    sa.Column("past_egress_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("past_ingress_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("ix_tasks_project_created", "project_id", "created_at", "task_id"),
    sa.Index("ix_tasks_used", "used_at"),
)
# The keeper looks only at tasks that something may end.
_LIMITED = TASKS.c.ended_at.is_(None) & (
    TASKS.c.deadline_at.is_not(None) | TASKS.c.cpu_seconds_max.is_not(None)
)
sa.Index(
    "ix_tasks_limited",
    TASKS.c.deadline_at,
    sqlite_where=_LIMITED,
    postgresql_where=_LIMITED,
)

TASK_OPERATIONS = sa.Table(
    "task_operations",
    METADATA,
    sa.Column("operation_id", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("task_id", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    # JSON: what each sandbox of it is told.
    sa.Column("params", sa.Text, nullable=False),
    # The caller's idempotency key.
    sa.Column("key", sa.Text, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("finished_at", sa.Double, nullable=True),
    sa.Column("superseded_by", sa.Text, nullable=True),
    sa.Column("asked", sa.Integer, nullable=False),
    sa.Column("done", sa.Integer, nullable=False),
    sa.Column("failed", sa.Integer, nullable=False),
    sa.Column("memory_freed_bytes", sa.BigInteger, nullable=False),
    # The process that works on it, and until when others leave it alone.
    sa.Column("owner", sa.Text, nullable=True),
    sa.Column("lease_until", sa.Double, nullable=False),
    sa.ForeignKeyConstraint(
        ["project_id", "task_id"],
        ["tasks.project_id", "tasks.task_id"],
        name="fk_task_operations_task",
        ondelete="CASCADE",
    ),
    sa.Index("ix_task_operations_task", "project_id", "task_id", "created_at"),
)
sa.Index(
    "ix_task_operations_running",
    TASK_OPERATIONS.c.lease_until,
    sqlite_where=TASK_OPERATIONS.c.finished_at.is_(None),
    postgresql_where=TASK_OPERATIONS.c.finished_at.is_(None),
)
sa.Index(
    "uq_task_operations_key",
    TASK_OPERATIONS.c.project_id,
    TASK_OPERATIONS.c.key,
    unique=True,
    sqlite_where=TASK_OPERATIONS.c.key.is_not(None),
    postgresql_where=TASK_OPERATIONS.c.key.is_not(None),
)

TASK_ITEMS = sa.Table(
    "task_items",
    METADATA,
    sa.Column(
        "operation_id",
        sa.Text,
        sa.ForeignKey("task_operations.operation_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("sandbox_id", sa.Text, primary_key=True),
    # The order in which outcomes came, from 1 on. None: not done yet.
    sa.Column("seq", sa.Integer, nullable=True),
    sa.Column("outcome", sa.Text, nullable=True),
    # JSON of an outcome `error`.
    sa.Column("error", sa.Text, nullable=True),
    sa.Column("memory_freed_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("ix_task_items_seq", "operation_id", "seq"),
)

SANDBOX_USAGE = sa.Table(
    "sandbox_usage",
    METADATA,
    sa.Column(
        "sandbox_id",
        sa.Text,
        sa.ForeignKey("sandboxes.sandbox_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("task_id", sa.Text, nullable=True),
    sa.Column("cpu_seconds", sa.Double, nullable=False),
    sa.Column("memory_mb_seconds", sa.Double, nullable=False),
    sa.Column("disk_bytes", sa.BigInteger, nullable=False),
    sa.Column("egress_bytes", sa.BigInteger, nullable=False),
    sa.Column("ingress_bytes", sa.BigInteger, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Index("ix_sandbox_usage_task", "project_id", "task_id"),
)

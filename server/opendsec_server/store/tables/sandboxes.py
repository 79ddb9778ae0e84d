# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of sandboxes, their history, and the keys of requests that made them."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

SANDBOXES = sa.Table(
    "sandboxes",
    METADATA,
    sa.Column("sandbox_id", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    sa.Column("node_id", sa.Text, nullable=False),
    # No foreign key: the record outlives its template.
    sa.Column("template_id", sa.Text, nullable=False),
    sa.Column("template", sa.Text, nullable=False),
    sa.Column("backend", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("cpu", sa.Double, nullable=False),
    sa.Column("memory_mb", sa.Integer, nullable=False),
    sa.Column("disk_mb", sa.Integer, nullable=False),
    sa.Column("env", sa.Text, nullable=False),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("labels", sa.Text, nullable=False),
    sa.Column("task_id", sa.Text, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double, nullable=True),
    sa.Column("end_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.Column("end_reason", sa.Text, nullable=True),
    sa.Column("message", sa.Text, nullable=True),
    sa.Column("fault", sa.Text, nullable=True),
    sa.Column("idle_timeout_s", sa.Integer, nullable=True),
    sa.Column("on_timeout", sa.Text, nullable=False),
    sa.Column("network", sa.Text, nullable=False),
    sa.Column("extra", sa.Text, nullable=False),
    sa.Column("transitions", sa.Integer, nullable=False),
    sa.Column("timeout_s", sa.Double, nullable=False, server_default="300"),
    sa.Column("pause_mode", sa.Text, nullable=False, server_default="full"),
    sa.Column("auto_resume", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("accelerator", sa.Text, nullable=False, server_default="none"),
    sa.Column("vmm", sa.Text, nullable=True),
    # What the present pause kept; None while it is not paused.
    sa.Column("paused_mode", sa.Text, nullable=True),
    # The node's count of changes of state when this record was last brought up to date.
    sa.Column("node_seq", sa.Integer, nullable=False, server_default="0"),
    # Started from it. Like the template, it may be gone by now.
    sa.Column("snapshot_id", sa.Text, nullable=True),
    # As the template or snapshot said at the create; None in records of older releases.
    sa.Column("image", sa.Text, nullable=True),
    sa.Column("default_user", sa.Text, nullable=True),
    sa.Column("default_workdir", sa.Text, nullable=True),
    # Devices of the host that it has.
    sa.Column("gpu", sa.Integer, nullable=False, server_default="0"),
    # A resume holds a place in the quota, until this time at the latest. None: none does.
    sa.Column("place_until", sa.Double, nullable=True),
    sa.Index("ix_sandboxes_project_created", "project_id", "created_at", "sandbox_id"),
    sa.Index("ix_sandboxes_project_task", "project_id", "task_id"),
    sa.Index("ix_sandboxes_template", "template_id", "created_at"),
)
# Counting and reconciling look at live sandboxes only, and most records are of ended ones.
sa.Index(
    "ix_sandboxes_live",
    SANDBOXES.c.project_id,
    SANDBOXES.c.state,
    sqlite_where=SANDBOXES.c.ended_at.is_(None),
    postgresql_where=SANDBOXES.c.ended_at.is_(None),
)
sa.Index(
    "ix_sandboxes_live_node",
    SANDBOXES.c.node_id,
    sqlite_where=SANDBOXES.c.ended_at.is_(None),
    postgresql_where=SANDBOXES.c.ended_at.is_(None),
)
sa.Index(
    "ix_sandboxes_place_until",
    SANDBOXES.c.place_until,
    sqlite_where=SANDBOXES.c.place_until.is_not(None),
    postgresql_where=SANDBOXES.c.place_until.is_not(None),
)
sa.Index(
    "ix_sandboxes_ended",
    SANDBOXES.c.ended_at,
    sqlite_where=SANDBOXES.c.ended_at.is_not(None),
    postgresql_where=SANDBOXES.c.ended_at.is_not(None),
)

SANDBOX_TRANSITIONS = sa.Table(
    "sandbox_transitions",
    METADATA,
    sa.Column(
        "sandbox_id",
        sa.Text,
        sa.ForeignKey("sandboxes.sandbox_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("from_state", sa.Text, nullable=False),
    sa.Column("to_state", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("reason", sa.Text, nullable=True),
    sa.Column("message", sa.Text, nullable=True),
    sa.Column("cause", sa.Text, nullable=False),
)

IDEMPOTENCY = sa.Table(
    "idempotency",
    METADATA,
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("params_sha256", sa.Text, nullable=False),
    sa.Column("sandbox_id", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
    # JSON of a request that made several things: their ids, and errors in place of some.
    sa.Column("result", sa.Text, nullable=True),
    sa.Index(None, "expires_at"),
    sa.Index(None, "sandbox_id"),
)

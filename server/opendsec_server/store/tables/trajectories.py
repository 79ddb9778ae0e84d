# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of trajectories: what was done in sandboxes, in order."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

TRAJECTORIES = sa.Table(
    "trajectories",
    METADATA,
    sa.Column(
        "sandbox_id",
        sa.Text,
        sa.ForeignKey("sandboxes.sandbox_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    # The number of the next action.
    sa.Column("next_seq", sa.Integer, nullable=False),
    # Of parameters and results, so that a limit can be kept without looking at them.
    sa.Column("bytes", sa.BigInteger, nullable=False),
)

ACTIONS = sa.Table(
    "actions",
    METADATA,
    sa.Column(
        "sandbox_id",
        sa.Text,
        sa.ForeignKey("trajectories.sandbox_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("action_id", sa.Text, primary_key=True),
    sa.Column("seq", sa.Integer, nullable=False),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    sa.Column("task_id", sa.Text, nullable=True),
    sa.Column("rollout_id", sa.Text, nullable=True),
    sa.Column("step", sa.Integer, nullable=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("params", sa.Text, nullable=False),
    sa.Column("params_sha256", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    # How often it was begun: another time only after it was known not to have run.
    sa.Column("attempt", sa.Integer, nullable=False),
    # Of the guest agent, before it was begun.
    sa.Column("instance", sa.Text, nullable=True),
    sa.Column("oom_before", sa.Integer, nullable=False),
    sa.Column("recorded_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.Column("result", sa.Text, nullable=True),
    sa.Column("error", sa.Text, nullable=True),
    sa.Column("fault", sa.Text, nullable=True),
    # Why, in one word; and the figures that show it, as JSON.
    sa.Column("cause", sa.Text, nullable=True),
    sa.Column("evidence", sa.Text, nullable=True),
    # The sandbox whose action this repeats, and whether it ran again here.
    sa.Column("origin", sa.Text, nullable=True),
    sa.Column("replayed", sa.Boolean, nullable=False),
    # Who said what became of an unknown one.
    sa.Column("resolved_by", sa.Text, nullable=True),
    # Which process runs it, and until when others leave it alone.
    sa.Column("owner", sa.Text, nullable=True),
    sa.Column("lease_until", sa.Double, nullable=False, server_default="0"),
    sa.Index("ix_actions_seq", "sandbox_id", "seq", unique=True),
    sa.Index("ix_actions_rollout", "project_id", "rollout_id", "recorded_at"),
    sa.Index("ix_actions_task", "project_id", "task_id"),
)
# At a start only those are looked at that nobody waits for any more.
sa.Index(
    "ix_actions_running",
    ACTIONS.c.sandbox_id,
    sqlite_where=ACTIONS.c.state == "running",
    postgresql_where=ACTIONS.c.state == "running",
)

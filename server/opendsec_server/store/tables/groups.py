# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of groups: sandboxes on one private network, and how far each of them is."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

GROUPS = sa.Table(
    "groups",
    METADATA,
    sa.Column("group_id", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    # JSON: what was asked for.
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    # The node of all its sandboxes. None: not chosen yet.
    sa.Column("node_id", sa.Text, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    # When it ends by itself. A paused one does not.
    sa.Column("end_at", sa.Double, nullable=False),
    sa.Column("ready_at", sa.Double, nullable=True),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.Column("end_reason", sa.Text, nullable=True),
    # JSON of the error that ended it.
    sa.Column("error", sa.Text, nullable=True),
    # The process that starts or ends it, and until when nobody else may.
    sa.Column("owner", sa.Text, nullable=True),
    sa.Column("lease_until", sa.Double, nullable=False, server_default="0"),
    sa.Index("ix_groups_project_created", "project_id", "created_at", "group_id"),
)
sa.Index(
    "uq_groups_live_name",
    GROUPS.c.project_id,
    GROUPS.c.name,
    unique=True,
    sqlite_where=GROUPS.c.ended_at.is_(None),
    postgresql_where=GROUPS.c.ended_at.is_(None),
)

GROUP_MEMBERS = sa.Table(
    "group_members",
    METADATA,
    sa.Column(
        "group_id",
        sa.Text,
        sa.ForeignKey("groups.group_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("position", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("message", sa.Text, nullable=True),
    # None: it was not seen to be made. Its idempotency key may know more.
    sa.Column("sandbox_id", sa.Text, nullable=True),
)

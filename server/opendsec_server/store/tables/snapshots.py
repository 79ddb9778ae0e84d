# SPDX-License-Identifier: AGPL-3.0-only
"""The table of snapshots."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

SNAPSHOTS = sa.Table(
    "snapshots",
    METADATA,
    sa.Column("snapshot_id", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    sa.Column("node_id", sa.Text, nullable=False),
    sa.Column("source_id", sa.Text, nullable=False),
    # None: it has no name, or a newer snapshot took it over.
    sa.Column("name", sa.Text, nullable=True),
    sa.Column("tag", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    # Of a fork: never listed, and gone when the fork is over.
    sa.Column("ephemeral", sa.Boolean, nullable=False),
    # An idempotency key stands for it: its caller will ask for it again.
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
    sa.Index("ix_snapshots_project_created", "project_id", "created_at", "snapshot_id"),
    sa.Index("ix_snapshots_source", "source_id"),
)
# One that is being made does not take the name before it is there.
sa.Index(
    "uq_snapshots_name",
    SNAPSHOTS.c.project_id,
    SNAPSHOTS.c.name,
    SNAPSHOTS.c.tag,
    unique=True,
    sqlite_where=SNAPSHOTS.c.state == "ready",
    postgresql_where=SNAPSHOTS.c.state == "ready",
)

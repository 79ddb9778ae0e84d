# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of function pools and their workers."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

FUNCTION_POOLS = sa.Table(
    "function_pools",
    METADATA,
    sa.Column("pool_id", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    # Counts the changes: gateways see by it that another one made one.
    sa.Column("version", sa.Integer, nullable=False, server_default="0"),
    sa.Index("uq_function_pools_name", "project_id", "name", unique=True),
)

# A row is there before its sandbox is asked for, and until that has ended.
FUNCTION_WORKERS = sa.Table(
    "function_workers",
    METADATA,
    sa.Column("worker_id", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

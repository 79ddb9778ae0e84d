# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of projects and their keys."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

PROJECTS = sa.Table(
    "projects",
    METADATA,
    sa.Column("project_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("sandboxes_max", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

API_KEYS = sa.Table(
    "api_keys",
    METADATA,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False, unique=True),
    sa.Column("hint", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Index(None, "project_id"),
)

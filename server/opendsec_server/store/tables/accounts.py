# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of projects, what they use, and who may do what in them."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

PROJECTS = sa.Table(
    "projects",
    METADATA,
    sa.Column("project_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    # NO_LIMIT: none of its own, as None is in the columns of later releases.
    sa.Column("sandboxes_max", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    # None: at the top. No foreign key: SQLite cannot add one to a table that is there.
    sa.Column("parent_id", sa.Text, nullable=True),
    sa.Column("depth", sa.Integer, nullable=False, server_default="0"),
    sa.Column("cpu_max", sa.Double, nullable=True),
    sa.Column("memory_mb_max", sa.BigInteger, nullable=True),
    sa.Column("disk_mb_max", sa.BigInteger, nullable=True),
    sa.Column("gpu_max", sa.Integer, nullable=True),
    sa.Column("egress_mb_max", sa.BigInteger, nullable=True),
    sa.Column("creates_per_s_max", sa.Double, nullable=True),
    # Nobody gets in any more. Its records stay.
    sa.Column("closed_at", sa.Double, nullable=True),
    sa.Index("ix_projects_parent", "parent_id"),
)

# Triggers keep this one: each project with itself and everything above it.
PROJECT_LINES = sa.Table(
    "project_lines",
    METADATA,
    sa.Column("project_id", sa.Text, primary_key=True),
    sa.Column("ancestor_id", sa.Text, primary_key=True),
    sa.Index("ix_project_lines_ancestor", "ancestor_id"),
)

# What a project and everything below it use now. Triggers on sandboxes keep the first five.
PROJECT_USE = sa.Table(
    "project_use",
    METADATA,
    sa.Column("project_id", sa.Text, primary_key=True),
    sa.Column("sandboxes", sa.BigInteger, nullable=False, server_default="0"),
    # Thousandths of a processor: sums of floats drift.
    sa.Column("cpu_milli", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("memory_mb", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("disk_mb", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("gpu", sa.BigInteger, nullable=False, server_default="0"),
    # When the next create would be due if all came evenly (GCRA).
    sa.Column("creates_due_at", sa.Double, nullable=False, server_default="0"),
    sa.Column("egress_day", sa.Integer, nullable=False, server_default="0"),
    sa.Column("egress_bytes", sa.BigInteger, nullable=False, server_default="0"),
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
    # None: of the project itself.
    sa.Column("principal_id", sa.Text, nullable=True),
    # Packed list. None: all rights in the project, or those of the principal.
    sa.Column("rights", sa.Text, nullable=True),
    sa.Index(None, "project_id"),
    sa.Index("ix_api_keys_principal", "principal_id"),
)

PRINCIPALS = sa.Table(
    "principals",
    METADATA,
    sa.Column("principal_id", sa.Text, primary_key=True),
    # Where it was made: who administers that project administers it.
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("disabled_at", sa.Double, nullable=True),
    sa.UniqueConstraint("project_id", "name", name="uq_principals_name"),
)

GRANTS = sa.Table(
    "grants",
    METADATA,
    sa.Column(
        "principal_id",
        sa.Text,
        sa.ForeignKey("principals.principal_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), primary_key=True),
    # None: only what ``rights`` lists.
    sa.Column("role", sa.Text, nullable=True),
    # Packed list.
    sa.Column("rights", sa.Text, nullable=False),
    sa.Column("granted_by", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Index("ix_grants_project", "project_id"),
)

TOKENS = sa.Table(
    "tokens",
    METADATA,
    sa.Column("token_id", sa.Text, primary_key=True),
    sa.Column("sha256", sa.Text, nullable=False, unique=True),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    # Who made it: a principal, or a key of a project. It is worth no more than its maker.
    sa.Column("principal_id", sa.Text, nullable=True),
    sa.Column("key_id", sa.Text, nullable=False),
    # The token that made it, if it was one.
    sa.Column("parent_id", sa.Text, nullable=True),
    # Packed lists.
    sa.Column("rights", sa.Text, nullable=False),
    sa.Column("projects", sa.Text, nullable=False),
    # It reaches this sandbox only. No foreign key: the record may be pruned before.
    sa.Column("sandbox_id", sa.Text, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
    sa.Index("ix_tokens_project", "project_id", "created_at"),
    sa.Index("ix_tokens_parent", "parent_id"),
    sa.Index("ix_tokens_key", "key_id"),
    sa.Index("ix_tokens_principal", "principal_id"),
    sa.Index("ix_tokens_expires", "expires_at"),
)

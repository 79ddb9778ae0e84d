# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of templates and their builds."""

from __future__ import annotations

import sqlalchemy as sa

from .metadata import METADATA

TEMPLATES = sa.Table(
    "templates",
    METADATA,
    sa.Column("template_id", sa.Text, primary_key=True),
    # None: the template belongs to the installation, not to a project.
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=True),
    sa.Column("name", sa.Text, nullable=False),
    # Empty for a project's template: its builds have the images.
    sa.Column("image", sa.Text, nullable=False),
    sa.Column("public", sa.Boolean, nullable=False),
    sa.Column("cpu", sa.Double, nullable=False),
    sa.Column("memory_mb", sa.Integer, nullable=False),
    sa.Column("disk_mb", sa.Integer, nullable=False),
    sa.Column("default_user", sa.Text, nullable=False),
    sa.Column("default_workdir", sa.Text, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
    # None: any backend that starts layers.
    sa.Column("backend", sa.Text, nullable=True),
)
# A name is unique in its project; those of the installation are unique among themselves.
sa.Index(
    "uq_templates_own_name",
    TEMPLATES.c.project_id,
    TEMPLATES.c.name,
    unique=True,
    sqlite_where=TEMPLATES.c.project_id.is_not(None),
    postgresql_where=TEMPLATES.c.project_id.is_not(None),
)
sa.Index(
    "uq_templates_installation_name",
    TEMPLATES.c.name,
    unique=True,
    sqlite_where=TEMPLATES.c.project_id.is_(None),
    postgresql_where=TEMPLATES.c.project_id.is_(None),
)

TEMPLATE_BUILDS = sa.Table(
    "template_builds",
    METADATA,
    sa.Column("build_id", sa.Text, primary_key=True),
    sa.Column(
        "template_id",
        sa.Text,
        sa.ForeignKey("templates.template_id", ondelete="CASCADE"),
        nullable=False,
    ),
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    # JSON list: where it goes when it is ready.
    sa.Column("tags", sa.Text, nullable=False),
    sa.Column("cpu", sa.Double, nullable=False),
    sa.Column("memory_mb", sa.Integer, nullable=False),
    sa.Column("disk_mb", sa.Integer, nullable=False),
    # The rest is known when it is ready, or has failed.
    sa.Column("image", sa.Text, nullable=True),
    sa.Column("default_user", sa.Text, nullable=True),
    sa.Column("default_workdir", sa.Text, nullable=True),
    sa.Column("env", sa.Text, nullable=False),
    # JSON of the start command.
    sa.Column("start", sa.Text, nullable=True),
    sa.Column("envd_version", sa.Text, nullable=False),
    sa.Column("error_code", sa.Text, nullable=True),
    sa.Column("error", sa.Text, nullable=True),
    sa.Column("error_step", sa.Text, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    # None: its files are still being sent.
    sa.Column("started_at", sa.Double, nullable=True),
    sa.Column("finished_at", sa.Double, nullable=True),
    sa.Index("ix_template_builds_template", "template_id", "created_at", "build_id"),
    sa.Index("ix_template_builds_project", "project_id", "state"),
)

TEMPLATE_TAGS = sa.Table(
    "template_tags",
    METADATA,
    sa.Column(
        "template_id",
        sa.Text,
        sa.ForeignKey("templates.template_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("tag", sa.Text, primary_key=True),
    sa.Column(
        "build_id",
        sa.Text,
        sa.ForeignKey("template_builds.build_id", ondelete="CASCADE"),
        nullable=False,
    ),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Index(None, "build_id"),
)

BUILD_STEPS = sa.Table(
    "build_steps",
    METADATA,
    sa.Column("project_id", sa.Text, sa.ForeignKey("projects.project_id"), primary_key=True),
    # SHA-256 of all that its result depends on.
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("image", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("last_used_at", sa.Double, nullable=False),
    sa.Index("ix_build_steps_used", "last_used_at"),
)

# SPDX-License-Identifier: AGPL-3.0-only
"""Tables of the control plane.

Times are Unix seconds. Maps and lists are JSON text: the store never looks inside them,
except for metadata and labels (see ``packing``).
"""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

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

# SPDX-License-Identifier: AGPL-3.0-only
"""Projects, keys, templates, sandboxes with their transitions, idempotency."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("sandboxes_max", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("project_id", name="pk_projects"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("hint", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_api_keys_project_id"
        ),
        sa.UniqueConstraint("sha256", name="uq_api_keys_sha256"),
    )
    op.create_index("ix_api_keys_project_id", "api_keys", ["project_id"])
    op.create_table(
        "templates",
        sa.Column("template_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("image", sa.Text, nullable=False),
        sa.Column("public", sa.Boolean, nullable=False),
        sa.Column("cpu", sa.Double, nullable=False),
        sa.Column("memory_mb", sa.Integer, nullable=False),
        sa.Column("disk_mb", sa.Integer, nullable=False),
        sa.Column("default_user", sa.Text, nullable=False),
        sa.Column("default_workdir", sa.Text, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("template_id", name="pk_templates"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_templates_project_id"
        ),
        sa.UniqueConstraint("name", name="uq_templates_name"),
    )
    _create_sandboxes()
    op.create_table(
        "sandbox_transitions",
        sa.Column("sandbox_id", sa.Text, nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("from_state", sa.Text, nullable=False),
        sa.Column("to_state", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("reason", sa.Text, nullable=True),
        sa.Column("message", sa.Text, nullable=True),
        sa.Column("cause", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("sandbox_id", "seq", name="pk_sandbox_transitions"),
        sa.ForeignKeyConstraint(
            ["sandbox_id"],
            ["sandboxes.sandbox_id"],
            name="fk_sandbox_transitions_sandbox_id",
            ondelete="CASCADE",
        ),
    )
    op.create_table(
        "idempotency",
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("params_sha256", sa.Text, nullable=False),
        sa.Column("sandbox_id", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("project_id", "key", name="pk_idempotency"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_idempotency_project_id"
        ),
    )
    op.create_index("ix_idempotency_expires_at", "idempotency", ["expires_at"])
    op.create_index("ix_idempotency_sandbox_id", "idempotency", ["sandbox_id"])


def _create_sandboxes() -> None:
    op.create_table(
        "sandboxes",
        sa.Column("sandbox_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("node_id", sa.Text, nullable=False),
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
        sa.PrimaryKeyConstraint("sandbox_id", name="pk_sandboxes"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_sandboxes_project_id"
        ),
    )
    op.create_index(
        "ix_sandboxes_project_created", "sandboxes", ["project_id", "created_at", "sandbox_id"]
    )
    op.create_index("ix_sandboxes_project_task", "sandboxes", ["project_id", "task_id"])
    op.create_index("ix_sandboxes_template", "sandboxes", ["template_id", "created_at"])
    live = sa.text("ended_at IS NULL")
    op.create_index(
        "ix_sandboxes_live",
        "sandboxes",
        ["project_id", "state"],
        sqlite_where=live,
        postgresql_where=live,
    )
    ended = sa.text("ended_at IS NOT NULL")
    op.create_index(
        "ix_sandboxes_ended",
        "sandboxes",
        ["ended_at"],
        sqlite_where=ended,
        postgresql_where=ended,
    )

# SPDX-License-Identifier: AGPL-3.0-only
"""Template builds, tags and the cache of build steps; names of templates unique per project."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _names_per_project()
    op.create_table(
        "template_builds",
        sa.Column("build_id", sa.Text, nullable=False),
        sa.Column("template_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("tags", sa.Text, nullable=False),
        sa.Column("cpu", sa.Double, nullable=False),
        sa.Column("memory_mb", sa.Integer, nullable=False),
        sa.Column("disk_mb", sa.Integer, nullable=False),
        sa.Column("image", sa.Text, nullable=True),
        sa.Column("default_user", sa.Text, nullable=True),
        sa.Column("default_workdir", sa.Text, nullable=True),
        sa.Column("env", sa.Text, nullable=False),
        sa.Column("start", sa.Text, nullable=True),
        sa.Column("envd_version", sa.Text, nullable=False),
        sa.Column("error_code", sa.Text, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("error_step", sa.Text, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double, nullable=True),
        sa.Column("finished_at", sa.Double, nullable=True),
        sa.PrimaryKeyConstraint("build_id", name="pk_template_builds"),
        sa.ForeignKeyConstraint(
            ["template_id"],
            ["templates.template_id"],
            name="fk_template_builds_template_id",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_template_builds_project_id"
        ),
    )
    op.create_index(
        "ix_template_builds_template", "template_builds", ["template_id", "created_at", "build_id"]
    )
    op.create_index("ix_template_builds_project", "template_builds", ["project_id", "state"])
    op.create_table(
        "template_tags",
        sa.Column("template_id", sa.Text, nullable=False),
        sa.Column("tag", sa.Text, nullable=False),
        sa.Column("build_id", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("template_id", "tag", name="pk_template_tags"),
        sa.ForeignKeyConstraint(
            ["template_id"],
            ["templates.template_id"],
            name="fk_template_tags_template_id",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["build_id"],
            ["template_builds.build_id"],
            name="fk_template_tags_build_id",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_template_tags_build_id", "template_tags", ["build_id"])
    op.create_table(
        "build_steps",
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("image", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_used_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("project_id", "key", name="pk_build_steps"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_build_steps_project_id"
        ),
    )
    op.create_index("ix_build_steps_used", "build_steps", ["last_used_at"])


def _names_per_project() -> None:
    # SQLite cannot drop a constraint: the table is made anew, which no other refers to yet.
    with op.batch_alter_table("templates") as table:
        table.drop_constraint("uq_templates_name", type_="unique")
    own, installation = sa.text("project_id IS NOT NULL"), sa.text("project_id IS NULL")
    op.create_index(
        "uq_templates_own_name",
        "templates",
        ["project_id", "name"],
        unique=True,
        sqlite_where=own,
        postgresql_where=own,
    )
    op.create_index(
        "uq_templates_installation_name",
        "templates",
        ["name"],
        unique=True,
        sqlite_where=installation,
        postgresql_where=installation,
    )

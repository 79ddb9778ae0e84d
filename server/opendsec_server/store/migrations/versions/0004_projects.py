# SPDX-License-Identifier: AGPL-3.0-only
"""Projects that nest, principals, roles, tokens and the audit log.

What projects use is counted by triggers, so that no way of writing a sandbox's record can forget
it, and asking is as quick with a million records as with ten.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_RUNS = "({row}.ended_at IS NULL AND {row}.state <> 'paused')"
_CPU_MILLI = "CAST(ROUND({row}.cpu * 1000) AS {bigint})"
_ADD = """
UPDATE project_use SET
    sandboxes = sandboxes {sign} CASE WHEN {runs} THEN 1 ELSE 0 END,
    cpu_milli = cpu_milli {sign} CASE WHEN {runs} THEN {cpu_milli} ELSE 0 END,
    memory_mb = memory_mb {sign} CASE WHEN {runs} THEN {row}.memory_mb ELSE 0 END,
    gpu = gpu {sign} CASE WHEN {runs} THEN {row}.gpu ELSE 0 END,
    disk_mb = disk_mb {sign} CASE WHEN {row}.ended_at IS NULL THEN {row}.disk_mb ELSE 0 END
WHERE project_id IN (
    SELECT ancestor_id FROM project_lines WHERE project_id = {row}.project_id
);
"""
_COUNT_ALL = """
INSERT INTO project_use (project_id, sandboxes, cpu_milli, memory_mb, disk_mb)
SELECT p.project_id,
    COALESCE(SUM(CASE WHEN {runs} THEN 1 ELSE 0 END), 0),
    COALESCE(SUM(CASE WHEN {runs} THEN {cpu_milli} ELSE 0 END), 0),
    COALESCE(SUM(CASE WHEN {runs} THEN s.memory_mb ELSE 0 END), 0),
    COALESCE(SUM(CASE WHEN s.sandbox_id IS NOT NULL THEN s.disk_mb ELSE 0 END), 0)
FROM projects p
LEFT JOIN sandboxes s ON s.project_id = p.project_id AND s.ended_at IS NULL
GROUP BY p.project_id
"""
# The lines of a project are made before it has sandboxes, and never change.
_NEW_PROJECT = """
INSERT INTO project_use (project_id) VALUES (NEW.project_id);
INSERT INTO project_lines (project_id, ancestor_id)
    SELECT NEW.project_id, ancestor_id FROM project_lines WHERE project_id = NEW.parent_id;
INSERT INTO project_lines (project_id, ancestor_id) VALUES (NEW.project_id, NEW.project_id);
"""
_COUNTED = ("ended_at", "state", "cpu", "memory_mb", "disk_mb", "gpu")


def upgrade() -> None:
    _tables()
    op.execute(
        "INSERT INTO project_lines (project_id, ancestor_id) "
        "SELECT project_id, project_id FROM projects"
    )
    sqlite = op.get_bind().dialect.name == "sqlite"
    runs = _RUNS.format(row="s")
    cpu_milli = _CPU_MILLI.format(row="s", bigint="INTEGER" if sqlite else "BIGINT")
    op.execute(_COUNT_ALL.format(runs=runs, cpu_milli=cpu_milli))
    if sqlite:
        _sqlite_triggers()
    else:
        _postgres_triggers()


def _add(row: str, sign: str, bigint: str) -> str:
    return _ADD.format(
        row=row,
        sign=sign,
        runs=_RUNS.format(row=row),
        cpu_milli=_CPU_MILLI.format(row=row, bigint=bigint),
    )


def _sqlite_triggers() -> None:
    changed = " OR ".join(f"OLD.{name} IS NOT NEW.{name}" for name in _COUNTED)
    new, old = _add("NEW", "+", "INTEGER"), _add("OLD", "-", "INTEGER")
    for name, when, body in (
        ("sandboxes_use_insert", "AFTER INSERT ON sandboxes WHEN NEW.ended_at IS NULL", new),
        ("sandboxes_use_delete", "AFTER DELETE ON sandboxes WHEN OLD.ended_at IS NULL", old),
        (
            "sandboxes_use_update",
            f"AFTER UPDATE OF {', '.join(_COUNTED)} ON sandboxes WHEN {changed}",
            old + new,
        ),
        ("projects_lines_insert", "AFTER INSERT ON projects", _NEW_PROJECT),
    ):
        op.execute(f"CREATE TRIGGER {name} {when} BEGIN {body} END")


def _postgres_triggers() -> None:
    # Rows are locked from the top down, so that two transactions never wait for each other.
    lock = """
    PERFORM 1 FROM project_use u
    JOIN project_lines l ON l.ancestor_id = u.project_id
    JOIN projects p ON p.project_id = u.project_id
    WHERE l.project_id = {row}.project_id ORDER BY p.depth, p.project_id FOR UPDATE OF u;
    """
    new, old = _add("NEW", "+", "BIGINT"), _add("OLD", "-", "BIGINT")
    changed = " OR ".join(f"OLD.{name} IS DISTINCT FROM NEW.{name}" for name in _COUNTED)
    for name, when, body in (
        (
            "sandboxes_use_insert",
            "AFTER INSERT ON sandboxes FOR EACH ROW WHEN (NEW.ended_at IS NULL)",
            lock.format(row="NEW") + new,
        ),
        (
            "sandboxes_use_delete",
            "AFTER DELETE ON sandboxes FOR EACH ROW WHEN (OLD.ended_at IS NULL)",
            lock.format(row="OLD") + old,
        ),
        (
            "sandboxes_use_update",
            f"AFTER UPDATE ON sandboxes FOR EACH ROW WHEN ({changed})",
            lock.format(row="NEW") + old + new,
        ),
        ("projects_lines_insert", "AFTER INSERT ON projects FOR EACH ROW", _NEW_PROJECT),
    ):
        op.execute(
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger AS $body$ "
            f"BEGIN {body} RETURN NULL; END $body$ LANGUAGE plpgsql"
        )
        op.execute(f"CREATE TRIGGER {name} {when} EXECUTE FUNCTION {name}()")


def _tables() -> None:
    for column in (
        sa.Column("parent_id", sa.Text, nullable=True),
        sa.Column("depth", sa.Integer, nullable=False, server_default="0"),
        sa.Column("cpu_max", sa.Double, nullable=True),
        sa.Column("memory_mb_max", sa.BigInteger, nullable=True),
        sa.Column("disk_mb_max", sa.BigInteger, nullable=True),
        sa.Column("gpu_max", sa.Integer, nullable=True),
        sa.Column("egress_mb_max", sa.BigInteger, nullable=True),
        sa.Column("creates_per_s_max", sa.Double, nullable=True),
        sa.Column("closed_at", sa.Double, nullable=True),
    ):
        op.add_column("projects", column)
    op.create_index("ix_projects_parent", "projects", ["parent_id"])
    op.add_column("sandboxes", sa.Column("gpu", sa.Integer, nullable=False, server_default="0"))
    op.add_column("api_keys", sa.Column("principal_id", sa.Text, nullable=True))
    op.add_column("api_keys", sa.Column("rights", sa.Text, nullable=True))
    op.create_index("ix_api_keys_principal", "api_keys", ["principal_id"])
    op.create_table(
        "project_lines",
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("ancestor_id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("project_id", "ancestor_id", name="pk_project_lines"),
    )
    op.create_index("ix_project_lines_ancestor", "project_lines", ["ancestor_id"])
    op.create_table(
        "project_use",
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("sandboxes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("cpu_milli", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("memory_mb", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("disk_mb", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("gpu", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("creates_due_at", sa.Double, nullable=False, server_default="0"),
        sa.Column("egress_day", sa.Integer, nullable=False, server_default="0"),
        sa.Column("egress_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("project_id", name="pk_project_use"),
    )
    op.create_table(
        "principals",
        sa.Column("principal_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("disabled_at", sa.Double, nullable=True),
        sa.PrimaryKeyConstraint("principal_id", name="pk_principals"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_principals_project_id"
        ),
        sa.UniqueConstraint("project_id", "name", name="uq_principals_name"),
    )
    op.create_table(
        "grants",
        sa.Column("principal_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=True),
        sa.Column("rights", sa.Text, nullable=False),
        sa.Column("granted_by", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("principal_id", "project_id", name="pk_grants"),
        sa.ForeignKeyConstraint(
            ["principal_id"],
            ["principals.principal_id"],
            name="fk_grants_principal_id",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_grants_project_id"
        ),
    )
    op.create_index("ix_grants_project", "grants", ["project_id"])
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("principal_id", sa.Text, nullable=True),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("parent_id", sa.Text, nullable=True),
        sa.Column("rights", sa.Text, nullable=False),
        sa.Column("projects", sa.Text, nullable=False),
        sa.Column("sandbox_id", sa.Text, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("token_id", name="pk_tokens"),
        sa.UniqueConstraint("sha256", name="uq_tokens_sha256"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_tokens_project_id"
        ),
    )
    op.create_index("ix_tokens_project", "tokens", ["project_id", "created_at"])
    op.create_index("ix_tokens_parent", "tokens", ["parent_id"])
    op.create_index("ix_tokens_key", "tokens", ["key_id"])
    op.create_index("ix_tokens_principal", "tokens", ["principal_id"])
    op.create_index("ix_tokens_expires", "tokens", ["expires_at"])
    op.create_table(
        "image_access",
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("digest", "project_id", name="pk_image_access"),
    )
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("actor_kind", sa.Text, nullable=False),
        sa.Column("actor_id", sa.Text, nullable=True),
        sa.Column("credential_id", sa.Text, nullable=True),
        sa.Column("project_id", sa.Text, nullable=True),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("object", sa.Text, nullable=True),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("address", sa.Text, nullable=True),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("mac", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_audit"),
    )
    op.create_index("ix_audit_project", "audit", ["project_id", "seq"])

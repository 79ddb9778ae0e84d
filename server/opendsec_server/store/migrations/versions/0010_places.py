# SPDX-License-Identifier: AGPL-3.0-only
"""What is about to run counts: paused sandboxes that are being resumed, and builds at work.

A place that a resume holds is written beside the record, so that creates and resumes at once, of
any gateway, see the same sums.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_RUNS = "({row}.ended_at IS NULL AND ({row}.state <> 'paused' OR {row}.place_until IS NOT NULL))"
_CPU_MILLI = "CAST(ROUND({row}.cpu * 1000) AS {bigint})"
_IN_LINE = """
WHERE project_id IN (
    SELECT ancestor_id FROM project_lines WHERE project_id = {row}.project_id
);
"""
_SANDBOX = (
    """
UPDATE project_use SET
    sandboxes = sandboxes {sign} CASE WHEN {runs} THEN 1 ELSE 0 END,
    cpu_milli = cpu_milli {sign} CASE WHEN {runs} THEN {cpu_milli} ELSE 0 END,
    memory_mb = memory_mb {sign} CASE WHEN {runs} THEN {row}.memory_mb ELSE 0 END,
    gpu = gpu {sign} CASE WHEN {runs} THEN {row}.gpu ELSE 0 END,
    disk_mb = disk_mb {sign} CASE WHEN {row}.ended_at IS NULL THEN {row}.disk_mb ELSE 0 END
"""
    + _IN_LINE
)
_BUILD = (
    """
UPDATE project_use SET
    sandboxes = sandboxes {sign} 1,
    cpu_milli = cpu_milli {sign} {cpu_milli},
    memory_mb = memory_mb {sign} {row}.memory_mb,
    disk_mb = disk_mb {sign} {row}.disk_mb
"""
    + _IN_LINE
)
# Rows are locked from the top down, so that two transactions never wait for each other.
_LOCK = """
PERFORM 1 FROM project_use u
JOIN project_lines l ON l.ancestor_id = u.project_id
JOIN projects p ON p.project_id = u.project_id
WHERE l.project_id = {row}.project_id ORDER BY p.depth, p.project_id FOR UPDATE OF u;
"""
_COUNTED = ("ended_at", "state", "cpu", "memory_mb", "disk_mb", "gpu", "place_until")
_SANDBOX_TRIGGERS = ("sandboxes_use_insert", "sandboxes_use_delete", "sandboxes_use_update")


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("place_until", sa.Double, nullable=True))
    held = sa.text("place_until IS NOT NULL")
    op.create_index(
        "ix_sandboxes_place_until",
        "sandboxes",
        ["place_until"],
        sqlite_where=held,
        postgresql_where=held,
    )
    _replace(_SANDBOX_TRIGGERS, "sandboxes", _sandbox_triggers())
    # Builds at work were not counted so far. Those of a server that is starting have failed.
    op.execute(
        "UPDATE template_builds SET state = 'error', error_code = 'build_interrupted', "
        "error = 'the server was updated; build again: what was done is kept' "
        "WHERE state = 'building'"
    )
    _replace((), "template_builds", _build_triggers())


def _sqlite() -> bool:
    return bool(op.get_bind().dialect.name == "sqlite")


def _replace(old: tuple[str, ...], table: str, new: dict[str, tuple[str, str]]) -> None:
    """Put triggers (when they fire, and what they do) in the place of others."""
    sqlite = _sqlite()
    for name in old:
        op.execute(f"DROP TRIGGER {name}" if sqlite else f"DROP TRIGGER {name} ON {table}")
    for name, (when, body) in new.items():
        if sqlite:
            op.execute(f"CREATE TRIGGER {name} {when} BEGIN {body} END")
            continue
        op.execute(
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger AS $body$ "
            f"BEGIN {body} RETURN NULL; END $body$ LANGUAGE plpgsql"
        )
        op.execute(f"CREATE TRIGGER {name} {when} EXECUTE FUNCTION {name}()")


def _sandbox_triggers() -> dict[str, tuple[str, str]]:
    def add(row: str, sign: str) -> str:
        return _SANDBOX.format(
            row=row, sign=sign, runs=_RUNS.format(row=row), cpu_milli=_cpu_milli(row)
        )

    new, old = add("NEW", "+"), add("OLD", "-")
    return {
        "sandboxes_use_insert": _when("INSERT ON sandboxes", "NEW.ended_at IS NULL", "NEW", new),
        "sandboxes_use_delete": _when("DELETE ON sandboxes", "OLD.ended_at IS NULL", "OLD", old),
        "sandboxes_use_update": _when(
            f"UPDATE OF {', '.join(_COUNTED)} ON sandboxes", _differs(_COUNTED), "NEW", old + new
        ),
    }


def _build_triggers() -> dict[str, tuple[str, str]]:
    def add(row: str, sign: str) -> str:
        return _BUILD.format(row=row, sign=sign, cpu_milli=_cpu_milli(row))

    new, old = add("NEW", "+"), add("OLD", "-")
    begins = "NEW.state = 'building' AND OLD.state <> 'building'"
    ends = "OLD.state = 'building' AND NEW.state <> 'building'"
    table = "template_builds"
    return {
        "builds_use_insert": _when(f"INSERT ON {table}", "NEW.state = 'building'", "NEW", new),
        "builds_use_delete": _when(f"DELETE ON {table}", "OLD.state = 'building'", "OLD", old),
        "builds_use_begin": _when(f"UPDATE OF state ON {table}", begins, "NEW", new),
        "builds_use_end": _when(f"UPDATE OF state ON {table}", ends, "OLD", old),
    }


def _when(what: str, condition: str, row: str, body: str) -> tuple[str, str]:
    if _sqlite():
        return f"AFTER {what} WHEN {condition}", body
    return f"AFTER {what} FOR EACH ROW WHEN ({condition})", _LOCK.format(row=row) + body


def _differs(columns: tuple[str, ...]) -> str:
    differs = "IS NOT" if _sqlite() else "IS DISTINCT FROM"
    return " OR ".join(f"OLD.{name} {differs} NEW.{name}" for name in columns)


def _cpu_milli(row: str) -> str:
    return _CPU_MILLI.format(row=row, bigint="INTEGER" if _sqlite() else "BIGINT")

# SPDX-License-Identifier: AGPL-3.0-only
"""What sandboxes used, as their nodes last said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from opendsec_server.contract.node import SandboxUsage

from .packing import struct_of
from .quotas import note_egress
from .store import Store
from .tables import SANDBOX_USAGE, SANDBOXES

_FIGURES = (
    "cpu_seconds",
    "memory_mb_seconds",
    "disk_bytes",
    "egress_bytes",
    "ingress_bytes",
    "at",
)
IDS_AT_ONCE = 500
"""In one statement: SQLite bounds its parameters."""

# Statements are built once: building them costs more than running them.
_KNOWN = (
    sa.select(
        SANDBOXES.c.sandbox_id,
        SANDBOXES.c.project_id,
        SANDBOXES.c.task_id,
        sa.func.coalesce(SANDBOX_USAGE.c.egress_bytes, 0).label("egress_bytes"),
        sa.func.coalesce(SANDBOX_USAGE.c.at, 0.0).label("at"),
    )
    .select_from(SANDBOXES)
    .outerjoin(SANDBOX_USAGE, SANDBOX_USAGE.c.sandbox_id == SANDBOXES.c.sandbox_id)
    .where(SANDBOXES.c.sandbox_id.in_(sa.bindparam("these", expanding=True)))
)


def _upsert(insert: Any) -> Any:
    statement = insert(SANDBOX_USAGE)
    return statement.on_conflict_do_update(
        index_elements=[SANDBOX_USAGE.c.sandbox_id],
        set_={name: statement.excluded[name] for name in _FIGURES},
    )


_UPSERTS = {"sqlite": _upsert(sqlite.insert), "postgresql": _upsert(postgresql.insert)}


def put_usage(connection: sa.Connection, usage: Mapping[str, SandboxUsage], *, now: float) -> None:
    """Keep readings of sandboxes that have a record; a reading older than the kept one is left
    out. What was sent since counts for the projects' quotas."""
    ids = list(usage)
    rows: list[dict[str, Any]] = []
    sent: dict[str, int] = defaultdict(int)
    for start in range(0, len(ids), IDS_AT_ONCE):
        these = ids[start : start + IDS_AT_ONCE]
        for known in connection.execute(_KNOWN, {"these": these}):
            read = usage[known.sandbox_id]
            if read.at <= known.at:
                continue
            sent[known.project_id] += max(0, read.egress_bytes - known.egress_bytes)
            rows.append(
                {
                    "sandbox_id": known.sandbox_id,
                    "project_id": known.project_id,
                    "task_id": known.task_id,
                    **msgspec.structs.asdict(read),
                }
            )
    if rows:
        connection.execute(_UPSERTS[connection.dialect.name], rows)
    # Always in the same order, so that two transactions never wait for each other.
    for project_id, sent_bytes in sorted(sent.items()):
        if sent_bytes:
            note_egress(connection, project_id, sent_bytes, now=now)


async def note_usage(store: Store, usage: Mapping[str, SandboxUsage], *, now: float) -> None:
    """``put_usage`` in a transaction of its own."""
    if usage:
        await store.write(lambda connection: put_usage(connection, usage, now=now))


async def get_usage(store: Store, sandbox_ids: Sequence[str]) -> dict[str, SandboxUsage]:
    """The last reading of each that has one."""

    def work(connection: sa.Connection) -> dict[str, SandboxUsage]:
        found: dict[str, SandboxUsage] = {}
        columns = [SANDBOX_USAGE.c[name] for name in _FIGURES]
        for start in range(0, len(sandbox_ids), IDS_AT_ONCE):
            these = sandbox_ids[start : start + IDS_AT_ONCE]
            query = sa.select(SANDBOX_USAGE.c.sandbox_id, *columns).where(
                SANDBOX_USAGE.c.sandbox_id.in_(these)
            )
            for row in connection.execute(query).mappings():
                found[row["sandbox_id"]] = struct_of(row, SandboxUsage)
        return found

    return await store.read(work)

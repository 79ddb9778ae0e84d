# SPDX-License-Identifier: AGPL-3.0-only
"""The one transaction before a sandbox is made: quota, idempotency key, record."""

from __future__ import annotations

import sqlalchemy as sa

from opendsec_server.contract.errors import IdempotencyMismatch, QuotaExceeded
from opendsec_server.contract.limits import IDEMPOTENCY_KEPT_S

from .packing import struct_of
from .records import IdempotencyClaim, IdempotencyRow, SandboxRecord
from .sandboxes import row_of
from .store import Store
from .tables import IDEMPOTENCY, PROJECTS, SANDBOXES

# Statements are built once: building them costs more than running them.
_IN_PROJECT = PROJECTS.c.project_id == sa.bindparam("in_project")
_THIS_KEY = sa.and_(
    IDEMPOTENCY.c.project_id == sa.bindparam("in_project"),
    IDEMPOTENCY.c.key == sa.bindparam("this_key"),
)
_FIND_KEY = sa.select(IDEMPOTENCY).where(_THIS_KEY)
_INSERT_KEY = sa.insert(IDEMPOTENCY)
_RENEW_KEY = (
    sa.update(IDEMPOTENCY)
    .where(_THIS_KEY)
    .values(
        {
            name: sa.bindparam(name)
            for name in ("params_sha256", "sandbox_id", "outcome", "expires_at")
        }
    )
)
_INSERT_SANDBOX = sa.insert(SANDBOXES)
_LOCK_PROJECT = sa.select(PROJECTS.c.project_id).where(_IN_PROJECT).with_for_update()
_QUOTA = sa.select(
    PROJECTS.c.sandboxes_max,
    sa.select(sa.func.count())
    .select_from(SANDBOXES)
    .where(SANDBOXES.c.project_id == sa.bindparam("in_project"), SANDBOXES.c.ended_at.is_(None))
    .scalar_subquery(),
).where(_IN_PROJECT)


async def begin_create(
    store: Store, record: SandboxRecord, claim: IdempotencyClaim | None
) -> IdempotencyRow | None:
    """Record a sandbox that is about to be made, and tie the key to it.

    Returns:
        None: recorded. Else what the key already stands for (``pending`` or ``done``);
        then nothing was written. A key whose create failed is free for a new attempt.

    Raises:
        IdempotencyMismatch: the key was used with other parameters.
        QuotaExceeded: the project has as many live sandboxes as it may have.
        StoreUnavailable: nothing was written.
    """

    def work(connection: sa.Connection) -> IdempotencyRow | None:
        return _begin_create(connection, store, record, claim)

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process took the key between our look and our insert.
        return await store.write(work)


def _begin_create(
    connection: sa.Connection,
    store: Store,
    record: SandboxRecord,
    claim: IdempotencyClaim | None,
) -> IdempotencyRow | None:
    earlier = None
    if claim is not None:
        earlier = _find(connection, record.project_id, claim.key)
        if earlier is not None and earlier.expires_at > record.created_at:
            if earlier.params_sha256 != claim.params_sha256:
                raise IdempotencyMismatch(
                    "this idempotency key was used before with other parameters"
                )
            if earlier.outcome != "failed":
                return earlier
    _check_quota(connection, store, record.project_id)
    connection.execute(_INSERT_SANDBOX, row_of(record))
    if claim is not None:
        values = {
            "params_sha256": claim.params_sha256,
            "sandbox_id": record.sandbox_id,
            "outcome": "pending",
            "expires_at": record.created_at + IDEMPOTENCY_KEPT_S,
        }
        if earlier is None:
            names = {"project_id": record.project_id, "key": claim.key}
            connection.execute(_INSERT_KEY, names | values)
        else:
            names = {"in_project": record.project_id, "this_key": claim.key}
            connection.execute(_RENEW_KEY, names | values)
    return None


def _find(connection: sa.Connection, project_id: str, key: str) -> IdempotencyRow | None:
    names = {"in_project": project_id, "this_key": key}
    row = connection.execute(_FIND_KEY, names).mappings().first()
    return None if row is None else struct_of(row, IdempotencyRow)


def _check_quota(connection: sa.Connection, store: Store, project_id: str) -> None:
    names = {"in_project": project_id}
    if not store.is_sqlite:
        # Creates of one project take turns, or two could both see the last free place.
        connection.execute(_LOCK_PROJECT, names)
    sandboxes_max, live = connection.execute(_QUOTA, names).one()
    if live >= sandboxes_max:
        raise QuotaExceeded(
            f"the project has {live} live sandboxes, and may have {sandboxes_max}",
            details={"limit": sandboxes_max, "live": live},
            retry_after_s=1,
        )

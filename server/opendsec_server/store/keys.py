# SPDX-License-Identifier: AGPL-3.0-only
"""Idempotency keys inside of other transactions."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from opendsec_server.contract.errors import IdempotencyMismatch
from opendsec_server.contract.limits import IDEMPOTENCY_KEPT_S

from .packing import struct_of
from .records import IdempotencyClaim, IdempotencyRow, KeyOutcome
from .tables import IDEMPOTENCY

# Statements are built once: building them costs more than running them.
_THIS_KEY = sa.and_(
    IDEMPOTENCY.c.project_id == sa.bindparam("in_project"),
    IDEMPOTENCY.c.key == sa.bindparam("this_key"),
)
_FIND = sa.select(IDEMPOTENCY).where(_THIS_KEY)
_INSERT = sa.insert(IDEMPOTENCY)
_VALUES = ("params_sha256", "sandbox_id", "outcome", "expires_at", "result")
_RENEW = (
    sa.update(IDEMPOTENCY)
    .where(_THIS_KEY)
    .values({name: sa.bindparam(name, type_=IDEMPOTENCY.c[name].type) for name in _VALUES})
)
_SETTLE = (
    sa.update(IDEMPOTENCY)
    .where(
        IDEMPOTENCY.c.sandbox_id == sa.bindparam("this_thing"), IDEMPOTENCY.c.outcome == "pending"
    )
    .values(
        outcome=sa.bindparam("settled_as"),
        result=sa.func.coalesce(sa.bindparam("with_result", type_=sa.Text), IDEMPOTENCY.c.result),
    )
)


def find_key(
    connection: sa.Connection, project_id: str, claim: IdempotencyClaim, now: float
) -> tuple[IdempotencyRow | None, bool]:
    """What a key stands for, and whether a row of it must be renewed instead of inserted.

    A key whose request failed, or that has expired, stands for nothing.

    Raises:
        IdempotencyMismatch: it was used with other parameters.
    """
    names = {"in_project": project_id, "this_key": claim.key}
    row = connection.execute(_FIND, names).mappings().first()
    if row is None:
        return None, False
    earlier = struct_of(row, IdempotencyRow)
    if earlier.expires_at <= now:
        return None, True
    if earlier.params_sha256 != claim.params_sha256:
        raise IdempotencyMismatch("this idempotency key was used before with other parameters")
    return (None if earlier.outcome == "failed" else earlier), True


def take_key(
    connection: sa.Connection,
    project_id: str,
    claim: IdempotencyClaim,
    thing_id: str,
    *,
    now: float,
    renew: bool,
    result: str | None = None,
) -> None:
    """Let a key stand for a request that is about to be carried out."""
    values: dict[str, Any] = {
        "params_sha256": claim.params_sha256,
        "sandbox_id": thing_id,
        "outcome": "pending",
        "expires_at": now + IDEMPOTENCY_KEPT_S,
        "result": result,
    }
    if renew:
        connection.execute(_RENEW, {"in_project": project_id, "this_key": claim.key} | values)
    else:
        connection.execute(_INSERT, {"project_id": project_id, "key": claim.key} | values)


def settle_key(
    connection: sa.Connection, thing_id: str, outcome: KeyOutcome, result: str | None = None
) -> None:
    """Note how the request of a pending key went, if there is one for this thing."""
    values = {"this_thing": thing_id, "settled_as": outcome, "with_result": result}
    connection.execute(_SETTLE, values)

# SPDX-License-Identifier: AGPL-3.0-only
"""The audit log's rows: appended in one order, each tied to the one before by its hash.

``hash`` is SHA-256 of the hash before and of what the row says, so that whoever holds an export
can follow it. ``mac`` is an HMAC of it with a secret that is not in the database, so that whoever
can write the database cannot make a chain of their own.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from .packing import struct_of
from .store import Store
from .tables import AUDIT, PROJECT_LINES

ActorKind = Literal["key", "principal", "token", "none"]

FIRST_HASH = "0" * 64
"""What the first row is tied to."""
# Any number, the same in all servers of a database.
_LOCK = sa.text("SELECT pg_advisory_xact_lock(7300001)")
_SAID = (
    "seq", "at", "request_id", "actor_kind", "actor_id", "credential_id", "project_id", "action",
    "object", "outcome", "status", "address",
)  # fmt: skip
_encode = msgspec.json.Encoder().encode


class Call(msgspec.Struct, kw_only=True, frozen=True):
    """One call of the management API, and how it went."""

    at: float
    request_id: str
    actor_kind: ActorKind
    actor_id: str | None
    credential_id: str | None
    project_id: str | None
    action: str
    object: str | None
    outcome: str
    """``ok``, or the error's code."""
    status: int
    address: str | None


class AuditEntry(Call, kw_only=True, frozen=True):
    """A call as it stands in the log."""

    seq: int
    hash: str
    mac: str


class AuditFilter(msgspec.Struct, kw_only=True, frozen=True):
    """Which entries to list."""

    project_id: str | None
    """It and all below it. None: everything."""
    actor_id: str | None = None
    object: str | None = None
    """All that a call was about, or one of several objects."""
    outcome: str | None = None
    since: float | None = None
    until: float | None = None
    after: int = 0
    """``seq`` of the last entry of the page before."""
    limit: int


def hash_of(previous: str, entry: Call, seq: int) -> str:
    """The hash of an entry that follows one with the hash ``previous``."""
    said = [seq if name == "seq" else getattr(entry, name) for name in _SAID]
    return hashlib.sha256(previous.encode() + b"\n" + _encode(said)).hexdigest()


def mac_of(secret: bytes, digest: str) -> str:
    """What only the installation can put on a hash."""
    return hmac.new(secret, digest.encode(), hashlib.sha256).hexdigest()


class Place(msgspec.Struct, frozen=True):
    """An entry's place in the chain."""

    seq: int
    hash: str


async def append(
    store: Store, calls: Sequence[Call], secret: bytes, known: Place | None = None
) -> tuple[Place, bool]:
    """Add calls in order.

    Args:
        store: Where.
        calls: What to add.
        secret: Of the installation.
        known: An entry that was written before.

    Returns:
        The place of the last, and whether the known entry still stands in the log.

    Raises:
        StoreUnavailable: none was added.
    """

    def work(connection: sa.Connection) -> tuple[Place, bool]:
        if connection.dialect.name != "sqlite":
            connection.execute(_LOCK)
        stands = known is None or known.hash == connection.scalar(
            sa.select(AUDIT.c.hash).where(AUDIT.c.seq == known.seq)
        )
        seq, digest = _head(connection)
        rows = []
        for call in calls:
            seq += 1
            digest = hash_of(digest, call, seq)
            rows.append(
                {
                    **msgspec.structs.asdict(call),
                    "seq": seq,
                    "hash": digest,
                    "mac": mac_of(secret, digest),
                }
            )
        connection.execute(sa.insert(AUDIT), rows)
        return Place(seq, digest), stands

    return await store.write(work)


async def head(store: Store) -> tuple[int, str]:
    """``seq`` and hash of the last entry; 0 and ``FIRST_HASH`` of an empty log."""
    return await store.read(_head)


async def list_entries(store: Store, wanted: AuditFilter) -> list[AuditEntry]:
    """Entries in order."""

    def work(connection: sa.Connection) -> list[AuditEntry]:
        query = sa.select(AUDIT).where(AUDIT.c.seq > wanted.after)
        if wanted.project_id is not None:
            below = sa.select(PROJECT_LINES.c.project_id).where(
                PROJECT_LINES.c.ancestor_id == wanted.project_id
            )
            query = query.where(AUDIT.c.project_id.in_(below))
        for name in ("actor_id", "outcome"):
            value = getattr(wanted, name)
            if value is not None:
                query = query.where(AUDIT.c[name] == value)
        if wanted.object is not None:
            # Of a call about several objects, each by itself.
            words = sa.literal(" ") + AUDIT.c.object + " "
            word = words.contains(f" {wanted.object} ", autoescape=True)
            query = query.where((AUDIT.c.object == wanted.object) | word)
        if wanted.since is not None:
            query = query.where(AUDIT.c.at >= wanted.since)
        if wanted.until is not None:
            query = query.where(AUDIT.c.at < wanted.until)
        rows = connection.execute(query.order_by(AUDIT.c.seq).limit(wanted.limit)).mappings()
        return [struct_of(row, AuditEntry) for row in rows]

    return await store.read(work)


def first_fault(
    entries: Sequence[AuditEntry], *, seq: int, digest: str, secret: bytes | None
) -> str | None:
    """What is wrong with a run of entries. None: nothing.

    Args:
        entries: In order.
        seq: Of the entry before them.
        digest: Its hash.
        secret: Of the installation. None: the MACs are not looked at.
    """
    for entry in entries:
        if entry.seq != seq + 1:
            return f"entry {seq + 1} is missing"
        if not hmac.compare_digest(hash_of(digest, entry, entry.seq), entry.hash):
            return f"entry {entry.seq} was changed, or one before it"
        if secret is not None and not hmac.compare_digest(mac_of(secret, entry.hash), entry.mac):
            return f"entry {entry.seq} was not written by this installation"
        seq, digest = entry.seq, entry.hash
    return None


def _head(connection: sa.Connection) -> tuple[int, str]:
    query = sa.select(AUDIT.c.seq, AUDIT.c.hash).order_by(AUDIT.c.seq.desc()).limit(1)
    row: Any = connection.execute(query).first()
    return (0, FIRST_HASH) if row is None else (row.seq, row.hash)

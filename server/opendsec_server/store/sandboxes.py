# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on sandboxes. Each function is one round of reading, or one transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.node import NetworkPolicy, StateMode
from opendsec_server.contract.states import TERMINAL, State

from .packing import (
    list_entry,
    map_entry,
    pack_list,
    pack_map,
    plain,
    struct_of,
    unpack_list,
    unpack_map,
)
from .records import SandboxExtra, SandboxRecord, Transition
from .store import Store
from .tables import IDEMPOTENCY, SANDBOX_TRANSITIONS, SANDBOXES
from .tasks import fold_past

_env = msgspec.json.Decoder(dict[str, str])
_network = msgspec.json.Decoder(NetworkPolicy)
_extra = msgspec.json.Decoder(SandboxExtra)

_SELECT_ONE = sa.select(SANDBOXES).where(SANDBOXES.c.sandbox_id == sa.bindparam("this_sandbox"))

_SEQS = sa.select(SANDBOXES.c.sandbox_id, SANDBOXES.c.node_seq).where(
    SANDBOXES.c.sandbox_id.in_(sa.bindparam("these", expanding=True))
)

PRUNE_BATCH = 500
"""Records removed in one transaction, so that creates are not held up."""


class SandboxFilter(msgspec.Struct, kw_only=True, frozen=True):
    """Which sandboxes of a project to list, and from where on."""

    project_id: str
    states: tuple[State, ...] = ()
    """Empty: all."""
    task_id: str | None = None
    labels: tuple[str, ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    template_id: str | None = None
    started_after: float | None = None
    ascending: bool = False
    after: tuple[float, str] | None = None
    """``created_at`` and id of the last sandbox of the page before."""
    limit: int


def row_of(record: SandboxRecord) -> dict[str, Any]:
    """The table row of a record."""
    row: dict[str, Any] = msgspec.structs.asdict(record)
    row["env"] = msgspec.json.encode(record.env).decode()
    row["metadata"] = pack_map(record.metadata)
    row["labels"] = pack_list(record.labels)
    row["network"] = msgspec.json.encode(record.network).decode()
    row["extra"] = msgspec.json.encode(record.extra).decode()
    return row


def record_of(row: sa.RowMapping) -> SandboxRecord:
    """The record of a table row."""
    values = plain(row)
    values["env"] = _env.decode(values["env"])
    values["metadata"] = unpack_map(values["metadata"])
    values["labels"] = unpack_list(values["labels"])
    values["network"] = _network.decode(values["network"])
    values["extra"] = _extra.decode(values["extra"])
    return msgspec.convert(values, SandboxRecord)


async def get_sandbox(store: Store, sandbox_id: str) -> SandboxRecord | None:
    """The record of one sandbox, whatever its state."""

    def work(connection: sa.Connection) -> SandboxRecord | None:
        row = connection.execute(_SELECT_ONE, {"this_sandbox": sandbox_id}).mappings().first()
        return None if row is None else record_of(row)

    return await store.read(work)


async def get_sandboxes(store: Store, sandbox_ids: Sequence[str]) -> dict[str, SandboxRecord]:
    """The records of those that exist."""
    if not sandbox_ids:
        return {}

    def work(connection: sa.Connection) -> dict[str, SandboxRecord]:
        query = sa.select(SANDBOXES).where(SANDBOXES.c.sandbox_id.in_(sandbox_ids))
        rows = connection.execute(query).mappings().all()
        return {row["sandbox_id"]: record_of(row) for row in rows}

    return await store.read(work)


async def node_seqs(store: Store, sandbox_ids: Collection[str]) -> dict[str, int]:
    """The nodes' counts of changes up to which records are known to be true."""

    def work(connection: sa.Connection) -> dict[str, int]:
        rows = connection.execute(_SEQS, {"these": list(sandbox_ids)})
        return {row.sandbox_id: row.node_seq for row in rows}

    return await store.read(work)


async def list_sandboxes(store: Store, wanted: SandboxFilter) -> list[SandboxRecord]:
    """At most ``wanted.limit`` sandboxes, newest first unless ``ascending``."""
    column = SANDBOXES.c
    query = sa.select(SANDBOXES).where(column.project_id == wanted.project_id)
    if wanted.states:
        query = query.where(column.state.in_(wanted.states))
        if not TERMINAL.intersection(wanted.states):
            query = query.where(column.ended_at.is_(None))
    if wanted.task_id is not None:
        query = query.where(column.task_id == wanted.task_id)
    if wanted.template_id is not None:
        query = query.where(column.template_id == wanted.template_id)
    if wanted.started_after is not None:
        started = sa.func.coalesce(column.started_at, column.created_at)
        query = query.where(started >= wanted.started_after)
    for label in wanted.labels:
        query = query.where(contains(store, column.labels, list_entry(label)))
    for key, value in wanted.metadata:
        query = query.where(contains(store, column.metadata, map_entry(key, value)))
    place = sa.tuple_(column.created_at, column.sandbox_id)
    if wanted.after is not None:
        last = sa.tuple_(sa.literal(wanted.after[0], sa.Double), sa.literal(wanted.after[1]))
        query = query.where(place > last if wanted.ascending else place < last)
    if wanted.ascending:
        query = query.order_by(column.created_at, column.sandbox_id)
    else:
        query = query.order_by(column.created_at.desc(), column.sandbox_id.desc())

    def work(connection: sa.Connection) -> list[SandboxRecord]:
        rows = (connection.execute(query.limit(wanted.limit))).mappings().all()
        return [record_of(row) for row in rows]

    return await store.read(work)


def contains(store: Store, column: sa.ColumnElement[str], text: str) -> sa.ColumnElement[bool]:
    """Whether a packed list or map holds an entry."""
    # LIKE would ignore case on SQLite.
    find = sa.func.instr if store.is_sqlite else sa.func.strpos
    return find(column, text) > 0


async def count_in_states(store: Store, project_id: str, states: Sequence[State]) -> int:
    """How many live sandboxes of a project are in one of ``states``."""

    def work(connection: sa.Connection) -> int:
        query = (
            sa.select(sa.func.count())
            .select_from(SANDBOXES)
            .where(
                SANDBOXES.c.project_id == project_id,
                SANDBOXES.c.ended_at.is_(None),
                SANDBOXES.c.state.in_(states),
            )
        )
        return int(connection.execute(query).scalar_one())

    return await store.read(work)


async def count_live(store: Store) -> dict[tuple[str, str], int]:
    """Live sandboxes of all projects by state and backend."""

    def work(connection: sa.Connection) -> dict[tuple[str, str], int]:
        query = (
            sa.select(SANDBOXES.c.state, SANDBOXES.c.backend, sa.func.count())
            .where(SANDBOXES.c.ended_at.is_(None))
            .group_by(SANDBOXES.c.state, SANDBOXES.c.backend)
        )
        rows = connection.execute(query).all()
        return {(state, backend): count for state, backend, count in rows}

    return await store.read(work)


async def live_sandboxes(store: Store, node_id: str) -> list[SandboxRecord]:
    """Every sandbox of a node whose record is not terminal."""

    def work(connection: sa.Connection) -> list[SandboxRecord]:
        query = sa.select(SANDBOXES).where(
            SANDBOXES.c.ended_at.is_(None), SANDBOXES.c.node_id == node_id
        )
        rows = connection.execute(query).mappings().all()
        return [record_of(row) for row in rows]

    return await store.read(work)


class LiveMark(msgspec.Struct, kw_only=True, frozen=True):
    """What a comparison with a node looks at."""

    sandbox_id: str
    state: State
    node_seq: int
    end_at: float
    paused_mode: StateMode | None


_C = SANDBOXES.c
_LIVE_MARKS = sa.select(_C.sandbox_id, _C.state, _C.node_seq, _C.end_at, _C.paused_mode).where(
    _C.ended_at.is_(None), _C.node_id == sa.bindparam("this_node")
)


async def live_marks(store: Store, node_id: str) -> list[LiveMark]:
    """As ``live_sandboxes``, only what is compared: a tenth of the time."""

    def work(connection: sa.Connection) -> list[LiveMark]:
        return [
            LiveMark(
                sandbox_id=sandbox_id,
                state=State(state),
                node_seq=node_seq,
                end_at=end_at,
                paused_mode=paused_mode,
            )
            for sandbox_id, state, node_seq, end_at, paused_mode in connection.execute(
                _LIVE_MARKS, {"this_node": node_id}
            )
        ]

    return await store.read(work)


async def nodes_of_live(store: Store) -> list[str]:
    """Ids of the nodes that live sandboxes are on."""

    def work(connection: sa.Connection) -> list[str]:
        query = sa.select(_C.node_id).where(_C.ended_at.is_(None)).distinct()
        return list(connection.execute(query).scalars())

    return await store.read(work)


async def ids_to_wake(store: Store) -> list[str]:
    """Paused sandboxes of all projects that traffic resumes."""

    def work(connection: sa.Connection) -> list[str]:
        query = sa.select(SANDBOXES.c.sandbox_id).where(
            SANDBOXES.c.ended_at.is_(None),
            SANDBOXES.c.state.in_((State.PAUSING, State.PAUSED, State.RESUMING)),
            SANDBOXES.c.auto_resume.is_(True),
        )
        return list(connection.execute(query).scalars())

    return await store.read(work)


async def transitions_of(store: Store, sandbox_id: str) -> list[Transition]:
    """The kept transitions of a sandbox, oldest first."""
    table = SANDBOX_TRANSITIONS

    def work(connection: sa.Connection) -> list[Transition]:
        query = sa.select(table).where(table.c.sandbox_id == sandbox_id).order_by(table.c.seq)
        rows = connection.execute(query).mappings().all()
        return [struct_of(row, Transition) for row in rows]

    return await store.read(work)


async def insert_adopted(store: Store, record: SandboxRecord) -> bool:
    """Record a sandbox that runs on a node without a record. False: one is there, or
    its project does not exist."""

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.insert(SANDBOXES), row_of(record))

    try:
        await store.write(work)
    except sa.exc.IntegrityError:
        return False
    return True


async def set_end_at(store: Store, sandbox_id: str, end_at: float) -> None:
    """Note a new end time."""
    await set_ends(store, [(sandbox_id, end_at)])


async def set_ends(store: Store, ends: Sequence[tuple[str, float]]) -> None:
    """Note new end times of many, by id, in one transaction."""
    if not ends:
        return
    query = (
        sa.update(SANDBOXES)
        .where(
            SANDBOXES.c.sandbox_id == sa.bindparam("this_sandbox"), SANDBOXES.c.ended_at.is_(None)
        )
        .values(end_at=sa.bindparam("new_end"))
    )
    values = [{"this_sandbox": sandbox_id, "new_end": end_at} for sandbox_id, end_at in ends]

    def work(connection: sa.Connection) -> None:
        connection.execute(query, values)

    await store.write(work)


async def set_paused_mode(store: Store, sandbox_id: str, mode: StateMode | None) -> None:
    """Note that less is left of a paused sandbox than was kept."""

    def work(connection: sa.Connection) -> None:
        connection.execute(
            sa.update(SANDBOXES)
            .where(SANDBOXES.c.sandbox_id == sandbox_id, SANDBOXES.c.state == State.PAUSED)
            .values(paused_mode=mode)
        )

    await store.write(work)


async def set_network(
    store: Store, sandbox_id: str, network: NetworkPolicy, extra: SandboxExtra
) -> None:
    """Note a new network policy."""

    def work(connection: sa.Connection) -> None:
        connection.execute(
            sa.update(SANDBOXES)
            .where(SANDBOXES.c.sandbox_id == sandbox_id)
            .values(
                network=msgspec.json.encode(network).decode(),
                extra=msgspec.json.encode(extra).decode(),
            )
        )

    await store.write(work)


async def prune(store: Store, *, ended_before: float, now: float) -> int:
    """Remove records of sandboxes that ended before a time, and expired idempotency keys.

    Returns how many sandboxes were removed; at ``PRUNE_BATCH``, call again.
    """
    old = (
        sa.select(SANDBOXES.c.sandbox_id)
        .where(SANDBOXES.c.ended_at < ended_before)
        .order_by(SANDBOXES.c.ended_at)
        .limit(PRUNE_BATCH)
    )

    def work(connection: sa.Connection) -> int:
        connection.execute(sa.delete(IDEMPOTENCY).where(IDEMPOTENCY.c.expires_at < now))
        gone = list(connection.execute(old).scalars())
        fold_past(connection, gone)
        removed = connection.execute(sa.delete(SANDBOXES).where(SANDBOXES.c.sandbox_id.in_(gone)))
        return int(removed.rowcount)

    return await store.write(work)

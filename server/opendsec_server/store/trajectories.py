# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on trajectories. Each function is one round of reading, or one transaction.

An action's row is there before anything of it runs. Its state changes from one known state to
another only, so that of two processes that settle it one wins, and the other reads what won.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.errors import Fault

from .leases import LEASE_S_MAX, is_over
from .packing import plain
from .store import Store
from .tables import ACTIONS, SANDBOXES, TRAJECTORIES

ActionKind = Literal["exec", "write_file", "read_file", "snapshot"]
ActionState = Literal["running", "done", "not_run", "unknown"]
"""``running``: recorded, and begun or about to be. ``done``: it ended, and how is known; or it
cannot be done, by the caller's mistake. ``not_run``: it is known that nothing of it happened; its
id may be used for another attempt. ``unknown``: whether it happened, or how it ended, is not
known."""

OPEN: tuple[ActionState, ...] = ("running", "unknown")
"""What can still become known."""

LEASED_AT_ONCE = 500

_C = ACTIONS.c
_ONE = sa.select(ACTIONS).where(
    _C.sandbox_id == sa.bindparam("this_sandbox"), _C.action_id == sa.bindparam("this_action")
)
_HEADER = sa.select(TRAJECTORIES).where(TRAJECTORIES.c.sandbox_id == sa.bindparam("this_sandbox"))
_HEADER_LOCKED = _HEADER.with_for_update()


class Action(msgspec.Struct, kw_only=True, frozen=True):
    """One action of a sandbox."""

    sandbox_id: str
    action_id: str
    seq: int = 0
    """Its place in the sandbox's log, from 1 on."""
    project_id: str
    task_id: str | None
    rollout_id: str | None
    step: int | None
    kind: ActionKind
    params: str
    """JSON; see ``control.trajectories.params``."""
    params_sha256: str
    state: ActionState = "running"
    attempt: int = 1
    instance: str | None = None
    oom_before: int = 0
    recorded_at: float
    ended_at: float | None = None
    result: str | None = None
    error: str | None = None
    fault: Fault | None = None
    cause: str | None = None
    evidence: str | None = None
    origin: str | None = None
    replayed: bool = False
    resolved_by: Literal["guest", "caller"] | None = None
    owner: str | None = None
    """Of one that runs: the process that runs it."""
    lease_until: float = 0.0
    """Until when other processes leave it to that."""

    def held(self, now: float) -> bool:
        """Whether the process that runs it is taken to live: the opposite of ``is_over``."""
        return now <= self.lease_until <= now + LEASE_S_MAX

    @property
    def size(self) -> int:
        """What it counts for in the limit of its trajectory, in bytes."""
        texts = (self.params, self.result, self.error, self.evidence)
        return sum(len(text.encode()) for text in texts if text is not None)


class Ending(msgspec.Struct, kw_only=True, frozen=True):
    """What became of an action."""

    state: ActionState
    ended_at: float | None = None
    result: str | None = None
    error: str | None = None
    fault: Fault | None = None
    cause: str | None = None
    evidence: str | None = None
    resolved_by: Literal["guest", "caller"] | None = None


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """How much one trajectory may hold."""

    actions: int
    bytes: int


class Begun(msgspec.Struct, kw_only=True, frozen=True):
    """What a begin found or made."""

    action: Action
    new: bool
    """It is this call's to run. False: it was begun before."""
    full: bool = False
    """Nothing was recorded: the trajectory is full."""
    busy: str | None = None
    """Nothing was recorded: this other action must end first."""


class Counted(msgspec.Struct, kw_only=True, frozen=True):
    """How many actions, or sandboxes, of a kind."""

    state: str
    cause: str | None
    fault: str | None
    count: int


class Rollout(msgspec.Struct, kw_only=True, frozen=True):
    """The actions with one rollout id, over all sandboxes."""

    rollout_id: str
    task_id: str | None
    sandboxes: int
    actions: int
    open: int
    """Actions that run, or whose outcome is not known."""
    last_step: int | None
    began_at: float
    last_at: float


def _action_of(row: sa.RowMapping) -> Action:
    return msgspec.convert(plain(row), Action)


def _locked(store: Store) -> sa.Select[Any]:
    return _HEADER if store.is_sqlite else _HEADER_LOCKED


async def begin_action(store: Store, wanted: Action, limits: Limits) -> Begun:
    """Record an action that is about to run.

    One that is known not to have run is begun once more, if it asks for the same. A snapshot is
    not begun beside other actions, nor they beside it: what it holds would not be known.

    Raises:
        StoreUnavailable: nothing was recorded.
    """

    def work(connection: sa.Connection) -> Begun:
        return _begin(connection, store, wanted, limits)

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process made the trajectory between our look and our insert.
        return await store.write(work)


def _begin(connection: sa.Connection, store: Store, wanted: Action, limits: Limits) -> Begun:
    header = _header(connection, store, wanted.sandbox_id)
    known = _find(connection, wanted.sandbox_id, wanted.action_id)
    if known is not None and (
        known.state != "not_run" or known.params_sha256 != wanted.params_sha256
    ):
        return Begun(action=known, new=False)
    busy = _busy(connection, wanted)
    if busy is not None:
        return Begun(action=wanted, new=False, busy=busy)
    if known is not None:
        again = msgspec.structs.replace(
            wanted,
            seq=header["next_seq"],
            attempt=known.attempt + 1,
            origin=known.origin,
            replayed=known.replayed,
        )
        size = again.size - known.size
    else:
        again = msgspec.structs.replace(wanted, seq=header["next_seq"])
        size = again.size
    if again.seq > limits.actions or header["bytes"] + size > limits.bytes:
        return Begun(action=wanted, new=False, full=True)
    values = msgspec.structs.asdict(again)
    if known is not None:
        _update(connection, again.sandbox_id, again.action_id, values)
    else:
        connection.execute(sa.insert(ACTIONS), values)
    _grow(connection, again.sandbox_id, size, seq=again.seq + 1)
    return Begun(action=again, new=True)


def _header(connection: sa.Connection, store: Store, sandbox_id: str) -> sa.RowMapping:
    """The trajectory's row, locked; made if it is the first action."""
    query, this = _locked(store), {"this_sandbox": sandbox_id}
    row = connection.execute(query, this).mappings().first()
    if row is None:
        values = {"sandbox_id": sandbox_id, "next_seq": 1, "bytes": 0}
        connection.execute(sa.insert(TRAJECTORIES), values)
        row = connection.execute(query, this).mappings().one()
    return row


def _find(connection: sa.Connection, sandbox_id: str, action_id: str) -> Action | None:
    this = {"this_sandbox": sandbox_id, "this_action": action_id}
    row = connection.execute(_ONE, this).mappings().first()
    return None if row is None else _action_of(row)


def _busy(connection: sa.Connection, wanted: Action) -> str | None:
    query = sa.select(_C.action_id).where(
        _C.sandbox_id == wanted.sandbox_id,
        _C.state == "running",
        _C.action_id != wanted.action_id,
    )
    if wanted.kind != "snapshot":
        query = query.where(_C.kind == "snapshot")
    return connection.execute(query.limit(1)).scalar()


def _update(
    connection: sa.Connection, sandbox_id: str, action_id: str, values: dict[str, Any]
) -> None:
    connection.execute(
        sa.update(ACTIONS)
        .where(_C.sandbox_id == sandbox_id, _C.action_id == action_id)
        .values(**values)
    )


def _grow(connection: sa.Connection, sandbox_id: str, size: int, *, seq: int | None = None) -> None:
    values: dict[str, Any] = {"bytes": TRAJECTORIES.c.bytes + size}
    if seq is not None:
        values["next_seq"] = seq
    connection.execute(
        sa.update(TRAJECTORIES).where(TRAJECTORIES.c.sandbox_id == sandbox_id).values(**values)
    )


async def end_action(store: Store, action: Action, ending: Ending) -> Action:
    """Record what became of an action, unless that is known already.

    Returns:
        The action as it is now: this ending, or an earlier one.

    Raises:
        StoreUnavailable: nothing was recorded.
    """

    def work(connection: sa.Connection) -> Action:
        connection.execute(_locked(store), {"this_sandbox": action.sandbox_id})
        known = _find(connection, action.sandbox_id, action.action_id)
        if known is None:
            # Its sandbox's record was removed meanwhile, and with it all that is kept of it.
            return action
        if known.state not in OPEN or known.attempt != action.attempt:
            return known
        ended = msgspec.structs.replace(
            known, owner=None, lease_until=0.0, **msgspec.structs.asdict(ending)
        )
        _update(connection, ended.sandbox_id, ended.action_id, msgspec.structs.asdict(ended))
        _grow(connection, ended.sandbox_id, ended.size - known.size)
        return ended

    return await store.write(work)


async def copy_action(store: Store, copied: Action, limits: Limits) -> Begun:
    """Put an action that ended elsewhere into a log, without running it."""

    def work(connection: sa.Connection) -> Begun:
        header = _header(connection, store, copied.sandbox_id)
        known = _find(connection, copied.sandbox_id, copied.action_id)
        if known is not None:
            return Begun(action=known, new=False)
        placed = msgspec.structs.replace(copied, seq=header["next_seq"])
        if placed.seq > limits.actions or header["bytes"] + placed.size > limits.bytes:
            return Begun(action=copied, new=False, full=True)
        connection.execute(sa.insert(ACTIONS), msgspec.structs.asdict(placed))
        _grow(connection, placed.sandbox_id, placed.size, seq=placed.seq + 1)
        return Begun(action=placed, new=True)

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        return await store.write(work)


async def set_replayed(store: Store, action: Action, origin: str) -> None:
    """Note that an action of this log repeats one of another sandbox's."""
    await store.write(
        lambda c: _update(
            c, action.sandbox_id, action.action_id, {"origin": origin, "replayed": True}
        )
    )


async def get_action(store: Store, sandbox_id: str, action_id: str) -> Action | None:
    """One action."""
    return await store.read(lambda c: _find(c, sandbox_id, action_id))


async def actions_of(store: Store, sandbox_id: str, *, after: int = 0, limit: int) -> list[Action]:
    """A sandbox's actions in order, those with a higher number than ``after``."""
    query = (
        sa.select(ACTIONS)
        .where(_C.sandbox_id == sandbox_id, _C.seq > after)
        .order_by(_C.seq)
        .limit(limit)
    )

    def work(connection: sa.Connection) -> list[Action]:
        return [_action_of(row) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def actions_of_rollout(
    store: Store,
    project_id: str,
    rollout_id: str,
    *,
    after: tuple[float, str, int] | None = None,
    limit: int,
) -> list[Action]:
    """A rollout's actions over all sandboxes, in the order of their record."""
    query = sa.select(ACTIONS).where(_C.project_id == project_id, _C.rollout_id == rollout_id)
    if after is not None:
        place = sa.tuple_(_C.recorded_at, _C.sandbox_id, _C.seq)
        at, sandbox_id, seq = after
        query = query.where(
            place > sa.tuple_(sa.literal(at, sa.Double), sa.literal(sandbox_id), sa.literal(seq))
        )
    query = query.order_by(_C.recorded_at, _C.sandbox_id, _C.seq).limit(limit)

    def work(connection: sa.Connection) -> list[Action]:
        return [_action_of(row) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def claim_actions(
    store: Store, owner: str, *, seat: str | None, now: float, lease_until: float
) -> list[Action]:
    """Take over actions that run and that nobody looks after.

    Args:
        store: Where.
        owner: Who takes them.
        seat: Beginning of the owners' names that are dead for sure: those of this place's earlier
            processes. None: wait until their leases are over.
        now: Unix seconds.
        lease_until: Until when others leave them alone.
    """
    free = _C.owner.is_(None) | is_over(_C.lease_until, now)
    if seat is not None:
        free = free | _C.owner.startswith(seat, autoescape=True)
    query = (
        sa.select(ACTIONS)
        .where(_C.state == "running", free)
        .order_by(_C.sandbox_id, _C.action_id)
        .with_for_update(skip_locked=True)
    )

    def work(connection: sa.Connection) -> list[Action]:
        found = [_action_of(row) for row in connection.execute(query).mappings()]
        for some in _some(found):
            connection.execute(_lease(some, owner, lease_until))
        return [
            msgspec.structs.replace(action, owner=owner, lease_until=lease_until)
            for action in found
        ]

    return await store.write(work)


async def renew_actions(
    store: Store, owner: str, actions: Sequence[Action], lease_until: float
) -> None:
    """Keep actions that are the owner's still for longer."""

    def work(connection: sa.Connection) -> None:
        for some in _some(sorted(actions, key=lambda a: (a.sandbox_id, a.action_id))):
            connection.execute(_lease(some, owner, lease_until).where(_C.owner == owner))

    if actions:
        await store.write(work)


def _some(actions: Sequence[Action]) -> Iterator[Sequence[Action]]:
    """As many as one statement takes."""
    for start in range(0, len(actions), LEASED_AT_ONCE):
        yield actions[start : start + LEASED_AT_ONCE]


def _lease(actions: Sequence[Action], owner: str, lease_until: float) -> sa.Update:
    these = [(action.sandbox_id, action.action_id) for action in actions]
    return (
        sa.update(ACTIONS)
        .where(sa.tuple_(_C.sandbox_id, _C.action_id).in_(these), _C.state == "running")
        .values(owner=owner, lease_until=lease_until)
    )


async def rollouts(
    store: Store,
    project_id: str,
    *,
    task_id: str | None,
    sandbox_id: str | None,
    after: str | None,
    limit: int,
) -> list[Rollout]:
    """A project's rollouts, by their ids."""
    query = (
        sa.select(
            _C.rollout_id,
            sa.func.max(_C.task_id).label("task_id"),
            sa.func.count(sa.distinct(_C.sandbox_id)).label("sandboxes"),
            sa.func.count().label("actions"),
            sa.func.sum(sa.case((_C.state.in_(OPEN), 1), else_=0)).label("open"),
            sa.func.max(_C.step).label("last_step"),
            sa.func.min(_C.recorded_at).label("began_at"),
            sa.func.max(_C.recorded_at).label("last_at"),
        )
        .where(_C.project_id == project_id, _C.rollout_id.is_not(None))
        .group_by(_C.rollout_id)
        .order_by(_C.rollout_id)
        .limit(limit)
    )
    if task_id is not None:
        query = query.where(_C.task_id == task_id)
    if sandbox_id is not None:
        query = query.where(_C.sandbox_id == sandbox_id)
    if after is not None:
        query = query.where(_C.rollout_id > after)

    def work(connection: sa.Connection) -> list[Rollout]:
        rows = connection.execute(query).mappings()
        return [msgspec.convert(plain(row), Rollout) for row in rows]

    return await store.read(work)


async def outcomes(
    store: Store, project_id: str, task_id: str
) -> tuple[Sequence[Counted], Sequence[Counted]]:
    """A task's sandboxes and its actions, counted by state, cause and fault. Actions that were
    copied from another sandbox's log are not counted again."""
    box = SANDBOXES.c
    of_sandboxes = (
        sa.select(
            box.state.label("state"),
            box.end_reason.label("cause"),
            box.fault.label("fault"),
            sa.func.count().label("count"),
        )
        .where(box.project_id == project_id, box.task_id == task_id)
        .group_by(box.state, box.end_reason, box.fault)
    )
    own = sa.or_(_C.origin.is_(None), _C.replayed.is_(True))
    of_actions = (
        sa.select(_C.state, _C.cause, _C.fault, sa.func.count().label("count"))
        .where(_C.project_id == project_id, _C.task_id == task_id, own)
        .group_by(_C.state, _C.cause, _C.fault)
    )

    def work(connection: sa.Connection) -> tuple[list[Counted], list[Counted]]:
        def counted(query: sa.Select[Any]) -> list[Counted]:
            rows = connection.execute(query).mappings()
            return [msgspec.convert(plain(row), Counted) for row in rows]

        return counted(of_sandboxes), counted(of_actions)

    return await store.read(work)

# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on groups. Each function is one round of reading, or one transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.errors import GroupExists

from .keys import find_key, take_key
from .leases import is_over
from .packing import struct_of
from .records import IdempotencyClaim
from .store import Store
from .tables import GROUP_MEMBERS, GROUPS, IDEMPOTENCY, SANDBOXES

GroupState = Literal["starting", "running", "paused", "ending", "ended"]
GroupEnd = Literal["killed", "timeout", "start_failed", "unhealthy", "members_ended"]
"""Why a group ended. ``members_ended``: each of its sandboxes had ended by itself."""
MemberState = Literal["waiting", "starting", "started", "healthy", "completed", "failed"]
PRUNE_BATCH = 500


class Group(msgspec.Struct, kw_only=True, frozen=True):
    """One group, as its row says."""

    group_id: str
    project_id: str
    name: str
    spec: str
    """JSON of what was asked for."""
    state: GroupState
    node_id: str | None = None
    """The node of all its sandboxes. None: not chosen yet."""
    created_at: float
    end_at: float
    """When it ends by itself, unless it is paused."""
    ready_at: float | None = None
    ended_at: float | None = None
    end_reason: GroupEnd | None = None
    error: str | None = None
    """JSON of the error that ended it."""
    owner: str | None = None
    lease_until: float = 0.0


class Member(msgspec.Struct, kw_only=True, frozen=True):
    """One service of a group."""

    group_id: str
    name: str
    position: int
    state: MemberState
    message: str | None = None
    sandbox_id: str | None = None
    """None: it was not seen to be made."""


_GROUP = GROUPS.c
_MEMBER = GROUP_MEMBERS.c
_LIVE = _GROUP.ended_at.is_(None)


def member_key(group_id: str, name: str) -> str:
    """The idempotency key of a member's sandbox. No caller can spell it: keys of callers have no
    slash."""
    return f"group/{group_id}/{name}"


async def insert_group(
    store: Store, group: Group, members: Sequence[Member], claim: IdempotencyClaim | None
) -> str:
    """Record what is asked for, and tie the key to it.

    Returns:
        Id of the group that the key stands for: this one's, or an earlier one's; then nothing
        was written.

    Raises:
        IdempotencyMismatch: the key was used with other parameters.
        GroupExists: one of this name lives.
        StoreUnavailable: nothing was written, or it is not known.
    """

    def work(connection: sa.Connection) -> str:
        renew = False
        if claim is not None:
            earlier, renew = find_key(connection, group.project_id, claim, group.created_at)
            if earlier is not None:
                return earlier.sandbox_id
        same = sa.select(_GROUP.group_id).where(
            _GROUP.project_id == group.project_id, _GROUP.name == group.name, _LIVE
        )
        other = connection.execute(same).scalar()
        if other is not None:
            raise GroupExists(
                f"a group `{group.name}` is there already", details={"group_id": other}
            )
        connection.execute(sa.insert(GROUPS), msgspec.structs.asdict(group))
        connection.execute(
            sa.insert(GROUP_MEMBERS), [msgspec.structs.asdict(member) for member in members]
        )
        if claim is not None:
            take_key(
                connection,
                group.project_id,
                claim,
                group.group_id,
                now=group.created_at,
                renew=renew,
            )
        return group.group_id

    try:
        return await store.write(work)
    except sa.exc.IntegrityError:
        # Another process took the key or the name between our look and our insert.
        return await store.write(work)


async def get_group(store: Store, group_id: str) -> Group | None:
    """One group."""
    return await store.read(lambda connection: _get(connection, group_id))


async def find_group(store: Store, project_id: str, name: str) -> Group | None:
    """A project's group by name: the one that lives, else the newest."""
    query = (
        sa.select(GROUPS)
        .where(_GROUP.project_id == project_id, _GROUP.name == name)
        .order_by(_GROUP.ended_at.is_not(None), _GROUP.created_at.desc())
        .limit(1)
    )

    def work(connection: sa.Connection) -> Group | None:
        row = connection.execute(query).mappings().first()
        return None if row is None else struct_of(row, Group)

    return await store.read(work)


async def members_of(store: Store, group_id: str) -> list[Member]:
    """Its services, in the order in which they were named.

    One whose create was not seen to its end has the sandbox that its key stands for.
    """
    key = sa.literal(f"group/{group_id}/").concat(_MEMBER.name)
    project = sa.select(_GROUP.project_id).where(_GROUP.group_id == group_id).scalar_subquery()
    query = (
        sa.select(
            *[column for column in _MEMBER if column.name != "sandbox_id"],
            sa.func.coalesce(_MEMBER.sandbox_id, IDEMPOTENCY.c.sandbox_id).label("sandbox_id"),
        )
        .select_from(
            GROUP_MEMBERS.outerjoin(
                IDEMPOTENCY,
                sa.and_(IDEMPOTENCY.c.project_id == project, IDEMPOTENCY.c.key == key),
            )
        )
        .where(_MEMBER.group_id == group_id)
        .order_by(_MEMBER.position)
    )

    def work(connection: sa.Connection) -> list[Member]:
        return [struct_of(row, Member) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def list_groups(
    store: Store,
    project_id: str,
    *,
    states: Collection[str] = (),
    after: tuple[float, str] | None = None,
    limit: int,
) -> list[Group]:
    """A project's groups, newest first; those before ``after``."""
    query = sa.select(GROUPS).where(_GROUP.project_id == project_id)
    if states:
        query = query.where(_GROUP.state.in_(list(states)))
    if after is not None:
        last = sa.tuple_(sa.literal(after[0], sa.Double), sa.literal(after[1]))
        query = query.where(sa.tuple_(_GROUP.created_at, _GROUP.group_id) < last)
    query = query.order_by(_GROUP.created_at.desc(), _GROUP.group_id.desc()).limit(limit)

    def work(connection: sa.Connection) -> list[Group]:
        return [struct_of(row, Group) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def set_node(store: Store, group_id: str, node_id: str) -> None:
    """Note where all its sandboxes are to be."""
    update = sa.update(GROUPS).where(_GROUP.group_id == group_id).values(node_id=node_id)
    await store.write(lambda connection: connection.execute(update))


async def set_member(store: Store, group_id: str, name: str, **values: Any) -> None:
    """Note how far a service is."""
    update = (
        sa.update(GROUP_MEMBERS)
        .where(_MEMBER.group_id == group_id, _MEMBER.name == name)
        .values(**values)
    )
    await store.write(lambda connection: connection.execute(update))


async def move_group(
    store: Store, group_id: str, *, while_in: Collection[GroupState], **values: Any
) -> Group | None:
    """Change a group, if it is in one of these states; returns it as it is then.

    None: it is gone.
    """
    update = (
        sa.update(GROUPS)
        .where(_GROUP.group_id == group_id, _GROUP.state.in_(list(while_in)))
        .values(**values)
    )

    def work(connection: sa.Connection) -> Group | None:
        connection.execute(update)
        return _get(connection, group_id)

    return await store.write(work)


async def renew_group(store: Store, group_id: str, owner: str, lease_until: float) -> Group | None:
    """Keep a group that this process works on. None: it is another's, or gone."""
    update = (
        sa.update(GROUPS)
        .where(_GROUP.group_id == group_id, _GROUP.owner == owner)
        .values(lease_until=lease_until)
    )

    def work(connection: sa.Connection) -> Group | None:
        connection.execute(update)
        group = _get(connection, group_id)
        return group if group is not None and group.owner == owner else None

    return await store.write(work)


async def claim_groups(
    store: Store,
    owner: str,
    *,
    held: Collection[str],
    now: float,
    lease_until: float,
    seat: str | None,
) -> list[Group]:
    """Take over groups that are being started or ended and that nobody works on.

    Args:
        store: Where.
        owner: This process.
        held: What it works on already.
        now: Leases that were over before are void.
        lease_until: The new ones.
        seat: Beginning of the owners' names that are dead for sure: those of this place's earlier
            processes. None: none is.
    """
    wanted = sa.and_(_GROUP.state.in_(["starting", "ending"]), _GROUP.group_id.not_in(list(held)))
    free = is_over(_GROUP.lease_until, now)
    if seat is not None:
        free = free | _GROUP.owner.startswith(seat, autoescape=True)
    wanted = sa.and_(wanted, free)

    def work(connection: sa.Connection) -> list[Group]:
        query = sa.select(GROUPS).where(wanted).order_by(_GROUP.created_at)
        if connection.dialect.name != "sqlite":
            query = query.with_for_update(skip_locked=True)
        found = [struct_of(row, Group) for row in connection.execute(query).mappings()]
        if found:
            connection.execute(
                sa.update(GROUPS)
                .where(_GROUP.group_id.in_([group.group_id for group in found]))
                .values(owner=owner, lease_until=lease_until)
            )
        return [
            msgspec.structs.replace(group, owner=owner, lease_until=lease_until) for group in found
        ]

    return await store.write(work)


async def groups_over(store: Store, now: float) -> list[Group]:
    """Running groups whose time is over."""
    query = sa.select(GROUPS).where(_LIVE, _GROUP.state == "running", _GROUP.end_at <= now)

    def work(connection: sa.Connection) -> list[Group]:
        return [struct_of(row, Group) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def groups_without_living(store: Store) -> list[str]:
    """Ids of groups that run or are paused, of which every sandbox has ended."""
    living = (
        sa.select(sa.literal(1))
        .select_from(GROUP_MEMBERS.join(SANDBOXES, SANDBOXES.c.sandbox_id == _MEMBER.sandbox_id))
        .where(_MEMBER.group_id == _GROUP.group_id, SANDBOXES.c.ended_at.is_(None))
    )
    query = sa.select(_GROUP.group_id).where(
        _LIVE, _GROUP.state.in_(["running", "paused"]), ~living.exists()
    )
    return await store.read(lambda connection: list(connection.execute(query).scalars()))


async def prune_groups(store: Store, ended_before: float) -> int:
    """Remove groups that ended long ago, some at a time. Returns how many."""
    old = sa.select(_GROUP.group_id).where(_GROUP.ended_at < ended_before).limit(PRUNE_BATCH)

    def work(connection: sa.Connection) -> int:
        names = list(connection.execute(old).scalars())
        connection.execute(sa.delete(GROUP_MEMBERS).where(_MEMBER.group_id.in_(names)))
        connection.execute(sa.delete(GROUPS).where(_GROUP.group_id.in_(names)))
        return len(names)

    return await store.write(work)


def _get(connection: sa.Connection, group_id: str) -> Group | None:
    query = sa.select(GROUPS).where(_GROUP.group_id == group_id)
    row = connection.execute(query).mappings().first()
    return None if row is None else struct_of(row, Group)

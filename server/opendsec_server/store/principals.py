# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on principals, what they are granted, tokens, and what a credential is worth now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.errors import Conflict

from .packing import pack_list, plain, struct_of, unpack_list
from .records import ApiKey, Project
from .store import Store
from .tables import API_KEYS, GRANTS, PRINCIPALS, PROJECT_LINES, PROJECTS, TOKENS

PrincipalKind = Literal["person", "service", "agent"]

EXPIRED_BATCH = 1_000
"""Tokens that are over, removed whenever one is made."""


class Principal(msgspec.Struct, kw_only=True, frozen=True):
    """A person, service or agent that may be granted rights in projects."""

    principal_id: str
    project_id: str
    """Where it was made."""
    kind: PrincipalKind
    name: str
    created_at: float
    disabled_at: float | None = None


class Grant(msgspec.Struct, kw_only=True, frozen=True):
    """What a principal may do in a project and those below it."""

    principal_id: str
    project_id: str
    role: str | None
    rights: list[str]
    """Beside those of the role."""
    granted_by: str
    created_at: float


class Token(msgspec.Struct, kw_only=True, frozen=True):
    """A short-lived credential that is worth no more than who made it."""

    token_id: str
    sha256: str
    project_id: str
    name: str
    principal_id: str | None
    key_id: str
    """The key at its root, whether the principal's or the project's."""
    parent_id: str | None
    """The token that made it."""
    rights: list[str]
    projects: list[str]
    """It is good in these and in those below them."""
    sandbox_id: str | None
    created_at: float
    expires_at: float


class Credential(msgspec.Struct, kw_only=True, frozen=True):
    """A key or token, and all that decides what it may do in one project."""

    key: ApiKey
    token: Token | None
    project: Project | None
    """The one asked for. None: there is no such project."""
    line: frozenset[str]
    """That project and those above it."""
    grants: tuple[Grant, ...]
    """Of the principal, in the line. Empty for a key of a project."""
    disabled: bool
    """The principal is switched off."""


async def find_credential(
    store: Store, sha256: str, project_id: str | None, *, now: float
) -> Credential | None:
    """What the key or token with this digest is, and what it meets in a project.

    Args:
        store: Where.
        sha256: Digest of what was shown.
        project_id: Where it will be used. None: the credential's own project.
        now: Tokens that ended before are not found.
    """

    def work(connection: sa.Connection) -> Credential | None:
        token = None
        key_row = _one(connection, sa.select(API_KEYS).where(API_KEYS.c.sha256 == sha256))
        if key_row is None:
            row = _one(
                connection,
                sa.select(TOKENS).where(TOKENS.c.sha256 == sha256, TOKENS.c.expires_at > now),
            )
            if row is None:
                return None
            token = _token_of(row)
            key_row = _one(connection, sa.select(API_KEYS).where(API_KEYS.c.key_id == token.key_id))
            if key_row is None:
                return None
        key = struct_of(key_row, ApiKey)
        wanted = project_id or (token.project_id if token else key.project_id)
        found = _one(connection, sa.select(PROJECTS).where(PROJECTS.c.project_id == wanted))
        line = connection.execute(
            sa.select(PROJECT_LINES.c.ancestor_id).where(PROJECT_LINES.c.project_id == wanted)
        ).scalars()
        ancestors = frozenset(line)
        grants: tuple[Grant, ...] = ()
        disabled = False
        if key.principal_id is not None:
            principal = _one(
                connection,
                sa.select(PRINCIPALS).where(PRINCIPALS.c.principal_id == key.principal_id),
            )
            disabled = principal is None or principal["disabled_at"] is not None
            grants = tuple(
                grant
                for grant in _grants(connection, GRANTS.c.principal_id == key.principal_id)
                if grant.project_id in ancestors
            )
        return Credential(
            key=key,
            token=token,
            project=None if found is None else struct_of(found, Project),
            line=ancestors,
            grants=grants,
            disabled=disabled,
        )

    return await store.read(work)


async def insert_principal(store: Store, principal: Principal) -> None:
    """Add a principal.

    Raises:
        Conflict: its project has one of that name.
    """

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.insert(PRINCIPALS), msgspec.structs.asdict(principal))

    try:
        await store.write(work)
    except sa.exc.IntegrityError:
        raise Conflict(
            f"the project has a principal `{principal.name}`",
            remediation="Use another name, or that principal.",
        ) from None


async def principals_of(store: Store, project_ids: Sequence[str]) -> list[Principal]:
    """Principals made in these projects, oldest first."""

    def work(connection: sa.Connection) -> list[Principal]:
        query = (
            sa.select(PRINCIPALS)
            .where(PRINCIPALS.c.project_id.in_(project_ids))
            .order_by(PRINCIPALS.c.created_at, PRINCIPALS.c.principal_id)
        )
        return [struct_of(row, Principal) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def get_principal(store: Store, principal_id: str) -> Principal | None:
    """One principal."""

    def work(connection: sa.Connection) -> Principal | None:
        row = _one(
            connection, sa.select(PRINCIPALS).where(PRINCIPALS.c.principal_id == principal_id)
        )
        return None if row is None else struct_of(row, Principal)

    return await store.read(work)


async def set_disabled(store: Store, principal_id: str, disabled_at: float | None) -> None:
    """Switch a principal off, or on again (None)."""

    def work(connection: sa.Connection) -> None:
        connection.execute(
            sa.update(PRINCIPALS)
            .where(PRINCIPALS.c.principal_id == principal_id)
            .values(disabled_at=disabled_at)
        )

    await store.write(work)


async def delete_principal(store: Store, principal_id: str) -> None:
    """Remove a principal with its grants, keys and tokens."""

    def work(connection: sa.Connection) -> None:
        for table in (TOKENS, API_KEYS, GRANTS, PRINCIPALS):
            connection.execute(sa.delete(table).where(table.c.principal_id == principal_id))

    await store.write(work)


async def grants_of(store: Store, principal_id: str) -> list[Grant]:
    """What a principal is granted, oldest first."""
    return await store.read(lambda c: _grants(c, GRANTS.c.principal_id == principal_id))


async def put_grant(store: Store, grant: Grant) -> None:
    """Grant, in place of what the principal had in that project."""

    def work(connection: sa.Connection) -> None:
        _delete_grant(connection, grant.principal_id, grant.project_id)
        row = msgspec.structs.asdict(grant) | {"rights": pack_list(grant.rights)}
        connection.execute(sa.insert(GRANTS), row)

    await store.write(work)


async def delete_grant(store: Store, principal_id: str, project_id: str) -> bool:
    """Take back what a principal has in a project. False: it has nothing there."""
    return await store.write(lambda c: _delete_grant(c, principal_id, project_id))


async def insert_token(store: Store, token: Token) -> None:
    """Add a token; some that are over go."""

    def work(connection: sa.Connection) -> None:
        over = (
            sa.select(TOKENS.c.token_id)
            .where(TOKENS.c.expires_at <= token.created_at)
            .limit(EXPIRED_BATCH)
        )
        connection.execute(sa.delete(TOKENS).where(TOKENS.c.token_id.in_(over.scalar_subquery())))
        row = msgspec.structs.asdict(token)
        row["rights"], row["projects"] = pack_list(token.rights), pack_list(token.projects)
        connection.execute(sa.insert(TOKENS), row)

    await store.write(work)


async def tokens_of(store: Store, project_id: str, *, now: float, limit: int) -> list[Token]:
    """The tokens of a project that are not over, newest first."""

    def work(connection: sa.Connection) -> list[Token]:
        query = (
            sa.select(TOKENS)
            .where(TOKENS.c.project_id == project_id, TOKENS.c.expires_at > now)
            .order_by(TOKENS.c.created_at.desc(), TOKENS.c.token_id)
            .limit(limit)
        )
        return [_token_of(row) for row in connection.execute(query).mappings()]

    return await store.read(work)


async def delete_token(store: Store, project_id: str, token_id: str) -> list[str]:
    """Revoke a token and all that were made with it; their ids. Empty: there is none."""

    def work(connection: sa.Connection) -> list[str]:
        query = sa.select(TOKENS.c.token_id).where(
            TOKENS.c.project_id == project_id, TOKENS.c.token_id == token_id
        )
        found = list(connection.execute(query).scalars())
        todo = found
        while todo:
            children = sa.select(TOKENS.c.token_id).where(TOKENS.c.parent_id.in_(todo))
            todo = list(connection.execute(children).scalars())
            found = found + todo
        connection.execute(sa.delete(TOKENS).where(TOKENS.c.token_id.in_(found)))
        return found

    return await store.write(work)


def _one(connection: sa.Connection, query: sa.Select[Any]) -> sa.RowMapping | None:
    return connection.execute(query).mappings().first()


def _grants(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[Grant]:
    query = sa.select(GRANTS).where(condition).order_by(GRANTS.c.created_at, GRANTS.c.project_id)
    found = []
    for row in connection.execute(query).mappings():
        values = plain(row)
        values["rights"] = unpack_list(values["rights"])
        found.append(msgspec.convert(values, Grant))
    return found


def _delete_grant(connection: sa.Connection, principal_id: str, project_id: str) -> bool:
    done = connection.execute(
        sa.delete(GRANTS).where(
            GRANTS.c.principal_id == principal_id, GRANTS.c.project_id == project_id
        )
    )
    return done.rowcount > 0


def _token_of(row: sa.RowMapping) -> Token:
    values = plain(row)
    values["rights"] = unpack_list(values["rights"])
    values["projects"] = unpack_list(values["projects"])
    return msgspec.convert(values, Token)

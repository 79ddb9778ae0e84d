# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on projects, API keys and templates."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.errors import Conflict

from .packing import struct_of
from .records import ApiKey, Project, Template
from .store import Store
from .tables import API_KEYS, PROJECT_LINES, PROJECTS, SANDBOXES, TEMPLATES


async def any_key(store: Store) -> bool:
    """Whether there is at least one key."""

    def work(connection: sa.Connection) -> bool:
        found = connection.execute(sa.select(API_KEYS.c.key_id).limit(1))
        return found.first() is not None

    return await store.read(work)


async def first_project_id(store: Store) -> str | None:
    """The oldest project: that of the installation itself."""

    def work(connection: sa.Connection) -> str | None:
        query = sa.select(PROJECTS.c.project_id).order_by(
            PROJECTS.c.created_at, PROJECTS.c.project_id
        )
        return connection.execute(query.limit(1)).scalar()

    return await store.read(work)


async def get_project(store: Store, project_id: str) -> Project | None:
    """One project, also a closed one."""

    def work(connection: sa.Connection) -> Project | None:
        query = sa.select(PROJECTS).where(PROJECTS.c.project_id == project_id)
        row = connection.execute(query).mappings().first()
        return None if row is None else struct_of(row, Project)

    return await store.read(work)


async def sandboxes_max_of(store: Store, project_id: str) -> int:
    """How many sandboxes a project may have at most: its own limit, or that of one above it."""

    def work(connection: sa.Connection) -> int:
        query = (
            sa.select(sa.func.min(PROJECTS.c.sandboxes_max))
            .join(PROJECT_LINES, PROJECT_LINES.c.ancestor_id == PROJECTS.c.project_id)
            .where(PROJECT_LINES.c.project_id == project_id)
        )
        return int(connection.execute(query).scalar_one())

    return await store.read(work)


async def line_of(store: Store, project_id: str) -> frozenset[str]:
    """A project and those above it. Empty: there is no such project."""

    def work(connection: sa.Connection) -> frozenset[str]:
        query = sa.select(PROJECT_LINES.c.ancestor_id).where(
            PROJECT_LINES.c.project_id == project_id
        )
        return frozenset(connection.execute(query).scalars())

    return await store.read(work)


async def insert_project(store: Store, project: Project, first_key: ApiKey) -> None:
    """Add a project with its first key."""

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.insert(PROJECTS), msgspec.structs.asdict(project))
        connection.execute(sa.insert(API_KEYS), msgspec.structs.asdict(first_key))

    await store.write(work)


async def insert_key(store: Store, key: ApiKey) -> None:
    """Add a key to its project."""

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.insert(API_KEYS), msgspec.structs.asdict(key))

    await store.write(work)


async def keys_of(store: Store, project_id: str) -> list[ApiKey]:
    """The keys of a project, oldest first."""

    def work(connection: sa.Connection) -> list[ApiKey]:
        query = (
            sa.select(API_KEYS)
            .where(API_KEYS.c.project_id == project_id)
            .order_by(API_KEYS.c.created_at, API_KEYS.c.key_id)
        )
        rows = connection.execute(query).mappings().all()
        return [struct_of(row, ApiKey) for row in rows]

    return await store.read(work)


async def delete_key(store: Store, project_id: str, key_id: str) -> ApiKey | None:
    """Remove a key of a project and return it. None: the project has no such key.

    Raises:
        Conflict: it is the project's last key, or the last one of its own with all rights, without
            which nobody could get in.
    """

    def work(connection: sa.Connection) -> ApiKey | None:
        query = sa.select(API_KEYS).where(API_KEYS.c.project_id == project_id)
        rows = connection.execute(query).mappings().all()
        row = next((row for row in rows if row["key_id"] == key_id), None)
        if row is None:
            return None
        whole = [one for one in rows if one["principal_id"] is None and one["rights"] is None]
        if len(rows) == 1 or whole == [row]:
            raise Conflict(
                "this is the project's last API key",
                remediation="Make another key first, then delete this one.",
            )
        connection.execute(sa.delete(API_KEYS).where(API_KEYS.c.key_id == key_id))
        return struct_of(row, ApiKey)

    return await store.write(work)


async def put_template(store: Store, template: Template) -> Template:
    """Add a template, or renew the one of that name (which keeps its id and birthday)."""

    def work(connection: sa.Connection) -> Template:
        query = sa.select(TEMPLATES).where(
            TEMPLATES.c.name == template.name, TEMPLATES.c.project_id.is_(None)
        )
        row = connection.execute(query).mappings().first()
        if row is None:
            connection.execute(sa.insert(TEMPLATES), msgspec.structs.asdict(template))
            return template
        before = struct_of(row, Template)
        kept = msgspec.structs.replace(
            template,
            template_id=before.template_id,
            created_at=before.created_at,
            updated_at=before.updated_at,
        )
        if kept != before:
            kept = msgspec.structs.replace(kept, updated_at=template.updated_at)
            connection.execute(
                sa.update(TEMPLATES)
                .where(TEMPLATES.c.template_id == kept.template_id)
                .values(msgspec.structs.asdict(kept))
            )
        return kept

    return await store.write(work)


async def all_templates(store: Store) -> list[Template]:
    """Every template, oldest first."""

    def work(connection: sa.Connection) -> list[Template]:
        query = sa.select(TEMPLATES).order_by(TEMPLATES.c.created_at, TEMPLATES.c.template_id)
        rows = connection.execute(query).mappings().all()
        return [struct_of(row, Template) for row in rows]

    return await store.read(work)


async def template_use(store: Store) -> dict[str, tuple[int, float]]:
    """For each template that was used: how often, and when last. Over the kept records."""

    def work(connection: sa.Connection) -> dict[str, tuple[int, float]]:
        query = sa.select(
            SANDBOXES.c.template_id, sa.func.count(), sa.func.max(SANDBOXES.c.created_at)
        ).group_by(SANDBOXES.c.template_id)
        rows = connection.execute(query).all()
        return {template_id: (count, last) for template_id, count, last in rows}

    return await store.read(work)

# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on the tree of projects: what each may use, uses, and has handed on.

A part that is handed on is a ceiling, not a reservation. The parts that a project has handed on
never sum to more than it has itself; a project without a limit of its own hands its parent's on.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.errors import Conflict, NotFound

from .packing import struct_of
from .quotas import DAY_S, MB, NO_LIMIT
from .records import Project
from .store import Store
from .tables import PROJECT_LINES, PROJECT_USE, PROJECTS, SANDBOXES, TEMPLATE_BUILDS

DEPTH_MAX = 64
PROJECTS_MAX = 10_000
"""In one tree, closed ones not counted."""

LIMITS: dict[str, str] = {
    "sandboxes": "sandboxes_max",
    "cpu": "cpu_max",
    "memory_mb": "memory_mb_max",
    "disk_mb": "disk_mb_max",
    "gpu": "gpu_max",
    "egress_mb": "egress_mb_max",
    "creates_per_s": "creates_per_s_max",
}
"""Columns of the limits, by the name of what is limited."""

Limits = Mapping[str, float | None]
"""By the names in ``LIMITS``. None: none of its own."""


class ProjectState(msgspec.Struct, kw_only=True, frozen=True):
    """A project and what is known of it now."""

    project: Project
    limits: dict[str, float | None]
    use: dict[str, float]
    """Of it and all below it. Creates per second are not shown."""
    handed_on: dict[str, float]
    """The sum of the limits of those below it."""


def limits_of(project: Project) -> dict[str, float | None]:
    """A project's own limits."""
    found = {name: getattr(project, column) for name, column in LIMITS.items()}
    if project.sandboxes_max >= NO_LIMIT:
        found["sandboxes"] = None
    return found


async def tree_below(
    store: Store, project_id: str, *, closed: bool, now: float
) -> list[ProjectState]:
    """A project and all below it, parents first.

    Args:
        store: Where.
        project_id: The one at the top.
        closed: Also those that are closed.
        now: Unix seconds: what was sent on earlier days is not shown.
    """

    def work(connection: sa.Connection) -> list[ProjectState]:
        below = sa.select(PROJECT_LINES.c.project_id).where(
            PROJECT_LINES.c.ancestor_id == project_id
        )
        query = (
            sa.select(PROJECTS, PROJECT_USE)
            .join(PROJECT_USE, PROJECT_USE.c.project_id == PROJECTS.c.project_id)
            .where(PROJECTS.c.project_id.in_(below))
            .order_by(PROJECTS.c.depth, PROJECTS.c.created_at, PROJECTS.c.project_id)
        )
        rows = connection.execute(query).all()
        width = len(PROJECTS.c)
        names = [str(column.name) for column in PROJECTS.c]
        projects = [
            msgspec.convert(dict(zip(names, row[:width], strict=True)), Project) for row in rows
        ]
        tree = _Tree(projects)
        return [
            ProjectState(
                project=project,
                limits=limits_of(project),
                use={
                    "sandboxes": row.sandboxes,
                    "cpu": row.cpu_milli / 1_000,
                    "memory_mb": row.memory_mb,
                    "disk_mb": row.disk_mb,
                    "gpu": row.gpu,
                    "egress_mb": row.egress_bytes // MB
                    if row.egress_day == int(now // DAY_S)
                    else 0,
                },
                handed_on={name: tree.handed_on(project.project_id, name) for name in LIMITS},
            )
            for project, row in zip(projects, rows, strict=True)
            if closed or project.closed_at is None
        ]

    return await store.read(work)


async def insert_child(store: Store, project: Project) -> Project:
    """Add a project below another; as it was recorded.

    Raises:
        NotFound: its parent does not exist, or is closed.
        Conflict: it would be handed more than its parent has, the parent has one of that name,
            or there are too many, or too many above each other.
    """

    def work(connection: sa.Connection) -> Project:
        tree = _Tree.around(connection, project.parent_id or "")
        parent = tree.projects.get(project.parent_id or "")
        if parent is None or parent.closed_at is not None:
            raise NotFound(f"there is no project `{(project.parent_id or '')[:80]}`")
        if parent.depth + 1 >= DEPTH_MAX:
            raise Conflict(
                f"projects nest at most {DEPTH_MAX} deep", remediation="Make it further up."
            )
        if sum(1 for one in tree.projects.values() if one.closed_at is None) >= PROJECTS_MAX:
            raise Conflict(
                f"there are {PROJECTS_MAX} projects", remediation="Close some that are not used."
            )
        _check_name(tree, project)
        made = msgspec.structs.replace(project, depth=parent.depth + 1)
        tree.put(made)
        tree.check(made.project_id)
        connection.execute(sa.insert(PROJECTS), msgspec.structs.asdict(made))
        return made

    return await store.write(work)


async def change_project(
    store: Store, project_id: str, *, name: str | None, limits: Limits
) -> Project:
    """Rename a project, or change some of its limits. What runs goes on.

    Raises:
        NotFound: there is none, or it is closed.
        Conflict: more than its parent has, or less than it has handed on itself; or its parent
            has another of that name.
    """

    def work(connection: sa.Connection) -> Project:
        tree = _Tree.around(connection, project_id)
        before = _open(tree, project_id)
        values: dict[str, Any] = {LIMITS[key]: value for key, value in limits.items()}
        if values.get("sandboxes_max", 0) is None:
            values["sandboxes_max"] = NO_LIMIT
        if name is not None:
            values["name"] = name
        after = msgspec.structs.replace(before, **values)
        if after.name != before.name:
            _check_name(tree, after)
        tree.put(after)
        if limits:
            tree.check(project_id)
        if values:
            connection.execute(
                sa.update(PROJECTS).where(PROJECTS.c.project_id == project_id).values(values)
            )
        return after

    return await store.write(work)


async def close_project(store: Store, project_id: str) -> Project:
    """Let nobody in any more. Its records stay.

    Raises:
        NotFound: there is none, or it is closed.
        Conflict: it has sandboxes, builds under way, or open projects below it; or it is at the
            top.
    """

    def work(connection: sa.Connection) -> Project:
        tree = _Tree.around(connection, project_id)
        project = _open(tree, project_id)
        if project.parent_id is None:
            raise Conflict("a project at the top cannot be closed")
        if any(tree.projects[one].closed_at is None for one in tree.children[project_id]):
            raise Conflict(
                "there are open projects below this one", remediation="Close those first."
            )
        live = sa.select(sa.func.count()).where(
            SANDBOXES.c.project_id == project_id, SANDBOXES.c.ended_at.is_(None)
        )
        builds = sa.select(sa.func.count()).where(
            TEMPLATE_BUILDS.c.project_id == project_id,
            TEMPLATE_BUILDS.c.state.in_(("waiting", "building")),
        )
        count, building = (connection.execute(query).scalar_one() for query in (live, builds))
        if count or building:
            raise Conflict(
                f"the project has {count} sandboxes and {building} builds under way",
                remediation="End them first; paused sandboxes too.",
                details={"sandboxes": count, "builds": building},
            )
        closed = msgspec.structs.replace(project, closed_at=time.time())
        connection.execute(
            sa.update(PROJECTS)
            .where(PROJECTS.c.project_id == project_id)
            .values(closed_at=closed.closed_at)
        )
        return closed

    return await store.write(work)


def _open(tree: _Tree, project_id: str) -> Project:
    project = tree.projects.get(project_id)
    if project is None or project.closed_at is not None:
        raise NotFound(f"there is no project `{project_id[:80]}`")
    return project


def _check_name(tree: _Tree, project: Project) -> None:
    for one in tree.children[project.parent_id or ""]:
        other = tree.projects[one]
        if other.name == project.name and other.closed_at is None and one != project.project_id:
            raise Conflict(
                f"there is a project `{project.name}` at this place",
                remediation="Use another name.",
            )


class _Tree:
    """Projects under one at the top, to check what is handed on."""

    def __init__(self, projects: list[Project]) -> None:
        self.projects = {project.project_id: project for project in projects}
        self.children: dict[str, list[str]] = defaultdict(list)
        for project in projects:
            if project.parent_id is not None:
                self.children[project.parent_id].append(project.project_id)

    @classmethod
    def around(cls, connection: sa.Connection, project_id: str) -> _Tree:
        """The whole tree that a project stands in; changes of it take turns."""
        line = sa.select(PROJECT_LINES.c.ancestor_id).where(
            PROJECT_LINES.c.project_id == project_id
        )
        top = connection.execute(
            sa.select(PROJECTS.c.project_id).where(
                PROJECTS.c.project_id.in_(line), PROJECTS.c.parent_id.is_(None)
            )
        ).scalar()
        if top is None:
            return cls([])
        if connection.dialect.name != "sqlite":
            lock = sa.select(PROJECT_USE.c.project_id).where(PROJECT_USE.c.project_id == top)
            connection.execute(lock.with_for_update())
        below = sa.select(PROJECT_LINES.c.project_id).where(PROJECT_LINES.c.ancestor_id == top)
        rows = connection.execute(sa.select(PROJECTS).where(PROJECTS.c.project_id.in_(below)))
        return cls([struct_of(row, Project) for row in rows.mappings()])

    def put(self, project: Project) -> None:
        """Take a project into account as it will be."""
        if project.project_id not in self.projects and project.parent_id is not None:
            self.children[project.parent_id].append(project.project_id)
        self.projects[project.project_id] = project

    def handed_on(self, project_id: str, name: str) -> float:
        """What those below a project have of it."""
        total, todo = 0.0, list(self.children[project_id])
        while todo:
            one = todo.pop()
            project = self.projects.get(one)
            if project is None or project.closed_at is not None:
                continue
            limit = limits_of(project)[name]
            if limit is None:
                todo.extend(self.children[one])
            else:
                total += limit
        return int(total) if total == int(total) else total

    def check(self, project_id: str) -> None:
        """Raises: Conflict: some project has handed on more than it has."""
        for name in LIMITS:
            at: str | None = project_id
            while at is not None:
                project = self.projects[at]
                limit = limits_of(project)[name]
                if limit is not None:
                    handed_on = self.handed_on(at, name)
                    if handed_on > limit + 1e-9:
                        raise _too_much(project, name, limit, handed_on)
                    if at != project_id:
                        break
                at = project.parent_id


def _too_much(project: Project, name: str, limit: float, handed_on: float) -> Conflict:
    return Conflict(
        f"{name}: project `{project.name}` ({project.project_id}) has {limit:g}, "
        f"and would have handed on {handed_on:g}",
        remediation="Ask for less, take some back from others, or have its limit raised.",
        details={
            "dimension": name,
            "limit": limit,
            "handed_on": handed_on,
            "project_id": project.project_id,
            "project": project.name,
        },
    )

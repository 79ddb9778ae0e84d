# SPDX-License-Identifier: AGPL-3.0-only
"""Projects that nest: made, changed and closed from above.

A caller's rights hold in its project and in all below it. What a project may use is decided from
above it, so that no project raises its own limits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog

from opendsec_server.contract import limits
from opendsec_server.contract.errors import Forbidden, InvalidRequest, NotFound
from opendsec_server.contract.ids import random_chars
from opendsec_server.control.params import check_text
from opendsec_server.store import accounts, projects
from opendsec_server.store.projects import LIMITS, ProjectState
from opendsec_server.store.quotas import NO_LIMIT
from opendsec_server.store.records import Project
from opendsec_server.store.store import Store

from .caller import Caller
from .service import Iam

log = structlog.get_logger(__name__)

LIMIT_MAX = 2**31 - 2
CREATES_PER_S_MIN = 0.001
_FRACTIONS = ("cpu", "creates_per_s")


class Projects:
    """What callers see and change of the tree of projects."""

    def __init__(self, store: Store, iam: Iam) -> None:
        self._store = store
        self._iam = iam

    async def reach(self, caller: Caller, project_id: str) -> None:
        """Go on only if a project is the caller's, or below it.

        Raises:
            NotFound: it is not, or does not exist.
        """
        if project_id == caller.project_id:
            return
        if caller.project_id not in await accounts.line_of(self._store, project_id):
            raise NotFound(
                f"there is no project `{project_id[:80]}` in or below `{caller.project.name}`"
            )

    async def sandboxes_max(self, caller: Caller) -> int:
        """How many sandboxes the caller's project may have at most, by all limits above it."""
        return await accounts.sandboxes_max_of(self._store, caller.project_id)

    async def list(self, caller: Caller, *, closed: bool = False) -> list[ProjectState]:
        """The caller's project and all below it, parents first."""
        return await projects.tree_below(
            self._store, caller.project_id, closed=closed, now=time.time()
        )

    async def get(self, caller: Caller, project_id: str) -> ProjectState:
        """One project with its limits, its use and what it has handed on.

        Raises:
            NotFound: not the caller's, nor below it.
        """
        await self.reach(caller, project_id)
        found = await projects.tree_below(self._store, project_id, closed=True, now=time.time())
        return found[0]

    async def create(
        self, caller: Caller, name: str, parent_id: str | None, quota: Mapping[str, float | None]
    ) -> ProjectState:
        """Make a project below the caller's, or below one that is.

        Raises:
            InvalidRequest: the name or a limit is out of range.
            NotFound: no such parent.
            Conflict: the parent has not so much to hand on, or has a project of that name.
        """
        check_text("name", name, limits.NAME_CHARS_MAX)
        columns = {LIMITS[key]: value for key, value in _checked(quota).items()}
        parent_id = parent_id or caller.project_id
        await self.reach(caller, parent_id)
        sandboxes_max = columns.pop("sandboxes_max", None)
        made = await projects.insert_child(
            self._store,
            Project(
                project_id=f"p{random_chars(15)}",
                name=name,
                sandboxes_max=NO_LIMIT if sandboxes_max is None else int(sandboxes_max),
                created_at=time.time(),
                parent_id=parent_id,
                **columns,  # type: ignore[arg-type]
            ),
        )
        log.info("project made", made=made.project_id, parent=parent_id)
        return await self.get(caller, made.project_id)

    async def change(
        self,
        caller: Caller,
        project_id: str,
        *,
        name: str | None,
        quota: Mapping[str, float | None],
    ) -> ProjectState:
        """Rename a project, or change some of its limits. What runs goes on.

        Raises:
            InvalidRequest: the name or a limit is out of range.
            NotFound: not the caller's, nor below it.
            Forbidden: limits of the caller's own project, unless it is the installation's.
            Conflict: see ``store.projects.change_project``.
        """
        if name is not None:
            check_text("name", name, limits.NAME_CHARS_MAX)
        await self.reach(caller, project_id)
        if quota:
            await self._from_above(caller, project_id, "limits are set")
        await projects.change_project(self._store, project_id, name=name, limits=_checked(quota))
        self._iam.forget()
        log.info("project changed", changed=project_id, limits=sorted(quota))
        return await self.get(caller, project_id)

    async def close(self, caller: Caller, project_id: str) -> None:
        """Close a project that has nothing left: its keys and tokens are refused.

        Raises:
            NotFound: not the caller's, nor below it.
            Forbidden: it is the caller's own.
            Conflict: it has sandboxes, builds under way, or open projects below it.
        """
        await self.reach(caller, project_id)
        await self._from_above(caller, project_id, "a project is closed")
        await projects.close_project(self._store, project_id)
        self._iam.forget()
        log.info("project closed", closed=project_id)

    async def _from_above(self, caller: Caller, project_id: str, what: str) -> None:
        own = project_id == caller.project_id
        if own and not (caller.may("*") and await self._iam.operates(caller)):
            raise Forbidden(
                f"{what} from above: project `{caller.project.name}` cannot do it to itself",
                remediation="Use a key or token of a project above it.",
                details={"project_id": project_id},
            )


def _checked(quota: Mapping[str, float | None]) -> dict[str, float | None]:
    """Raises: InvalidRequest: a limit is out of range."""
    found: dict[str, float | None] = {}
    for name, value in quota.items():
        if value is None:
            found[name] = None
            continue
        least = CREATES_PER_S_MIN if name == "creates_per_s" else 0
        if not least <= value <= LIMIT_MAX:
            raise InvalidRequest(f"quota.{name}: must be between {least} and {LIMIT_MAX}")
        found[name] = float(value) if name in _FRACTIONS else int(value)
    return found

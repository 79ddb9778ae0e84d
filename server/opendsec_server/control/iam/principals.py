# SPDX-License-Identifier: AGPL-3.0-only
"""Principals: people, services and agents, and what they are granted in projects.

Nobody hands on a right that they do not have, and nobody changes a principal that may do more than
they may themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import structlog

from opendsec_server.contract import limits
from opendsec_server.contract.errors import Forbidden, InvalidRequest, NotFound
from opendsec_server.contract.ids import random_chars
from opendsec_server.control.params import check_text
from opendsec_server.store import accounts, principals, projects
from opendsec_server.store.principals import Grant, Principal, PrincipalKind
from opendsec_server.store.records import ApiKey
from opendsec_server.store.store import Store

from .caller import Caller
from .projects import Projects
from .rights import ROLES, Right, check_rights, missing
from .service import Iam, new_key, refuse_token

log = structlog.get_logger(__name__)


class PrincipalState(msgspec.Struct, kw_only=True, frozen=True):
    """A principal and all that it is granted."""

    principal: Principal
    grants: list[Grant]


def rights_in(grant: Grant) -> frozenset[Right]:
    """All rights of a grant."""
    return frozenset(grant.rights) | ROLES.get(grant.role or "", frozenset())


class Principals:
    """Makes, changes and removes principals for callers."""

    def __init__(self, store: Store, iam: Iam, tree: Projects) -> None:
        self._store = store
        self._iam = iam
        self._tree = tree

    async def create(self, caller: Caller, kind: PrincipalKind, name: str) -> Principal:
        """Make a principal of the caller's project. It may do nothing yet.

        Raises:
            InvalidRequest: the name is empty, too long, or has NUL.
            Conflict: the project has one of that name.
        """
        check_text("name", name, limits.NAME_CHARS_MAX)
        principal = Principal(
            principal_id=f"u{random_chars(15)}",
            project_id=caller.project_id,
            kind=kind,
            name=name,
            created_at=time.time(),
        )
        await principals.insert_principal(self._store, principal)
        log.info("principal made", principal=principal.principal_id, kind=kind)
        return principal

    async def list(self, caller: Caller) -> list[Principal]:
        """Those of the caller's project and of all below it, oldest first."""
        below = await projects.tree_below(
            self._store, caller.project_id, closed=True, now=time.time()
        )
        return await principals.principals_of(
            self._store, [state.project.project_id for state in below]
        )

    async def get(self, caller: Caller, principal_id: str) -> PrincipalState:
        """One principal with what it is granted.

        Raises:
            NotFound: not of the caller's project, nor of one below it.
        """
        principal = await principals.get_principal(self._store, principal_id)
        if principal is None or caller.project_id not in await accounts.line_of(
            self._store, principal.project_id
        ):
            raise NotFound(f"there is no principal `{principal_id[:80]}` in this project")
        return PrincipalState(
            principal=principal, grants=await principals.grants_of(self._store, principal_id)
        )

    async def set_disabled(self, caller: Caller, principal_id: str, disabled: bool) -> None:
        """Switch a principal off, or on again. Its keys and tokens are refused meanwhile.

        Raises:
            NotFound: no such principal.
            Forbidden: it may do what the caller may not, here or, to be switched on, anywhere.
        """
        await self._stronger_than(caller, principal_id, elsewhere=not disabled)
        await principals.set_disabled(self._store, principal_id, time.time() if disabled else None)
        self._iam.forget()
        log.info("principal switched", principal=principal_id, disabled=disabled)

    async def delete(self, caller: Caller, principal_id: str) -> None:
        """Remove a principal with its grants, keys and tokens.

        Raises:
            As ``set_disabled``.
        """
        await self._stronger_than(caller, principal_id, elsewhere=False)
        await principals.delete_principal(self._store, principal_id)
        self._iam.forget()
        log.info("principal deleted", principal=principal_id)

    async def grant(
        self,
        caller: Caller,
        principal_id: str,
        project_id: str,
        *,
        role: str | None,
        rights: Sequence[str],
    ) -> Grant:
        """Let a principal act in a project and those below it, in place of what it had there.

        Raises:
            InvalidRequest: no such role, or no right.
            NotFound: no such project or principal.
            Forbidden: rights that the caller does not have itself; or it came with a token, which
                ends, and a grant does not.
        """
        refuse_token(caller)
        if role is None and not rights:
            raise InvalidRequest("a grant needs a role or rights")
        if role is not None and role not in ROLES:
            raise InvalidRequest(f"role: one of {', '.join(ROLES)}")
        own = check_rights("rights", rights) if rights else frozenset[Right]()
        await self._tree.reach(caller, project_id)
        # Whoever knows the id may grant: people work in projects beside their own.
        if await principals.get_principal(self._store, principal_id) is None:
            raise NotFound(f"there is no principal `{principal_id[:80]}`")
        grant = Grant(
            principal_id=principal_id,
            project_id=project_id,
            role=role,
            rights=sorted(own),
            granted_by=caller.actor_id,
            created_at=time.time(),
        )
        _refuse_missing(caller, rights_in(grant))
        before = await principals.grants_of(self._store, principal_id)
        for one in before:
            if one.project_id == project_id:
                _refuse_missing(caller, rights_in(one))
        await principals.put_grant(self._store, grant)
        self._iam.forget()
        log.info("granted", principal=principal_id, project=project_id, role=role)
        return grant

    async def revoke(self, caller: Caller, principal_id: str, project_id: str) -> None:
        """Take back what a principal may do in a project.

        Raises:
            NotFound: it has nothing there, or the project is not the caller's nor below it.
            Forbidden: it has rights there that the caller does not have.
        """
        await self._tree.reach(caller, project_id)
        for one in await principals.grants_of(self._store, principal_id):
            if one.project_id == project_id:
                _refuse_missing(caller, rights_in(one))
        if not await principals.delete_grant(self._store, principal_id, project_id):
            raise NotFound("this principal is granted nothing in this project")
        self._iam.forget()
        log.info("grant taken back", principal=principal_id, project=project_id)

    async def create_key(
        self, caller: Caller, principal_id: str, name: str, project_id: str | None
    ) -> tuple[ApiKey, str]:
        """Make a key of a principal. The key itself is shown only here.

        Args:
            caller: Who asks.
            principal_id: Whose it is.
            name: For people.
            project_id: Where it acts unless a request names another project. None: where the
                principal is granted something first, else where it was made.

        Raises:
            InvalidRequest: the name is empty, too long, or has NUL.
            NotFound: no such principal or project.
            Forbidden: it may do what the caller may not, or the caller came with a token.
        """
        refuse_token(caller)
        check_text("name", name, limits.NAME_CHARS_MAX)
        state = await self._stronger_than(caller, principal_id)
        if project_id is None:
            project_id = state.grants[0].project_id if state.grants else state.principal.project_id
        await self._tree.reach(caller, project_id)
        key, secret = new_key(project_id, name, principal_id=principal_id)
        await accounts.insert_key(self._store, key)
        log.info("api key made", key_id=key.key_id, principal=principal_id)
        return key, secret

    async def _stronger_than(
        self, caller: Caller, principal_id: str, *, elsewhere: bool = True
    ) -> PrincipalState:
        """Whether the caller may do all that a principal may.

        Args:
            caller: Who asks.
            principal_id: Whose rights.
            elsewhere: Also in projects out of the caller's reach. Not asked where rights are only
                taken away: anybody who knows a principal's id can grant it something there.
        """
        state = await self.get(caller, principal_id)
        for grant in state.grants:
            try:
                await self._tree.reach(caller, grant.project_id)
            except NotFound:
                if not elsewhere:
                    continue
                raise Forbidden(
                    "this principal has rights in projects that are not below yours",
                    remediation="Have it done from a project above both.",
                ) from None
            _refuse_missing(caller, rights_in(grant))
        return state


def _refuse_missing(caller: Caller, rights: frozenset[Right]) -> None:
    lacking = missing(caller.rights, rights)
    if lacking:
        raise Forbidden(
            f"you do not have `{lacking[0]}` in project `{caller.project.name}` "
            f"({caller.project_id}) yourself",
            remediation="Grant no more than you have, or have it done by who has more.",
            details={"missing": lacking, "project_id": caller.project_id},
        )

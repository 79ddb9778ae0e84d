# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_iam.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""Projects that nest, principals and what they are granted, tokens, and the audit log."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from opendsec._errors import InvalidRequest, NotFound
from opendsec._iam_models import (
    AuditEntry,
    AuditVerdict,
    CallerInfo,
    GrantInfo,
    PrincipalInfo,
    PrincipalKind,
    ProjectInfo,
    Quota,
    Role,
    TokenInfo,
)
from opendsec._models import ApiKey
from opendsec._retry import Repeat

from ._ndjson import open_lines
from ._transport import Transport

VERIFY_TIMEOUT_S = 600.0
"""A check of a log reads all of it."""


class _Projects(msgspec.Struct):
    projects: list[ProjectInfo] = []


class _Principals(msgspec.Struct):
    principals: list[PrincipalInfo] = []


class _Roles(msgspec.Struct):
    roles: dict[str, list[str]] = {}


class _Tokens(msgspec.Struct):
    tokens: list[TokenInfo] = []


class _Nothing(msgspec.Struct):
    pass


class Projects:
    """The project in use and those below it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def caller(self) -> CallerInfo:
        """Whom the key or token in use stands for, and what it may do."""
        return self._transport.api("GET", "/v1/caller", CallerInfo)

    def list(self, *, closed: bool = False) -> builtins.list[ProjectInfo]:
        """The project in use and all below it, parents first.

        Args:
            closed: Also those that are closed.
        """
        params = {"closed": "true"} if closed else None
        return (self._transport.api("GET", "/v1/projects", _Projects, params=params)).projects

    def get(self, project_id: str) -> ProjectInfo:
        """One project with its limits and its use.

        Raises:
            NotFound: not the one in use, nor below it.
        """
        return self._transport.api("GET", _path("projects", project_id), ProjectInfo)

    def create(
        self, name: str, *, parent_id: str | None = None, quota: Quota | None = None
    ) -> ProjectInfo:
        """Make a project, and hand on to it a part of what its parent has.

        Args:
            name: Unique under its parent.
            parent_id: None: the project in use.
            quota: None: no limits of its own; those above it hold.

        Raises:
            Conflict: the parent has not so much to hand on, or has a project of that name.
            NotFound: no such parent.
        """
        body = {"name": name, "parent_id": parent_id, "quota": quota or Quota()}
        return self._transport.api(
            "POST", "/v1/projects", ProjectInfo, body=body, repeat=Repeat.IF_UNSENT
        )

    def change(
        self,
        project_id: str,
        *,
        name: str | None = None,
        limits: Mapping[str, float | None] | None = None,
    ) -> ProjectInfo:
        """Rename a project, or change some of its limits. What runs goes on.

        Args:
            project_id: Which.
            name: None: it stays.
            limits: By the names of ``Quota``; None takes a limit away. What is left out stays.

        Raises:
            Forbidden: limits of the project in use, which are set from above.
            Conflict: more than its parent has, or less than it has handed on itself.
        """
        body = {"name": name, "quota": dict(limits or {})}
        return self._transport.api("PATCH", _path("projects", project_id), ProjectInfo, body=body)

    def close(self, project_id: str) -> None:
        """Close a project that has nothing left: nobody gets in any more; its records stay.

        Raises:
            Conflict: it has sandboxes, builds under way, or open projects below it.
        """
        self._transport.api("DELETE", _path("projects", project_id), _Nothing)


class Principals:
    """People, services and agents, and what they may do where."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def roles(self) -> dict[str, builtins.list[str]]:
        """The rights of each role."""
        return (self._transport.api("GET", "/v1/roles", _Roles)).roles

    def list(self) -> builtins.list[PrincipalInfo]:
        """Those of the project in use and of all below it, oldest first."""
        return (self._transport.api("GET", "/v1/principals", _Principals)).principals

    def get(self, principal_id: str) -> PrincipalInfo:
        """One principal and what it is granted.

        Raises:
            NotFound: no such principal here.
        """
        return self._transport.api("GET", _path("principals", principal_id), PrincipalInfo)

    def create(self, name: str, *, kind: PrincipalKind = "agent") -> PrincipalInfo:
        """Make a principal. It may do nothing until something is granted to it.

        Raises:
            Conflict: the project has one of that name.
        """
        return self._transport.api(
            "POST",
            "/v1/principals",
            PrincipalInfo,
            body={"name": name, "kind": kind},
            repeat=Repeat.IF_UNSENT,
        )

    def set_disabled(self, principal_id: str, disabled: bool) -> None:
        """Switch a principal off, or on again. Its keys and tokens are refused meanwhile."""
        self._transport.api(
            "PATCH", _path("principals", principal_id), _Nothing, body={"disabled": disabled}
        )

    def delete(self, principal_id: str) -> bool:
        """Remove a principal with its grants, keys and tokens; False if there is none."""
        return _removed(self._transport, _path("principals", principal_id))

    def grant(
        self,
        principal_id: str,
        project_id: str,
        *,
        role: Role | None = None,
        rights: Sequence[str] = (),
    ) -> GrantInfo:
        """Let a principal act in a project and those below it, in place of what it had there.

        Args:
            principal_id: Who.
            project_id: Where.
            role: What it may do.
            rights: Beside those of the role, such as ``sandboxes:read``.

        Raises:
            Forbidden: rights that the caller does not have itself.
            NotFound: no such principal or project.
        """
        path = f"{_path('principals', principal_id)}/grants/{_segment(project_id)}"
        body = {"role": role, "rights": builtins.list(rights)}
        return self._transport.api("PUT", path, GrantInfo, body=body)

    def revoke(self, principal_id: str, project_id: str) -> bool:
        """Take back what a principal may do in a project; False if it had nothing there."""
        path = f"{_path('principals', principal_id)}/grants/{_segment(project_id)}"
        return _removed(self._transport, path)

    def create_key(self, principal_id: str, name: str, *, project_id: str | None = None) -> ApiKey:
        """Make a key of a principal. Its ``key`` is in this answer only.

        Args:
            principal_id: Whose it is.
            name: For people.
            project_id: Where it acts unless a client names another project. None: where the
                principal was first granted something.

        Raises:
            Forbidden: the principal may do what the caller may not.
        """
        return self._transport.api(
            "POST",
            f"{_path('principals', principal_id)}/api-keys",
            ApiKey,
            body={"name": name, "project_id": project_id},
            repeat=Repeat.IF_UNSENT,
        )


class Tokens:
    """Short-lived parts of what the caller may do."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> builtins.list[TokenInfo]:
        """The project's tokens that are good now, newest first."""
        return (self._transport.api("GET", "/v1/tokens", _Tokens)).tokens

    def create(
        self,
        *,
        name: str = "token",
        ttl_s: int | None = None,
        rights: Sequence[str] | None = None,
        projects: Sequence[str] | None = None,
        sandbox_id: str | None = None,
    ) -> TokenInfo:
        """Make a token: give it to ``Client(api_key=…)``. It is in this answer only.

        Args:
            name: For people.
            ttl_s: Seconds until it ends, at most a week. None: an hour.
            rights: None: all of the caller's; of a token for one sandbox, to look at it and to
                run commands in it.
            projects: Where it is good, and below. None: the project in use.
            sandbox_id: The only sandbox that it reaches.

        Raises:
            Forbidden: rights that the caller does not have itself.
            SandboxNotFound: no such sandbox.
        """
        body: dict[str, Any] = {
            "name": name,
            "ttl_s": ttl_s,
            "rights": None if rights is None else builtins.list(rights),
            "projects": None if projects is None else builtins.list(projects),
            "sandbox_id": sandbox_id,
        }
        return self._transport.api(
            "POST", "/v1/tokens", TokenInfo, body=body, repeat=Repeat.IF_UNSENT
        )

    def revoke(self, token_id: str) -> bool:
        """End a token now, and all that were made with it; False if there is none."""
        return _removed(self._transport, _path("tokens", token_id))


class Audit:
    """Who did what, and how it went."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def entries(
        self,
        *,
        actor: str | None = None,
        object: str | None = None,
        outcome: str | None = None,
        since: float | None = None,
        until: float | None = None,
        after: int = 0,
    ) -> Iterator[AuditEntry]:
        """Entries of the project in use and those below it, oldest first, as they come.

        Args:
            actor: Principal, or key of a project.
            object: What calls were about.
            outcome: ``ok``, or an error's code.
            since: Unix seconds.
            until: Unix seconds.
            after: ``seq`` of the last entry that is known.

        Raises:
            Forbidden: the caller may not read the log.
        """
        given = {
            "actor": actor,
            "object": object,
            "outcome": outcome,
            "since": since,
            "until": until,
            "after": after,
        }
        params: dict[str, str | int | builtins.list[str]] = {
            name: str(value) for name, value in given.items() if value is not None
        }
        lines = open_lines(self._transport, "GET", "/v1/audit/export", AuditEntry, params=params)
        with lines:
            for entry in lines:
                yield entry

    def verify(self) -> AuditVerdict:
        """Have the server check the whole log: nothing was changed, removed or added.

        Raises:
            Forbidden: the caller's project is not the installation's first one.
        """
        return self._transport.api(
            "GET", "/v1/audit/verify", AuditVerdict, timeout_s=VERIFY_TIMEOUT_S
        )


def _segment(name: str) -> str:
    if not name:
        raise InvalidRequest("An id is empty.")
    return quote(name, safe="")


def _path(kind: str, name: str) -> str:
    return f"/v1/{kind}/{_segment(name)}"


def _removed(transport: Transport, path: str) -> bool:
    try:
        transport.api("DELETE", path, _Nothing)
    except NotFound:
        return False
    return True

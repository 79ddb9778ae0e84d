# SPDX-License-Identifier: AGPL-3.0-only
"""Who makes a request, in which project, and what it may do there."""

from __future__ import annotations

import msgspec

from opendsec_server.contract.errors import Forbidden
from opendsec_server.store.records import Project

from .rights import EVERYTHING, Right, covers


class KnownRefused(Forbidden):
    """A key or token that is good, but not in the project that the request names."""

    def __init__(
        self, message: str, *, actor_id: str, credential_id: str, own_project_id: str
    ) -> None:
        super().__init__(
            message, remediation="Use a key or token that has, or leave the project out."
        )
        self.actor_id = actor_id
        self.credential_id = credential_id
        self.own_project_id = own_project_id


class Caller(msgspec.Struct, kw_only=True, frozen=True):
    """The project in whose name a request is made, and who makes it."""

    project: Project
    key_id: str
    """The key that was shown, or that the token shown was made with."""
    principal_id: str | None = None
    """None: the project itself, by one of its keys."""
    token_id: str | None = None
    """The token that was shown instead of a key."""
    rights: frozenset[Right] = EVERYTHING
    """In this project and those below it."""
    sandbox_id: str | None = None
    """The only sandbox that the token reaches. None: all of the project's."""
    expires_at: float | None = None
    """When the token ends. None: a key, which does not."""

    @property
    def project_id(self) -> str:
        """Scope of everything the caller sees."""
        return self.project.project_id

    @property
    def actor_id(self) -> str:
        """Principal or, where there is none, the key: whom the audit log names."""
        return self.principal_id or self.key_id

    def may(self, right: Right) -> bool:
        """Whether the caller has a right in its project."""
        return covers(self.rights, right)

    @property
    def may_enter(self) -> bool:
        """Whether the caller is shown the tokens that open a sandbox."""
        return self.may("sandboxes:connect")

    def require(self, right: Right) -> None:
        """Go on only with a right.

        Raises:
            Forbidden: the caller does not have it. The message names it.
        """
        if not self.may(right):
            raise Forbidden(
                f"this needs the right `{right}` in project `{self.project.name}` "
                f"({self.project_id})",
                remediation="Use a key or token that has it, or have the right granted.",
                details={"right": right, "project_id": self.project_id},
            )

    def require_sandbox(self, sandbox_id: str | None) -> None:
        """Keep a token for one sandbox to that sandbox.

        Args:
            sandbox_id: What the request is about. None: not one sandbox.

        Raises:
            Forbidden: the token is for another.
        """
        if self.sandbox_id is not None and sandbox_id != self.sandbox_id:
            raise Forbidden(
                f"this token is for sandbox `{self.sandbox_id}` only",
                remediation="Use a key or token of the project.",
                details={"sandbox_id": self.sandbox_id},
            )

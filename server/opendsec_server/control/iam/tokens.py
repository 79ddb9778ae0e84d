# SPDX-License-Identifier: AGPL-3.0-only
"""Short-lived tokens: a part of what their maker may do, for a while, in some of its projects, or
for one sandbox only. They are sent like keys, and look like keys to E2B's clients."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence

import structlog

from opendsec_server.contract import limits
from opendsec_server.contract.errors import Forbidden, InvalidRequest, NotFound, SandboxNotFound
from opendsec_server.contract.ids import random_chars
from opendsec_server.control.params import check_text
from opendsec_server.store import principals
from opendsec_server.store.principals import Token
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store

from .caller import Caller
from .projects import Projects
from .rights import SANDBOX_RIGHTS, check_rights, missing
from .service import Iam

log = structlog.get_logger(__name__)

TTL_S_DEFAULT = 3_600
TTL_S_MIN = 1
TTL_S_MAX = 7 * 24 * 3_600
PROJECTS_MAX = 64
"""That one token names."""
LISTED_MAX = 1_000
SANDBOX_RIGHTS_DEFAULT = ("sandboxes:connect", "sandboxes:read")


class Tokens:
    """Makes and revokes tokens for callers."""

    def __init__(self, store: Store, iam: Iam, tree: Projects) -> None:
        self._store = store
        self._iam = iam
        self._tree = tree

    async def create(
        self,
        caller: Caller,
        *,
        name: str,
        ttl_s: int | None,
        rights: Sequence[str] | None,
        projects: Sequence[str] | None,
        sandbox_id: str | None,
    ) -> tuple[Token, str]:
        """Make a token. The token itself is shown only here.

        Args:
            caller: Who makes it. It is never worth more than its maker is at the time of use.
            name: For people.
            ttl_s: Seconds until it ends; a token's token ends no later than that one.
            rights: None: all of the caller's; for one sandbox, to look at it and to enter it.
            projects: Where it is good, and below. None: the caller's project.
            sandbox_id: The only sandbox that it reaches.

        Raises:
            InvalidRequest: a value is out of range.
            NotFound: a project is not the caller's, nor below it.
            SandboxNotFound: not one of the caller's project, or over.
            Forbidden: rights that the caller does not have, or that no token for one sandbox has.
        """
        check_text("name", name, limits.NAME_CHARS_MAX)
        ttl_s = TTL_S_DEFAULT if ttl_s is None else ttl_s
        if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise InvalidRequest(f"ttl_s: must be between {TTL_S_MIN} and {TTL_S_MAX}")
        wanted = check_rights("rights", _rights(caller, rights, sandbox_id))
        lacking = missing(caller.rights, wanted)
        if lacking:
            raise Forbidden(
                f"you do not have `{lacking[0]}` in project `{caller.project.name}` yourself",
                remediation="Ask for no more than you have.",
                details={"missing": lacking, "project_id": caller.project_id},
            )
        good_in = list(dict.fromkeys(projects or (caller.project_id,)))
        if len(good_in) > PROJECTS_MAX:
            raise InvalidRequest(f"projects: at most {PROJECTS_MAX}")
        for project_id in good_in:
            await self._tree.reach(caller, project_id)
        if sandbox_id is not None:
            await self._check_sandbox(caller, sandbox_id, wanted, good_in)
        now = time.time()
        ends = now + ttl_s if caller.expires_at is None else min(now + ttl_s, caller.expires_at)
        secret = f"e2b_{secrets.token_hex(32)}"
        token = Token(
            token_id=f"t{random_chars(15)}",
            sha256=hashlib.sha256(secret.encode()).hexdigest(),
            project_id=caller.project_id if caller.project_id in good_in else good_in[0],
            name=name,
            principal_id=caller.principal_id,
            key_id=caller.key_id,
            parent_id=caller.token_id,
            rights=sorted(wanted),
            projects=good_in,
            sandbox_id=sandbox_id,
            created_at=now,
            expires_at=ends,
        )
        await principals.insert_token(self._store, token)
        log.info("token made", token=token.token_id, sandbox_id=sandbox_id, ttl_s=ttl_s)
        return token, secret

    async def list(self, caller: Caller) -> list[Token]:
        """The tokens of the caller's project that are good now, newest first."""
        return await principals.tokens_of(
            self._store, caller.project_id, now=time.time(), limit=LISTED_MAX
        )

    async def revoke(self, caller: Caller, token_id: str) -> None:
        """End a token now, and all that were made with it.

        Raises:
            NotFound: the caller's project has no such token.
        """
        gone = await principals.delete_token(self._store, caller.project_id, token_id)
        if not gone:
            raise NotFound("there is no such token in this project")
        self._iam.forget()
        log.info("token revoked", token=token_id, with_it=len(gone) - 1)

    async def _check_sandbox(
        self, caller: Caller, sandbox_id: str, wanted: frozenset[str], good_in: Sequence[str]
    ) -> None:
        if tuple(good_in) != (caller.project_id,):
            raise InvalidRequest("projects: a token for one sandbox is good in its project only")
        beyond = missing(SANDBOX_RIGHTS, wanted)
        if beyond:
            raise Forbidden(
                f"a token for one sandbox cannot have `{beyond[0]}`",
                remediation=f"It can have {', '.join(sorted(SANDBOX_RIGHTS))}.",
                details={"missing": beyond},
            )
        record = await get_sandbox(self._store, sandbox_id)
        if record is None or record.project_id != caller.project_id or record.terminal:
            raise SandboxNotFound(f"there is no sandbox `{sandbox_id[:64]}`")


def _rights(caller: Caller, rights: Sequence[str] | None, sandbox_id: str | None) -> Sequence[str]:
    if rights is not None:
        return rights
    return sorted(caller.rights) if sandbox_id is None else SANDBOX_RIGHTS_DEFAULT

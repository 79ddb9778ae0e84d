# SPDX-License-Identifier: AGPL-3.0-only
"""Puts calls of the management APIs into the audit log, before their answers leave.

Calls that change something, and all that are refused. Reads that work are left out unless the
settings say otherwise.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import unquote

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from opendsec_server.control.audit import Audit
from opendsec_server.control.iam import Caller, KnownRefused
from opendsec_server.store.audit import Call

from .http import (
    AUDIT_OBJECT_KEY,
    AUDIT_TEXT_CHARS_MAX,
    CALLER_KEY,
    ERROR_CODE_KEY,
    GUARDED_KEY,
    REFUSED_KEY,
)

_REFUSED = frozenset({401, 403, 429})
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Audited:
    """ASGI wrapper around the application, inside of ``Observed``."""

    def __init__(self, app: ASGIApp, audit: Audit, *, reads: bool) -> None:
        self._app = app
        self._audit = audit
        self._reads = reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        inner: dict[str, Any] = scope  # type: ignore[assignment]
        answered = False

        async def send_when_written(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start" and not answered:
                answered = True
                await self._record(inner, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_when_written)
        finally:
            if not answered:
                # Its caller went away. What it began goes on.
                await self._record(inner, 499)

    async def _record(self, scope: dict[str, Any], status: int) -> None:
        if not scope.get(GUARDED_KEY):
            return
        method = scope["method"]
        if method in _READS and status not in _REFUSED and not self._reads:
            return
        caller: Caller | None = scope.get(CALLER_KEY)
        outcome = scope.get(ERROR_CODE_KEY) or ("unknown" if status == 499 else "ok")
        await self._audit.record(
            Call(
                at=time.time(),
                request_id=str(scope.get("opendsec.request_id") or "")[:AUDIT_TEXT_CHARS_MAX],
                **_who(caller, scope.get(REFUSED_KEY)),
                action=f"{method} {scope.get('path_template') or scope['path']}"[
                    :AUDIT_TEXT_CHARS_MAX
                ],
                object=_object(scope),
                outcome=outcome,
                status=status,
                address=_address(scope),
            )
        )


def _who(caller: Caller | None, refused: KnownRefused | None) -> dict[str, Any]:
    """The fields that say who called."""
    if caller is not None:
        kind = "key" if caller.principal_id is None else "principal"
        return {
            "actor_kind": kind if caller.token_id is None else "token",
            "actor_id": caller.actor_id,
            "credential_id": caller.token_id or caller.key_id,
            "project_id": caller.project_id,
        }
    if refused is not None:
        kind = "key" if refused.actor_id == refused.credential_id else "principal"
        return {
            "actor_kind": kind,
            "actor_id": refused.actor_id,
            "credential_id": refused.credential_id,
            "project_id": refused.own_project_id,
        }
    return dict.fromkeys(("actor_id", "credential_id", "project_id")) | {"actor_kind": "none"}


def _object(scope: dict[str, Any]) -> str | None:
    named = scope.get(AUDIT_OBJECT_KEY)
    if named is None:
        parts = [unquote(str(v), errors="replace") for v in scope.get("path_params", {}).values()]
        named = " ".join(parts)[:AUDIT_TEXT_CHARS_MAX]
    # PostgreSQL takes no NUL.
    return named.replace("\0", "\ufffd") or None


def _address(scope: dict[str, Any]) -> str | None:
    """As the edge says, who alone reaches this socket."""
    for name, value in scope["headers"]:
        if name == b"x-forwarded-for":
            first: str = value.decode("latin-1").partition(",")[0].strip()
            return first[:AUDIT_TEXT_CHARS_MAX].replace("\0", "\ufffd")
    client = scope.get("client")
    return str(client[0]) if client else None

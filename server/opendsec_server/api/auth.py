# SPDX-License-Identifier: AGPL-3.0-only
"""Finds out who calls, and whether they may, before a body is read."""

from __future__ import annotations

from typing import Any

import structlog
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.control.iam import Caller, KnownRefused
from opendsec_server.control.services import Services

from .http import CALLER_KEY, GUARDED_KEY, REFUSED_KEY, segment
from .rights import rights_of

Connection = ASGIConnection[Any, Any, Any, Any]


def key_of(connection: Connection) -> str | None:
    """The API key of a request: ``X-API-Key``, or ``Authorization: Bearer``."""
    key = connection.headers.get("x-api-key")
    if key is not None:
        return key.strip()
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def project_of(connection: Connection) -> str | None:
    """The project that a request names in ``X-Project-Id`` (E2B: ``X-Team-Id``), if it does.

    Raises:
        InvalidRequest: two that differ.
    """
    named = {
        value.strip()
        for name in ("x-project-id", "x-team-id")
        if (value := connection.headers.get(name)) is not None and value.strip()
    }
    if len(named) > 1:
        raise InvalidRequest("X-Project-Id and X-Team-Id name different projects")
    return named.pop() if named else None


async def authenticate(connection: Connection) -> Caller:
    """The caller of a request.

    Raises:
        Unauthenticated: no valid key.
        Forbidden: it has no rights in the project that the request names.
        StoreUnavailable: the key cannot be looked up.
    """
    services: Services = connection.app.state.services
    caller = await services.iam.authenticate(key_of(connection), project_of(connection))
    structlog.contextvars.bind_contextvars(project=caller.project_id)
    return caller


async def require_key(connection: Connection, handler: BaseRouteHandler) -> None:
    """Guard: refuse requests without a valid key, and those that it has no right to."""
    scope = connection.scope
    scope[GUARDED_KEY] = True  # type: ignore[literal-required]
    try:
        caller = await authenticate(connection)
    except KnownRefused as exc:
        scope[REFUSED_KEY] = exc  # type: ignore[literal-required]
        raise
    # Set before it is refused: the audit log names who was.
    scope[CALLER_KEY] = caller  # type: ignore[literal-required]
    # Only HTTP routes are guarded.
    rights = rights_of(handler, scope["method"], scope["path"])  # type: ignore[typeddict-item]
    if caller.sandbox_id is not None and rights:
        named = scope["path_params"].get("sandbox_id")
        caller.require_sandbox(None if named is None else segment(str(named)))
    for right in rights:
        caller.require(right)

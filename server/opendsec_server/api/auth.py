# SPDX-License-Identifier: AGPL-3.0-only
"""Finds out who calls, before a body is read."""

from __future__ import annotations

from typing import Any

import structlog
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from opendsec_server.control.iam import Caller
from opendsec_server.control.services import Services

from .http import CALLER_KEY

Connection = ASGIConnection[Any, Any, Any, Any]


def key_of(connection: Connection) -> str | None:
    """The API key of a request: ``X-API-Key``, or ``Authorization: Bearer``."""
    key = connection.headers.get("x-api-key")
    if key is not None:
        return key.strip()
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


async def authenticate(connection: Connection) -> Caller:
    """The caller of a request.

    Raises:
        Unauthenticated: no valid key.
        StoreUnavailable: the key cannot be looked up.
    """
    services: Services = connection.app.state.services
    caller = await services.iam.authenticate(key_of(connection))
    structlog.contextvars.bind_contextvars(project=caller.project_id)
    return caller


async def require_key(connection: Connection, _handler: BaseRouteHandler) -> None:
    """Guard: refuse requests without a valid key."""
    connection.scope[CALLER_KEY] = await authenticate(connection)  # type: ignore[literal-required]

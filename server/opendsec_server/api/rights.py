# SPDX-License-Identifier: AGPL-3.0-only
"""Which rights a route needs. A route says so itself, or its tag or path and its method do."""

from __future__ import annotations

import re
from typing import Any

from litestar.handlers import BaseRouteHandler

from opendsec_server.control.iam import Right

from .native.documented import ANY_RIGHT, OPERATION_KEY, Operation

RIGHT_KEY, ALSO_KEY = "right", "also_right"
_VERSION_RE = re.compile(r"v[0-9]+")
_AREAS = {
    "project": "projects",
    "teams": "projects",
    "api-keys": "keys",
    "default-templates": "templates",
}
"""Areas of rights that are called something else in a tag or path."""
_ALSO: dict[Right, Right] = {
    f"{area}:write": "sandboxes:write" for area in ("batches", "functions", "groups", "tasks")
}
"""What changes these makes, stops or ends sandboxes, so that nobody needs less for it than for
doing that itself."""


def needs(right: Right, also: Right | None = None) -> dict[str, Any]:
    """The ``opt`` of a handler without documentation whose rights its method does not tell."""
    return {RIGHT_KEY: right, ALSO_KEY: also}


def rights_of(handler: BaseRouteHandler, method: str, path: str) -> tuple[Right, ...]:
    """All rights that a request needs; none: any caller may make it.

    Args:
        handler: Of its route.
        method: Of the request.
        path: As it was sent.
    """
    right = _right_of(handler, method, path)
    if right == ANY_RIGHT:
        return ()
    operation = handler.opt.get(OPERATION_KEY)
    also = handler.opt.get(ALSO_KEY)
    if also is None and isinstance(operation, Operation):
        also = operation.also
    if also is None:
        also = _ALSO.get(right)
    return (right,) if also is None else (right, also)


def _right_of(handler: BaseRouteHandler, method: str, path: str) -> Right:
    """The right that says what a request is about."""
    operation = handler.opt.get(OPERATION_KEY)
    own = handler.opt.get(RIGHT_KEY)
    if own is None and isinstance(operation, Operation):
        own = operation.right
    if own is not None:
        return str(own)
    if isinstance(operation, Operation):
        area = operation.tag
    else:
        parts = [part for part in path.split("/") if part and not _VERSION_RE.fullmatch(part)]
        area = parts[0] if parts else "server"
    act = "read" if method in ("GET", "HEAD") else "write"
    return f"{_AREAS.get(area, area)}:{act}"

# SPDX-License-Identifier: AGPL-3.0-only
"""Which right a route needs. A route says so itself, or its tag or path and its method do."""

from __future__ import annotations

import re
from typing import Any

from litestar.handlers import BaseRouteHandler

from opendsec_server.control.iam import Right

from .native.documented import OPERATION_KEY, Operation

RIGHT_KEY = "right"
_VERSION_RE = re.compile(r"v[0-9]+")
_AREAS = {
    "project": "projects",
    "teams": "projects",
    "api-keys": "keys",
    "default-templates": "templates",
}
"""Areas of rights that are called something else in a tag or path."""


def needs(right: Right) -> dict[str, Any]:
    """The ``opt`` of a handler without documentation whose right its method does not tell."""
    return {RIGHT_KEY: right}


def right_of(handler: BaseRouteHandler, method: str, path: str) -> Right:
    """The right that a request needs.

    Args:
        handler: Of its route.
        method: Of the request.
        path: As it was sent.
    """
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

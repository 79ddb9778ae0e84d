# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's calls that come later: refused with 501, never answered as if they had worked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Response, route
from litestar.handlers import HTTPRouteHandler

from opendsec_server.api.http import Request
from opendsec_server.contract.errors import NotSupported

_LATER: dict[str, tuple[str, list[str]]] = {
    "/templates": ("building a template by pushing an image (version 1)", ["POST"]),
    "/templates/{template_id:str}": (
        "building a template by pushing an image (version 1)",
        ["POST"],
    ),
    "/templates/{template_id:str}/tags/{part:str}": ("reading groups of tags", ["GET"]),
    "/templates/{template_id:str}/tags/{tag:str}/assignments": (
        "reading the history of a tag",
        ["GET"],
    ),
    "/templates/{template_id:str}/builds/{build_id:str}": (
        "building a template by pushing an image (version 1)",
        ["POST"],
    ),
    "/volumes": ("using volumes", ["GET", "POST"]),
    "/volumes/{volume_id:str}": ("using volumes", ["GET", "DELETE"]),
    "/secrets": ("using secrets", ["GET", "POST"]),
    "/secrets/{secret_id:str}": ("using secrets", ["GET", "POST", "DELETE"]),
    "/events/sandboxes": ("reading events", ["GET"]),
    "/events/sandboxes/{sandbox_id:str}": ("reading events", ["GET"]),
    "/events/webhooks": ("using webhooks", ["GET", "POST"]),
    "/events/webhooks/{webhook_id:str}": ("using webhooks", ["GET", "PATCH", "DELETE"]),
    "/teams/{team_id:str}/metrics": ("reading a team's metrics", ["GET"]),
    "/teams/{team_id:str}/metrics/max": ("reading a team's metrics", ["GET"]),
    "/api-keys": ("managing keys by E2B's API", ["GET", "POST"]),
    "/api-keys/{key_id:str}": ("managing keys by E2B's API", ["PATCH", "DELETE"]),
}


def _refuse(what: str) -> Callable[[Request], Awaitable[Response[Any]]]:
    async def handler(request: Request) -> Response[Any]:
        raise NotSupported(f"{what} is not supported yet")

    return handler


HANDLERS: list[HTTPRouteHandler] = [
    route(path, http_method=methods, status_code=501)(_refuse(what))  # type: ignore[arg-type]
    for path, (what, methods) in _LATER.items()
]

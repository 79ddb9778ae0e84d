# SPDX-License-Identifier: AGPL-3.0-only
"""What the edge asks: routes of sandboxes, and which of them to forget.

Served on its own socket, which only root can open, and never proxied: the answers hold the
sandboxes' control tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from litestar import Litestar, Response, get
from litestar.datastructures import State
from litestar.params import FromPath
from litestar.response import Stream
from litestar.types import ASGIApp

from opendsec_server.contract.errors import InvalidRequest, SandboxNotFound
from opendsec_server.contract.ids import is_sandbox_id
from opendsec_server.control.services import Services

from .errors import handle_error
from .http import Query, Request, answer, segment, services_of
from .observe import Observed

ACCESS_HEADER = "x-opendsec-access-token"
TRAFFIC_HEADER = "x-opendsec-traffic-token"

_encode = msgspec.json.Encoder().encode


@get("/routes/by-signature")
async def route_by_signature(request: Request) -> Response[bytes]:
    """The sandbox whose token made a signed file URL. For URLs that carry no sandbox id."""
    query = Query(request)
    path, operation = query.text("path"), query.text("operation")
    signature = query.text("signature")
    if path is None or signature is None or operation not in ("read", "write"):
        raise InvalidRequest("path, operation (read or write) and signature are required")
    route = await services_of(request).routes.find_by_signature(
        path=path,
        operation=operation,
        username=query.text("username") or "",
        signature=signature,
        expiration=query.text("expiration"),
    )
    return answer(route)


@get("/routes/{sandbox_id:str}")
async def route(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """How to reach a sandbox. Waits while it starts, pauses or resumes; served without the store
    when it runs. One that wakes by traffic is resumed first, if the request may do that: ``port``
    says what it is for, and the headers bring the tokens that its caller gave."""
    name = segment(sandbox_id)
    if not is_sandbox_id(name):
        raise SandboxNotFound("there is no such sandbox")
    port = Query(request).integer("port", 0, at_least=0, at_most=65_535)
    found = await services_of(request).routes.find(
        name,
        port=port or None,
        access_token=request.headers.get(ACCESS_HEADER),
        traffic_token=request.headers.get(TRAFFIC_HEADER),
    )
    return answer(found)


@get("/consoles/{sandbox_id:str}")
async def console(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """Where the console or screen (``kind``) of a running sandbox is served, if the header brings
    its access token."""
    name = segment(sandbox_id)
    kind = Query(request).text("kind")
    if not is_sandbox_id(name):
        raise SandboxNotFound("there is no such sandbox")
    if kind not in ("console", "vnc"):
        raise InvalidRequest("kind: console or vnc")
    socket = await services_of(request).routes.console(
        name, "vnc" if kind == "vnc" else "console", request.headers.get(ACCESS_HEADER)
    )
    return answer({"socket": socket})


@get("/invalidations")
async def invalidations(request: Request) -> Stream:
    """Endless lines of JSON: which routes to forget."""
    published = services_of(request).invalidations.subscribe()

    async def lines() -> AsyncIterator[bytes]:
        async for invalidation in published:
            yield _encode(invalidation) + b"\n"

    return Stream(lines(), media_type="application/x-ndjson")


def build_control_app(services: Services) -> ASGIApp:
    """The application for ``config.control_socket``."""
    app = Litestar(
        [route_by_signature, route, console, invalidations],
        openapi_config=None,
        logging_config=None,
        exception_handlers={Exception: handle_error},
        state=State({"services": services}, deep_copy=False),
    )
    return Observed(app, services.metrics)

# SPDX-License-Identifier: AGPL-3.0-only
"""For machines that watch the server."""

from __future__ import annotations

from litestar import Response, get

from opendsec_server.contract.errors import Forbidden

from .auth import authenticate
from .http import Request, answer, services_of


@get("/healthz")
async def healthz(request: Request) -> Response[bytes]:
    """The process is alive."""
    return answer({"status": "ok"})


@get("/readyz")
async def readyz(request: Request) -> Response[bytes]:
    """Whether the server can make sandboxes, and if not, why."""
    reasons = await services_of(request).not_ready()
    return answer({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@get("/metrics")
async def metrics(request: Request) -> Response[bytes]:
    """Prometheus' text format. From outside this machine, a key of the installation's first project
    is needed: the figures are of all projects together."""
    if not _is_local(request):
        caller = await authenticate(request)
        caller.require_sandbox(None)
        caller.require("server:read")
        if not await services_of(request).iam.operates(caller):
            raise Forbidden(
                "the figures are of all projects together",
                remediation="Ask with a key of the installation's first project.",
            )
    return Response(
        await services_of(request).render_metrics(),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


def _is_local(request: Request) -> bool:
    # The edge names the client of everything it forwards; without that header the request
    # came over the socket itself, which only root can open.
    forwarded = request.headers.get("x-forwarded-for")
    if forwarded is None:
        return True
    nearest = forwarded.split(",")[-1].strip()
    return nearest == "::1" or nearest.startswith("127.")


HANDLERS = [healthz, readyz, metrics]

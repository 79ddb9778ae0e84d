# SPDX-License-Identifier: AGPL-3.0-only
"""All of E2B's paths."""

from __future__ import annotations

from litestar import Response, get

from opendsec_server.api.http import Request, no_content

from . import builds, logs, not_yet, sandboxes, states, teams, templates


@get("/health")
async def health(request: Request) -> Response[None]:
    """``GET /health``: needs no key."""
    return no_content()


OPEN_HANDLERS = [health]
HANDLERS = [
    *sandboxes.HANDLERS,
    *states.HANDLERS,
    *logs.HANDLERS,
    *templates.HANDLERS,
    *builds.HANDLERS,
    *teams.HANDLERS,
    *not_yet.HANDLERS,
]

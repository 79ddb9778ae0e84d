# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's teams are projects: the caller's and those below it. ``X-Team-Id`` chooses one."""

from __future__ import annotations

from litestar import Response, get

from opendsec_server.api.auth import key_of
from opendsec_server.api.http import Request, answer, caller_of, services_of


@get("/teams")
async def list_teams(request: Request) -> Response[bytes]:
    """``GET /teams``, of the CLI. The key of each is the caller's own, which is good in all."""
    caller = caller_of(request)
    found = await services_of(request).projects.list(caller)
    return answer(
        [
            {
                "teamID": state.project.project_id,
                "name": state.project.name,
                "apiKey": key_of(request),
                "isDefault": state.project.project_id == caller.project_id,
            }
            for state in found
        ]
    )


HANDLERS = [list_teams]

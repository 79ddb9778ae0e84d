# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's calls that build templates. Status codes are exact: 202 and 201, never 200."""

from __future__ import annotations

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath

from opendsec_server.api.http import (
    Query,
    Request,
    about,
    answer,
    caller_of,
    read_json,
    segment,
    services_of,
)
from opendsec_server.api.rights import needs
from opendsec_server.api.uploads import upload_url
from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.control.builds.logs import LEVELS, Level, LogEntry, at_least
from opendsec_server.store.records import TemplateBuild

from . import template_convert as convert
from . import template_schemas as schemas

LOG_ENTRIES_MAX = 100
"""Per answer; clients ask until nothing more comes."""
_CURSOR_UNIT_S = 1e-3
"""Log cursors are Unix milliseconds."""

_new = msgspec.json.Decoder(schemas.NewBuild)
_start = msgspec.json.Decoder(schemas.StartBuild)


@post(["/v3/templates", "/v2/templates"])
async def request_build(request: Request) -> Response[bytes]:
    """``POST /v3/templates``: 202, with the ids of template and build."""
    body = await read_json(request, _new)
    template, build = await services_of(request).builds.request(
        caller_of(request), convert.request_of(body)
    )
    about(request, template.template_id, build.build_id)
    if request.scope["path"].startswith("/v2/"):
        (shown,) = await services_of(request).builds.shown([template])
        old = msgspec.structs.replace(
            convert.template_of(shown, None), build_id=build.build_id, build_status=build.state
        )
        return answer(old, 202)
    return answer(convert.requested_of(template, build), 202)


@get("/templates/{template_id:str}/files/{files_hash:str}", opt=needs("templates:write"))
async def upload_address(
    request: Request, template_id: FromPath[str], files_hash: FromPath[str]
) -> Response[bytes]:
    """Where to send the archive of a COPY, and whether it is here already: 201."""
    services, caller = services_of(request), caller_of(request)
    await services.templates.own(caller, segment(template_id))
    name = segment(files_hash)
    present = services.builds.uploads.present(caller.project_id, name)
    url = upload_url(request, caller.project_id, segment(template_id), name)
    return answer(schemas.FileUpload(present=present, url=url), 201)


@post("/v2/templates/{template_id:str}/builds/{build_id:str}")
async def start_build(
    request: Request, template_id: FromPath[str], build_id: FromPath[str]
) -> Response[bytes]:
    """``POST /v2/templates/{id}/builds/{id}``: 202; the build goes on by itself."""
    body = await read_json(request, _start)
    services = services_of(request)
    build = await _build(request, template_id, build_id)
    await services.builds.start(caller_of(request), build, convert.plan_of(body))
    return Response(b"", status_code=202)


@get("/templates/{template_id:str}/builds/{build_id:str}/status")
async def build_status(
    request: Request, template_id: FromPath[str], build_id: FromPath[str]
) -> Response[bytes]:
    """``GET …/status``: state, and log entries from ``logsOffset`` on."""
    query = Query(request)
    offset = query.integer("logsOffset", 0, at_least=0)
    limit = query.integer("limit", LOG_ENTRIES_MAX, at_least=0, at_most=LOG_ENTRIES_MAX)
    build = await _build(request, template_id, build_id)
    every = await services_of(request).builds.logs.read(build.build_id)
    entries = at_least(every, _level(query))
    return answer(convert.info_of(build, entries[offset : offset + limit], every))


@get("/templates/{template_id:str}/builds/{build_id:str}/logs")
async def build_logs(
    request: Request, template_id: FromPath[str], build_id: FromPath[str]
) -> Response[bytes]:
    """``GET …/logs``: entries after a time, or before it."""
    query = Query(request)
    limit = query.integer("limit", LOG_ENTRIES_MAX, at_least=0, at_most=LOG_ENTRIES_MAX)
    cursor = query.integer("cursor", -1, at_least=-1)
    direction = query.text("direction") or "forward"
    if direction not in ("forward", "backward"):
        raise InvalidRequest("direction: forward or backward")
    build = await _build(request, template_id, build_id)
    entries = at_least(await services_of(request).builds.logs.read(build.build_id), _level(query))
    if cursor >= 0:
        entries = _beyond(entries, cursor * _CURSOR_UNIT_S, forward=direction == "forward")
    if direction == "backward":
        entries = entries[::-1]
    return answer(schemas.BuildLogs(logs=[convert.entry_of(entry) for entry in entries[:limit]]))


def _beyond(entries: list[LogEntry], at: float, *, forward: bool) -> list[LogEntry]:
    return [entry for entry in entries if (entry.at >= at if forward else entry.at < at)]


def _level(query: Query) -> Level | None:
    text = query.text("level")
    found = next((level for level in LEVELS if level == text), None)
    if text is not None and found is None:
        raise InvalidRequest(f"level: one of {', '.join(LEVELS)}")
    return found


async def _build(request: Request, template_id: str, build_id: str) -> TemplateBuild:
    services, caller = services_of(request), caller_of(request)
    template = await services.templates.own(caller, segment(template_id))
    return await services.builds.get(caller, template, segment(build_id))


HANDLERS = [request_build, upload_address, start_build, build_status, build_logs]

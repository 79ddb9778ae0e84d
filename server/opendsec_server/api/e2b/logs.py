# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's sandbox logs: what happened to a sandbox, from its kept changes of state."""

from __future__ import annotations

import msgspec
from litestar import Response, get
from litestar.params import FromPath

from opendsec_server.api.http import (
    Query,
    Request,
    answer,
    caller_of,
    rfc3339,
    segment,
    services_of,
)
from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.contract.limits import LOG_ENTRIES_MAX
from opendsec_server.contract.states import TERMINAL
from opendsec_server.control.ledger import fault_of
from opendsec_server.store.records import Transition

from . import schemas

_LEVELS = ("debug", "info", "warn", "error")
LOGGER = "opendsec"
SEARCH_CHARS_MAX = 256


class _Entry(msgspec.Struct, kw_only=True, frozen=True):
    at_ms: int
    shown: schemas.LogEntry


@get("/sandboxes/{sandbox_id:str}/logs")
async def logs_v1(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """``GET /sandboxes/{id}/logs``. Each ``line`` is itself JSON: the CLI parses it."""
    query = Query(request)
    start_ms = query.integer("start", 0, at_least=0)
    limit = query.integer("limit", LOG_ENTRIES_MAX, at_least=0)
    entries = [e for e in await _entries(request, sandbox_id) if e.at_ms >= start_ms][:limit]
    return answer(
        schemas.Logs(
            logs=[schemas.Log(timestamp=e.shown.timestamp, line=_line(e.shown)) for e in entries],
            log_entries=[e.shown for e in entries],
        )
    )


@get("/v2/sandboxes/{sandbox_id:str}/logs")
async def logs_v2(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """``GET /v2/sandboxes/{id}/logs``, by cursor, in either direction."""
    query = Query(request)
    direction = query.text("direction") or "forward"
    level = query.text("level") or _LEVELS[0]
    search = query.text("search") or ""
    cursor_text = query.text("cursor")
    cursor_ms = query.integer("cursor", 0, at_least=0)
    limit = query.integer("limit", LOG_ENTRIES_MAX, at_least=0, at_most=LOG_ENTRIES_MAX)
    if direction not in ("forward", "backward"):
        raise InvalidRequest("direction: forward or backward")
    if level not in _LEVELS:
        raise InvalidRequest(f"level: one of {', '.join(_LEVELS)}")
    if len(search) > SEARCH_CHARS_MAX:
        raise InvalidRequest(f"search: at most {SEARCH_CHARS_MAX} characters")
    wanted = [
        entry
        for entry in await _entries(request, sandbox_id)
        if _LEVELS.index(entry.shown.level) >= _LEVELS.index(level)
        and search in entry.shown.message
    ]
    if direction == "backward":
        wanted = [e for e in reversed(wanted) if cursor_text is None or e.at_ms <= cursor_ms]
    else:
        wanted = [e for e in wanted if e.at_ms >= cursor_ms]
    return answer(schemas.LogsV2(logs=[entry.shown for entry in wanted[:limit]]))


async def _entries(request: Request, sandbox_id: str) -> list[_Entry]:
    name = segment(sandbox_id)
    record, transitions = await services_of(request).lifecycle.transitions(caller_of(request), name)
    return [_entry(record.sandbox_id, transition) for transition in transitions]


def _entry(sandbox_id: str, transition: Transition) -> _Entry:
    message = f"sandbox {transition.to_state}"
    if transition.reason is not None:
        message += f": {transition.reason}"
    if transition.message:
        message += f" ({transition.message})"
    bad = transition.to_state in TERMINAL and fault_of(transition.reason) is not None
    return _Entry(
        at_ms=int(transition.at * 1_000),
        shown=schemas.LogEntry(
            timestamp=rfc3339(transition.at),
            level="error" if bad else "info",
            message=message,
            fields={"logger": LOGGER, "sandboxID": sandbox_id, "cause": transition.cause},
        ),
    )


def _line(entry: schemas.LogEntry) -> str:
    line = {
        "timestamp": entry.timestamp,
        "level": entry.level,
        "message": entry.message,
        **entry.fields,
    }
    return msgspec.json.encode(line).decode()


HANDLERS = [logs_v1, logs_v2]

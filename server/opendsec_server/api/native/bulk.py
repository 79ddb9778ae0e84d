# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/sandboxes/bulk``: one thing done to many sandboxes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import post
from litestar.response import Stream

from opendsec_server.api.http import (
    Request,
    about_many,
    caller_of,
    read_json,
    rfc3339,
    services_of,
)
from opendsec_server.api.ndjson import done, ndjson
from opendsec_server.contract import limits
from opendsec_server.control.bulk import Command, CommandResult, Done, Told
from opendsec_server.control.params import check_env, check_text
from opendsec_server.control.selection import Selection

from . import batch_schemas as schemas
from .documented import BODY, Operation, documented
from .schemas import Error

_LINES = (
    "Lines of JSON (`application/x-ndjson`), one for each sandbox as it is done; a line `{}` at "
    'least every 15 s; last `{"done": {"selected", "ok", "failed"}}`. It goes on when the reader '
    "goes away. "
)
_kill = msgspec.json.Decoder(schemas.BulkKill)
_timeout = msgspec.json.Decoder(schemas.BulkTimeout)
_exec = msgspec.json.Decoder(schemas.BulkExec)


@post(
    "/sandboxes/bulk/kill",
    status_code=200,
    opt=documented(
        Operation(
            tag="sandboxes",
            summary="End many sandboxes",
            description=_LINES + "One that has ended before counts as ended.",
            request=schemas.BulkKill,
            response=schemas.BulkLine,
            errors=BODY,
        )
    ),
)
async def bulk_kill(request: Request) -> Stream:
    body = await read_json(request, _kill)
    selection = _selection_of(body.select)
    results = await services_of(request).bulk.kill(caller_of(request), selection, _told(request))
    return ndjson(request, _lines(request, results))


@post(
    "/sandboxes/bulk/timeout",
    status_code=200,
    opt=documented(
        Operation(
            tag="sandboxes",
            summary="Set when many sandboxes end",
            description=_LINES,
            request=schemas.BulkTimeout,
            response=schemas.BulkLine,
            errors=BODY,
        )
    ),
)
async def bulk_timeout(request: Request) -> Stream:
    body = await read_json(request, _timeout)
    selection = _selection_of(body.select)
    results = await services_of(request).bulk.set_timeout(
        caller_of(request), selection, body.timeout_s, _told(request)
    )
    return ndjson(request, _lines(request, results))


@post(
    "/sandboxes/bulk/exec",
    status_code=200,
    opt=documented(
        Operation(
            tag="sandboxes",
            right="sandboxes:connect",
            summary="Run a command in many sandboxes",
            description=_LINES + "A command that fails is a result, not an error. Sent again, it "
            "runs again.",
            request=schemas.BulkExec,
            response=schemas.BulkLine,
            errors=BODY,
        )
    ),
)
async def bulk_exec(request: Request) -> Stream:
    body = await read_json(request, _exec)
    check_text("command", body.command, limits.BULK_COMMAND_CHARS_MAX)
    check_env(body.env)
    for field, text in (("user", body.user), ("workdir", body.workdir)):
        if text is not None:
            check_text(field, text, 4_096)
    command = Command(
        command=body.command,
        user=body.user,
        workdir=body.workdir,
        env=body.env,
        timeout_s=body.timeout_s,
        output_bytes=body.output_bytes,
    )
    results = await services_of(request).bulk.exec(
        caller_of(request),
        _selection_of(body.select),
        command,
        body.concurrency,
        _told(request),
    )
    return ndjson(request, _lines(request, results))


HANDLERS = [bulk_kill, bulk_timeout, bulk_exec]


def _told(request: Request) -> Told:
    """Names the sandboxes in the audit log."""
    return lambda names: about_many(request, "sandboxes", names)


def _selection_of(select: schemas.Selection) -> Selection:
    return Selection(
        ids=None if select.ids is None else tuple(select.ids),
        task_id=select.task_id,
        labels=tuple(select.labels),
        batch_id=select.batch_id,
    )


async def _lines(
    request: Request, results: AsyncGenerator[Done, None]
) -> AsyncGenerator[object, None]:
    ok = failed = 0
    request_id: Any = request.scope.get("opendsec.request_id")
    async with contextlib.aclosing(results):
        async for one in results:
            error = None
            if one.error is None:
                ok += 1
            else:
                failed += 1
                error = Error(**one.error.to_dict(), request_id=request_id)
            yield schemas.BulkLine(
                sandbox_id=one.sandbox_id,
                state=one.state,
                end_at=None if one.end_at is None else rfc3339(one.end_at),
                result=None if one.result is None else _result_of(one.result),
                error=error,
            )
    yield done(selected=ok + failed, ok=ok, failed=failed)


def _result_of(result: CommandResult) -> schemas.CommandResult:
    return schemas.CommandResult(
        exit_code=result.exit_code,
        signal=result.signal,
        timed_out=result.timed_out,
        stdout=result.stdout.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
        stdout_cut=result.stdout_cut,
        stderr_cut=result.stderr_cut,
        took_s=result.took_s,
    )

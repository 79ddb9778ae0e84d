# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/functions``: pools, single calls, and maps."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator, Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec
from litestar import Response, delete, get, post, put
from litestar.params import FromPath
from litestar.response import Stream

from opendsec_server.api.http import (
    Request,
    about,
    answer,
    caller_of,
    no_content,
    read_json,
    rfc3339,
    segment,
    services_of,
)
from opendsec_server.api.ndjson import done, ndjson
from opendsec_server.contract.errors import (
    FunctionPoolNotFound,
    FunctionQueueFull,
    FunctionWorkerLost,
    InvalidRequest,
    PayloadTooLarge,
    QuotaExceeded,
)
from opendsec_server.control.functions import model
from opendsec_server.control.functions.model import Code, Limits, Outcome
from opendsec_server.control.functions.outcomes import Outcomes
from opendsec_server.control.functions.service import PoolState
from opendsec_server.store.functions import PoolSpec

from . import function_schemas as schemas
from .documented import BODY, Operation, documented

_put = msgspec.json.Decoder(schemas.PutPool)
_run = msgspec.json.Decoder(schemas.RunCall)
_map = msgspec.json.Decoder(schemas.MapCalls)
_encode = msgspec.json.Encoder().encode

_CALL_ERRORS = (*BODY, FunctionPoolNotFound, FunctionQueueFull, FunctionWorkerLost)


@put(
    "/functions/pools/{name:str}",
    opt=documented(
        Operation(
            tag="functions",
            summary="Make or change a function pool",
            description="Its workers are sandboxes of the project, made when calls come, or at "
            "once as `workers_min` says. After a change, workers of the old kind end when idle.",
            request=schemas.PutPool,
            request_required=False,
            response=schemas.FunctionPool,
            errors=(*BODY, QuotaExceeded),
        )
    ),
)
async def put_pool(request: Request, name: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _put, empty=b"{}")
    values = msgspec.structs.asdict(body)
    spec = PoolSpec(**{**values, "preload": tuple(body.preload)})
    functions = services_of(request).functions
    return answer(_pool_of(await functions.put_pool(caller_of(request), segment(name), spec)))


@get(
    "/functions/pools",
    opt=documented(
        Operation(tag="functions", summary="List function pools", response=schemas.PoolList)
    ),
)
async def list_pools(request: Request) -> Response[bytes]:
    states = await services_of(request).functions.pools(caller_of(request))
    return answer(schemas.PoolList(pools=[_pool_of(state) for state in states]))


@get(
    "/functions/pools/{name:str}",
    opt=documented(
        Operation(
            tag="functions",
            summary="A function pool",
            response=schemas.FunctionPool,
            errors=(FunctionPoolNotFound,),
        )
    ),
)
async def get_pool(request: Request, name: FromPath[str]) -> Response[bytes]:
    state = await services_of(request).functions.pool(caller_of(request), segment(name))
    return answer(_pool_of(state))


@delete(
    "/functions/pools/{name:str}",
    opt=documented(
        Operation(
            tag="functions",
            summary="Delete a function pool",
            description="Its workers end; calls that wait or run come out as `function_cancelled`.",
            status=204,
            errors=(FunctionPoolNotFound,),
        )
    ),
)
async def delete_pool(request: Request, name: FromPath[str]) -> Response[None]:
    await services_of(request).functions.delete_pool(caller_of(request), segment(name))
    return no_content()


@post(
    "/functions/run",
    status_code=200,
    request_max_body_size=model.REQUEST_BYTES_MAX,
    opt=documented(
        Operation(
            tag="functions",
            summary="Call a function once",
            description="Answers when the call is over. What the call itself came to, an exception "
            "or a time-out as well, is in the answer; its status is then 200 all the same. Given "
            "up when the caller goes away.",
            request=schemas.RunCall,
            response=schemas.CallResult,
            errors=_CALL_ERRORS,
        )
    ),
)
async def run_call(request: Request) -> Response[bytes]:
    body = await read_json(request, _run)
    about(request, body.pool)
    code, limits = _code_of(body), _limits_of(body)
    outcome = await services_of(request).functions.call(
        caller_of(request), body.pool, code, _item_of(body.item, body.code), limits
    )
    return answer(_result_of(0, outcome))


@post(
    "/functions/map",
    status_code=200,
    request_max_body_size=model.REQUEST_BYTES_MAX,
    opt=documented(
        Operation(
            tag="functions",
            summary="Call a function many times",
            description="Lines of JSON (NDJSON), one for each item as it is over, with its "
            '`index`; `{}` now and then as a sign of life; the last is `{"done": {"ok", '
            '"errors"}}`. What is not over is given up when the reader goes away.',
            request=schemas.MapCalls,
            response=schemas.CallResult,
            response_description="A line for each item.",
            errors=_CALL_ERRORS,
        )
    ),
)
async def map_calls(request: Request) -> Stream:
    body = await read_json(request, _map)
    about(request, body.pool)
    code, limits = _code_of(body), _limits_of(body)
    items = [_item_of(item, body.code) for item in body.items]
    outcomes = await services_of(request).functions.map(
        caller_of(request), body.pool, code, items, limits
    )
    return ndjson(request, _lines(outcomes))


async def _lines(outcomes: Outcomes) -> AsyncGenerator[object, None]:
    ok = errors = 0
    try:
        async for index, outcome in outcomes:
            if outcome.error is None:
                ok += 1
            else:
                errors += 1
            yield _result_of(index, outcome)
    finally:
        await outcomes.aclose()
    yield done(ok=ok, errors=errors)


def _code_of(body: schemas.RunCall | schemas.MapCalls) -> Code:
    code = body.code
    if (code.source is None) == (code.pickle is None):
        raise InvalidRequest("code: one of source and pickle is needed")
    if code.entry is not None and not code.entry.isidentifier():
        raise InvalidRequest("code.entry: not a name of a function")
    _check_env("env", body.env)
    for pattern in body.collect:
        path = PurePosixPath(pattern)
        if path.is_absolute() or ".." in path.parts or "\0" in pattern:
            raise InvalidRequest(f"collect: `{pattern[:64]}` leads out of the call's directory")
    value: dict[str, Any] = {
        "env": body.env,
        "collect": body.collect,
        "result": body.result,
        "files_max": model.FILES_BYTES_MAX,
    }
    if code.pickle is not None:
        _check_base64("code.pickle", code.pickle)
        value |= {"kind": "pickle", "data": code.pickle, "python": code.python}
    else:
        value |= {
            "kind": "source",
            "source": code.source,
            "entry": code.entry,
            "values": code.values,
        }
    try:
        made = Code.of(value)
    except UnicodeEncodeError:
        raise InvalidRequest("code: the source is not Unicode text") from None
    if len(made.text) > model.CODE_BYTES_MAX:
        raise PayloadTooLarge(f"code: more than {model.CODE_BYTES_MAX} bytes")
    return made


def _item_of(item: schemas.CallItem, code: schemas.SourceCode) -> bytes:
    if (item.pickled is None) != (code.pickle is None):
        raise InvalidRequest("item: `pickled` is for pickled code, and only for that")
    if item.pickled is not None:
        _check_base64("item.pickled", item.pickled)
    _check_env("item.env", item.env)
    for name, text in item.files.items():
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise InvalidRequest(f"files: `{name[:64]}` leads out of the call's directory")
        _check_base64(f"files: `{name[:64]}`", text)
    return _encode(item)


def _limits_of(body: schemas.RunCall | schemas.MapCalls) -> Limits:
    return Limits(
        timeout_s=body.timeout_s,
        memory_mb=body.memory_mb,
        processes=body.processes,
        output_bytes=body.output_bytes,
    )


def _check_base64(field: str, text: str) -> None:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{field}: not base64") from None


def _check_env(field: str, env: Mapping[str, str]) -> None:
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or "\0" in value:
            raise InvalidRequest(f"{field}: `{key[:64]}` is not a variable")


def _result_of(index: int, outcome: Outcome) -> schemas.CallResult:
    return schemas.CallResult(
        index=index,
        outcome="ok" if outcome.error is None else "error",
        value=outcome.value,
        error=None if outcome.error is None else outcome.error.to_dict(),
        files=outcome.files,
        stdout=outcome.stdout,
        stderr=outcome.stderr,
        stdout_lost_bytes=outcome.stdout_lost_bytes,
        stderr_lost_bytes=outcome.stderr_lost_bytes,
        seconds=round(outcome.seconds, 6),
        cpu_seconds=round(outcome.cpu_seconds, 6),
        peak_memory_mb=round(outcome.peak_memory_mb, 3),
        worker=outcome.worker,
    )


def _pool_of(state: PoolState) -> schemas.FunctionPool:
    spec = msgspec.structs.asdict(state.record.spec)
    spec["modules"] = sorted(spec["modules"])
    spec["preload"] = list(spec["preload"])
    return schemas.FunctionPool(
        **spec,
        name=state.record.name,
        created_at=rfc3339(state.record.created_at),
        workers_idle=state.idle,
        workers_busy=state.busy,
        workers_starting=state.starting,
        calls_waiting=state.queued,
        calls_finished=state.finished,
        python=state.python,
        last_error=None if state.last_error is None else state.last_error.to_dict(),
    )


HANDLERS = [put_pool, list_pools, get_pool, delete_pool, run_call, map_calls]

# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/batches``: many creates in one call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath
from litestar.response import Stream

from opendsec_server.api.http import (
    Query,
    Request,
    about,
    answer,
    caller_of,
    explain,
    make_cursor,
    read_cursor,
    read_json,
    rfc3339,
    segment,
    services_of,
)
from opendsec_server.api.ndjson import done, ndjson
from opendsec_server.api.protocol import NATIVE_KEY_RE, idempotency_key
from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    BatchNotFound,
    IdempotencyMismatch,
    InvalidRequest,
    NotSupported,
    SnapshotNotFound,
    TemplateNotFound,
)
from opendsec_server.control.batches import BatchParams
from opendsec_server.control.params import CreateParams
from opendsec_server.store.batches import Batch, Item
from opendsec_server.store.records import SandboxRecord

from . import batch_schemas as schemas
from .convert import params_of, sandbox_of
from .documented import BODY, Operation, Parameter, documented, paged
from .sandboxes import KEY
from .schemas import CreateSandbox, Error

TAG = "batches"
_ADDED = ("env", "metadata")
_create = msgspec.json.Decoder(schemas.CreateBatch)

FOLLOW = Parameter(
    name="follow",
    description="`false`: answer with what there is now.",
    schema={"type": "boolean", "default": True},
)
_LINES = (
    "Lines of JSON (`application/x-ndjson`): first the batch, then each item's outcome as it "
    'comes; a line `{}` at least every 15 s; last `{"done": …}`. '
)


@post(
    "/batches",
    request_max_body_size=limits.BATCH_BODY_BYTES_MAX,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Create many sandboxes",
            description=_LINES + "Each item is made or is an error of its own. The batch goes on "
            "when the reader goes away: the same key, or `GET /v1/batches/{batch_id}/results`, "
            "finds it again. With `follow=false` the answer is the batch alone.",
            request=schemas.CreateBatch,
            response=schemas.BatchLine,
            response_description="The batch is recorded.",
            status=201,
            parameters=(KEY, FOLLOW),
            errors=(
                *BODY,
                TemplateNotFound,
                SnapshotNotFound,
                NotSupported,
                IdempotencyMismatch,
            ),
        )
    ),
)
async def create_batch(request: Request) -> Stream | Response[bytes]:
    key = idempotency_key(request.headers.get("idempotency-key"), NATIVE_KEY_RE)
    follow = _follow(Query(request))
    body = await read_json(request, _create)
    # Thousands of items take a moment to check.
    params = await asyncio.to_thread(_params_of, body)
    batch = await services_of(request).batches.create(caller_of(request), params, key=key)
    about(request, batch.batch_id)
    if not follow:
        return answer(batch_of(batch), 201)
    return ndjson(request, _results(request, batch.batch_id, 0, follow=True), status=201)


@get(
    "/batches",
    opt=documented(
        Operation(
            tag=TAG,
            summary="List batches",
            description="Newest first. A batch is kept for 30 days after its end.",
            response=schemas.BatchList,
            parameters=paged("Batches"),
            errors=(InvalidRequest,),
        )
    ),
)
async def list_batches(request: Request) -> Response[bytes]:
    query = Query(request)
    cursor = query.text("cursor")
    limit = query.integer("limit", limits.LIST_LIMIT_MAX, at_least=1, at_most=limits.LIST_LIMIT_MAX)
    found = await services_of(request).batches.list(
        caller_of(request),
        after=read_cursor(cursor, ascending=False) if cursor else None,
        limit=limit + 1,
    )
    shown = found[:limit]
    last = shown[-1] if len(found) > limit else None
    return answer(
        schemas.BatchList(
            batches=[batch_of(batch) for batch in shown],
            next_cursor=make_cursor(last.created_at, last.batch_id, ascending=False)
            if last
            else None,
        )
    )


@get(
    "/batches/{batch_id:str}",
    opt=documented(
        Operation(tag=TAG, summary="A batch", response=schemas.Batch, errors=(BatchNotFound,))
    ),
)
async def get_batch(request: Request, batch_id: FromPath[str]) -> Response[bytes]:
    batches = services_of(request).batches
    batch = await batches.get(caller_of(request), segment(batch_id))
    failures = [
        schemas.BatchFailure(code=one.code, fault=one.fault, count=one.count)
        for one in await batches.failures(batch)
    ]
    return answer(msgspec.structs.replace(batch_of(batch), failures=failures))


@get(
    "/batches/{batch_id:str}/results",
    opt=documented(
        Operation(
            tag=TAG,
            also="sandboxes:read",
            summary="The results of a batch, live",
            description=_LINES + "Outcomes come in the order of their `seq`, which stays the same "
            "however often they are read.",
            response=schemas.BatchLine,
            parameters=(
                Parameter(
                    name="after",
                    description="Leave out the outcomes up to this `seq`.",
                    schema={"type": "integer", "minimum": 0, "default": 0},
                ),
                FOLLOW,
            ),
            errors=(InvalidRequest, BatchNotFound),
        )
    ),
)
async def batch_results(request: Request, batch_id: FromPath[str]) -> Stream:
    query = Query(request)
    after = query.integer("after", 0, at_least=0, at_most=limits.BATCH_ITEMS_MAX)
    follow = _follow(query)
    batch = await services_of(request).batches.get(caller_of(request), segment(batch_id))
    return ndjson(request, _results(request, batch.batch_id, after, follow=follow))


@post(
    "/batches/{batch_id:str}/cancel",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Cancel the rest of a batch",
            description="Items that have not begun come out as `batch_cancelled`. Those that have "
            "are made; `POST /v1/sandboxes/bulk/kill` with the `batch_id` ends them.",
            response=schemas.Batch,
            errors=(BatchNotFound,),
        )
    ),
)
async def cancel_batch(request: Request, batch_id: FromPath[str]) -> Response[bytes]:
    batch = await services_of(request).batches.cancel(caller_of(request), segment(batch_id))
    return answer(batch_of(batch))


HANDLERS = [create_batch, list_batches, get_batch, batch_results, cancel_batch]


def batch_of(batch: Batch) -> schemas.Batch:
    """A batch as it is shown."""
    state: schemas.BatchState = "running" if batch.cancelled_at is None else "cancelling"
    return schemas.Batch(
        batch_id=batch.batch_id,
        project_id=batch.project_id,
        state=state if batch.finished_at is None else "done",
        asked=batch.asked,
        made=batch.made,
        failed=batch.failed,
        starting=batch.next_index - batch.outcomes,
        waiting=batch.asked - batch.next_index,
        created_at=rfc3339(batch.created_at),
        cancelled_at=None if batch.cancelled_at is None else rfc3339(batch.cancelled_at),
        finished_at=None if batch.finished_at is None else rfc3339(batch.finished_at),
    )


async def _results(
    request: Request, batch_id: str, after: int, *, follow: bool
) -> AsyncGenerator[object, None]:
    caller = caller_of(request)
    batch: Batch | None = None
    news = services_of(request).batches.watch(caller, batch_id, after=after, follow=follow)
    async with contextlib.aclosing(news):
        async for watched in news:
            if batch is None:
                yield schemas.BatchLine(batch=batch_of(watched.batch))
            batch = watched.batch
            for item, record in watched.outcomes:
                yield _line_of(request, item, record)
    assert batch is not None
    yield done(asked=batch.asked, made=batch.made, failed=batch.failed)


def _line_of(request: Request, item: Item, record: SandboxRecord | None) -> schemas.BatchLine:
    if record is not None:
        shown = sandbox_of(
            services_of(request), record, env=False, tokens=caller_of(request).may_enter
        )
        return schemas.BatchLine(index=item.index, seq=item.seq, sandbox=shown)
    error: dict[str, Any] = item.error or {
        "code": "sandbox_not_found",
        "message": f"sandbox `{item.sandbox_id}` was made, and has ended long ago",
        "remediation": "Nothing is to be done: its record is no longer kept.",
        "retryable": False,
        "fault": "user",
        "details": {"sandbox_id": item.sandbox_id},
    }
    request_id: Any = request.scope.get("opendsec.request_id")
    return schemas.BatchLine(
        index=item.index, seq=item.seq, error=Error(**error, request_id=request_id)
    )


def _params_of(body: schemas.CreateBatch) -> BatchParams:
    """What a body asks for.

    Raises:
        InvalidRequest, NotSupported: the message names the item and the field.
    """
    common = params_of(body.sandbox)
    if (body.count is None) == (body.items is None):
        raise InvalidRequest("give one of count and items")
    if body.items is None:
        return BatchParams.of(common, None, count=body.count or 0, wait_s=body.wait_s)
    plain = msgspec.to_builtins(body.sandbox)
    items: list[CreateParams] = []
    for index, own in enumerate(body.items):
        if not own:
            items.append(common)
            continue
        merged = plain | own
        for name in _ADDED:
            if isinstance(own.get(name), dict):
                merged[name] = plain[name] | own[name]
        try:
            items.append(params_of(msgspec.convert(merged, CreateSandbox)))
        except msgspec.ValidationError as exc:
            raise InvalidRequest(f"items[{index}]: {explain(str(exc), CreateSandbox)}") from None
    return BatchParams.of(common, items, count=0, wait_s=body.wait_s)


def _follow(query: Query) -> bool:
    text = query.text("follow") or "true"
    if text not in ("true", "false"):
        raise InvalidRequest("follow: true or false")
    return text == "true"

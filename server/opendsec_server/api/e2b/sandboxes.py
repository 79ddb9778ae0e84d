# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's calls on sandboxes. Status codes are exact: its clients parse no others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote

import msgspec
from litestar import Response, delete, get, post, put
from litestar.params import FromPath

from opendsec_server.api.errors import MAY_HAVE_HAPPENED_KEY
from opendsec_server.api.http import (
    Query,
    Request,
    about,
    answer,
    caller_of,
    make_cursor,
    no_content,
    read_cursor,
    read_json,
    segment,
    services_of,
)
from opendsec_server.api.native.sandboxes import metrics_span
from opendsec_server.api.protocol import E2B_KEY_RE, idempotency_key
from opendsec_server.api.rights import needs
from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest, SandboxNotFound, StateConflict
from opendsec_server.contract.states import TERMINAL, State
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.sandboxes import SandboxFilter

from . import convert, schemas

_new = msgspec.json.Decoder(schemas.NewSandbox)
_connect = msgspec.json.Decoder(schemas.Connect)
_connect_v1 = msgspec.json.Decoder(schemas.ConnectV1)
_timeout = msgspec.json.Decoder(schemas.SetTimeout)
_refresh = msgspec.json.Decoder(schemas.Refresh)
_network = msgspec.json.Decoder(schemas.PutNetwork)

_STATES: dict[str, tuple[State, ...]] = {"running": convert.RUNNING, "paused": convert.PAUSED}
LATEST_METRICS_S = 60.0


@post("/v2/sandboxes")
async def create_v2(request: Request) -> Response[bytes]:
    """``POST /v2/sandboxes``: 300 s unless said otherwise."""
    return await _create(request, limits.E2B_TIMEOUT_S_DEFAULT)


@post("/sandboxes")
async def create_v1(request: Request) -> Response[bytes]:
    """``POST /sandboxes``, of the CLI and older SDKs: 15 s unless said otherwise."""
    return await _create(request, limits.E2B_V1_TIMEOUT_S_DEFAULT, v1=True)


async def _create(request: Request, timeout_s_default: int, *, v1: bool = False) -> Response[bytes]:
    key = idempotency_key(request.headers.get("idempotency-key"), E2B_KEY_RE)
    body = await read_json(request, _new)
    if v1 and not body.secure and body.network and body.network.allow_public_traffic is False:
        raise InvalidRequest("network.allowPublicTraffic: false needs secure: true")
    if key is None:
        request.scope[MAY_HAVE_HAPPENED_KEY] = True  # type: ignore[literal-required]
    services = services_of(request)
    params = convert.params_of(body, timeout_s_default=timeout_s_default)
    created = await services.creates.create(caller_of(request), params, key=key, join=False)
    about(request, created.record.sandbox_id)
    return answer(convert.sandbox_of(services, created.record), 201)


@post("/v2/sandboxes/{sandbox_id:str}/connect", opt=needs("sandboxes:connect"))
async def connect_v2(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """``POST /v2/sandboxes/{id}/connect``: only ever extends; resumes a paused one."""
    body = await read_json(request, _connect, empty=b"{}")
    timeout_s = limits.E2B_TIMEOUT_S_DEFAULT if body.timeout is None else body.timeout
    return await _connect_for(request, sandbox_id, timeout_s, body.memory)


@post("/sandboxes/{sandbox_id:str}/connect", opt=needs("sandboxes:connect"))
async def connect_v1(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """``POST /sandboxes/{id}/connect``: as v2, but ``timeout`` is required."""
    body = await read_json(request, _connect_v1)
    return await _connect_for(request, sandbox_id, body.timeout, body.memory)


async def _connect_for(
    request: Request, sandbox_id: str, timeout_s: int, memory: bool | None
) -> Response[bytes]:
    if timeout_s < 0:
        raise InvalidRequest("timeout: must not be negative")
    services, name = services_of(request), segment(sandbox_id)
    with ending_is_gone(name):
        connected = await services.lifecycle.connect(
            caller_of(request), name, timeout_s, reboot=memory is False
        )
    status = 201 if connected.resumed else 200
    return answer(convert.sandbox_of(services, connected.record), status)


@get("/v2/sandboxes")
async def list_v2(request: Request) -> Response[bytes]:
    """``GET /v2/sandboxes``, page by page."""
    query = Query(request)
    order = query.text("order") or "desc"
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: asc or desc")
    template = query.text("template")
    if template is not None and ":" in template:
        raise InvalidRequest("template: a filter must not name a tag")
    limit = query.integer("limit", limits.LIST_LIMIT_MAX, at_least=1, at_most=limits.LIST_LIMIT_MAX)
    return await _list(request, query, ascending=order == "asc", limit=limit, template=template)


@get("/sandboxes")
async def list_v1(request: Request) -> Response[bytes]:
    """``GET /sandboxes``: running ones, all at once."""
    query = Query(request)
    services, caller = services_of(request), caller_of(request)
    wanted = SandboxFilter(
        project_id=caller.project_id,
        states=convert.RUNNING,
        metadata=_metadata(query.text("metadata")),
        limit=limits.LIST_LIMIT_MAX,
    )
    shown: list[schemas.ListedSandbox] = []
    while True:
        page = await services.lifecycle.page(wanted)
        shown.extend(convert.listed_of(record) for record in page.records)
        if not page.more:
            return answer(shown)
        last = page.records[-1]
        wanted = msgspec.structs.replace(wanted, after=(last.created_at, last.sandbox_id))


async def _list(
    request: Request, query: Query, *, ascending: bool, limit: int, template: str | None
) -> Response[bytes]:
    services, caller = services_of(request), caller_of(request)
    token = query.text("nextToken")
    wanted = SandboxFilter(
        project_id=caller.project_id,
        states=_states(query.csv("state")),
        metadata=_metadata(query.text("metadata")),
        template_id=await services.snapshots.template_to_list(caller, template),
        started_after=query.rfc3339("startedAfter"),
        ascending=ascending,
        after=read_cursor(token, ascending=ascending) if token else None,
        limit=limit,
    )
    page = await services.lifecycle.page(wanted)
    headers = {"X-Total-Running": str(await services.lifecycle.count_running(caller))}
    if page.more:
        last = page.records[-1]
        headers["X-Next-Token"] = make_cursor(last.created_at, last.sandbox_id, ascending=ascending)
    return answer([convert.listed_of(record) for record in page.records], headers=headers)


def _states(names: list[str]) -> tuple[State, ...]:
    if not names:
        return convert.VISIBLE
    try:
        return tuple(state for name in names for state in _STATES[name])
    except KeyError:
        raise InvalidRequest("state: running, paused, or both") from None


def _metadata(text: str | None) -> tuple[tuple[str, str], ...]:
    """Clients quote keys and values, encode the pairs, and encode the result once more."""
    if text is None:
        return ()
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=True, max_num_fields=64)
    except ValueError:
        raise InvalidRequest("metadata: must be key=value pairs") from None
    return tuple((unquote(key), unquote(value)) for key, value in pairs)


@get("/sandboxes/metrics")
async def bulk_metrics(request: Request) -> Response[bytes]:
    """``GET /sandboxes/metrics``: the newest reading of each."""
    names = list(dict.fromkeys(Query(request).csv("sandbox_ids")))
    if not names:
        raise InvalidRequest("sandbox_ids: at least one")
    if len(names) > limits.METRICS_BULK_IDS_MAX:
        raise InvalidRequest(f"sandbox_ids: at most {limits.METRICS_BULK_IDS_MAX}")
    latest = await services_of(request).lifecycle.latest_metrics(
        caller_of(request), names, time.time() - LATEST_METRICS_S
    )
    return answer(
        schemas.SandboxesWithMetrics(
            sandboxes={name: convert.metric_of(sample) for name, sample in latest.items()}
        )
    )


@get("/sandboxes/{sandbox_id:str}")
async def get_sandbox(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """``GET /sandboxes/{id}``: 404 once it has ended."""
    record = await visible(request, sandbox_id)
    return answer(
        convert.detail_of(services_of(request), record, token=caller_of(request).may_enter)
    )


@delete("/sandboxes/{sandbox_id:str}")
async def kill(request: Request, sandbox_id: FromPath[str]) -> Response[None]:
    """``DELETE /sandboxes/{id}``: 204 the first time, 404 after that."""
    name = segment(sandbox_id)
    _, was_alive = await services_of(request).lifecycle.kill(caller_of(request), name)
    if not was_alive:
        raise _not_found(name)
    return no_content()


@post("/sandboxes/{sandbox_id:str}/timeout")
async def set_timeout(request: Request, sandbox_id: FromPath[str]) -> Response[None]:
    """``POST /sandboxes/{id}/timeout``: may shorten; zero or less ends it at once."""
    body = await read_json(request, _timeout)
    name = segment(sandbox_id)
    with paused_is_gone(name):
        await services_of(request).lifecycle.set_timeout(caller_of(request), name, body.timeout)
    return no_content()


@post("/sandboxes/{sandbox_id:str}/refreshes")
async def refresh(request: Request, sandbox_id: FromPath[str]) -> Response[None]:
    """``POST /sandboxes/{id}/refreshes``, of older SDKs: only ever extends."""
    body = await read_json(request, _refresh, empty=b"{}")
    duration_s = limits.E2B_REFRESH_S_DEFAULT if body.duration is None else body.duration
    if not 0 <= duration_s <= limits.E2B_REFRESH_S_MAX:
        raise InvalidRequest(f"duration: 0 to {limits.E2B_REFRESH_S_MAX}")
    name = segment(sandbox_id)
    with paused_is_gone(name):
        await services_of(request).lifecycle.connect(
            caller_of(request),
            name,
            max(duration_s, limits.E2B_REFRESH_S_DEFAULT),
            resume=False,
        )
    return no_content()


@put("/sandboxes/{sandbox_id:str}/network")
async def put_network(request: Request, sandbox_id: FromPath[str]) -> Response[None]:
    """``PUT /sandboxes/{id}/network``: replaces egress whole."""
    body = await read_json(request, _network)
    record = await visible(request, sandbox_id)
    policy = convert.policy_of(body, body.allow_internet_access, before=record.network)
    extra = msgspec.structs.replace(record.extra, allow_internet_access=body.allow_internet_access)
    await services_of(request).lifecycle.set_network(
        caller_of(request), record.sandbox_id, policy, extra
    )
    return no_content()


@get("/sandboxes/{sandbox_id:str}/metrics")
async def get_metrics(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """``GET /sandboxes/{id}/metrics``: readings, oldest first."""
    start, end = metrics_span(Query(request))
    samples = await services_of(request).lifecycle.metrics(
        caller_of(request), segment(sandbox_id), start, end
    )
    return answer([convert.metric_of(sample) for sample in samples])


async def visible(request: Request, sandbox_id: FromPath[str]) -> SandboxRecord:
    """The sandbox of a path, if it is there for E2B's clients.

    Raises:
        SandboxNotFound: it is not.
    """
    name = segment(sandbox_id)
    record = await services_of(request).lifecycle.get(caller_of(request), name)
    if record.state not in convert.VISIBLE:
        raise _not_found(name)
    return record


@contextlib.contextmanager
def ending_is_gone(sandbox_id: str) -> Iterator[None]:
    """One that is ending is not there any more for E2B's clients.

    Raises:
        SandboxNotFound: in place of the conflict.
    """
    try:
        yield
    except StateConflict as exc:
        if exc.details.get("state") in (State.STOPPING, *TERMINAL):
            raise _not_found(sandbox_id) from exc
        raise


@contextlib.contextmanager
def paused_is_gone(sandbox_id: str) -> Iterator[None]:
    """E2B's calls on a sandbox's time do not find one that is paused.

    Raises:
        SandboxNotFound: in place of the conflict.
    """
    try:
        yield
    except StateConflict as exc:
        raise _not_found(sandbox_id) from exc


def _not_found(sandbox_id: str) -> SandboxNotFound:
    return SandboxNotFound(f"there is no sandbox `{sandbox_id[:64]}`")


HANDLERS = [
    create_v2,
    create_v1,
    connect_v2,
    connect_v1,
    list_v2,
    list_v1,
    bulk_metrics,
    get_sandbox,
    kill,
    set_timeout,
    refresh,
    put_network,
    get_metrics,
]

# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/sandboxes``."""

from __future__ import annotations

import time

import msgspec
from litestar import Response, delete, get, post, put
from litestar.params import FromPath

from opendsec_server.api.http import (
    Query,
    Request,
    about,
    answer,
    caller_of,
    make_cursor,
    read_cursor,
    read_json,
    segment,
    services_of,
)
from opendsec_server.api.protocol import NATIVE_KEY_RE, idempotency_key
from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    IdempotencyInProgress,
    IdempotencyMismatch,
    IdempotencyOutcomeUnknown,
    ImageDamaged,
    ImageNotFound,
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    NotSupported,
    OpendsecError,
    QuotaExceeded,
    ResumeFailed,
    SandboxNotFound,
    SandboxStartFailed,
    SnapshotDamaged,
    SnapshotIncompatible,
    SnapshotNotFound,
    StartTimeout,
    StateConflict,
    TemplateNotFound,
)
from opendsec_server.contract.states import TERMINAL, State
from opendsec_server.store.sandboxes import SandboxFilter

from . import schemas
from .convert import params_of, policy_of, sample_of, sandbox_of, transition_of
from .documented import BODY, REGISTRY, Operation, Parameter, documented, paged

TAG = "sandboxes"
LIVE = tuple(state for state in State if state not in TERMINAL)
METRICS_SPAN_S_DEFAULT = 300.0

_create = msgspec.json.Decoder(schemas.CreateSandbox)
_connect = msgspec.json.Decoder(schemas.Connect)
_timeout = msgspec.json.Decoder(schemas.SetTimeout)
_network = msgspec.json.Decoder(schemas.Network)
PULLING: tuple[type[OpendsecError], ...] = (ImageNotFound, *REGISTRY, ImageDamaged)
"""Why an image cannot be had."""
RESUMING = (
    QuotaExceeded,
    NodeFull,
    SnapshotIncompatible,
    SnapshotDamaged,
    ResumeFailed,
)
"""Why a paused sandbox may stay paused."""

KEY = Parameter(
    name="Idempotency-Key",
    place="header",
    description="Same key and same parameters: the same result, also for calls at the same time "
    "and after a restart of the server. Kept for 24 hours, scoped to the project. A request that "
    "failed frees its key for another attempt.",
    schema={"type": "string", "pattern": f"^{NATIVE_KEY_RE.pattern}$"},
    example="rollout-17",
)


@post(
    "/sandboxes",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Create a sandbox",
            description="Answers when the sandbox can take its first command.",
            request=schemas.CreateSandbox,
            response=schemas.Sandbox,
            response_description="The sandbox runs.",
            response_headers={
                "Idempotent-Replay": "`true` when it is the result of an earlier call."
            },
            status=201,
            parameters=(KEY,),
            errors=(
                *BODY,
                TemplateNotFound,
                *PULLING,
                SnapshotNotFound,
                SnapshotDamaged,
                SnapshotIncompatible,
                IdempotencyMismatch,
                IdempotencyInProgress,
                IdempotencyOutcomeUnknown,
                StateConflict,
                NotSupported,
                QuotaExceeded,
                NodeFull,
                SandboxStartFailed,
                StartTimeout,
                NodeUnavailable,
            ),
        )
    ),
)
async def create_sandbox(request: Request) -> Response[bytes]:
    key = idempotency_key(request.headers.get("idempotency-key"), NATIVE_KEY_RE)
    body = await read_json(request, _create)
    services = services_of(request)
    created = await services.creates.create(caller_of(request), params_of(body), key=key)
    about(request, created.record.sandbox_id)
    headers = {"Idempotent-Replay": "true"} if created.replayed else None
    return answer(sandbox_of(services, created.record, tokens=True), 201, headers)


@get(
    "/sandboxes",
    opt=documented(
        Operation(
            tag=TAG,
            summary="List sandboxes",
            description="Newest first. All filters must fit.",
            response=schemas.SandboxList,
            parameters=(
                Parameter(
                    name="state",
                    description="Comma-separated states, or `all`. Default: all but ended ones.",
                    schema={"type": "string"},
                    example="running,paused",
                ),
                Parameter(
                    name="task_id", description="The caller's job.", schema={"type": "string"}
                ),
                Parameter(
                    name="label",
                    description="A label that the sandbox has. Repeatable.",
                    schema={"type": "array", "items": {"type": "string"}},
                ),
                Parameter(
                    name="metadata",
                    description="`key:value` that the sandbox's metadata holds. Repeatable.",
                    schema={"type": "array", "items": {"type": "string"}},
                ),
                Parameter(
                    name="template",
                    description="Name or id of the template or snapshot that it was created from.",
                    schema={"type": "string"},
                ),
                *paged("Sandboxes"),
            ),
            errors=(InvalidRequest,),
        )
    ),
)
async def list_sandboxes(request: Request) -> Response[bytes]:
    query = Query(request)
    services, caller = services_of(request), caller_of(request)
    cursor, template = query.text("cursor"), query.text("template")
    wanted = SandboxFilter(
        project_id=caller.project_id,
        states=_states(query.csv("state")),
        task_id=query.text("task_id"),
        labels=tuple(query.texts("label")),
        metadata=tuple(_metadata(pair) for pair in query.texts("metadata")),
        template_id=await services.snapshots.template_to_list(caller, template),
        after=read_cursor(cursor, ascending=False) if cursor else None,
        limit=query.integer(
            "limit", limits.LIST_LIMIT_MAX, at_least=1, at_most=limits.LIST_LIMIT_MAX
        ),
    )
    page = await services.lifecycle.page(wanted)
    last = page.records[-1] if page.more else None
    return answer(
        schemas.SandboxList(
            sandboxes=[sandbox_of(services, record, env=False) for record in page.records],
            next_cursor=make_cursor(last.created_at, last.sandbox_id, ascending=False)
            if last
            else None,
        )
    )


@get(
    "/sandboxes/{sandbox_id:str}",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Get a sandbox",
            description="Ended ones too, with the reason.",
            response=schemas.Sandbox,
            errors=(SandboxNotFound,),
        )
    ),
)
async def get_sandbox(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    services = services_of(request)
    record = await services.lifecycle.get(caller_of(request), segment(sandbox_id))
    record = await services.lifecycle.with_trouble(record)
    usage = await services.tasks.usage_of(record)
    return answer(sandbox_of(services, record, tokens=caller_of(request).may_enter, usage=usage))


@delete(
    "/sandboxes/{sandbox_id:str}",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            summary="End a sandbox",
            description="Works in every state, and as often as it is called.",
            response=schemas.Sandbox,
            response_description="Nothing of the sandbox runs any more.",
            errors=(SandboxNotFound, NodeUnavailable),
        )
    ),
)
async def delete_sandbox(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    services = services_of(request)
    record, _ = await services.lifecycle.kill(caller_of(request), segment(sandbox_id))
    return answer(sandbox_of(services, record, usage=await services.tasks.usage_of(record)))


@post(
    "/sandboxes/{sandbox_id:str}/connect",
    opt=documented(
        Operation(
            tag=TAG,
            right="sandboxes:connect",
            summary="Connect to a sandbox",
            description="Makes sure that it runs for at least `timeout_s` more seconds; never "
            "shortens its life. Resumes it if it is paused.",
            request=schemas.Connect,
            request_required=False,
            response=schemas.Sandbox,
            errors=(*BODY, SandboxNotFound, StateConflict, *RESUMING, NodeUnavailable),
        )
    ),
)
async def connect_sandbox(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _connect, empty=b"{}")
    services = services_of(request)
    connected = await services.lifecycle.connect(
        caller_of(request), segment(sandbox_id), body.timeout_s
    )
    return answer(sandbox_of(services, connected.record, tokens=True))


@post(
    "/sandboxes/{sandbox_id:str}/timeout",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Set when a sandbox ends",
            description="A paused one has no end: resume it, which sets one.",
            request=schemas.SetTimeout,
            response=schemas.Sandbox,
            errors=(*BODY, SandboxNotFound, StateConflict, NodeUnavailable),
        )
    ),
)
async def set_timeout(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _timeout)
    services = services_of(request)
    record = await services.lifecycle.set_timeout(
        caller_of(request), segment(sandbox_id), body.timeout_s
    )
    return answer(sandbox_of(services, record))


@put(
    "/sandboxes/{sandbox_id:str}/network",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Replace a sandbox's network policy",
            description="Fields left out take their defaults. Applies at once; only while it runs.",
            request=schemas.Network,
            response=schemas.Sandbox,
            errors=(*BODY, SandboxNotFound, StateConflict, NotSupported, NodeUnavailable),
        )
    ),
)
async def set_network(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _network)
    services, caller, name = services_of(request), caller_of(request), segment(sandbox_id)
    record = await services.lifecycle.get_live(caller, name)
    # What E2B's callers are told of internet access follows the policy from now on.
    extra = msgspec.structs.replace(record.extra, allow_internet_access=body.internet)
    record = await services.lifecycle.set_network(caller, name, policy_of(body), extra)
    return answer(sandbox_of(services, record))


@get(
    "/sandboxes/{sandbox_id:str}/metrics",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Get a sandbox's metrics",
            description="Readings of CPU, memory and disk, every few seconds, kept for an hour; "
            "also answered while it is paused.",
            response=schemas.MetricSamples,
            parameters=(
                Parameter(
                    name="start",
                    description="Unix seconds. Default: five minutes before `end`.",
                    schema={"type": "number", "minimum": 0},
                ),
                Parameter(
                    name="end",
                    description="Unix seconds. Default: now.",
                    schema={"type": "number", "minimum": 0},
                ),
            ),
            errors=(InvalidRequest, SandboxNotFound, NodeUnavailable),
        )
    ),
)
async def get_metrics(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    start, end = metrics_span(Query(request))
    samples = await services_of(request).lifecycle.metrics(
        caller_of(request), segment(sandbox_id), start, end
    )
    return answer(schemas.MetricSamples(samples=[sample_of(sample) for sample in samples]))


@get(
    "/sandboxes/{sandbox_id:str}/transitions",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Get a sandbox's changes of state",
            response=schemas.Transitions,
            errors=(SandboxNotFound,),
        )
    ),
)
async def get_transitions(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    _, transitions = await services_of(request).lifecycle.transitions(
        caller_of(request), segment(sandbox_id)
    )
    return answer(schemas.Transitions(transitions=[transition_of(t) for t in transitions]))


HANDLERS = [
    create_sandbox,
    list_sandboxes,
    get_sandbox,
    delete_sandbox,
    connect_sandbox,
    set_timeout,
    set_network,
    get_metrics,
    get_transitions,
]


def metrics_span(query: Query) -> tuple[float, float]:
    """``start`` and ``end`` of a request for metrics, with their defaults.

    Raises:
        InvalidRequest: not times, or the wrong way round.
    """
    end = query.seconds("end")
    end = time.time() if end is None else end
    start = query.seconds("start")
    start = end - METRICS_SPAN_S_DEFAULT if start is None else start
    if start > end:
        raise InvalidRequest("start: must not be after end")
    return start, end


def _states(names: list[str]) -> tuple[State, ...]:
    if not names:
        return LIVE
    if names == ["all"]:
        return ()
    try:
        return tuple(State(name) for name in names)
    except ValueError:
        known = ", ".join(State)
        raise InvalidRequest(f"state: one or more of {known}, or all") from None


def _metadata(pair: str) -> tuple[str, str]:
    key, colon, value = pair.partition(":")
    if not colon:
        raise InvalidRequest("metadata: must be key:value")
    return key, value

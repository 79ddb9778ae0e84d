# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1``: pause, resume, fork, snapshots."""

from __future__ import annotations

import msgspec
from litestar import Response, delete, get, post
from litestar.params import FromPath

from opendsec_server.api.http import (
    Query,
    Request,
    about,
    about_many,
    answer,
    caller_of,
    make_cursor,
    no_content,
    read_cursor,
    read_json,
    segment,
    services_of,
)
from opendsec_server.api.protocol import NATIVE_KEY_RE, idempotency_key
from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    AlreadyPaused,
    Conflict,
    IdempotencyInProgress,
    IdempotencyMismatch,
    IdempotencyOutcomeUnknown,
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    NotSupported,
    SandboxNotFound,
    SnapshotFailed,
    SnapshotNotFound,
    StateConflict,
)
from opendsec_server.control.saving import ForkParams, SnapshotParams
from opendsec_server.control.templates import Reference, parse_reference
from opendsec_server.store.snapshots import SnapshotFilter

from . import schemas
from .convert import fork_item_of, image_of, paused_of, sandbox_of, snapshot_of
from .documented import BODY, Operation, Parameter, documented, paged
from .sandboxes import KEY, RESUMING

REPLAY = {"Idempotent-Replay": "`true` when it is the result of an earlier call."}
_SAVING = (
    IdempotencyMismatch,
    IdempotencyInProgress,
    IdempotencyOutcomeUnknown,
    StateConflict,
    NotSupported,
    NodeFull,
    SnapshotFailed,
    NodeUnavailable,
)

_pause = msgspec.json.Decoder(schemas.Pause)
_resume = msgspec.json.Decoder(schemas.Resume)
_fork = msgspec.json.Decoder(schemas.Fork)
_pack = msgspec.json.Decoder(schemas.Pack)
_snapshot = msgspec.json.Decoder(schemas.CreateSnapshot)


@post(
    "/sandboxes/{sandbox_id:str}/pause",
    status_code=200,
    opt=documented(
        Operation(
            tag="sandboxes",
            summary="Pause a sandbox",
            description="Frees its memory and keeps the rest. It then has no end, and does not "
            "count for the project's limit. A call during a pause shares it; when an answer was "
            "lost, a repeated call says `already_paused`.",
            request=schemas.Pause,
            request_required=False,
            response=schemas.PausedSandbox,
            response_description="It is paused.",
            errors=(
                *BODY,
                SandboxNotFound,
                AlreadyPaused,
                StateConflict,
                NotSupported,
                SnapshotFailed,
                NodeUnavailable,
            ),
        )
    ),
)
async def pause_sandbox(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _pause, empty=b"{}")
    services = services_of(request)
    paused = await services.lifecycle.pause(caller_of(request), segment(sandbox_id), body.mode)
    return answer(paused_of(services, paused.record, paused.report))


@post(
    "/sandboxes/{sandbox_id:str}/resume",
    status_code=200,
    opt=documented(
        Operation(
            tag="sandboxes",
            summary="Resume a sandbox",
            description="Lets a paused one run on, for `timeout_s` from now. One that runs is "
            "answered like a connect: its life is extended, never shortened. Waits while it is "
            "pausing. Safe to repeat.",
            request=schemas.Resume,
            request_required=False,
            response=schemas.Sandbox,
            response_description="It runs.",
            errors=(*BODY, SandboxNotFound, StateConflict, *RESUMING, NodeUnavailable),
        )
    ),
)
async def resume_sandbox(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _resume, empty=b"{}")
    services = services_of(request)
    connected = await services.lifecycle.connect(
        caller_of(request), segment(sandbox_id), body.timeout_s, reboot=body.reboot
    )
    may_enter = caller_of(request).may_enter
    return answer(sandbox_of(services, connected.record, tokens=may_enter))


@post(
    "/sandboxes/{sandbox_id:str}/fork",
    status_code=201,
    opt=documented(
        Operation(
            tag="sandboxes",
            right="snapshots:write",
            also="sandboxes:write",
            summary="Fork a sandbox",
            description="Makes sandboxes that start with its disk, or disk and memory, of this "
            "instant; it stops for as short as possible and goes on. Children inherit everything "
            "but identity, tokens and time. Each succeeds or fails by itself; what concerns the "
            "source fails the whole call. A fork that made nothing frees its key.",
            request=schemas.Fork,
            request_required=False,
            response=schemas.Forked,
            response_description="One item per sandbox asked for.",
            response_headers=REPLAY,
            status=201,
            parameters=(KEY,),
            errors=(*BODY, SandboxNotFound, *_SAVING),
        )
    ),
)
async def fork_sandbox(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    key = idempotency_key(request.headers.get("idempotency-key"), NATIVE_KEY_RE)
    body = await read_json(request, _fork, empty=b"{}")
    services = services_of(request)
    forked = await services.saving.fork(
        caller_of(request),
        segment(sandbox_id),
        ForkParams(
            count=body.count,
            mode=body.mode,
            timeout_s=body.timeout_s,
            metadata=body.metadata,
            labels=body.labels,
        ),
        key=key,
    )
    request_id = request.scope.get("opendsec.request_id")
    made = [child.record.sandbox_id for child in forked.children if child.record is not None]
    about_many(request, "sandboxes", made, segment(sandbox_id))
    items = [fork_item_of(services, child, request_id) for child in forked.children]  # type: ignore[arg-type]
    return answer(schemas.Forked(items=items), 201, _replayed(forked.replayed))


@post(
    "/sandboxes/{sandbox_id:str}/snapshots",
    status_code=201,
    opt=documented(
        Operation(
            tag="snapshots",
            also="sandboxes:write",
            summary="Take a snapshot",
            description="Saves a running or paused sandbox as it is at this instant; it goes on. "
            "Sandboxes are created from the snapshot by naming it as their template.",
            request=schemas.CreateSnapshot,
            request_required=False,
            response=schemas.Snapshot,
            response_description="It is there.",
            response_headers=REPLAY,
            status=201,
            parameters=(KEY,),
            errors=(*BODY, SandboxNotFound, Conflict, *_SAVING),
        )
    ),
)
async def create_snapshot(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    key = idempotency_key(request.headers.get("idempotency-key"), NATIVE_KEY_RE)
    body = await read_json(request, _snapshot, empty=b"{}")
    saved = await services_of(request).saving.snapshot(
        caller_of(request),
        segment(sandbox_id),
        SnapshotParams(mode=body.mode, name=body.name),
        key=key,
    )
    about(request, segment(sandbox_id), saved.snapshot.snapshot_id)
    return answer(snapshot_of(saved.snapshot), 201, _replayed(saved.replayed))


@post(
    "/sandboxes/{sandbox_id:str}/pack",
    opt=documented(
        Operation(
            tag="sandboxes",
            right="images:write",
            # It reads all of its files.
            also="sandboxes:connect",
            summary="Pack a sandbox",
            description="Its changes become a layer, and an image of it on top of its own image's. "
            "It stands still for a moment only, and goes on; a paused one stays paused.",
            request=schemas.Pack,
            request_required=False,
            response=schemas.Image,
            response_description="The image is there.",
            status=201,
            errors=(
                *BODY,
                SandboxNotFound,
                StateConflict,
                NotSupported,
                NodeFull,
                SnapshotFailed,
                NodeUnavailable,
            ),
        )
    ),
)
async def pack_sandbox(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _pack, empty=b"{}")
    image = await services_of(request).packing.pack(
        caller_of(request),
        segment(sandbox_id),
        name=body.name,
        squash=body.squash,
        scrub=body.scrub,
    )
    about(request, segment(sandbox_id), image.digest)
    return answer(image_of(image), 201)


@get(
    "/snapshots",
    opt=documented(
        Operation(
            tag="snapshots",
            summary="List snapshots",
            description="Newest first. All filters must fit.",
            response=schemas.SnapshotList,
            parameters=(
                Parameter(
                    name="sandbox_id",
                    description="The sandbox they were taken of.",
                    schema={"type": "string"},
                ),
                Parameter(
                    name="name",
                    description="Name or id, with or without a tag.",
                    schema={"type": "string"},
                    example="trained",
                ),
                *paged("Snapshots"),
            ),
            errors=(InvalidRequest,),
        )
    ),
)
async def list_snapshots(request: Request) -> Response[bytes]:
    wanted = snapshots_wanted(request, source="sandbox_id", cursor="cursor")
    page = await services_of(request).snapshots.page(wanted)
    last = page.snapshots[-1] if page.more else None
    return answer(
        schemas.SnapshotList(
            snapshots=[snapshot_of(snapshot) for snapshot in page.snapshots],
            next_cursor=make_cursor(last.created_at, last.snapshot_id, ascending=False)
            if last
            else None,
        )
    )


@get(
    "/snapshots/{snapshot_id:str}",
    opt=documented(
        Operation(
            tag="snapshots",
            summary="Get a snapshot",
            description="By id or name.",
            response=schemas.Snapshot,
            errors=(SnapshotNotFound,),
        )
    ),
)
async def get_snapshot(request: Request, snapshot_id: FromPath[str]) -> Response[bytes]:
    found = await services_of(request).snapshots.get(caller_of(request), segment(snapshot_id))
    return answer(snapshot_of(found))


@delete(
    "/snapshots/{snapshot_id:str}",
    opt=documented(
        Operation(
            tag="snapshots",
            summary="Delete a snapshot",
            description="By id or name. Sandboxes started from it go on; creates from it that are "
            "under way end first.",
            status=204,
            errors=(SnapshotNotFound,),
        )
    ),
)
async def delete_snapshot(request: Request, snapshot_id: FromPath[str]) -> Response[None]:
    await services_of(request).snapshots.delete(caller_of(request), segment(snapshot_id))
    return no_content()


HANDLERS = [
    pause_sandbox,
    resume_sandbox,
    fork_sandbox,
    create_snapshot,
    pack_sandbox,
    list_snapshots,
    get_snapshot,
    delete_snapshot,
]


def snapshots_wanted(request: Request, *, source: str, cursor: str) -> SnapshotFilter:
    """The filter that a request to list snapshots describes.

    Args:
        request: With ``name`` and ``limit`` in its query.
        source: The query parameter that names a sandbox.
        cursor: The query parameter that says where the page starts.

    Raises:
        InvalidRequest: a parameter is malformed.
    """
    query, caller = Query(request), caller_of(request)
    name, token = query.text("name"), query.text(cursor)
    reference = Reference(scope=None, name="", tag=None) if name is None else parse_reference(name)
    if reference.scope not in (None, caller.project_id):
        # Nobody else's snapshots are shown.
        reference = Reference(scope=None, name="/", tag=None)
    return SnapshotFilter(
        project_id=caller.project_id,
        source_id=query.text(source),
        name=reference.name or None,
        tag=reference.tag,
        after=read_cursor(token, ascending=False) if token else None,
        limit=query.integer(
            "limit", limits.LIST_LIMIT_MAX, at_least=1, at_most=limits.LIST_LIMIT_MAX
        ),
    )


def _replayed(replayed: bool) -> dict[str, str] | None:
    return {"Idempotent-Replay": "true"} if replayed else None

# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's calls to pause, resume and fork sandboxes, and on snapshots. Status codes are exact."""

from __future__ import annotations

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath

from opendsec_server.api.errors import MAY_HAVE_HAPPENED_KEY
from opendsec_server.api.http import (
    Request,
    about,
    about_many,
    answer,
    caller_of,
    make_cursor,
    no_content,
    read_json,
    segment,
    services_of,
)
from opendsec_server.api.native.states import snapshots_wanted
from opendsec_server.api.rights import needs
from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    AlreadyPaused,
    InvalidRequest,
    NotSupported,
    StateConflict,
)
from opendsec_server.contract.node import StateMode
from opendsec_server.contract.states import State
from opendsec_server.control.saving import ForkParams, SnapshotParams

from . import convert, schemas
from .sandboxes import ending_is_gone

FORK_MODE_HEADER = "X-Opendsec-Fork-Mode"
SNAPSHOT_MODE_HEADER = "X-Opendsec-Snapshot-Mode"
RESUME_TIMEOUT_S_DEFAULT = 15
FORK_TIMEOUT_S_DEFAULT = 15

_pause = msgspec.json.Decoder(schemas.Pause)
_resume = msgspec.json.Decoder(schemas.Resume)
_fork = msgspec.json.Decoder(schemas.Fork)
_snapshot = msgspec.json.Decoder(schemas.NewSnapshot)


@post("/sandboxes/{sandbox_id:str}/pause")
async def pause(request: Request, sandbox_id: FromPath[str]) -> Response[None]:
    """``POST /sandboxes/{id}/pause``: 204; 409 when it is paused already."""
    body = await read_json(request, _pause, empty=b"{}")
    name = segment(sandbox_id)
    mode: StateMode = "filesystem" if body.memory is False else "full"
    try:
        with ending_is_gone(name):
            await services_of(request).lifecycle.pause(caller_of(request), name, mode)
    except AlreadyPaused as exc:
        raise AlreadyPaused(f"Error pausing sandbox - sandbox '{name}' is already paused") from exc
    return no_content()


@post("/sandboxes/{sandbox_id:str}/resume", opt=needs("sandboxes:write", "sandboxes:connect"))
async def resume(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """``POST /sandboxes/{id}/resume``, of older SDKs: 201; 409 when it runs."""
    body = await read_json(request, _resume, empty=b"{}")
    timeout_s = RESUME_TIMEOUT_S_DEFAULT if body.timeout is None else body.timeout
    if timeout_s < 0:
        raise InvalidRequest("timeout: must not be negative")
    services, caller, name = services_of(request), caller_of(request), segment(sandbox_id)
    if await services.lifecycle.state_now(caller, name) is State.RUNNING:
        raise StateConflict(f"Sandbox {name} is already running")
    with ending_is_gone(name):
        connected = await services.lifecycle.connect(
            caller, name, timeout_s, reboot=body.memory is False
        )
    return answer(convert.sandbox_of(services, connected.record), 201)


@post("/sandboxes/{sandbox_id:str}/fork", opt=needs("snapshots:write", "sandboxes:write"))
async def fork(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """``POST /sandboxes/{id}/fork``: 201 with one result per sandbox; 409 when it is paused.

    Where a backend cannot save memory, the disk is forked, and a header says so.
    """
    body = await read_json(request, _fork, empty=b"{}")
    # There is no key to repeat it with.
    request.scope[MAY_HAVE_HAPPENED_KEY] = True  # type: ignore[literal-required]
    services, caller, name = services_of(request), caller_of(request), segment(sandbox_id)
    timeout_s = FORK_TIMEOUT_S_DEFAULT if body.timeout is None else body.timeout
    if timeout_s < 0:
        raise InvalidRequest("timeout: must not be negative")
    count = 1 if body.count is None else body.count
    if not 1 <= count <= limits.FORK_COUNT_MAX:
        raise InvalidRequest(f"count: 1 to {limits.FORK_COUNT_MAX}")
    if await services.lifecycle.state_now(caller, name) is State.PAUSED:
        raise StateConflict(f"Sandbox '{name}' is paused and cannot be forked; resume it first")
    mode, headers = await _mode(request, name, True, FORK_MODE_HEADER)
    with ending_is_gone(name):
        forked = await services.saving.fork(
            caller, name, ForkParams(count=count, mode=mode, timeout_s=timeout_s)
        )
    made = [child.record.sandbox_id for child in forked.children if child.record is not None]
    about_many(request, "sandboxes", made, name)
    results = [convert.fork_result_of(services, child) for child in forked.children]
    return answer(results, 201, headers)


@post("/sandboxes/{sandbox_id:str}/snapshots", opt=needs("snapshots:write", "sandboxes:write"))
async def create_snapshot(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    """``POST /sandboxes/{id}/snapshots``: 201, of a running or paused one.

    Where a backend cannot save memory, the disk is saved, and a header says so.
    """
    body = await read_json(request, _snapshot, empty=b"{}")
    request.scope[MAY_HAVE_HAPPENED_KEY] = True  # type: ignore[literal-required]
    name = segment(sandbox_id)
    mode, headers = await _mode(request, name, body.memory is not False, SNAPSHOT_MODE_HEADER)
    with ending_is_gone(name):
        saved = await services_of(request).saving.snapshot(
            caller_of(request), name, SnapshotParams(mode=mode, name=body.name or None)
        )
    about(request, name, saved.snapshot.snapshot_id)
    return answer(convert.snapshot_info_of(saved.snapshot), 201, headers)


async def _mode(
    request: Request, sandbox_id: str, memory: bool, header: str
) -> tuple[StateMode, dict[str, str] | None]:
    """What can be saved in place of what E2B always saves, and the header that says so.

    Raises:
        SandboxNotFound: not one of the caller's, or ended.
        NotSupported: the server is set to refuse less than memory.
    """
    if not memory:
        return "filesystem", None
    services = services_of(request)
    record = await services.lifecycle.get_live(caller_of(request), sandbox_id)
    if services.backends.keeps_memory(record.backend):
        return "full", None
    if services.config.e2b_fork_of_containers == "refuse":
        raise NotSupported(
            f"backend `{record.backend}` cannot save memory, and this server is set to refuse "
            "forks and snapshots without it",
            remediation="Use a backend with memory snapshots, or the setting "
            "e2b_fork_of_containers.",
        )
    return "filesystem", {header: "filesystem"}


@get("/snapshots")
async def list_snapshots(request: Request) -> Response[bytes]:
    """``GET /snapshots``, page by page."""
    wanted = snapshots_wanted(request, source="sandboxID", cursor="nextToken")
    page = await services_of(request).snapshots.page(wanted)
    headers = None
    if page.more:
        last = page.snapshots[-1]
        token = make_cursor(last.created_at, last.snapshot_id, ascending=False)
        headers = {"X-Next-Token": token}
    return answer([convert.snapshot_info_of(s) for s in page.snapshots], headers=headers)


HANDLERS = [pause, resume, fork, create_snapshot, list_snapshots]

# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/groups``: several sandboxes on one private network."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

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
    read_json,
    rfc3339,
    segment,
    services_of,
)
from opendsec_server.api.ndjson import done, ndjson
from opendsec_server.api.protocol import NATIVE_KEY_RE, idempotency_key
from opendsec_server.contract import limits
from opendsec_server.contract.actions import KeptOutput, KeptProgram
from opendsec_server.contract.errors import (
    GroupExists,
    GroupNotFound,
    GroupServiceNotFound,
    GroupStateConflict,
    IdempotencyMismatch,
    InvalidRequest,
    NodeFull,
    NotSupported,
    QuotaExceeded,
    ResumeFailed,
    SandboxNotFound,
    SnapshotFailed,
    StateConflict,
)
from opendsec_server.control.groups import (
    GroupSpec,
    GroupView,
    HealthCheck,
    Logs,
    MemberView,
    ServiceSpec,
)
from opendsec_server.control.groups.model import SHELL
from opendsec_server.control.groups.program import text_of
from opendsec_server.control.groups.service import WaitFor
from opendsec_server.store.groups import GroupState

from . import group_schemas as schemas
from .convert import policy_of
from .cursors import make_cursor, read_cursor
from .documented import BODY, Operation, Parameter, documented, paged

TAG = "groups"
WAIT_S_DEFAULT = 3_600
_STATES: tuple[GroupState, ...] = ("starting", "running", "paused", "ending", "ended")
_WAITS: tuple[WaitFor, ...] = ("running", "ended")

_create = msgspec.json.Decoder(schemas.CreateGroup)

_KEY = Parameter(
    name="Idempotency-Key",
    place="header",
    description="Same key and same parameters: the same group. Kept for 24 hours, scoped to the "
    "project.",
    schema={"type": "string", "pattern": f"^{NATIVE_KEY_RE.pattern}$"},
)
_NAMED = " `group` is its id, or its name."


@post(
    "/groups",
    status_code=202,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Create a group",
            description="Answers at once; services start in the order of `depends_on`, those that "
            "do not wait for each other side by side. It comes up whole, or it is ended whole and "
            "`error` says why (`wait` tells when). All its sandboxes are on one node; they reach "
            "each other by name on every port, and no other sandbox reaches them.",
            request=schemas.CreateGroup,
            response=schemas.Group,
            status=202,
            parameters=(_KEY,),
            errors=(*BODY, NotSupported, GroupExists, IdempotencyMismatch),
        )
    ),
)
async def create_group(request: Request) -> Response[bytes]:
    key = idempotency_key(request.headers.get("idempotency-key"), NATIVE_KEY_RE)
    body = await read_json(request, _create)
    view = await services_of(request).groups.create(caller_of(request), spec_of(body), key=key)
    about(request, view.group.group_id)
    return answer(group_of(view), 202)


@get(
    "/groups",
    opt=documented(
        Operation(
            tag=TAG,
            summary="List groups",
            description="Newest first.",
            response=schemas.GroupList,
            parameters=(
                Parameter(
                    name="state",
                    description="Comma-separated: `starting`, `running` (degraded ones too), "
                    "`paused`, `ending`, `ended`. Default: all.",
                    schema={"type": "string"},
                ),
                *paged("Groups"),
            ),
            errors=(InvalidRequest,),
        )
    ),
)
async def list_groups(request: Request) -> Response[bytes]:
    query = Query(request)
    cursor = query.text("cursor")
    states = query.csv("state")
    if set(states) - set(_STATES):
        raise InvalidRequest(f"state: {', '.join(_STATES)}")
    views, more = await services_of(request).groups.page(
        caller_of(request),
        states=cast("list[GroupState]", states),
        after=read_cursor(cursor) if cursor else None,
        limit=query.integer(
            "limit", limits.LIST_LIMIT_MAX, at_least=1, at_most=limits.LIST_LIMIT_MAX
        ),
    )
    last = views[-1].group if more else None
    return answer(
        schemas.GroupList(
            groups=[group_of(view) for view in views],
            next_cursor=None if last is None else make_cursor(last.created_at, last.group_id),
        )
    )


@get(
    "/groups/{group:str}",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Get a group",
            description="With how its services' programs are at this moment." + _NAMED,
            response=schemas.Group,
            errors=(GroupNotFound,),
        )
    ),
)
async def get_group(request: Request, group: FromPath[str]) -> Response[bytes]:
    view = await services_of(request).groups.inspect(caller_of(request), segment(group))
    return answer(group_of(view))


@get(
    "/groups/{group:str}/wait",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Wait for a group",
            description="NDJSON: a line `group` each time it changes, and at the end `done` with "
            "`reached`: false, if the time was over before." + _NAMED,
            parameters=(
                Parameter(
                    name="until",
                    description="`running`: all services are up, or it has failed and ended. "
                    "`ended`: nothing of it is left.",
                    schema={"type": "string", "enum": list(_WAITS), "default": "running"},
                ),
                Parameter(
                    name="timeout_s",
                    description="How long to wait.",
                    schema={
                        "type": "integer",
                        "minimum": 0,
                        "maximum": limits.TIMEOUT_S_MAX,
                        "default": WAIT_S_DEFAULT,
                    },
                ),
            ),
            errors=(InvalidRequest, GroupNotFound),
        )
    ),
)
async def wait_for_group(request: Request, group: FromPath[str]) -> Stream:
    query = Query(request)
    until = query.text("until") or "running"
    if until not in _WAITS:
        raise InvalidRequest(f"until: {', '.join(_WAITS)}")
    timeout_s = query.integer("timeout_s", WAIT_S_DEFAULT, at_least=0, at_most=limits.TIMEOUT_S_MAX)
    services, caller = services_of(request), caller_of(request)
    name = (await services.groups.get(caller, segment(group))).group.group_id

    async def lines() -> AsyncGenerator[object, None]:
        reached = False
        async for view, reached in services.groups.wait(caller, name, until, timeout_s):  # noqa: B007
            yield schemas.GroupLine(group=group_of(view))
        yield done(reached=reached)

    return ndjson(request, lines())


@post(
    "/groups/{group:str}/kill",
    status_code=202,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Kill a group",
            description="Ends all its sandboxes, in whatever state it is; `wait` tells when none "
            "is left. Idempotent." + _NAMED,
            response=schemas.Group,
            status=202,
            errors=(GroupNotFound,),
        )
    ),
)
async def kill_group(request: Request, group: FromPath[str]) -> Response[bytes]:
    view = await services_of(request).groups.kill(caller_of(request), segment(group))
    return answer(group_of(view), 202)


@post(
    "/groups/{group:str}/pause",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Pause a group",
            description="Pauses all its sandboxes (`full`), or none of them. A paused group has no "
            "end." + _NAMED,
            response=schemas.Group,
            errors=(
                GroupNotFound,
                GroupStateConflict,
                StateConflict,
                NotSupported,
                SnapshotFailed,
            ),
        )
    ),
)
async def pause_group(request: Request, group: FromPath[str]) -> Response[bytes]:
    view = await services_of(request).groups.pause(caller_of(request), segment(group))
    return answer(group_of(view))


@post(
    "/groups/{group:str}/resume",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Resume a group",
            description="Lets all its sandboxes run on, for `timeout_s` from now. If one cannot, "
            "call it again." + _NAMED,
            response=schemas.Group,
            errors=(
                GroupNotFound,
                GroupStateConflict,
                StateConflict,
                QuotaExceeded,
                NodeFull,
                ResumeFailed,
            ),
        )
    ),
)
async def resume_group(request: Request, group: FromPath[str]) -> Response[bytes]:
    view = await services_of(request).groups.resume(caller_of(request), segment(group))
    return answer(group_of(view))


@get(
    "/groups/{group:str}/services/{service:str}/logs",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Read the output of a service",
            description="Of its program: the first and last 128 KiB of each output." + _NAMED,
            response=schemas.GroupLogs,
            also="sandboxes:read",
            errors=(GroupNotFound, GroupServiceNotFound, SandboxNotFound, StateConflict),
        )
    ),
)
async def service_logs(
    request: Request, group: FromPath[str], service: FromPath[str]
) -> Response[bytes]:
    found = await services_of(request).groups.logs(
        caller_of(request), segment(group), segment(service)
    )
    return answer(_logs_of(found))


def spec_of(body: schemas.CreateGroup) -> GroupSpec:
    """What a body asks for."""
    return GroupSpec(
        name=body.name,
        services={name: _service_of(service) for name, service in body.services.items()},
        timeout_s=body.timeout_s,
        start_timeout_s=body.start_timeout_s,
        task_id=body.task_id,
        labels=tuple(body.labels),
    )


def _service_of(body: schemas.Service) -> ServiceSpec:
    check = body.healthcheck
    return ServiceSpec(
        template=body.template,
        image=body.image,
        backend=body.backend,
        entrypoint=_argv(body.entrypoint),
        command=_argv(body.command),
        env=body.env,
        cpu=body.cpu,
        memory_mb=body.memory_mb,
        disk_mb=body.disk_mb,
        user=body.user,
        workdir=body.workdir,
        depends_on=dict(body.depends_on),
        healthcheck=None
        if check is None
        else HealthCheck(
            test=_argv(check.test) or (),
            interval_s=check.interval_s,
            timeout_s=check.timeout_s,
            retries=check.retries,
            start_period_s=check.start_period_s,
        ),
        aliases=tuple(body.aliases),
        network=policy_of(body.network),
        metadata=body.metadata,
        labels=tuple(body.labels),
    )


def _argv(command: str | list[str] | None) -> tuple[str, ...] | None:
    if command is None:
        return None
    return (SHELL, "-c", command) if isinstance(command, str) else tuple(command)


def group_of(view: GroupView) -> schemas.Group:
    """A group as it is shown."""
    group = view.group
    return schemas.Group(
        group_id=group.group_id,
        name=group.name,
        state=view.state,
        created_at=rfc3339(group.created_at),
        ready_at=None if group.ready_at is None else rfc3339(group.ready_at),
        end_at=None if group.state == "paused" else rfc3339(group.end_at),
        ended_at=None if group.ended_at is None else rfc3339(group.ended_at),
        end_reason=group.end_reason,
        error=None if group.error is None else msgspec.json.decode(group.error),
        task_id=view.spec.task_id,
        labels=list(view.spec.labels),
        services=[_member_of(one) for one in view.members],
    )


def _member_of(view: MemberView) -> schemas.ServiceState:
    record = view.record
    return schemas.ServiceState(
        name=view.member.name,
        state=view.member.state,
        message=view.member.message,
        sandbox_id=view.member.sandbox_id,
        sandbox_state=None if record is None else record.state,
        end_reason=None if record is None else record.end_reason,
        program=_program_of(view.program),
        depends_on=dict(view.service.depends_on),
    )


def _program_of(program: KeptProgram | None) -> schemas.ServiceProgram | None:
    if program is None:
        return None
    return schemas.ServiceProgram(
        state=program.state, exit_code=program.exit_code, signal=program.signal
    )


def _logs_of(logs: Logs) -> schemas.GroupLogs:
    program = logs.program
    stdout = KeptOutput() if program is None else program.stdout
    stderr = KeptOutput() if program is None else program.stderr
    return schemas.GroupLogs(
        program=_program_of(program),
        stdout=text_of(stdout),
        stderr=text_of(stderr),
        stdout_bytes=stdout.bytes_total,
        stderr_bytes=stderr.bytes_total,
    )


HANDLERS = (
    create_group,
    list_groups,
    get_group,
    wait_for_group,
    kill_group,
    pause_group,
    resume_group,
    service_logs,
)

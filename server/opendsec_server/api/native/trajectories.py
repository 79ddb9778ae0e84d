# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/sandboxes/{id}/actions``, ``/v1/trajectories``: what was done, once, and whose fault."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence

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
from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    ActionInProgress,
    ActionMismatch,
    ActionNotFound,
    ActionUnknown,
    AgentUnresponsive,
    InvalidRequest,
    NodeUnavailable,
    SandboxEnded,
    SandboxLost,
    SandboxNotFound,
    StateConflict,
    TrajectoryFull,
    TrajectoryNotFound,
)
from opendsec_server.control.trajectories import ActionParams
from opendsec_server.control.trajectories import params as kept
from opendsec_server.control.trajectories.results import (
    ActionResult,
    unpack_error,
    unpack_result,
)
from opendsec_server.control.trajectories.service import Forwarded
from opendsec_server.store import trajectories as rows

from . import action_schemas as schemas
from .documented import BODY, Operation, Parameter, documented

TAG = "trajectories"
_RIGHTS = {"snapshot": "snapshots:write"}
"""What doing the same without a record needs; ``sandboxes:connect`` where it is not named."""
_create = msgspec.json.Decoder(schemas.CreateAction)
_resolve = msgspec.json.Decoder(schemas.ResolveAction)
_forward = msgspec.json.Decoder(schemas.FastForward)
_evidence = msgspec.json.Decoder(dict[str, object])

_LINES = 'Lines of JSON (`application/x-ndjson`), the last one `{"done": …}`. '
_WAIT = Parameter(
    name="wait_s",
    description="Wait so many seconds for its end.",
    schema={"type": "integer", "minimum": 0, "maximum": int(kept.WAIT_S_MAX), "default": 0},
)
_LIMIT = Parameter(
    name="limit",
    description="How many per page.",
    schema={
        "type": "integer",
        "minimum": 1,
        "maximum": limits.LIST_LIMIT_MAX,
        "default": limits.LIST_LIMIT_MAX,
    },
)


@post(
    "/sandboxes/{sandbox_id:str}/actions",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Do something in a sandbox, once",
            description="The action is recorded before it runs, and its result after. The same "
            "`action_id` again, also after a restart of the server or the end of the sandbox, "
            "answers what is recorded and runs nothing; `rollout_id` and `step` may differ, "
            "everything else must be the same. It goes on when the caller goes away. Beside "
            "`trajectories:write` it needs `sandboxes:connect`, a snapshot `snapshots:write`.",
            request=schemas.CreateAction,
            response=schemas.Action,
            response_description="What is recorded of it. `state` says whether it is over.",
            response_headers={
                "Idempotent-Replay": "`true` when it was recorded by an earlier call."
            },
            errors=(
                *BODY,
                SandboxNotFound,
                SandboxEnded,
                SandboxLost,
                ActionMismatch,
                ActionInProgress,
                TrajectoryFull,
                StateConflict,
                AgentUnresponsive,
                NodeUnavailable,
            ),
        )
    ),
)
async def create_action(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _create)
    fields = msgspec.structs.asdict(body)
    wait_s = fields.pop("wait_s")
    fields["argv"] = tuple(fields["argv"])
    about(request, segment(sandbox_id), body.action_id)
    caller = caller_of(request)
    caller.require(_RIGHTS.get(body.kind, "sandboxes:connect"))
    acted = await services_of(request).trajectories.act(
        caller, segment(sandbox_id), ActionParams(**fields), wait_s=wait_s
    )
    headers = {"Idempotent-Replay": "true"} if acted.replayed else None
    return answer(action_of(acted.action), 200, headers)


@get(
    "/sandboxes/{sandbox_id:str}/actions",
    opt=documented(
        Operation(
            tag=TAG,
            summary="List a sandbox's actions",
            description="In order; also after its end.",
            response=schemas.ActionList,
            parameters=(
                Parameter(
                    name="after",
                    description="Leave out those up to this `seq`.",
                    schema={"type": "integer", "minimum": 0, "default": 0},
                ),
                _LIMIT,
            ),
            errors=(InvalidRequest, SandboxNotFound),
        )
    ),
)
async def list_actions(request: Request, sandbox_id: FromPath[str]) -> Response[bytes]:
    query = Query(request)
    page = await services_of(request).trajectories.page(
        caller_of(request),
        segment(sandbox_id),
        after=query.integer("after", 0, at_least=0, at_most=(1 << 31) - 1),
        limit=_limit(query),
    )
    return answer(
        schemas.ActionList(
            actions=[action_of(action) for action in page.actions],
            next_after=page.actions[-1].seq if page.more else None,
        )
    )


@get(
    "/sandboxes/{sandbox_id:str}/actions/{action_id:str}",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Get an action",
            response=schemas.Action,
            parameters=(_WAIT,),
            errors=(InvalidRequest, SandboxNotFound, ActionNotFound),
        )
    ),
)
async def get_action(
    request: Request, sandbox_id: FromPath[str], action_id: FromPath[str]
) -> Response[bytes]:
    wait_s = Query(request).integer("wait_s", 0, at_least=0, at_most=int(kept.WAIT_S_MAX))
    action = await services_of(request).trajectories.get(
        caller_of(request), segment(sandbox_id), segment(action_id), wait_s=wait_s
    )
    return answer(action_of(action))


@post(
    "/sandboxes/{sandbox_id:str}/actions/{action_id:str}/resolve",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Find out what became of an action",
            description="Asks the sandbox once more about one whose outcome is unknown; runs "
            "nothing. If it cannot be found out, the caller may state it.",
            request=schemas.ResolveAction,
            request_required=False,
            response=schemas.Action,
            errors=(*BODY, SandboxNotFound, ActionNotFound, StateConflict),
        )
    ),
)
async def resolve_action(
    request: Request, sandbox_id: FromPath[str], action_id: FromPath[str]
) -> Response[bytes]:
    body = await read_json(request, _resolve, empty=b"{}")
    action = await services_of(request).trajectories.resolve(
        caller_of(request),
        segment(sandbox_id),
        segment(action_id),
        state=body.state,
        result=ActionResult(exit_code=body.exit_code),
    )
    return answer(action_of(action))


@get(
    "/sandboxes/{sandbox_id:str}/trajectory",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Export a sandbox's actions",
            description=_LINES + "In order, with the contents of files that were written.",
            response=schemas.Action,
            errors=(SandboxNotFound,),
        )
    ),
)
async def export_sandbox(request: Request, sandbox_id: FromPath[str]) -> Stream:
    actions = await services_of(request).trajectories.export_sandbox(
        caller_of(request), segment(sandbox_id)
    )
    return ndjson(request, _lines(actions))


@post(
    "/sandboxes/{sandbox_id:str}/fast-forward",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            also="sandboxes:connect",
            summary="Bring a sandbox to where another one was",
            description=_LINES + "Actions that the new sandbox's snapshot holds are taken over as "
            "recorded; later commands and writes run again, in order, unless they are `once`. "
            "Safe to repeat. It goes on when the reader goes away. Nothing is done if an action "
            "of the log is unknown, unless `unknown` says what to do with it.",
            request=schemas.FastForward,
            response=schemas.ForwardLine,
            errors=(
                *BODY,
                SandboxNotFound,
                SandboxEnded,
                SandboxLost,
                ActionUnknown,
                ActionInProgress,
            ),
        )
    ),
)
async def fast_forward(request: Request, sandbox_id: FromPath[str]) -> Stream:
    body = await read_json(request, _forward)
    caller = caller_of(request)
    caller.require_sandbox(segment(sandbox_id))
    caller.require_sandbox(body.source)
    about(request, segment(sandbox_id), body.source)
    lines = await services_of(request).trajectories.fast_forward(
        caller,
        segment(sandbox_id),
        source_id=body.source,
        through=body.through,
        holds=body.holds,
        of_unknown=body.unknown,
    )
    return ndjson(request, _forwarded(lines))


@get(
    "/trajectories",
    opt=documented(
        Operation(
            tag=TAG,
            summary="List trajectories",
            description="By rollout id.",
            response=schemas.TrajectoryList,
            parameters=(
                Parameter(
                    name="task_id", description="The caller's job.", schema={"type": "string"}
                ),
                Parameter(
                    name="after",
                    description="Leave out those up to this rollout id.",
                    schema={"type": "string"},
                ),
                _LIMIT,
            ),
            errors=(InvalidRequest,),
        )
    ),
)
async def list_trajectories(request: Request) -> Response[bytes]:
    query = Query(request)
    found, more = await services_of(request).trajectories.rollouts(
        caller_of(request),
        task_id=query.text("task_id"),
        after=query.text("after"),
        limit=_limit(query),
    )
    return answer(
        schemas.TrajectoryList(
            trajectories=[_trajectory_of(rollout) for rollout in found],
            next_after=found[-1].rollout_id if more else None,
        )
    )


@get(
    "/trajectories/{rollout_id:str}",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Export a trajectory",
            description=_LINES + "Every action with this rollout id, over all sandboxes, in the "
            "order of their record.",
            response=schemas.Action,
            errors=(TrajectoryNotFound,),
        )
    ),
)
async def export_trajectory(request: Request, rollout_id: FromPath[str]) -> Stream:
    actions = await services_of(request).trajectories.export_rollout(
        caller_of(request), segment(rollout_id)
    )
    return ndjson(request, _lines(actions))


@get(
    "/tasks/{task_id:str}/outcomes",
    opt=documented(
        Operation(
            tag="tasks",
            summary="Outcomes of a task, by whose fault it was",
            description="Of its sandboxes and of its actions. Actions that a fast-forward took "
            "over without running them are not counted again.",
            response=schemas.TaskOutcomes,
        )
    ),
)
async def task_outcomes(request: Request, task_id: FromPath[str]) -> Response[bytes]:
    name = segment(task_id)
    found = await services_of(request).trajectories.outcomes(caller_of(request), name)
    return answer(
        schemas.TaskOutcomes(
            task_id=name, sandboxes=_sum_of(found.sandboxes), actions=_sum_of(found.actions)
        )
    )


HANDLERS = [
    create_action,
    list_actions,
    get_action,
    resolve_action,
    export_sandbox,
    fast_forward,
    list_trajectories,
    export_trajectory,
    task_outcomes,
]


def _limit(query: Query) -> int:
    most = limits.LIST_LIMIT_MAX
    return query.integer("limit", most, at_least=1, at_most=most)


def action_of(action: rows.Action, *, content: bool = False) -> schemas.Action:
    """An action as it is shown; with the content of a file that was written, if wanted."""
    params = kept.unpack_params(action.params)
    return schemas.Action(
        sandbox_id=action.sandbox_id,
        action_id=action.action_id,
        seq=action.seq,
        kind=action.kind,
        state=action.state,
        task_id=action.task_id,
        rollout_id=action.rollout_id,
        step=action.step,
        once=params.once,
        attempt=action.attempt,
        asked=_asked_of(params, content),
        recorded_at=rfc3339(action.recorded_at),
        ended_at=None if action.ended_at is None else rfc3339(action.ended_at),
        result=unpack_result(action.result),
        error=unpack_error(action.error),
        fault=action.fault,
        cause=action.cause,
        evidence={} if action.evidence is None else _evidence.decode(action.evidence),
        origin=action.origin,
        replayed=action.replayed,
        resolved_by=action.resolved_by,
    )


def _asked_of(params: ActionParams, content: bool) -> schemas.ActionAsked:
    if params.kind == "exec":
        return schemas.ActionAsked(
            argv=list(params.argv),
            user=params.user,
            workdir=params.workdir,
            env=params.env,
            timeout_s=params.timeout_s,
            output_bytes=params.output_bytes,
        )
    if params.kind == "snapshot":
        return schemas.ActionAsked(mode=params.mode, name=params.name)
    if params.kind == "read_file":
        return schemas.ActionAsked(path=params.path, user=params.user)
    data = base64.b64decode(params.content or "")
    return schemas.ActionAsked(
        path=params.path,
        user=params.user,
        content=params.content if content else None,
        content_sha256=kept.content_sha256(data),
        bytes=len(data),
    )


async def _lines(actions: AsyncGenerator[rows.Action, None]) -> AsyncGenerator[object, None]:
    count = 0
    async for action in actions:
        yield action_of(action, content=True)
        count += 1
    yield done(actions=count)


async def _forwarded(lines: AsyncGenerator[Forwarded, None]) -> AsyncGenerator[object, None]:
    counts = {"copied": 0, "ran": 0, "skipped": 0}
    diverged = 0
    async for line in lines:
        counts[line.how] += 1
        diverged += line.diverged
        yield schemas.ForwardLine(**msgspec.structs.asdict(line))
    yield done(**counts, diverged=diverged)


def _trajectory_of(rollout: rows.Rollout) -> schemas.Trajectory:
    return schemas.Trajectory(
        rollout_id=rollout.rollout_id,
        task_id=rollout.task_id,
        sandboxes=rollout.sandboxes,
        actions=rollout.actions,
        open=rollout.open,
        last_step=rollout.last_step,
        began_at=rfc3339(rollout.began_at),
        last_at=rfc3339(rollout.last_at),
    )


def _sum_of(counted: Sequence[rows.Counted]) -> schemas.OutcomeSum:
    def of(fault: str | None) -> int:
        return sum(c.count for c in counted if c.fault == fault)

    return schemas.OutcomeSum(
        total=sum(c.count for c in counted),
        user=of("user"),
        platform=of("platform"),
        capacity=of("capacity"),
        none=of(None),
        unknown=sum(c.count for c in counted if c.state == "unknown"),
        by_cause=[
            msgspec.convert(msgspec.structs.asdict(c), schemas.OutcomeCount)
            for c in sorted(counted, key=lambda c: (-c.count, c.state, c.cause or ""))
        ],
    )

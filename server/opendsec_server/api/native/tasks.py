# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/tasks``: the caller's jobs, and what is done to all sandboxes of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from litestar import Response, get, patch, post
from litestar.params import FromPath
from litestar.response import Stream

from opendsec_server.api.http import (
    Query,
    Request,
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
from opendsec_server.contract.errors import (
    Conflict,
    IdempotencyMismatch,
    InvalidRequest,
    TaskEnded,
    TaskExists,
    TaskNotFound,
    TaskOperationNotFound,
)
from opendsec_server.contract.states import TERMINAL
from opendsec_server.control.tasks import TaskLimits, TaskView
from opendsec_server.store.task_operations import (
    OperationKind,
    OperationParams,
    TaskItem,
    TaskOperation,
)
from opendsec_server.store.tasks import TaskCount, TaskState

from . import task_schemas as schemas
from .cursors import make_cursor, read_cursor
from .documented import BODY, Operation, Parameter, documented, paged

TAG = "tasks"
WAIT_S_DEFAULT = 3_600
_STATES: tuple[TaskState, ...] = ("open", "paused", "ended")
_WAITS: tuple[schemas.WaitFor, ...] = ("ended", "running", "paused", "idle")

_create = msgspec.json.Decoder(schemas.CreateTask)
_change = msgspec.json.Decoder(schemas.ChangeTask)
_pause = msgspec.json.Decoder(schemas.PauseTask)
_resume = msgspec.json.Decoder(schemas.ResumeTask)
_kill = msgspec.json.Decoder(schemas.KillTask)

_KEY = Parameter(
    name="Idempotency-Key",
    place="header",
    description="Same key and same parameters: the same operation, with its outcomes from the "
    "first on. Kept for 7 days after its end, scoped to the project.",
    schema={"type": "string", "pattern": f"^{NATIVE_KEY_RE.pattern}$"},
)
_STREAM = Parameter(
    name="stream",
    description="`false`: answer at once with the operation as JSON.",
    schema={"type": "boolean", "default": True},
)
_LINES = (
    " The answer is NDJSON: a line `operation`, a line for each sandbox as its outcome comes "
    "(`sandbox_id`, `outcome`, `error`), lines `progress`, and at the end `done` with the counts. "
    "It goes on when the reader goes away, and after a restart of the server. Asking for the same "
    "while it runs joins it; another operation takes its place."
)
_OPERATION_ERRORS = (*BODY, TaskNotFound, TaskEnded, IdempotencyMismatch)


@post(
    "/tasks",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Create a task",
            description="With limits from the start. Again with the same limits: the same task. "
            "A task without limits is made by its first sandbox.",
            request=schemas.CreateTask,
            response=schemas.Task,
            status=201,
            errors=(*BODY, TaskExists),
        )
    ),
)
async def create_task(request: Request) -> Response[bytes]:
    body = await read_json(request, _create)
    view, new = await services_of(request).tasks.make(
        caller_of(request),
        body.task_id,
        TaskLimits(
            deadline_at=_moment(body.deadline_at),
            sandboxes_max=body.sandboxes_max,
            cpu_seconds_max=body.cpu_seconds_max,
        ),
    )
    return answer(task_of(view), 201 if new else 200)


@get(
    "/tasks",
    opt=documented(
        Operation(
            tag=TAG,
            summary="List tasks",
            description="Newest first, with what they used at the last reading.",
            response=schemas.TaskList,
            parameters=(
                Parameter(
                    name="state",
                    description="Comma-separated: `open`, `paused`, `ended`. Default: all.",
                    schema={"type": "string"},
                ),
                *paged("Tasks"),
            ),
            errors=(InvalidRequest,),
        )
    ),
)
async def list_tasks(request: Request) -> Response[bytes]:
    query = Query(request)
    cursor = query.text("cursor")
    states = query.csv("state")
    if set(states) - set(_STATES):
        raise InvalidRequest(f"state: {', '.join(_STATES)}")
    views, more = await services_of(request).tasks.page(
        caller_of(request),
        states=cast("list[TaskState]", states),
        after=read_cursor(cursor) if cursor else None,
        limit=query.integer(
            "limit", limits.LIST_LIMIT_MAX, at_least=1, at_most=limits.LIST_LIMIT_MAX
        ),
    )
    last = views[-1].task if more else None
    return answer(
        schemas.TaskList(
            tasks=[task_of(view) for view in views],
            next_cursor=None if last is None else make_cursor(last.created_at, last.task_id),
        )
    )


@get(
    "/tasks/{task_id:str}",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Get a task",
            description="With its sandboxes counted, and what they have used until now.",
            response=schemas.Task,
            errors=(TaskNotFound,),
        )
    ),
)
async def get_task(request: Request, task_id: FromPath[str]) -> Response[bytes]:
    view = await services_of(request).tasks.get(caller_of(request), segment(task_id))
    return answer(task_of(view))


@patch(
    "/tasks/{task_id:str}",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Change a task's limits",
            request=schemas.ChangeTask,
            response=schemas.Task,
            errors=(*BODY, TaskNotFound, Conflict),
        )
    ),
)
async def change_task(request: Request, task_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _change)
    services, caller, name = services_of(request), caller_of(request), segment(task_id)
    now = (await services.tasks.get(caller, name)).task
    wanted = TaskLimits(
        deadline_at=now.deadline_at
        if body.deadline_at is msgspec.UNSET
        else _moment(body.deadline_at),
        sandboxes_max=now.sandboxes_max
        if body.sandboxes_max is msgspec.UNSET
        else body.sandboxes_max,
        cpu_seconds_max=now.cpu_seconds_max
        if body.cpu_seconds_max is msgspec.UNSET
        else body.cpu_seconds_max,
    )
    view = await services.tasks.set_limits(caller, name, wanted, reopen=body.reopen)
    return answer(task_of(view))


@post(
    "/tasks/{task_id:str}/pause",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Pause a task",
            description="Pauses every sandbox of it, and lets none be made in it until it is "
            "resumed. Says how much memory that freed." + _LINES,
            request=schemas.PauseTask,
            request_required=False,
            parameters=(_KEY, _STREAM),
            errors=_OPERATION_ERRORS,
        )
    ),
)
async def pause_task(request: Request, task_id: FromPath[str]) -> Response[bytes] | Stream:
    body = await read_json(request, _pause, empty=b"{}")
    return await _operate(request, task_id, "pause", OperationParams(mode=body.mode))


@post(
    "/tasks/{task_id:str}/resume",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Resume a task",
            description="Lets every paused sandbox of it run on; each needs a place in the quota."
            + _LINES,
            request=schemas.ResumeTask,
            request_required=False,
            parameters=(_KEY, _STREAM),
            errors=_OPERATION_ERRORS,
        )
    ),
)
async def resume_task(request: Request, task_id: FromPath[str]) -> Response[bytes] | Stream:
    body = await read_json(request, _resume, empty=b"{}")
    timeout_s = None if body.timeout_s is None else float(body.timeout_s)
    return await _operate(request, task_id, "resume", OperationParams(timeout_s=timeout_s))


@post(
    "/tasks/{task_id:str}/kill",
    status_code=200,
    opt=documented(
        Operation(
            tag=TAG,
            summary="Kill a task",
            description="Ends every sandbox of it, in whatever state." + _LINES,
            request=schemas.KillTask,
            request_required=False,
            parameters=(_KEY, _STREAM),
            errors=_OPERATION_ERRORS,
        )
    ),
)
async def kill_task(request: Request, task_id: FromPath[str]) -> Response[bytes] | Stream:
    body = await read_json(request, _kill, empty=b"{}")
    return await _operate(request, task_id, "kill", OperationParams(end=body.end))


@get(
    "/tasks/{task_id:str}/operations",
    opt=documented(
        Operation(
            tag=TAG,
            summary="List operations on a task",
            description="The latest 100, newest first.",
            response=schemas.TaskOperationList,
            errors=(TaskNotFound,),
        )
    ),
)
async def list_operations(request: Request, task_id: FromPath[str]) -> Response[bytes]:
    found = await services_of(request).tasks.operations(caller_of(request), segment(task_id))
    return answer(schemas.TaskOperationList(operations=[operation_of(one) for one in found]))


@get(
    "/tasks/{task_id:str}/operations/{operation_id:str}",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Get an operation on a task",
            response=schemas.TaskOperation,
            errors=(TaskNotFound, TaskOperationNotFound),
        )
    ),
)
async def get_operation(
    request: Request, task_id: FromPath[str], operation_id: FromPath[str]
) -> Response[bytes]:
    operation = await services_of(request).tasks.operation(
        caller_of(request), segment(task_id), segment(operation_id)
    )
    return answer(operation_of(operation))


@get(
    "/tasks/{task_id:str}/operations/{operation_id:str}/outcomes",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Follow an operation on a task",
            description="Its outcomes, from the first or from the one after `after` on, as they "
            "come: NDJSON, as the request that began it is answered.",
            parameters=(
                Parameter(
                    name="after",
                    description="`seq` of the last outcome that was read.",
                    schema={"type": "integer", "minimum": 0, "default": 0},
                ),
            ),
            errors=(InvalidRequest, TaskNotFound, TaskOperationNotFound),
        )
    ),
)
async def follow_operation(
    request: Request, task_id: FromPath[str], operation_id: FromPath[str]
) -> Stream:
    after = Query(request).integer("after", 0, at_least=0)
    operation = await services_of(request).tasks.operation(
        caller_of(request), segment(task_id), segment(operation_id)
    )
    return ndjson(request, _lines(request, operation, after))


@get(
    "/tasks/{task_id:str}/wait",
    opt=documented(
        Operation(
            tag=TAG,
            summary="Wait for a task",
            description="NDJSON: the task's sandboxes (`sandboxes`) each time their counts change, "
            "and at the end `done` with `reached`: false, if the time was over before.",
            parameters=(
                Parameter(
                    name="until",
                    description="`ended`: no sandbox is left. `running`, `paused`: every one that "
                    "is left is. `idle`: none is between two states.",
                    schema={"type": "string", "enum": list(_WAITS), "default": "ended"},
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
            errors=(InvalidRequest, TaskNotFound),
        )
    ),
)
async def wait_for_task(request: Request, task_id: FromPath[str]) -> Stream:
    query = Query(request)
    until = query.text("until") or "ended"
    if until not in _WAITS:
        raise InvalidRequest(f"until: {', '.join(_WAITS)}")
    timeout_s = query.integer("timeout_s", WAIT_S_DEFAULT, at_least=0, at_most=limits.TIMEOUT_S_MAX)
    services, caller, name = services_of(request), caller_of(request), segment(task_id)
    await services.tasks.check(caller, name)

    async def lines() -> AsyncGenerator[object, None]:
        reached, counts = False, sandboxes_of([])
        async for found, reached in services.tasks.wait(caller, name, until, timeout_s):  # noqa: B007
            counts = sandboxes_of(found)
            yield {"sandboxes": counts}
        yield done(reached=reached, sandboxes=counts)

    return ndjson(request, lines())


async def _operate(
    request: Request, task_id: str, kind: OperationKind, params: OperationParams
) -> Response[bytes] | Stream:
    key = idempotency_key(request.headers.get("idempotency-key"), NATIVE_KEY_RE)
    stream = Query(request).text("stream") or "true"
    if stream not in ("true", "false"):
        raise InvalidRequest("stream: true or false")
    operation, _ = await services_of(request).tasks.operate(
        caller_of(request), segment(task_id), kind, params, key=key
    )
    if stream == "false":
        return answer(operation_of(operation), 202)
    return ndjson(request, _lines(request, operation, 0))


async def _lines(
    request: Request, operation: TaskOperation, after: int
) -> AsyncGenerator[object, None]:
    yield schemas.TaskLine(operation=operation_of(operation))
    last = operation
    async for now, items in services_of(request).tasks.follow(operation, after):
        for item in items:
            yield _item_of(item)
        if (now.done, now.failed) != (last.done, last.failed):
            yield schemas.TaskLine(progress=operation_of(now))
        last = now
    yield done(**msgspec.structs.asdict(operation_of(last)))


def task_of(view: TaskView) -> schemas.Task:
    """A task as it is shown."""
    task, used = view.task, view.usage
    return schemas.Task(
        task_id=task.task_id,
        state=task.state,
        created_at=rfc3339(task.created_at),
        used_at=rfc3339(task.used_at),
        deadline_at=None if task.deadline_at is None else rfc3339(task.deadline_at),
        sandboxes_max=task.sandboxes_max,
        cpu_seconds_max=task.cpu_seconds_max,
        made=task.made,
        ended_at=None if task.ended_at is None else rfc3339(task.ended_at),
        end_reason=task.end_reason,
        sandboxes=sandboxes_of(view.counts),
        usage=schemas.TaskUsage(**msgspec.structs.asdict(used)),
        operation=None if view.operation is None else operation_of(view.operation),
    )


def sandboxes_of(counts: list[TaskCount]) -> schemas.TaskSandboxes:
    """The sandboxes of a task as they are shown."""
    by_state: Counter[Any] = Counter()
    by_backend: Counter[Any] = Counter()
    ended: Counter[Any] = Counter()
    for one in counts:
        if one.state in TERMINAL:
            ended[one.reason, one.fault] += one.count
        else:
            by_state[one.state] += one.count
            by_backend[one.backend] += one.count
    return schemas.TaskSandboxes(
        live=by_state.total(),
        by_state=dict(by_state),
        by_backend=dict(by_backend),
        ended=[
            schemas.TaskEnd(reason=reason, fault=fault, count=count)
            for (reason, fault), count in ended.most_common()
        ],
    )


def operation_of(operation: TaskOperation) -> schemas.TaskOperation:
    """An operation as it is shown."""
    finished_at = operation.finished_at
    return schemas.TaskOperation(
        operation_id=operation.operation_id,
        kind=operation.kind,
        created_at=rfc3339(operation.created_at),
        finished_at=None if finished_at is None else rfc3339(finished_at),
        superseded_by=operation.superseded_by,
        asked=operation.asked,
        done=operation.done,
        failed=operation.failed,
        memory_freed_bytes=operation.memory_freed_bytes,
    )


def _item_of(item: TaskItem) -> schemas.TaskLine:
    return schemas.TaskLine(
        sandbox_id=item.sandbox_id,
        seq=item.seq,
        outcome=item.outcome,
        memory_freed_bytes=item.memory_freed_bytes or None,
        error=None if item.error is None else msgspec.json.decode(item.error),
    )


def _moment(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        # Into UTC: what has no place there cannot be shown.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"deadline_at: `{text[:64]}` is not a date and time (RFC 3339)"
        ) from None


HANDLERS = (
    create_task,
    list_tasks,
    get_task,
    change_task,
    pause_task,
    resume_task,
    kill_task,
    list_operations,
    get_operation,
    follow_operation,
    wait_for_task,
)

# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/builds``: build templates of steps or of a Dockerfile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

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
    no_content,
    read_json,
    rfc3339,
    segment,
    services_of,
)
from opendsec_server.api.protocol import ENVD_VERSION
from opendsec_server.api.uploads import upload_url
from opendsec_server.contract.errors import (
    BuildNotFound,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotSupported,
    QuotaExceeded,
)
from opendsec_server.control.builds.dockerfile import plan_of_dockerfile
from opendsec_server.control.builds.logs import LogEntry
from opendsec_server.control.builds.plan import BuildPlan, BuildStep, Stage
from opendsec_server.control.builds.service import CANCELLED, BuildRequest

from . import template_schemas as schemas
from .documented import BODY, Operation, Parameter, documented
from .templates import auth_of, build_of

SILENCE_S = 15.0
"""A log that is followed sends an empty line after so long a silence, so that no proxy ends it."""

_new = msgspec.json.Decoder(schemas.NewBuild)
_start = msgspec.json.Decoder(schemas.StartBuild)
_encode = msgspec.json.Encoder().encode


@post(
    "/builds",
    opt=documented(
        Operation(
            tag="templates",
            summary="Ask for a build of a template",
            description="The template is made if the project has none of that name. Send the "
            "files that it copies, then start it.",
            request=schemas.NewBuild,
            response=schemas.Build,
            status=201,
            errors=(*BODY, Forbidden, Conflict, QuotaExceeded),
        )
    ),
)
async def request_build(request: Request) -> Response[bytes]:
    body = await read_json(request, _new)
    wanted = BuildRequest(
        name=body.name,
        tags=tuple(body.tags),
        cpu=body.cpu,
        memory_mb=body.memory_mb,
        disk_mb=body.disk_mb,
        envd_version=ENVD_VERSION,
    )
    _, build = await services_of(request).builds.request(caller_of(request), wanted)
    about(request, f"{body.name} {build.build_id}")
    return answer(build_of(build), 201)


@get(
    "/builds/{build_id:str}",
    opt=documented(
        Operation(
            tag="templates", summary="A build", response=schemas.Build, errors=(BuildNotFound,)
        )
    ),
)
async def get_build(request: Request, build_id: FromPath[str]) -> Response[bytes]:
    build = await services_of(request).builds.by_id(caller_of(request), segment(build_id))
    return answer(build_of(build))


@get(
    "/builds/{build_id:str}/files/{files:str}",
    opt=documented(
        Operation(
            tag="templates",
            right="templates:write",
            summary="Where to send an archive",
            description="`files` is the SHA-256 that the steps name it by, in hexadecimal.",
            response=schemas.FileUpload,
            errors=(InvalidRequest, BuildNotFound),
        )
    ),
)
async def upload_address(
    request: Request, build_id: FromPath[str], files: FromPath[str]
) -> Response[bytes]:
    services, caller, name = services_of(request), caller_of(request), segment(files)
    build = await services.builds.by_id(caller, segment(build_id))
    present = services.builds.uploads.present(caller.project_id, name)
    url = upload_url(request, caller.project_id, build.template_id, name)
    return answer(schemas.FileUpload(present=present, url=url))


@post(
    "/builds/{build_id:str}/start",
    opt=documented(
        Operation(
            tag="templates",
            summary="Start a build",
            description="It goes on by itself: read its state and log. A step that is unknown or "
            "malformed makes a failed build; a Dockerfile that cannot be read is refused.",
            request=schemas.StartBuild,
            status=202,
            errors=(*BODY, BuildNotFound, Conflict, QuotaExceeded, NotSupported),
        )
    ),
    status_code=202,
)
async def start_build(request: Request, build_id: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _start)
    services, caller = services_of(request), caller_of(request)
    build = await services.builds.by_id(caller, segment(build_id))
    # A long Dockerfile takes a second to read.
    plan = await asyncio.to_thread(_plan_of, body)
    await services.builds.start(caller, build, plan)
    return Response(b"", status_code=202)


def _plan_of(body: schemas.StartBuild) -> BuildPlan:
    bases = (body.dockerfile, body.from_image, body.from_template)
    if sum(base is not None for base in bases) != 1:
        raise InvalidRequest("give one of dockerfile, from_image and from_template")
    if body.start_command and body.start_image:
        raise InvalidRequest("give either start_command or start_image")
    if body.dockerfile is not None:
        if body.steps:
            raise InvalidRequest("steps: a Dockerfile has its own")
        plan = plan_of_dockerfile(
            body.dockerfile,
            context=body.context,
            build_args=body.build_args,
            target=body.target,
        )
    else:
        steps = tuple(
            BuildStep(
                type=step.type, args=tuple(step.args), files_hash=step.files, force=step.force
            )
            for step in body.steps
        )
        stage = Stage(
            name="builder",
            from_image=body.from_image,
            from_template=body.from_template,
            steps=steps,
        )
        plan = BuildPlan(stages=(stage,))
    return msgspec.structs.replace(
        plan,
        auth=auth_of(body.registry_auth),
        force=body.force,
        start_cmd=body.start_command,
        start_image=body.start_image,
        ready_cmd=body.ready_command,
    )


@post(
    "/builds/{build_id:str}/cancel",
    opt=documented(
        Operation(
            tag="templates",
            summary="Cancel a build",
            description="Returns when nothing of it runs. What it has done is kept for the next.",
            status=204,
            errors=(BuildNotFound, Conflict),
        )
    ),
    status_code=204,
)
async def cancel_build(request: Request, build_id: FromPath[str]) -> Response[None]:
    services = services_of(request)
    build = await services.builds.by_id(caller_of(request), segment(build_id))
    await services.builds.cancel(build.build_id)
    return no_content()


@get(
    "/builds/{build_id:str}/logs",
    opt=documented(
        Operation(
            tag="templates",
            summary="The log of a build, live",
            description="Lines of JSON, each an entry. They come as they are written; the last "
            'line is `{"build": …}`, the build as it ended. Empty lines keep it alive.',
            parameters=(
                Parameter(
                    name="offset",
                    description="How many entries to leave out.",
                    schema={"type": "integer", "minimum": 0, "default": 0},
                ),
            ),
            errors=(InvalidRequest, BuildNotFound),
        )
    ),
)
async def follow_logs(request: Request, build_id: FromPath[str]) -> Stream:
    services, caller = services_of(request), caller_of(request)
    offset = Query(request).integer("offset", 0, at_least=0)
    build = await services.builds.by_id(caller, segment(build_id))

    async def lines() -> AsyncIterator[bytes]:
        entries = services.builds.follow(build.build_id, offset)
        async for entry in _alive(entries):
            yield b"\n" if entry is None else _encode(_entry_of(entry)) + b"\n"
        try:
            ended = await services.builds.by_id(caller, build.build_id)
        except BuildNotFound:
            ended = msgspec.structs.replace(
                build, state="error", error_code=CANCELLED, error="the template was deleted"
            )
        yield _encode(schemas.BuildEnd(build=build_of(ended))) + b"\n"

    return Stream(lines(), media_type="application/x-ndjson")


async def _alive(entries: AsyncIterator[LogEntry]) -> AsyncIterator[LogEntry | None]:
    """The entries, and None after each silence."""
    following = asyncio.ensure_future(anext(entries))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=SILENCE_S)
            if not done:
                yield None
                continue
            try:
                yield following.result()
            except StopAsyncIteration:
                return
            following = asyncio.ensure_future(anext(entries))
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
            await following


def _entry_of(entry: LogEntry) -> schemas.LogEntry:
    return schemas.LogEntry(
        at=rfc3339(entry.at), level=entry.level, message=entry.message, step=entry.step
    )


HANDLERS = [
    request_build,
    get_build,
    upload_address,
    start_build,
    cancel_build,
    follow_logs,
]

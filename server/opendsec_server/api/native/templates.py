# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/templates``: read, show, tag, push and delete them."""

from __future__ import annotations

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.params import FromPath

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
from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    Forbidden,
    ImageNotFound,
    InvalidRequest,
    TemplateNotFound,
)
from opendsec_server.contract.images import RegistryAuth
from opendsec_server.control.builds.service import Shown
from opendsec_server.control.iam import Caller
from opendsec_server.store import records
from opendsec_server.store.templates import BuildFilter

from . import template_schemas as schemas
from .documented import BODY, REGISTRY, Operation, documented

_OWN = (TemplateNotFound, Forbidden)

_update = msgspec.json.Decoder(schemas.UpdateTemplate)
_assign = msgspec.json.Decoder(schemas.AssignTags)
_push = msgspec.json.Decoder(schemas.PushTemplate)


def build_of(build: records.TemplateBuild) -> schemas.Build:
    """A build as it is shown."""
    error = None
    if build.error is not None:
        error = schemas.BuildError(
            code=build.error_code or "internal", message=build.error, step=build.error_step
        )
    return schemas.Build(
        build_id=build.build_id,
        template_id=build.template_id,
        state=build.state,
        tags=build.tags,
        cpu=build.cpu,
        memory_mb=build.memory_mb,
        disk_mb=build.disk_mb,
        image=build.image,
        default_user=build.default_user,
        default_workdir=build.default_workdir,
        env=build.env,
        start_command=None if build.start is None else list(build.start.argv),
        error=error,
        created_at=rfc3339(build.created_at),
        started_at=_time(build.started_at),
        finished_at=_time(build.finished_at),
    )


def _time(at: float | None) -> str | None:
    return None if at is None else rfc3339(at)


def _template_of(caller: Caller, shown: Shown, use: tuple[int, float] | None) -> schemas.Template:
    template, build = shown.template, shown.build
    spawned, last = use or (0, None)
    return schemas.Template(
        template_id=template.template_id,
        name=template.name,
        own=template.project_id == caller.project_id,
        cpu=build.cpu if build else template.cpu,
        memory_mb=build.memory_mb if build else template.memory_mb,
        disk_mb=build.disk_mb if build else template.disk_mb,
        created_at=rfc3339(template.created_at),
        updated_at=rfc3339(template.updated_at),
        public=template.public,
        state=build.state if build else "ready",
        builds=shown.builds,
        spawned=spawned,
        last_spawned_at=_time(last),
    )


@get(
    "/templates",
    opt=documented(
        Operation(tag="templates", summary="List templates", response=schemas.TemplateList)
    ),
)
async def list_templates(request: Request) -> Response[bytes]:
    services, caller = services_of(request), caller_of(request)
    use = await services.templates.use()
    shown = await services.builds.shown(await services.templates.visible(caller))
    templates = [_template_of(caller, s, use.get(s.template.template_id)) for s in shown]
    return answer(schemas.TemplateList(templates=templates))


@get(
    "/templates/{template:str}",
    opt=documented(
        Operation(
            tag="templates",
            summary="A template with its tags and builds",
            response=schemas.TemplateDetail,
            errors=(InvalidRequest, TemplateNotFound),
        )
    ),
)
async def get_template(request: Request, template: FromPath[str]) -> Response[bytes]:
    services, caller = services_of(request), caller_of(request)
    found = await services.templates.resolve(caller, segment(template))
    use = await services.templates.use()
    (shown,) = await services.builds.shown([found])
    tags, builds = [], []
    if found.project_id == caller.project_id:
        tags = await services.builds.tags(found)
        wanted = BuildFilter(template_id=found.template_id, limit=limits.LIST_LIMIT_MAX)
        builds = (await services.builds.page(wanted)).builds
    described = _template_of(caller, shown, use.get(found.template_id))
    return answer(
        schemas.TemplateDetail(
            **msgspec.structs.asdict(described),
            tags=[
                schemas.Tag(tag=t.tag, build_id=t.build_id, created_at=rfc3339(t.created_at))
                for t in tags
            ],
            newest_builds=[build_of(build) for build in builds],
        )
    )


@patch(
    "/templates/{template:str}",
    opt=documented(
        Operation(
            tag="templates",
            summary="Show a template to all projects, or no longer",
            request=schemas.UpdateTemplate,
            status=204,
            errors=(*BODY, *_OWN),
        )
    ),
)
async def update_template(request: Request, template: FromPath[str]) -> Response[None]:
    body = await read_json(request, _update)
    await services_of(request).builds.set_public(caller_of(request), segment(template), body.public)
    return no_content()


@delete(
    "/templates/{template:str}",
    opt=documented(
        Operation(
            tag="templates",
            summary="Delete a template",
            description="With its builds; those under way are cancelled. Sandboxes of it go on.",
            status=204,
            errors=(InvalidRequest, *_OWN),
        )
    ),
)
async def delete_template(request: Request, template: FromPath[str]) -> Response[None]:
    await services_of(request).builds.delete(caller_of(request), segment(template))
    return no_content()


@post(
    "/templates/{template:str}/tags",
    opt=documented(
        Operation(
            tag="templates",
            summary="Give tags to a build",
            description="To the one that the template's reference means. Others lose them.",
            request=schemas.AssignTags,
            response=schemas.Build,
            status=201,
            errors=(*BODY, *_OWN),
        )
    ),
)
async def assign_tags(request: Request, template: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _assign)
    about(request, segment(template), *body.tags)
    build, _ = await services_of(request).builds.assign_tags(
        caller_of(request), segment(template), body.tags
    )
    return answer(build_of(build), 201)


@delete(
    "/templates/{template:str}/tags/{tag:str}",
    opt=documented(
        Operation(
            tag="templates",
            summary="Take a tag away",
            description="The build stays. The tag `default` cannot be taken away.",
            status=204,
            errors=(InvalidRequest, *_OWN),
        )
    ),
)
async def remove_tag(
    request: Request, template: FromPath[str], tag: FromPath[str]
) -> Response[None]:
    await services_of(request).builds.remove_tags(
        caller_of(request), segment(template), [segment(tag)]
    )
    return no_content()


@post(
    "/templates/{template:str}/push",
    opt=documented(
        Operation(
            tag="templates",
            summary="Send a template's image to a registry",
            request=schemas.PushTemplate,
            response=schemas.Pushed,
            status=200,
            errors=(
                *BODY,
                *_OWN,
                ImageNotFound,
                *REGISTRY,
            ),
        )
    ),
    status_code=200,
)
async def push_template(request: Request, template: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _push)
    about(request, segment(template), body.reference)
    digest = await services_of(request).builds.push(
        caller_of(request),
        segment(template),
        body.reference,
        auth=auth_of(body.registry_auth),
    )
    return answer(schemas.Pushed(digest=digest))


def auth_of(login: schemas.RegistryLogin | None) -> RegistryAuth | None:
    """A caller's log-in for a registry."""
    if login is None:
        return None
    return RegistryAuth(username=login.username, password=login.password)


HANDLERS = [
    list_templates,
    get_template,
    update_template,
    delete_template,
    assign_tags,
    remove_tag,
    push_template,
]

# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's calls that read and change templates and their tags. Status codes are exact."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.params import FromPath

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
    rfc3339,
    segment,
    services_of,
)
from opendsec_server.contract import limits
from opendsec_server.contract.errors import Forbidden, InvalidRequest, TemplateNotFound
from opendsec_server.control.templates import parse_reference
from opendsec_server.store.records import Template
from opendsec_server.store.templates import BuildFilter

from . import template_convert as convert
from . import template_schemas as schemas

_update = msgspec.json.Decoder(schemas.Update)
_assign = msgspec.json.Decoder(schemas.AssignTags)
_delete = msgspec.json.Decoder(schemas.DeleteTags)


async def _shown(request: Request, templates: Sequence[Template]) -> list[schemas.Template]:
    services = services_of(request)
    use = await services.templates.use()
    return [
        convert.template_of(shown, use.get(shown.template.template_id))
        for shown in await services.builds.shown(templates)
    ]


@get("/templates")
async def list_templates(request: Request) -> Response[bytes]:
    """``GET /templates``: every template of the project and of the installation."""
    visible = await services_of(request).templates.visible(caller_of(request))
    return answer(await _shown(request, visible))


@get("/default-templates")
async def list_default_templates(request: Request) -> Response[bytes]:
    """``GET /default-templates``: those of the installation."""
    visible = await services_of(request).templates.visible(caller_of(request))
    return answer(await _shown(request, [t for t in visible if t.project_id is None]))


@get("/v2/templates")
async def list_templates_by_page(request: Request) -> Response[bytes]:
    """``GET /v2/templates``: the same, newest first, page by page."""
    query = Query(request)
    limit = query.integer("limit", limits.LIST_LIMIT_MAX, at_least=1, at_most=limits.LIST_LIMIT_MAX)
    token = query.text("nextToken")
    visible = await services_of(request).templates.visible(caller_of(request))
    visible.sort(key=_place, reverse=True)
    if token is not None:
        last = read_cursor(token, ascending=False)
        visible = [t for t in visible if _place(t) < last]
    page = visible[:limit]
    headers = None
    if len(visible) > limit:
        headers = {"X-Next-Token": make_cursor(*_place(page[-1]), ascending=False)}
    return answer(await _shown(request, page), headers=headers)


def _place(template: Template) -> tuple[float, str]:
    return template.created_at, template.template_id


@get("/templates/{template_id:str}")
async def get_template(request: Request, template_id: FromPath[str]) -> Response[bytes]:
    """``GET /templates/{id}``: the template with a page of its builds, newest first."""
    services, query = services_of(request), Query(request)
    limit = query.integer("limit", limits.LIST_LIMIT_MAX, at_least=1, at_most=limits.LIST_LIMIT_MAX)
    token = query.text("nextToken")
    template = await services.templates.resolve(caller_of(request), segment(template_id))
    page = await services.builds.page(
        BuildFilter(
            template_id=template.template_id,
            after=None if token is None else read_cursor(token, ascending=False),
            limit=limit,
        )
    )
    headers = None
    if page.more:
        last = page.builds[-1]
        headers = {"X-Next-Token": make_cursor(last.created_at, last.build_id, ascending=False)}
    (shown,) = await _shown(request, [template])
    return answer(
        schemas.TemplateWithBuilds(
            **msgspec.structs.asdict(shown),
            builds=[convert.build_of(build) for build in page.builds],
        ),
        headers=headers,
    )


@patch(["/templates/{template_id:str}", "/v2/templates/{template_id:str}"])
async def update_template(request: Request, template_id: FromPath[str]) -> Response[bytes]:
    """``PATCH /templates/{id}`` and ``/v2``: who may use it."""
    body = await read_json(request, _update)
    services, caller, name = services_of(request), caller_of(request), segment(template_id)
    if body.public is None:
        template = await services.templates.own(caller, name)
    else:
        template = await services.builds.set_public(caller, name, body.public)
    return answer(schemas.Updated(names=convert.names_of(template)))


@delete("/templates/{template_id:str}")
async def delete_template(request: Request, template_id: FromPath[str]) -> Response[None]:
    """``DELETE /templates/{id}`` of a template, or of a snapshot, whose id is a template's."""
    services, caller, name = services_of(request), caller_of(request), segment(template_id)
    try:
        await services.templates.resolve(caller, name)
    except (InvalidRequest, TemplateNotFound):
        caller.require("snapshots:write")
        await services.snapshots.delete(caller, name)
        return no_content()
    await services.builds.delete(caller, name)
    return no_content()


@get("/templates/aliases/{alias:str}")
async def get_alias(request: Request, alias: FromPath[str]) -> Response[bytes]:
    """Whether a template or snapshot of that name exists. 403: it does, is shown to all, and is not
    the caller's. What others do not show is not there."""
    services, caller, name = services_of(request), caller_of(request), segment(alias)
    wanted = parse_reference(name)
    template = await services.templates.find(caller, wanted)
    if template is not None:
        if template.project_id is not None and wanted.tag is not None:
            await services.templates.build_of(template, wanted.tag)
        if template.project_id not in (None, caller.project_id):
            raise Forbidden(f"the template `{name}` is not of this project")
        return answer(
            schemas.TemplateAlias(template_id=template.template_id, public=template.public)
        )
    snapshot = await services.snapshots.find(caller, wanted)
    if snapshot is not None:
        return answer(schemas.TemplateAlias(template_id=snapshot.snapshot_id, public=False))
    raise TemplateNotFound(f"there is no template `{name}`")


@post("/templates/tags")
async def assign_tags(request: Request) -> Response[bytes]:
    """``POST /templates/tags``: 201."""
    body = await read_json(request, _assign)
    about(request, body.target, *body.tags)
    build, tags = await services_of(request).builds.assign_tags(
        caller_of(request), body.target, body.tags
    )
    return answer(schemas.AssignedTags(tags=tags, build_id=build.build_id), 201)


@delete("/templates/tags")
async def remove_tags(request: Request) -> Response[None]:
    """``DELETE /templates/tags``, with a body: 204."""
    body = await read_json(request, _delete)
    about(request, body.name, *body.tags)
    await services_of(request).builds.remove_tags(caller_of(request), body.name, body.tags)
    return no_content()


@get("/templates/{template_id:str}/tags")
async def list_tags(request: Request, template_id: FromPath[str]) -> Response[bytes]:
    """``GET /templates/{id}/tags``, newest first."""
    services = services_of(request)
    template = await services.templates.resolve(caller_of(request), segment(template_id))
    return answer(
        [
            schemas.Tag(tag=tag.tag, build_id=tag.build_id, created_at=rfc3339(tag.created_at))
            for tag in await services.builds.tags(template)
        ]
    )


HANDLERS = [
    list_templates,
    list_default_templates,
    list_templates_by_page,
    get_template,
    update_template,
    delete_template,
    get_alias,
    assign_tags,
    remove_tags,
    list_tags,
]

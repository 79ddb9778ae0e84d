# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's calls that read templates."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromPath

from opendsec_server.api.http import Request, answer, caller_of, segment, services_of

from . import convert, schemas


@get(["/templates", "/v2/templates", "/default-templates"])
async def list_templates(request: Request) -> Response[bytes]:
    """Every template that the caller may use. Few, so always on one page."""
    templates = services_of(request).templates
    use = await templates.use()
    visible = await templates.visible(caller_of(request))
    return answer([convert.template_of(t, use.get(t.template_id)) for t in visible])


@get("/templates/aliases/{alias:str}")
async def get_alias(request: Request, alias: FromPath[str]) -> Response[bytes]:
    """Whether a template of that name exists."""
    template = await services_of(request).templates.resolve(caller_of(request), segment(alias))
    return answer(schemas.TemplateAlias(template_id=template.template_id, public=template.public))


HANDLERS = [list_templates, get_alias]

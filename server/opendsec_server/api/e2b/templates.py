# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's calls that read templates."""

from __future__ import annotations

from litestar import Response, get
from litestar.params import FromPath

from opendsec_server.api.http import Request, answer, caller_of, segment, services_of
from opendsec_server.contract.errors import TemplateNotFound
from opendsec_server.control.templates import parse_reference

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
    """Whether a template or snapshot of that name exists."""
    services, caller, name = services_of(request), caller_of(request), segment(alias)
    wanted = parse_reference(name)
    template = await services.templates.find(caller, wanted)
    if template is not None:
        return answer(
            schemas.TemplateAlias(template_id=template.template_id, public=template.public)
        )
    snapshot = await services.snapshots.find(caller, wanted)
    if snapshot is None:
        raise TemplateNotFound(f"there is no template `{name}`")
    return answer(schemas.TemplateAlias(template_id=snapshot.snapshot_id, public=False))


HANDLERS = [list_templates, get_alias]

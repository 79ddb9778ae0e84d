# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1`` beside the sandboxes: templates, the server, the project and its keys."""

from __future__ import annotations

import msgspec
from litestar import Response, delete, get, post
from litestar.params import FromPath

from opendsec_server import __version__
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
from opendsec_server.api.protocol import ENVD_VERSION
from opendsec_server.contract.errors import (
    Conflict,
    InvalidRequest,
    NodeUnavailable,
    NotFound,
    PayloadTooLarge,
)
from opendsec_server.contract.node import NodeLoad

from . import schemas
from .convert import key_of
from .documented import Operation, documented

FEATURES = {
    "metrics": True,
    "network_rules": True,
    "domain_rules": False,
    "pause": True,
    "fork": True,
    "snapshots": True,
    "template_builds": True,
    "volumes": False,
    "secrets": False,
}

_create_key = msgspec.json.Decoder(schemas.CreateKey)


@get(
    "/info",
    opt=documented(
        Operation(
            tag="server",
            summary="What this server is and offers",
            description="The load of the node, its host's name and its labels are for the "
            "installation's first project.",
            response=schemas.Info,
            errors=(NodeUnavailable,),
        )
    ),
)
async def get_info(request: Request) -> Response[bytes]:
    services = services_of(request)
    node = await services.node.info()
    if not await services.iam.operates(caller_of(request)):
        # How much others do, and on which machine, is the operator's to know.
        node = msgspec.structs.replace(
            node, hostname="", sandboxes=0, load=NodeLoad(), labels={}, features={}
        )
    return answer(
        schemas.Info(
            version=__version__,
            node=node,
            domain=services.config.domain,
            envd_version=ENVD_VERSION,
            features=FEATURES,
            backends=list(node.backends),
            default_backend=services.backends.default,
        )
    )


@get(
    "/project",
    opt=documented(
        Operation(tag="project", summary="The caller's project", response=schemas.Project)
    ),
)
async def get_project(request: Request) -> Response[bytes]:
    project = caller_of(request).project
    return answer(
        schemas.Project(
            project_id=project.project_id,
            name=project.name,
            sandboxes_max=await services_of(request).projects.sandboxes_max(caller_of(request)),
            created_at=rfc3339(project.created_at),
        )
    )


@get(
    "/api-keys",
    opt=documented(
        Operation(
            tag="project", right="keys:read", summary="List API keys", response=schemas.ApiKeyList
        )
    ),
)
async def list_keys(request: Request) -> Response[bytes]:
    keys = await services_of(request).iam.keys(caller_of(request))
    return answer(schemas.ApiKeyList(api_keys=[key_of(key) for key in keys]))


@post(
    "/api-keys",
    opt=documented(
        Operation(
            tag="project",
            right="keys:write",
            summary="Make an API key",
            description="The key itself is in this answer only.",
            request=schemas.CreateKey,
            response=schemas.NewApiKey,
            status=201,
            errors=(InvalidRequest, PayloadTooLarge),
        )
    ),
)
async def create_key(request: Request) -> Response[bytes]:
    body = await read_json(request, _create_key)
    key, secret = await services_of(request).iam.create_key(caller_of(request), body.name)
    about(request, key.key_id)
    shown = msgspec.structs.asdict(key_of(key))
    return answer(schemas.NewApiKey(**shown, key=secret), 201)


@delete(
    "/api-keys/{key_id:str}",
    opt=documented(
        Operation(
            tag="project",
            right="keys:write",
            summary="Delete an API key",
            description="It is refused from now on.",
            status=204,
            errors=(NotFound, Conflict),
        )
    ),
)
async def delete_key(request: Request, key_id: FromPath[str]) -> Response[None]:
    await services_of(request).iam.delete_key(caller_of(request), segment(key_id))
    return no_content()


HANDLERS = [get_info, get_project, list_keys, create_key, delete_key]

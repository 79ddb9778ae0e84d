# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/nodes``: the machines, for operators."""

from __future__ import annotations

import msgspec
from litestar import Response, get, patch, post
from litestar.params import FromPath

from opendsec_server.api.http import (
    Request,
    answer,
    caller_of,
    read_json,
    segment,
    services_of,
)
from opendsec_server.contract.errors import Conflict, Forbidden, NodeUnavailable, NotFound
from opendsec_server.control.nodes import Member

from . import node_schemas as schemas
from .documented import BODY, Operation, documented

_NAMED = "By id, or by the name that the gateway's settings give it (URL-encoded)."

_mark = msgspec.json.Decoder(schemas.MarkNode)


@get(
    "/nodes",
    opt=documented(
        Operation(
            tag="nodes",
            summary="List nodes",
            description="As this gateway knows them. For the installation's first project.",
            response=schemas.NodeList,
            errors=(Forbidden,),
        )
    ),
)
async def list_nodes(request: Request) -> Response[bytes]:
    nodes = await services_of(request).nodes.list(caller_of(request))
    return answer(schemas.NodeList(nodes=[_node_of(node) for node in nodes]))


@get(
    "/nodes/{node:str}",
    opt=documented(
        Operation(
            tag="nodes",
            summary="A node",
            description=_NAMED,
            response=schemas.Node,
            errors=(Forbidden, NotFound),
        )
    ),
)
async def get_node(request: Request, node: FromPath[str]) -> Response[bytes]:
    found = await services_of(request).nodes.get(caller_of(request), segment(node))
    return answer(_node_of(found))


@patch(
    "/nodes/{node:str}",
    opt=documented(
        Operation(
            tag="nodes",
            summary="Label or drain a node",
            description=f"{_NAMED} What is left out stays as it is. The node keeps it over "
            "restarts, and every gateway sees it at its next poll.",
            request=schemas.MarkNode,
            response=schemas.Node,
            errors=(*BODY, Forbidden, NotFound, NodeUnavailable),
        )
    ),
)
async def mark_node(request: Request, node: FromPath[str]) -> Response[bytes]:
    body = await read_json(request, _mark)
    marked = await services_of(request).nodes.mark(
        caller_of(request), segment(node), labels=body.labels, draining=body.draining
    )
    return answer(_node_of(marked))


@post(
    "/nodes/{node:str}/forget",
    status_code=200,
    opt=documented(
        Operation(
            tag="nodes",
            summary="Give up what a node that is gone has",
            description="All its sandboxes end as `lost`, paused ones too. Only of a node that "
            "is `down`. If it comes back, it ends them.",
            response=schemas.Forgotten,
            errors=(Forbidden, NotFound, Conflict),
        )
    ),
)
async def forget_node(request: Request, node: FromPath[str]) -> Response[bytes]:
    lost = await services_of(request).nodes.forget(caller_of(request), segment(node))
    return answer(schemas.Forgotten(lost=lost))


HANDLERS = [list_nodes, get_node, mark_node, forget_node]


def _node_of(member: Member) -> schemas.Node:
    info, standing = member.info, member.standing
    return schemas.Node(
        node_id=member.node_id,
        name=member.name,
        health=standing.health,
        trouble=member.trouble,
        unreached_s=round(member.unreached_for(), 1),
        draining=standing.draining,
        labels=dict(standing.labels),
        hostname=None if info is None else info.hostname,
        version=None if info is None else info.version,
        backends=sorted(standing.backends),
        cpu_count=0 if info is None else info.cpu_count,
        cpu_used=round(standing.cpu_used, 3),
        memory_total_mb=standing.memory_total_mb,
        memory_available_mb=standing.memory_free_mb,
        disk_free_mb=standing.disk_free_mb,
        sandboxes=standing.sandboxes,
        sandboxes_max=standing.sandboxes_max,
        starting=standing.starting,
        unseen=standing.unseen,
    )

# SPDX-License-Identifier: AGPL-3.0-only
"""The OpenAPI 3.1 document, made of the handlers' own descriptions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from opendsec_server import __version__
from opendsec_server.api.http import Request
from opendsec_server.api.rights import rights_of
from opendsec_server.contract.errors import OpendsecError

from . import schemas
from .documented import EVERYWHERE, OPERATION_KEY, Operation

_DESCRIPTION = """Isolated sandboxes for RL rollouts and code-executing agents.

Processes, files and ports of a sandbox are reached through the data plane at the same address:
E2B's in-sandbox protocol, with the headers `E2b-Sandbox-Id`, `E2b-Sandbox-Port: 49983` and
`X-Access-Token` (the sandbox's `access_token`).

Every error has a `code`, says whose `fault` it is, whether to retry, and what to do. Every answer
carries `X-Request-Id`.
"""
_TAGS = {
    "sandboxes": "Make, find, extend and end sandboxes.",
    "templates": "What sandboxes are made from.",
    "tasks": "The caller's jobs: pause, resume, end and account for all sandboxes of one.",
    "snapshots": "Saved sandboxes, which others can start from.",
    "batches": "Many sandboxes in one call.",
    "groups": "Several sandboxes on one private network, started and ended as one.",
    "trajectories": "What is done in sandboxes: recorded before it runs, and never done twice.",
    "nodes": "Machines that run sandboxes. For operators.",
    "images": "Container images on the node, shared by all projects.",
    "project": "The caller's project and its API keys.",
    "projects": "Projects that nest, with their limits and use.",
    "principals": "People, services and agents, and what they may do where.",
    "tokens": "Short-lived parts of what a caller may do.",
    "audit": "Who did what, and how it went.",
    "server": "The server itself.",
}
_REF = "#/components/schemas/{name}"


def build_document(handlers: Sequence[HTTPRouteHandler], prefix: str) -> bytes:
    """The document as JSON."""
    operations: list[tuple[str, str, HTTPRouteHandler, Operation]] = [
        (path, method.lower(), handler, handler.opt[OPERATION_KEY])
        for handler in handlers
        for path in sorted(handler.paths)
        for method in sorted(handler.http_methods)
    ]
    structs: set[Any] = {schemas.ErrorBody}
    for _, _, _, operation in operations:
        structs.update(t for t in (operation.request, operation.response) if t is not None)
    _, components = msgspec.json.schema_components(sorted(structs, key=str), ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, handler, operation in operations:
        shown = prefix + re.sub(r"\{(\w+):str\}", r"{\1}", path)
        paths.setdefault(shown, {})[method] = _operation(shown, method, handler, operation)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "OpenDsec",
            "version": __version__,
            "description": _DESCRIPTION,
            "license": {"name": "AGPL-3.0-only", "identifier": "AGPL-3.0-only"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "security": [{"ApiKey": []}, {"Bearer": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                "Bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }
    return msgspec.json.encode(document)


def _operation(
    path: str, method: str, handler: HTTPRouteHandler, operation: Operation
) -> dict[str, Any]:
    rights = list(rights_of(handler, method.upper(), path))
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            "description": "Its id.",
        }
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    for parameter in operation.parameters:
        shown: dict[str, Any] = {
            "name": parameter.name,
            "in": parameter.place,
            "description": parameter.description,
            "schema": parameter.schema,
        }
        if parameter.example is not None:
            shown["example"] = parameter.example
        parameters.append(shown)
    result: dict[str, Any] = {
        "operationId": handler.handler_name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": parameters,
        "responses": _responses(operation),
        # The rights that a key or token must have, all of them.
        "security": [{"ApiKey": rights}, {"Bearer": rights}],
    }
    if operation.description:
        result["description"] = operation.description
    if operation.request is not None:
        result["requestBody"] = {
            "required": operation.request_required,
            "content": _json(operation.request.__name__),
        }
    return result


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}


def _responses(operation: Operation) -> dict[str, Any]:
    request_id = {"X-Request-Id": {"schema": {"type": "string"}}}
    success: dict[str, Any] = {"description": operation.response_description}
    success["headers"] = request_id | {
        name: {"description": text, "schema": {"type": "string"}}
        for name, text in operation.response_headers.items()
    }
    if operation.response is not None:
        success["content"] = _json(operation.response.__name__)
    responses = {} if operation.status is None else {str(operation.status): success}
    by_status: dict[int, list[type[OpendsecError]]] = {}
    for error in (*operation.errors, *EVERYWHERE):
        by_status.setdefault(error.http_status, []).append(error)
    for status, errors in sorted(by_status.items()):
        lines = [f"`{e.code}`: {_first_sentence(e)}" for e in dict.fromkeys(errors)]
        responses[str(status)] = {
            "description": "\n\n".join(lines),
            "headers": request_id,
            "content": {
                "application/json": {
                    "schema": {"$ref": _REF.format(name="ErrorBody")},
                    "examples": {e.code: {"value": _example(e)} for e in errors},
                }
            },
        }
    return responses


def _first_sentence(error: type[OpendsecError]) -> str:
    return " ".join((error.__doc__ or "").split())


def _example(error: type[OpendsecError]) -> dict[str, Any]:
    shown = error(_first_sentence(error)).to_dict()
    return {"error": {**shown, "request_id": "5f0c0e0a8f6b4d1c9a3e7b2d4c6f8a01"}}


def document_handler(handlers: Sequence[HTTPRouteHandler], prefix: str) -> HTTPRouteHandler:
    """A handler that serves the document, open to everyone."""
    # Seldom asked for, and not worth its time at every start.
    document = cache(lambda: build_document(handlers, prefix))

    @get(f"{prefix}/openapi.json")
    async def openapi_document(request: Request) -> Response[bytes]:
        return Response(document(), media_type="application/json")

    return openapi_document

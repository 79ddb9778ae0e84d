# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes that E2B's code interpreter clients call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from .contexts import Contexts, TooManyContexts
from .kernels import Context
from .languages import find

_ENV_URL = "http://127.0.0.1:49983/envs"
"""The guest agent's: what the sandbox was created with."""
_ENV_TIMEOUT_S = 5.0
_AT_ONCE = ("python", "javascript")
"""Languages whose default contexts are there from the beginning."""


class _Execute(msgspec.Struct):
    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


class _Create(msgspec.Struct):
    language: str | None = None
    cwd: str | None = None


async def health(request: Request) -> Response:
    """Answers when code can run."""
    return JSONResponse("OK")


async def execute(request: Request) -> Response:
    """Run code and stream what it does, a JSON object on each line."""
    contexts: Contexts = request.app.state.contexts
    try:
        wanted = msgspec.json.decode(await request.body(), type=_Execute)
    except msgspec.DecodeError as exc:
        return PlainTextResponse(f"bad request: {exc}", 400)
    if wanted.context_id and wanted.language:
        return PlainTextResponse("context_id and language exclude each other", 400)
    try:
        if wanted.context_id:
            context = contexts.get(wanted.context_id)
            if context is None:
                return PlainTextResponse(f"there is no context {wanted.context_id}", 404)
        else:
            context = await contexts.default(find(wanted.language))
    except LookupError as exc:
        return PlainTextResponse(str(exc.args[0]), 400)
    except (RuntimeError, OSError, TooManyContexts) as exc:
        return PlainTextResponse(str(exc), 500)
    sandbox_env = await asyncio.to_thread(_sandbox_env, request.headers.get("x-access-token"))

    async def lines() -> AsyncIterator[bytes]:
        running = context.execute(wanted.code, sandbox_env=sandbox_env, env=wanted.env_vars or {})
        async with contextlib.aclosing(running):
            async for line in running:
                yield msgspec.json.encode(line) + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def list_contexts(request: Request) -> Response:
    """All contexts."""
    contexts: Contexts = request.app.state.contexts
    return JSONResponse([_shown(context) for context in contexts.list()])


async def create_context(request: Request) -> Response:
    """Make a context."""
    contexts: Contexts = request.app.state.contexts
    try:
        wanted = msgspec.json.decode(await request.body() or b"{}", type=_Create)
        return JSONResponse(_shown(await contexts.create(find(wanted.language), wanted.cwd)))
    except msgspec.DecodeError as exc:
        return PlainTextResponse(f"bad request: {exc}", 400)
    except LookupError as exc:
        return PlainTextResponse(str(exc.args[0]), 400)
    except (RuntimeError, OSError, TooManyContexts) as exc:
        return PlainTextResponse(str(exc), 500)


async def remove_context(request: Request) -> Response:
    """End a context."""
    contexts: Contexts = request.app.state.contexts
    name = request.path_params["context_id"]
    if not await contexts.remove(name):
        return PlainTextResponse(f"there is no context {name}", 404)
    return JSONResponse(None)


async def restart_context(request: Request) -> Response:
    """Start a context anew."""
    contexts: Contexts = request.app.state.contexts
    name = request.path_params["context_id"]
    context = contexts.get(name)
    if context is None:
        return PlainTextResponse(f"there is no context {name}", 404)
    await context.restart()
    return JSONResponse(None)


def build_app() -> Starlette:
    """The application. It answers when the contexts that clients expect are up."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.contexts = Contexts()
        for name in _AT_ONCE:
            await app.state.contexts.default(find(name))
        try:
            yield
        finally:
            await app.state.contexts.close()

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/execute", execute, methods=["POST"]),
            Route("/contexts", list_contexts, methods=["GET"]),
            Route("/contexts", create_context, methods=["POST"]),
            Route("/contexts/{context_id}", remove_context, methods=["DELETE"]),
            Route("/contexts/{context_id}/restart", restart_context, methods=["POST"]),
        ],
        lifespan=lifespan,
    )


def _shown(context: Context) -> Mapping[str, str]:
    return {
        "id": context.context_id,
        "language": context.language.name,
        "cwd": context.cwd,
    }


def _sandbox_env(token: str | None) -> dict[str, str]:
    """The sandbox's variables, as its guest agent tells them to who has the token."""
    request = urllib.request.Request(_ENV_URL)
    if token:
        request.add_header("X-Access-Token", token)
    try:
        with urllib.request.urlopen(request, timeout=_ENV_TIMEOUT_S) as answer:  # noqa: S310
            found = json.load(answer)
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()}

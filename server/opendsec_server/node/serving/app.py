# SPDX-License-Identifier: AGPL-3.0-only
"""The ASGI application of a node.

Plain ASGI: it is called thousands of times a second, and its paths are few and fixed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import structlog

from opendsec_server.contract import node_wire as wire
from opendsec_server.contract.errors import (
    Internal,
    InvalidRequest,
    NodeUnavailable,
    NotFound,
    OpendsecError,
    PayloadTooLarge,
    Unauthenticated,
)
from opendsec_server.contract.node import NodeClient, SandboxSpec

log = structlog.get_logger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

ARCHIVE_BYTES_MAX = 4 * 1_024 * 1_024 * 1_024
_JSON = b"application/json"
_LINES = b"application/x-ndjson"


class NodeApp:
    """Answers gateways.

    Args:
        node: What is served.
        secret: What gateways must hold, too.
        scratch: Directory for archives on their way into sandboxes.
    """

    def __init__(self, node: NodeClient, secret: bytes, scratch: Path) -> None:
        self._node = node
        self._secret = secret
        self._scratch = scratch
        self._work: set[asyncio.Task[Any]] = set()
        self._readers: set[asyncio.Task[None]] = set()
        """Each waits for the gateway of a stream to go away."""
        self._closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        answer = _Answer(send)
        try:
            answer.proof = self._authenticate(scope)
            await self._dispatch(scope, receive, answer)
        except OpendsecError as exc:
            await answer.fail(exc)
        except Exception:
            log.exception("a gateway's request failed", path=scope["path"])
            await answer.fail(Internal("the node failed because of a defect"))

    def _authenticate(self, scope: Scope) -> str:
        header = _header(scope, wire.AUTH_HEADER)
        target = scope["raw_path"].decode("latin-1")
        nonce = None
        if header is not None:
            nonce = wire.proven_nonce(self._secret, header, scope["method"], target)
        if nonce is None:
            raise Unauthenticated(
                "the request does not prove that it comes from a gateway of this node",
                remediation="Give gateway and node the same node_secret_file.",
            )
        return wire.answer_proof(self._secret, nonce)

    async def _dispatch(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        name = scope["path"].removeprefix(wire.PREFIX + "/")
        if scope["method"] != "POST" or name == scope["path"]:
            raise NotFound("there is no such call")
        if name == wire.CREATES:
            specs = _specs(await _body(receive))
            await self._creates(specs, answer)
        elif name == wire.EXEC:
            arguments = wire.EXEC_CALL.arguments_of(await _body(receive))
            events = self._node.exec(**arguments)
            await self._stream(_lines(events, lambda e: wire.ExecLine(ok=e)), receive, answer)
        elif name == wire.EVENTS:
            await _body(receive)
            changes = self._node.events()
            await self._stream(_lines(changes, lambda e: wire.EventLine(ok=e)), receive, answer)
        elif name == wire.UNPACK:
            await self._unpack(scope, receive, answer)
        else:
            call = wire.CALLS.get(name)
            if call is None:
                raise NotFound(f"there is no call `{name[:64]}`")
            arguments = call.arguments_of(await _body(receive))
            place: Any = self._node
            for part in name.split("."):
                place = getattr(place, part)
            await self._plain(place(**arguments), answer)

    # --- plain calls --------------------------------------------------------

    async def _plain(self, work: Coroutine[Any, Any, Any], answer: _Answer) -> None:
        """It goes on when the gateway goes away: what was begun is finished."""
        task = self._begin(work)
        while True:
            await asyncio.wait({task}, timeout=wire.ALIVE_EVERY_S)
            if task.done():
                break
            await answer.alive()
        try:
            result = task.result()
        except OpendsecError as exc:
            await answer.fail(exc)
        else:
            await answer.end(wire.encode({"ok": result}))

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()

    # --- many creates -------------------------------------------------------

    async def _creates(self, specs: list[SandboxSpec], answer: _Answer) -> None:
        tasks = {self._begin(self._node.create(spec)): n for n, spec in enumerate(specs)}
        left = set(tasks)
        while left:
            done, left = await asyncio.wait(
                left, timeout=wire.ALIVE_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                await answer.alive()
                continue
            lines = b"".join(wire.encode(_create_line(tasks[task], task)) + b"\n" for task in done)
            if left:
                await answer.write(lines, _LINES)
            else:
                await answer.end(lines, _LINES)
        if not specs:
            await answer.end(b"", _LINES)

    # --- streams ------------------------------------------------------------

    async def _stream(
        self, lines: AsyncGenerator[bytes], receive: Receive, answer: _Answer
    ) -> None:
        """Lines until there are no more, or the gateway goes away: then it stops what makes
        them."""
        gone = asyncio.create_task(_gone(receive))
        self._readers.add(gone)
        await answer.alive()
        following: asyncio.Task[Any] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(lines))
                while not following.done():
                    done, _ = await asyncio.wait(
                        {following, gone},
                        timeout=wire.ALIVE_EVERY_S,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if gone in done:
                        if self._closed:
                            raise NodeUnavailable("the node is shutting down", retry_after_s=2)
                        await answer.end(b"", _LINES)
                        return
                    if not done:
                        await answer.alive()
                try:
                    line = following.result()
                except StopAsyncIteration:
                    await answer.end(b"", _LINES)
                    return
                await answer.write(line, _LINES)
        finally:
            self._readers.discard(gone)
            gone.cancel()
            if following is not None and not following.done():
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            with contextlib.suppress(OpendsecError):
                await lines.aclose()

    # --- files --------------------------------------------------------------

    async def _unpack(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        arguments = wire.UNPACK_CALL.arguments_of(_arguments(scope))
        with tempfile.NamedTemporaryFile(dir=self._scratch, prefix="unpack-") as file:
            size = 0
            async for piece in _pieces(receive):
                size += len(piece)
                if size > ARCHIVE_BYTES_MAX:
                    raise PayloadTooLarge("the archive is too large")
                await asyncio.to_thread(file.write, piece)
            file.flush()
            arguments["archive"] = file.name
            await self._plain(self._node.unpack(**arguments), answer)

    def close(self) -> None:
        """End every stream: the node stops."""
        self._closed = True
        for reader in self._readers:
            reader.cancel()


class _Answer:
    """An answer whose head is sent when there is something to send, or when it takes long."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False
        self.proof: str | None = None

    async def _begin(self, status: int, kind: bytes, length: int | None = None) -> None:
        self._begun = True
        headers = [(b"content-type", kind)]
        if self.proof is not None:
            headers.append((wire.PROOF_HEADER.encode(), self.proof.encode()))
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, kind: bytes = _JSON) -> None:
        """A piece of the body."""
        if not self._begun:
            await self._begin(200, kind)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def alive(self) -> None:
        """A blank line."""
        await self.write(b"\n", _LINES)

    async def end(self, data: bytes, kind: bytes = _JSON, status: int = 200) -> None:
        """The last piece."""
        if not self._begun:
            await self._begin(status, kind, len(data))
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, exc: OpendsecError) -> None:
        """The last piece, an error."""
        status = 401 if isinstance(exc, Unauthenticated) else 200
        await self.end(wire.encode(wire.Failure(error=wire.to_wire(exc))) + b"\n", status=status)


def _create_line(n: int, task: asyncio.Task[Any]) -> wire.CreateLine:
    try:
        return wire.CreateLine(n=n, ok=task.result())
    except OpendsecError as exc:
        return wire.CreateLine(n=n, error=wire.to_wire(exc))
    except Exception:
        log.exception("create failed unexpectedly")
        failure = Internal("the sandbox could not be made because of a defect")
        return wire.CreateLine(n=n, error=wire.to_wire(failure))


async def _lines(
    events: AsyncIterator[Any], line_of: Callable[[Any], msgspec.Struct]
) -> AsyncGenerator[bytes]:
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(events, AsyncGenerator):
            await stack.enter_async_context(contextlib.aclosing(events))
        async for event in events:
            yield wire.encode(line_of(event)) + b"\n"


def _specs(body: bytes) -> list[SandboxSpec]:
    try:
        specs: list[SandboxSpec] = wire.decode_specs(body)
    except msgspec.DecodeError as exc:
        raise InvalidRequest(f"creates: {exc}") from exc
    if len(specs) > wire.CREATES_MAX:
        raise PayloadTooLarge(f"creates: at most {wire.CREATES_MAX} at once")
    return specs


def _header(scope: Scope, name: str) -> str | None:
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            text: str = value.decode("latin-1")
            return text
    return None


def _arguments(scope: Scope) -> bytes:
    try:
        return base64.b64decode(_header(scope, wire.ARGUMENTS_HEADER) or "", validate=True)
    except binascii.Error as exc:
        raise InvalidRequest("the arguments are not base64") from exc


async def _body(receive: Receive) -> bytes:
    message = await receive()
    first: bytes = message.get("body", b"")
    if not message.get("more_body"):
        return first
    parts, size = [first], len(first)
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > wire.BODY_BYTES_MAX:
            raise PayloadTooLarge("the request is too large")
    return b"".join(parts)


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidRequest("the upload was broken off")
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

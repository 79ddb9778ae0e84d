# SPDX-License-Identifier: AGPL-3.0-only
"""The ASGI application of a node.

Plain ASGI: it is called thousands of times a second, and its paths are few and fixed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import IO, Any

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
)
from opendsec_server.contract.node import NodeClient, SandboxSpec
from opendsec_server.contract.node_proof import STREAMED, TRAILER_BYTES, Claims, Prover, digest_of

from .memory import Memory

log = structlog.get_logger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

ARCHIVE_BYTES_MAX = 4 * 1_024 * 1_024 * 1_024
_JSON = b"application/json"
_LINES = b"application/x-ndjson"


class _RefusedError(Exception):
    """The request is not heard."""

    def __init__(self, why: wire.Refusal) -> None:
        super().__init__(why.message)
        self.why = why


class NodeApp:
    """Answers gateways.

    Args:
        node: What is served.
        node_id: Its id.
        secret: What gateways must hold, too.
        scratch: Directory for archives on their way into sandboxes.
    """

    def __init__(self, node: NodeClient, node_id: str, secret: bytes, scratch: Path) -> None:
        self._node = node
        self._node_id = node_id
        self._prover = Prover(secret)
        self._memory = Memory()
        self._scratch = scratch
        self._work: set[asyncio.Task[Any]] = set()
        self._readers: set[asyncio.Task[None]] = set()
        """Each waits for the gateway of a stream to go away."""
        self._closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        answer = _Answer(send, self._prover)
        try:
            claims = self._authenticate(scope)
            answer.nonce = claims.nonce
            if not self._memory.note(claims.nonce, claims.made_at_us):
                raise _RefusedError(wire.REPEATED)
            await self._dispatch(scope, claims.digest, receive, answer)
        except _RefusedError as exc:
            await answer.refuse(exc.why)
        except OpendsecError as exc:
            await answer.fail(exc)
        except Exception:
            log.exception("a gateway's request failed", path=scope["path"])
            await answer.fail(Internal("the node failed because of a defect"))

    def _authenticate(self, scope: Scope) -> Claims:
        target = scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        claims = self._prover.claims(
            _header(scope, wire.AUTH_HEADER) or "",
            scope["method"],
            target,
            _header(scope, wire.ARGUMENTS_HEADER) or "",
        )
        if claims is None:
            raise _RefusedError(wire.STRANGER)
        # A gateway learns the node's id by this call.
        of_anyone = claims.node_id == "" and target == f"{wire.PREFIX}/{wire.INFO}"
        if claims.node_id != self._node_id and not of_anyone:
            raise _RefusedError(wire.MISDIRECTED)
        return claims

    async def _dispatch(self, scope: Scope, digest: str, receive: Receive, answer: _Answer) -> None:
        name = scope["path"].removeprefix(wire.PREFIX + "/")
        if scope["method"] != "POST" or name == scope["path"]:
            raise NotFound("there is no such call")
        if name == wire.UNPACK:
            await self._unpack(scope, digest, receive, answer)
            return
        body = await _body(receive, digest)
        if name == wire.CREATES:
            await self._creates(_specs(body), answer)
        elif name == wire.EXEC:
            arguments = wire.EXEC_CALL.arguments_of(body)
            events = self._node.exec(**arguments)
            await self._stream(_lines(events, lambda e: wire.ExecLine(ok=e)), receive, answer)
        elif name == wire.EVENTS:
            changes = self._node.events()
            await self._stream(_lines(changes, lambda e: wire.EventLine(ok=e)), receive, answer)
        else:
            call = wire.CALLS.get(name)
            if call is None:
                raise NotFound(f"there is no call `{name[:64]}`")
            arguments = call.arguments_of(body)
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
            await answer.end(answer.line(wire.encode({"ok": result})))

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
            lines = b"".join(
                answer.line(wire.encode(_create_line(tasks[task], task))) for task in done
            )
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
                await answer.write(answer.line(line), _LINES)
        finally:
            self._readers.discard(gone)
            gone.cancel()
            if following is not None and not following.done():
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            with contextlib.suppress(OpendsecError):
                await lines.aclose()

    # --- files --------------------------------------------------------------

    async def _unpack(self, scope: Scope, digest: str, receive: Receive, answer: _Answer) -> None:
        """Nothing is unpacked before the whole archive is proven."""
        if digest != STREAMED:
            raise InvalidRequest("an archive is sent piece by piece, its proof at its end")
        arguments = wire.UNPACK_CALL.arguments_of(_arguments(scope))
        with tempfile.NamedTemporaryFile(dir=self._scratch, prefix="unpack-") as file:
            content = hashlib.sha256()
            size, rest = 0, b""
            async for piece in _pieces(receive):
                # The last bytes of all are the proof.
                data = rest + piece
                data, rest = data[:-TRAILER_BYTES], data[-TRAILER_BYTES:]
                size += len(data)
                if size > ARCHIVE_BYTES_MAX:
                    raise PayloadTooLarge("the archive is too large")
                await asyncio.to_thread(_take, file, content, data)
            if not self._prover.is_trailer(rest, answer.nonce, content.hexdigest()):
                raise _RefusedError(wire.ALTERED)
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

    def __init__(self, send: Send, prover: Prover) -> None:
        self._send = send
        self._prover = prover
        self._begun = False
        self._lines = 0
        self.nonce = ""
        """Of the request. Empty: its sender has proven nothing."""

    async def _begin(self, status: int, kind: bytes, length: int | None = None) -> None:
        self._begun = True
        headers = [(b"content-type", kind)]
        if self.nonce:
            proof = self._prover.answer(self.nonce)
            headers.append((wire.PROOF_HEADER.encode(), proof.encode()))
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def line(self, text: bytes) -> bytes:
        """The next line of the body, with its proof."""
        proof = self._prover.line(self.nonce, self._lines, text)
        self._lines += 1
        return b"%s%s\n" % (proof, text)

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
        await self.end(self.line(wire.encode(wire.Failure(error=wire.to_wire(exc)))))

    async def refuse(self, why: wire.Refusal) -> None:
        """An answer that proves nothing."""
        self.nonce = ""
        told = wire.encode({"message": why.message, "remediation": why.remediation})
        await self.end(told + b"\n", status=why.status)


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
            yield wire.encode(line_of(event))


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


async def _body(receive: Receive, digest: str) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        parts, size = [body], len(body)
        while message.get("more_body"):
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > wire.BODY_BYTES_MAX:
                raise PayloadTooLarge("the request is too large")
        body = b"".join(parts)
    if digest_of(body) != digest:
        raise _RefusedError(wire.ALTERED)
    return body


def _take(file: IO[bytes], content: hashlib._Hash, data: bytes) -> None:
    content.update(data)
    file.write(data)


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

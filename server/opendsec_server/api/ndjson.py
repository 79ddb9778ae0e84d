# SPDX-License-Identifier: AGPL-3.0-only
"""Answers of many lines (NDJSON): one JSON object per line, as they come.

The last line is ``{"done": {…counts}}``, or ``{"failed": {…error}}`` when the answer cannot go on.
A line ``{}`` says after each silence that the connection lives. An answer without a last line was
cut off. Lines are a view: the work that they tell of goes on when the reader goes away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import structlog
from litestar.response import Stream

from opendsec_server.contract.errors import Internal, NodeUnavailable, OpendsecError

from .http import Request, services_of

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/x-ndjson"
SILENCE_S = 15.0
"""A line says that the connection lives after so long a silence, so that no proxy ends it."""
LINES_AHEAD_MAX = 1_024
BYTES_AHEAD_MAX = 4 * 1024 * 1024
"""A slow reader holds back the source when so much waits for it."""
CHUNK_BYTES_MAX = 256 * 1024

_KEEP_ALIVE = b"{}\n"
_encode = msgspec.json.Encoder().encode


def done(**counts: Any) -> dict[str, Any]:
    """The last line of an answer that is whole."""
    return {"done": counts}


def ndjson(request: Request, lines: AsyncGenerator[object, None], *, status: int = 200) -> Stream:
    """An answer of many lines. Check the request before: what fails later comes in a line.

    Args:
        request: Whose answer it is.
        lines: What JSON can hold, one per line; ends with ``done(…)``. It is closed when the
            reader goes away, so it must only watch the work, not be it.
        status: Of the answer's head.
    """
    services = services_of(request)
    text = chunks(
        lines,
        closing=services.closing,
        request_id=request.scope.get("opendsec.request_id"),
    )
    return Stream(text, media_type=MEDIA_TYPE, status_code=status)


async def chunks(
    lines: AsyncGenerator[object, None],
    *,
    closing: asyncio.Event,
    request_id: Any = None,
    silence_s: float = SILENCE_S,
) -> AsyncIterator[bytes]:
    """The lines as bytes, many at once when they come quickly.

    Args:
        lines: As of ``ndjson``.
        closing: Set when the server stops: the answer ends with a retryable error.
        request_id: Named in an error.
        silence_s: Longest time without a line.
    """
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(LINES_AHEAD_MAX)
    room = asyncio.Event()
    ahead_bytes = 0

    async def pump() -> None:
        nonlocal ahead_bytes
        try:
            async for line in lines:
                text = _encode(line) + b"\n"
                ahead_bytes += len(text)
                await queue.put(text)
                while ahead_bytes > BYTES_AHEAD_MAX:
                    room.clear()
                    await room.wait()
        except Exception as exc:
            await queue.put(_failed(exc, request_id))
        await queue.put(None)

    pumping = asyncio.create_task(pump(), name="ndjson")
    stopping = asyncio.create_task(closing.wait(), name="ndjson-closing")
    getting = asyncio.create_task(queue.get())
    try:
        while True:
            ready, _ = await asyncio.wait(
                {getting, stopping}, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
            )
            if getting in ready:
                text, ended = _gather(getting.result(), queue)
                ahead_bytes -= len(text)
                room.set()
                if text:
                    yield text
                if ended:
                    return
                getting = asyncio.create_task(queue.get())
            elif stopping in ready:
                yield _failed(NodeUnavailable("the server is stopping"), request_id)
                return
            else:
                yield _KEEP_ALIVE
    finally:
        for task in (getting, stopping, pumping):
            task.cancel()
        await asyncio.gather(getting, stopping, pumping, return_exceptions=True)
        with contextlib.suppress(Exception):
            await lines.aclose()


def _gather(first: bytes | None, queue: asyncio.Queue[bytes | None]) -> tuple[bytes, bool]:
    """What waits, up to the size of a chunk; and whether that was the end."""
    parts, size = [], 0
    item = first
    while item is not None:
        parts.append(item)
        size += len(item)
        if size >= CHUNK_BYTES_MAX or queue.empty():
            return b"".join(parts), False
        item = queue.get_nowait()
    return b"".join(parts), True


def _failed(exc: Exception, request_id: Any) -> bytes:
    if not isinstance(exc, OpendsecError):
        log.error("an answer of many lines broke off", exc_info=exc)
        exc = Internal("the server has a defect; it is logged under the request id")
    return _encode({"failed": {**exc.to_dict(), "request_id": request_id}}) + b"\n"

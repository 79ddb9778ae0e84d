# SPDX-License-Identifier: Apache-2.0
"""What async and sync do differently. Written by hand on both sides, with the same names."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import IO, TypeVar

from opendsec import _limits

T = TypeVar("T")

OutputCallback = Callable[[str], Awaitable[None] | None]
"""Called with each piece of output; may be a coroutine function."""

Content = bytes | bytearray | str | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]
"""What can be written: bytes, text (as UTF-8), an open binary file, or an iterable of bytes."""


Listener = Callable[[T], Awaitable[None] | None]
"""Called with each of many things; may be a coroutine function."""


async def sleep(seconds: float) -> None:
    """Wait."""
    await asyncio.sleep(seconds)


async def call(callback: OutputCallback, text: str) -> None:
    """Call back, and wait if the callback is async."""
    result = callback(text)
    if inspect.isawaitable(result):
        await result


async def tell(listener: Listener[T], value: T) -> None:
    """Call a listener, and wait if it is async."""
    result = listener(value)
    if inspect.isawaitable(result):
        await result


async def all_of(things: AsyncIterable[T]) -> list[T]:
    """Wait for all of many things."""
    return [thing async for thing in things]


async def in_thread(function: Callable[[], T]) -> T:
    """Run what blocks without blocking the event loop."""
    return await asyncio.to_thread(function)


async def chunks(content: Content, size_bytes: int) -> AsyncIterator[bytes]:
    """The content in pieces of at most ``size_bytes`` (iterables: as they come, cut if larger)."""
    if isinstance(content, str):
        content = content.encode()
    if isinstance(content, (bytes, bytearray)):
        for start in range(0, len(content), size_bytes):
            yield bytes(content[start : start + size_bytes])
    elif isinstance(content, AsyncIterable):
        async for piece in content:
            for start in range(0, len(piece), size_bytes):
                yield piece[start : start + size_bytes]
    elif hasattr(content, "read"):
        while piece := await asyncio.to_thread(content.read, size_bytes):
            yield piece
    else:
        for piece in content:
            for start in range(0, len(piece), size_bytes):
                yield piece[start : start + size_bytes]


@contextlib.asynccontextmanager
async def alongside(job: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
    """Run ``job`` while the block runs; stop it at the end of the block.

    An exception of the job is raised at the end of a block that ended well.
    """
    if job is None:
        yield
        return
    task = asyncio.ensure_future(job())
    try:
        yield
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    # A job that has just failed must be able to say so.
    await asyncio.wait({task}, timeout=_limits.STDIN_END_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error

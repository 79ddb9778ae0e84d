# SPDX-License-Identifier: Apache-2.0
"""What async and sync do differently. Written by hand on both sides, with the same names."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TypeVar

from opendsec import _limits

T = TypeVar("T")

OutputCallback = Callable[[str], None]
"""Called with each piece of output."""

Content = bytes | bytearray | str | IO[bytes] | Iterable[bytes]
"""What can be written: bytes, text (as UTF-8), an open binary file, or an iterable of bytes."""


Listener = Callable[[T], None]
"""Called with each of many things."""


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def call(callback: OutputCallback, text: str) -> None:
    """Call back."""
    callback(text)


def tell(listener: Listener[T], value: T) -> None:
    """Call a listener."""
    listener(value)


def all_of(things: Iterable[T]) -> list[T]:
    """Wait for all of many things."""
    return list(things)


def in_thread(function: Callable[[], T]) -> T:
    """Run what blocks; sync code may block."""
    return function()


def chunks(content: Content, size_bytes: int) -> Iterator[bytes]:
    """The content in pieces of at most ``size_bytes`` (iterables: as they come, cut if larger)."""
    if isinstance(content, str):
        content = content.encode()
    if isinstance(content, (bytes, bytearray)):
        for start in range(0, len(content), size_bytes):
            yield bytes(content[start : start + size_bytes])
    elif hasattr(content, "read"):
        while piece := content.read(size_bytes):
            yield piece
    else:
        for piece in content:
            for start in range(0, len(piece), size_bytes):
                yield piece[start : start + size_bytes]


@contextlib.contextmanager
def alongside(job: Callable[[], None] | None) -> Iterator[None]:
    """Run ``job`` in a thread while the block runs.

    A thread cannot be stopped. The job must end by itself when what it feeds is gone; one that
    still waits for its own input then is left behind as a daemon.
    An exception of the job is raised at the end of a block that ended well.
    """
    if job is None:
        yield
        return
    errors: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, name="opendsec-stdin", daemon=True)
    thread.start()
    yield
    thread.join(_limits.STDIN_END_S)
    if errors:
        raise errors[0]

# SPDX-License-Identifier: Apache-2.0
"""One test for both halves of the package: sync objects are used as if they were async."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator
from typing import Any

import opendsec


async def done(value: Any) -> Any:
    """The result of a call of either half."""
    return await value if inspect.isawaitable(value) else value


async def each(iterable: Any) -> AsyncIterator[Any]:
    """Iterate over an iterable of either half."""
    if hasattr(iterable, "__aiter__"):
        async for item in iterable:
            yield item
    else:
        for item in iterable:
            yield item


async def collect(iterable: Any) -> list[Any]:
    """All items of an iterable of either half."""
    return [item async for item in each(iterable)]


async def close(thing: Any) -> None:
    """Close an object of either half."""
    await done((getattr(thing, "aclose", None) or thing.close)())


@contextlib.asynccontextmanager
async def within(manager: Any) -> AsyncIterator[Any]:
    """Enter a context manager of either half."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value


class Kit:
    """Names of one half."""

    def __init__(self, name: str) -> None:
        prefix = "Async" if name == "async" else ""
        self.name = name
        self.Client: Any = getattr(opendsec, f"{prefix}Client")
        self.Sandbox: Any = getattr(opendsec, f"{prefix}Sandbox")

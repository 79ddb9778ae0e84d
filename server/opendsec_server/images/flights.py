# SPDX-License-Identifier: AGPL-3.0-only
"""Work that is done once for all who ask for it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Flights(Generic[T]):
    """By key: the first to ask starts the work, others join, and it is given up with the last."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}
        self._waiting: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tasks

    async def join(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """The result. What the work raises, all get."""
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.ensure_future(_await(work))
            self._tasks[key] = task
            self._waiting[key] = 0
        self._waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            if self._tasks.get(key) is task:
                self._waiting[key] -= 1
                if task.done() or not self._waiting[key]:
                    # Whoever comes from now on starts anew.
                    del self._tasks[key], self._waiting[key]
                    if not task.done():
                        task.cancel()
                        await asyncio.wait({task})


async def _await(work: Callable[[], Awaitable[T]]) -> T:
    return await work()

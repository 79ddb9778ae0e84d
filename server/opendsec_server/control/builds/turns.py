# SPDX-License-Identifier: AGPL-3.0-only
"""Whose build is next. Projects take turns, however many builds each has asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator


class Turns:
    """So many builds at one time. A place goes to the project that has the fewest, and of those
    to the one whose last turn is longest ago; within a project to whoever came first.

    Args:
        count: At one time, of all projects.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._at_work: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, project_id: str) -> AsyncIterator[None]:
        """A place, as soon as it is the project's turn."""
        await self._take(project_id)
        try:
            yield
        finally:
            self._leave(project_id)

    async def _take(self, project_id: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(project_id, deque()).append(mine)
        self._give()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._leave(project_id)
            else:
                self._forget(project_id, mine)
            raise

    def _leave(self, project_id: str) -> None:
        self._free += 1
        self._at_work[project_id] -= 1
        if not self._at_work[project_id]:
            del self._at_work[project_id]
        self._give()

    def _give(self) -> None:
        while self._free and self._waiting:
            project_id = min(self._waiting, key=lambda name: self._at_work[name])
            mine = self._waiting[project_id][0]
            self._forget(project_id, mine)
            if mine.done():
                continue
            self._free -= 1
            self._at_work[project_id] += 1
            if project_id in self._waiting:
                self._waiting.move_to_end(project_id)
            mine.set_result(None)

    def _forget(self, project_id: str, mine: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(project_id)
        if waiting is not None and mine in waiting:
            waiting.remove(mine)
            if not waiting:
                del self._waiting[project_id]

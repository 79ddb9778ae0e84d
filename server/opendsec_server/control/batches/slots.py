# SPDX-License-Identifier: AGPL-3.0-only
"""How many starts of batches each node is given at one time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StartSlots:
    """More at once would only make each start slower, until none is done in its time.

    Args:
        cap_of: How many a node may be given at one time.
        on_free: Called when a node may be given another.
    """

    def __init__(self, cap_of: Callable[[str], int], on_free: Callable[[], None]) -> None:
        self._cap_of = cap_of
        self._on_free = on_free
        self._taken: dict[str, int] = {}
        self._freed = asyncio.Event()

    def taken(self) -> int:
        """Starts under way, on all nodes."""
        return sum(self._taken.values())

    def take(self, node_id: str) -> bool:
        """One of a node's places, if there is one left."""
        taken = self._taken.get(node_id, 0)
        if taken >= self._cap_of(node_id):
            return False
        self._taken[node_id] = taken + 1
        return True

    async def acquire(self, node_id: str) -> None:
        """One of a node's places, as soon as there is one."""
        while not self.take(node_id):
            self._freed.clear()
            await self._freed.wait()

    def release(self, node_id: str) -> None:
        """Give a place back."""
        self._taken[node_id] -= 1
        if not self._taken[node_id]:
            del self._taken[node_id]
        self._freed.set()
        self._on_free()

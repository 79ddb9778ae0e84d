# SPDX-License-Identifier: AGPL-3.0-only
"""Absolute deadlines: one heap, one timer, nothing outside the node needed."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable

_LOOK_AGAIN_S = 10.0
"""The clock may be set, or the machine sleep; so the heap is looked at this often at least."""


class Deadlines:
    """Calls back when a key's time has come. Setting a key again replaces its time.

    Args:
        fire: Called in the event loop with the key.
        now: Unix seconds; replaceable for tests.
    """

    def __init__(self, fire: Callable[[str], None], now: Callable[[], float] = time.time) -> None:
        self._fire = fire
        self._now = now
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None

    def set(self, key: str, at: float) -> None:
        """Fire ``key`` at a Unix time; at once when it has passed."""
        self._at[key] = at
        heapq.heappush(self._heap, (at, key))
        if self._heap[0] == (at, key):
            self._arm()

    def clear(self, key: str) -> None:
        """Never fire ``key``."""
        self._at.pop(key, None)

    def stop(self) -> None:
        """Fire nothing any more."""
        self._at.clear()
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            delay = min(max(0.0, self._heap[0][0] - self._now()), _LOOK_AGAIN_S)
            self._timer = asyncio.get_running_loop().call_later(delay, self._due)

    def _due(self) -> None:
        now = self._now()
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                self._fire(key)
        self._arm()

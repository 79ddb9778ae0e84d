# SPDX-License-Identifier: AGPL-3.0-only
"""Tells every edge that a route it may have cached is no longer right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

PING_INTERVAL_S = 5.0
BACKLOG_MAX = 1_024
"""Above it a subscriber is told to forget everything instead of one by one."""


class Invalidation(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One line of the stream."""

    event: Literal["hello", "invalidate", "invalidate_all", "ping"]
    sandbox_id: str | None = None


class Invalidations:
    """Fan-out to the subscribed edges. Publishing never waits."""

    def __init__(self) -> None:
        self._subscribers: set[_Subscriber] = set()
        self._closed = False

    def publish(self, sandbox_id: str) -> None:
        """The route of this sandbox has changed or is gone."""
        for subscriber in self._subscribers:
            subscriber.put(sandbox_id)

    def publish_all(self) -> None:
        """Any route may have changed: reports were missed."""
        for subscriber in self._subscribers:
            subscriber.put_all()

    def close(self) -> None:
        """End every stream, so that a stopping server need not wait for them."""
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.wake.set()

    async def subscribe(self) -> AsyncIterator[Invalidation]:
        """What is published from now on, with a ping when nothing is. Ends at ``close``."""
        subscriber = _Subscriber()
        self._subscribers.add(subscriber)
        try:
            yield Invalidation(event="hello")
            while not self._closed:
                try:
                    async with asyncio.timeout(PING_INTERVAL_S):
                        await subscriber.wake.wait()
                except TimeoutError:
                    yield Invalidation(event="ping")
                    continue
                for line in subscriber.take():
                    yield line
        finally:
            self._subscribers.discard(subscriber)


class _Subscriber:
    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self._pending: dict[str, None] = {}
        self._everything = False

    def put(self, sandbox_id: str) -> None:
        if len(self._pending) >= BACKLOG_MAX:
            self.put_all()
        elif not self._everything:
            self._pending[sandbox_id] = None
        self.wake.set()

    def put_all(self) -> None:
        self._everything = True
        self._pending.clear()
        self.wake.set()

    def take(self) -> list[Invalidation]:
        self.wake.clear()
        pending, self._pending = self._pending, {}
        if self._everything:
            self._everything = False
            return [Invalidation(event="invalidate_all")]
        return [Invalidation(event="invalidate", sandbox_id=sandbox_id) for sandbox_id in pending]

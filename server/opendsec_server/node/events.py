# SPDX-License-Identifier: AGPL-3.0-only
"""Changes of state, handed to everyone who listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from opendsec_server.contract.node import NodeEvent

from . import limits


class Events:
    """Hands each change of state to every reader, in order."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[NodeEvent | None]] = set()

    def publish(self, event: NodeEvent) -> None:
        """To every reader; one that lags too far is cut off."""
        for queue in list(self._queues):
            if queue.qsize() >= limits.EVENTS_QUEUED_MAX:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    def close(self) -> None:
        """End every reader's stream."""
        for queue in self._queues:
            queue.put_nowait(None)
        self._queues.clear()

    def subscribe(self) -> AsyncIterator[NodeEvent]:
        """Events from now on (from this call, not from the first ``anext``)."""
        queue: asyncio.Queue[NodeEvent | None] = asyncio.Queue()
        self._queues.add(queue)
        return self._read(queue)

    async def _read(self, queue: asyncio.Queue[NodeEvent | None]) -> AsyncIterator[NodeEvent]:
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._queues.discard(queue)

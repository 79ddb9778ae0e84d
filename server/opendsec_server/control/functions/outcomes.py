# SPDX-License-Identifier: AGPL-3.0-only
"""What comes of the calls of one request, on its way to who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .model import UNREAD_BYTES_MAX, Outcome


class _Unread:
    """What waits for the reader."""

    def __init__(self, hold: Callable[[], None]) -> None:
        self.queue: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()
        self.size_bytes = 0
        self._hold = hold

    def put(self, index: int, outcome: Outcome) -> None:
        self.size_bytes += outcome.size_bytes
        self.queue.put_nowait((index, outcome))
        if self.size_bytes > UNREAD_BYTES_MAX:
            self._hold()


class Outcomes:
    """An iterator: each call's outcome once, with the call's index, as they come.

    A reader that does not take them holds its own calls back. Closed, or dropped by the last one
    who had it, it gives up the calls that are not over.

    Args:
        count: Calls.
        hold: Let none of them begin for now.
        let_go: Let them begin again.
        give_up: End those that wait or run.
    """

    def __init__(
        self,
        count: int,
        *,
        hold: Callable[[], None],
        let_go: Callable[[], None],
        give_up: Callable[[], None],
    ) -> None:
        self._left = count
        self._unread = _Unread(hold)
        self._let_go = let_go
        self._give_up: Callable[[], None] | None = give_up

    def putter(self) -> Callable[[int, Outcome], None]:
        """How outcomes come in. It does not keep this object alive."""
        return self._unread.put

    def __aiter__(self) -> Outcomes:
        return self

    async def __anext__(self) -> tuple[int, Outcome]:
        if self._left == 0 or self._give_up is None:
            raise StopAsyncIteration
        try:
            index, outcome = await self._unread.queue.get()
        except BaseException:
            # The reader was cut off.
            self._close()
            raise
        self._left -= 1
        self._unread.size_bytes -= outcome.size_bytes
        if self._unread.size_bytes <= UNREAD_BYTES_MAX:
            self._let_go()
        return index, outcome

    async def aclose(self) -> None:
        """Give up what is not over."""
        self._close()

    def _close(self) -> None:
        give_up, self._give_up = self._give_up, None
        if give_up is not None:
            give_up()

    def __del__(self) -> None:
        # An answer whose reader went away before its first line is never closed.
        self._close()

# SPDX-License-Identifier: AGPL-3.0-only
"""What many ask for at the same time, done in one go: transactions cost more than their content."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from opendsec_server.store.records import StateChange

from .ledger import Ledger

T = TypeVar("T")
R = TypeVar("R")

GROUP_MAX = 500


class Grouped(Generic[T, R]):
    """Collects what waits while a group is being worked on, for the next group.

    Args:
        work: Does a group; a result for each, in order. What it raises goes to all of them.
        undo: Called with what was done for one who has gone away meanwhile.
    """

    def __init__(
        self,
        work: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
        undo: Callable[[T], None] = lambda _: None,
    ) -> None:
        self._work = work
        self._undo = undo
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._task: asyncio.Task[None] | None = None

    async def do(self, one: T) -> R:
        """The result of ``one``, done together with others."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((one, done))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="grouped")
        try:
            return await done
        except asyncio.CancelledError:
            if done.done() and not done.cancelled():
                self._undo(one)
            raise

    async def _run(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
                await self._do(group)
        finally:
            self._task = None

    async def _do(self, group: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._work([one for one, _ in group])
        except Exception as exc:
            for _, done in group:
                if not done.done():
                    done.set_exception(exc)
            return
        for (one, done), result in zip(group, results, strict=True):
            if done.done():
                self._undo(one)
            else:
                done.set_result(result)


class GroupedLedger:
    """Records changes that wait at the same time in one transaction."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changes = Grouped[StateChange, None](self._apply)

    async def apply(self, change: StateChange) -> None:
        """Returns when the change is recorded.

        Raises:
            StoreUnavailable: it is not; the node's events, or the next comparison, bring it.
        """
        await self._changes.do(change)

    async def _apply(self, changes: Sequence[StateChange]) -> list[None]:
        await self._ledger.apply(changes)
        return [None] * len(changes)

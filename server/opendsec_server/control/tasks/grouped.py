# SPDX-License-Identifier: AGPL-3.0-only
"""Changes of many sandboxes at once, in few transactions."""

from __future__ import annotations

import asyncio

from opendsec_server.contract.errors import StoreUnavailable
from opendsec_server.control.ledger import Ledger
from opendsec_server.store.records import StateChange

GROUP_MAX = 500


class GroupedLedger:
    """Applies changes that wait at the same time together: a commit costs more than a change."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: list[tuple[StateChange, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def apply(self, change: StateChange) -> None:
        """Returns when the change is recorded.

        Raises:
            StoreUnavailable: it is not; the node's events, or the next comparison, bring it.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="grouped-changes")
        await done

    async def _work(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
                error: Exception | None = None
                try:
                    await self._ledger.apply([change for change, _ in group])
                except StoreUnavailable as exc:
                    error = exc
                except Exception as exc:
                    error = exc
                for _, done in group:
                    if done.done():
                        continue
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(error)
        finally:
            self._task = None

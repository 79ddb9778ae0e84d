# SPDX-License-Identifier: AGPL-3.0-only
"""Records what became of items: many in one transaction, and never without an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from opendsec_server.contract.errors import StoreUnavailable
from opendsec_server.control.ledger import Ledger
from opendsec_server.store.batches import Outcome, noting
from opendsec_server.store.records import StateChange
from opendsec_server.store.store import Store

log = structlog.get_logger(__name__)

TOGETHER_MAX = 256
RETRY_S = 0.5
"""While the store is down. What is not recorded then is done again after a restart: making a
sandbox is idempotent by its id."""


class _Waiting(msgspec.Struct):
    changes: Sequence[StateChange]
    outcome: Outcome
    noted: asyncio.Future[None]


class OutcomeWriter:
    """Commits what has come together while the commit before was under way.

    Args:
        store: Where.
        ledger: Applies the changes of the sandboxes.
        on_noted: Called with the ids of the batches that have news.
    """

    def __init__(self, store: Store, ledger: Ledger, on_noted: Callable[[set[str]], None]) -> None:
        self._store = store
        self._ledger = ledger
        self._on_noted = on_noted
        self._waiting: list[_Waiting] = []
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._run(), name="batch-outcomes")

    async def stop(self) -> None:
        """Write no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def note(self, changes: Sequence[StateChange], outcome: Outcome) -> None:
        """Record changes and outcome together; returns when they are in the store."""
        noted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(changes, outcome, noted))
        self._more.set()
        await noted

    async def _run(self) -> None:
        while True:
            await self._more.wait()
            together = self._waiting[:TOGETHER_MAX]
            del self._waiting[:TOGETHER_MAX]
            if not self._waiting:
                self._more.clear()
            await self._write(together)

    async def _write(self, together: list[_Waiting]) -> None:
        changes = [change for waiting in together for change in waiting.changes]
        outcomes = [waiting.outcome for waiting in together]
        while True:
            try:
                first = noting(self._store, outcomes, now=time.time())
                await self._ledger.apply(changes, first=first)
                break
            except StoreUnavailable as exc:
                log.warning("outcomes wait for the store", count=len(together), why=exc.message)
                await asyncio.sleep(RETRY_S)
            except Exception as exc:
                log.exception("outcomes not recorded", count=len(together))
                for waiting in together:
                    if not waiting.noted.done():
                        waiting.noted.set_exception(exc)
                return
        self._on_noted({outcome.batch_id for outcome in outcomes})
        for waiting in together:
            if not waiting.noted.done():
                waiting.noted.set_result(None)

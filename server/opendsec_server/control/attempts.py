# SPDX-License-Identifier: AGPL-3.0-only
"""Work that goes on when its caller goes away, and that callers with the same key share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import msgspec

from opendsec_server.contract.errors import IdempotencyInProgress, IdempotencyMismatch
from opendsec_server.store.records import IdempotencyClaim

T = TypeVar("T")

STOP_WAIT_S = 5.0


class _Attempt(msgspec.Struct, kw_only=True, frozen=True):
    claim: IdempotencyClaim
    task: asyncio.Task[Any]


class Attempts(Generic[T]):
    """The attempts of this process that are under way."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._keyed: dict[tuple[str, str], _Attempt] = {}
        self.tasks: set[asyncio.Task[T]] = set()
        """What is under way, keyed or not."""

    async def run(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        *,
        project_id: str,
        claim: IdempotencyClaim | None = None,
        join: bool = True,
    ) -> tuple[T, bool]:
        """Do the work, or share it with an attempt that has the same key.

        Args:
            work: Makes the coroutine; it is not cancelled with the caller.
            project_id: Scope of the key.
            claim: The caller's key. None: nothing to share.
            join: Wait for an attempt that is still running.

        Returns:
            Its result, and whether it was another caller's.

        Raises:
            IdempotencyMismatch: the key is in use with other parameters.
            IdempotencyInProgress: an attempt is running, and ``join`` is false.
        """
        if claim is None:
            return await asyncio.shield(self.spawn(work())), False
        place = (project_id, claim.key)
        attempt = self._keyed.get(place)
        if attempt is not None:
            if attempt.claim != claim:
                raise IdempotencyMismatch("this idempotency key is in use with other parameters")
            if not join:
                raise IdempotencyInProgress(
                    "the first request with this idempotency key is still running",
                    retry_after_s=1,
                )
            return await asyncio.shield(attempt.task), True
        task = self.spawn(work())
        self._keyed[place] = _Attempt(claim=claim, task=task)
        task.add_done_callback(lambda _: self._keyed.pop(place))
        return await asyncio.shield(task), False

    async def stop(self) -> None:
        """Give what is under way a moment to end, then cut it off."""
        if self.tasks:
            _, late = await asyncio.wait(self.tasks, timeout=STOP_WAIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that is this process's to finish, whoever waits for it."""
        task = asyncio.create_task(work, name=self._name)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[T]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            # Taken here, or asyncio complains when the caller has gone away.
            task.exception()

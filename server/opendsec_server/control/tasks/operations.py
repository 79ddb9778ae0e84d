# SPDX-License-Identifier: AGPL-3.0-only
"""Carries out operations on whole tasks, from their rows: also those that another process began.

Sandboxes of one node are worked on a few at a time, those of different nodes side by side. An
outcome is written with others that came at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary

import msgspec
import structlog

from opendsec_server.contract.errors import OpendsecError, StoreUnavailable
from opendsec_server.contract.ids import random_chars
from opendsec_server.store import task_operations as rows
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.sandboxes import get_sandboxes
from opendsec_server.store.store import Store
from opendsec_server.store.task_operations import Noted, OperationKind, TaskItem, TaskOperation

from .work import Work

log = structlog.get_logger(__name__)

AT_ONCE_PER_NODE: dict[OperationKind, int] = {"pause": 8, "resume": 8, "kill": 32}
"""Operations on sandboxes of one node under way at one time, of one task."""
AT_ONCE_MAX = 512
"""Over all nodes."""
RECORDS_AT_ONCE = 500
LEASE_S = 15.0
RENEW_S = 5.0
LOOK_S = 5.0
"""How often operations are looked for that nobody works on."""
RETRY_S = 1.0
AGAIN_S = 0.05
ITEMS_PAGE = 500
WATCH_S = 1.0
"""An operation that another process works on is looked at this often."""


class Operations:
    """The operations of this process.

    Args:
        store: Where they are kept.
        work: Does one to one sandbox.
    """

    def __init__(self, store: Store, work: Work) -> None:
        self._store = store
        self._work = work
        self._owner = random_chars(12)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._places: dict[str, tuple[str, str]] = {}
        """Project and task of each that runs."""
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Of projects and tasks whose operations begin."""
        self._changed: dict[str, asyncio.Event] = {}
        self._looker: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Go on with what was left half-way, and look for more from time to time."""
        with contextlib.suppress(StoreUnavailable):
            # Nobody but us can hold this database.
            await self._claim(alone=self._store.is_sqlite)
        self._looker = asyncio.create_task(self._look(), name="task-operations")

    async def stop(self) -> None:
        """Let go. What is missing is done after the next start, or by another process."""
        self._stopped = True
        tasks = [*self._running.values()]
        if self._looker is not None:
            tasks.append(self._looker)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin(self, wanted: TaskOperation) -> tuple[TaskOperation, bool]:
        """Record an operation, or find the one that it joins, and see that it is carried out.

        Returns:
            The operation, and whether it is new.

        Raises:
            As ``begin_operation``.
        """
        now = time.time()
        wanted = _leased(wanted, self._owner, now)
        place = (wanted.project_id, wanted.task_id)
        # One after the other: or one that was superseded meanwhile would end its successor.
        async with self._locks.setdefault(place, asyncio.Lock()):
            operation, new = await rows.begin_operation(self._store, wanted, now=now)
            if new:
                await self._end_others(operation)
            if operation.owner == self._owner and operation.finished_at is None:
                self._spawn(operation)
        return operation, new

    async def follow(
        self, operation_id: str, after: int
    ) -> AsyncIterator[tuple[TaskOperation, list[TaskItem]]]:
        """The operation with each group of new outcomes, up to its end. Watching is all it does:
        the work goes on without it."""
        while True:
            changed = self._changed.get(operation_id)
            if changed is not None:
                changed.clear()
            operation, items = await rows.outcomes_after(
                self._store, operation_id, after, ITEMS_PAGE
            )
            if operation is None:
                return
            if items:
                after = items[-1].seq
            yield operation, items
            if len(items) == ITEMS_PAGE:
                continue
            if operation.finished_at is not None:
                return
            if changed is None:
                await asyncio.sleep(WATCH_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await changed.wait()

    async def _end_others(self, operation: TaskOperation) -> None:
        """Those that it takes the place of begin nothing more. What they have begun, nodes know."""
        place = (operation.project_id, operation.task_id)
        others = [self._running[name] for name, its in self._places.items() if its == place]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # --- taking over --------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._claim(alone=False)
            except StoreUnavailable as exc:
                log.warning("operations on tasks not looked for", why=exc.message)
            except Exception:
                log.exception("operations on tasks not looked for")

    async def _claim(self, *, alone: bool) -> None:
        now = time.time()
        for operation in await rows.claim_operations(
            self._store,
            self._owner,
            held=tuple(self._running),
            now=now,
            lease_until=now + LEASE_S,
            alone=alone,
        ):
            log.info(
                "operation on a task goes on",
                operation_id=operation.operation_id,
                kind=operation.kind,
                done=operation.done,
                asked=operation.asked,
            )
            self._spawn(operation)

    def _spawn(self, operation: TaskOperation) -> None:
        name = operation.operation_id
        if name in self._running or self._stopped:
            return
        self._changed[name] = asyncio.Event()
        self._places[name] = (operation.project_id, operation.task_id)
        task = asyncio.create_task(self._run(operation), name=f"{operation.kind}-task")
        self._running[name] = task
        task.add_done_callback(lambda _: self._over(name))

    def _over(self, name: str) -> None:
        self._running.pop(name, None)
        self._places.pop(name, None)
        changed = self._changed.pop(name, None)
        if changed is not None:
            changed.set()

    # --- carrying out -------------------------------------------------------

    async def _run(self, operation: TaskOperation) -> None:
        began = time.monotonic()
        run = _Run(self._store, self._work, operation, self._owner, self._changed)
        while True:
            try:
                finished = await run.to_the_end()
                break
            except OpendsecError as exc:
                log.warning("operation on a task waits", kind=operation.kind, why=exc.message)
            except Exception:
                log.exception("operation on a task broke off", kind=operation.kind)
            await asyncio.sleep(RETRY_S)
        if finished is not None:
            log.info(
                "operation on a task is done",
                operation_id=operation.operation_id,
                task_id=operation.task_id,
                kind=operation.kind,
                done=finished.done,
                failed=finished.failed,
                freed_bytes=finished.memory_freed_bytes,
                took_s=round(time.monotonic() - began, 3),
            )


class _Run:
    """One operation while this process works on it."""

    def __init__(
        self,
        store: Store,
        work: Work,
        operation: TaskOperation,
        owner: str,
        changed: dict[str, asyncio.Event],
    ) -> None:
        self._store = store
        self._work = work
        self._operation = operation
        self._owner = owner
        self._changed = changed
        self._outcomes: list[Noted] = []
        self._some = asyncio.Event()
        self._room = asyncio.Semaphore(AT_ONCE_MAX)
        self._queues: dict[str, deque[SandboxRecord]] = defaultdict(deque)
        self._workers: Counter[str] = Counter()

    async def to_the_end(self) -> TaskOperation | None:
        """None: it is another process's, or another operation has taken its place.

        Raises:
            StoreUnavailable: it cannot go on now. What was done is done.
        """
        while True:
            self._outcomes.clear()
            self._queues.clear()
            missing = await rows.missing_of(self._store, self._operation.operation_id)
            working = asyncio.create_task(self._work_on(missing), name="task-operation-work")
            try:
                after = await self._write(working)
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
            if after is None or after.finished_at is not None:
                return after
            # Something came into the task meanwhile.
            await asyncio.sleep(AGAIN_S)

    async def _write(self, working: asyncio.Task[None]) -> TaskOperation | None:
        while True:
            # A moment's outcomes go together.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._some.wait()
            self._some.clear()
            over = working.done()
            group, self._outcomes = self._outcomes, []
            now = time.time()
            after = await self._note(group, now)
            if after is None or after.finished_at is not None:
                return after
            changed = self._changed.get(after.operation_id)
            if changed is not None and group:
                changed.set()
            if over:
                working.result()
                if not self._outcomes:
                    return after

    async def _note(self, group: list[Noted], now: float) -> TaskOperation | None:
        while True:
            try:
                return await rows.note_outcomes(
                    self._store,
                    self._operation.operation_id,
                    self._owner,
                    group,
                    now=now,
                    lease_until=time.time() + LEASE_S,
                )
            except StoreUnavailable as exc:
                log.warning("outcomes wait for the store", count=len(group), why=exc.message)
                await asyncio.sleep(RETRY_S)

    async def _work_on(self, missing: list[str]) -> None:
        """The first are worked on while the records of the others are read."""
        async with asyncio.TaskGroup() as group:
            for start in range(0, len(missing), RECORDS_AT_ONCE):
                these = missing[start : start + RECORDS_AT_ONCE]
                records = await get_sandboxes(self._store, these)
                for name in these:
                    record = records.get(name)
                    if record is None or record.terminal:
                        self._came(Noted(sandbox_id=name, outcome="gone"))
                    else:
                        self._put(group, record)
        self._some.set()

    def _put(self, group: asyncio.TaskGroup, record: SandboxRecord) -> None:
        node = record.node_id
        self._queues[node].append(record)
        if self._workers[node] < AT_ONCE_PER_NODE[self._operation.kind]:
            self._workers[node] += 1
            group.create_task(self._work_off(node))

    async def _work_off(self, node: str) -> None:
        queue = self._queues[node]
        try:
            while queue:
                record = queue.popleft()
                async with self._room:
                    self._came(await self._work.do(self._operation, record))
        finally:
            self._workers[node] -= 1

    def _came(self, outcome: Noted) -> None:
        self._outcomes.append(outcome)
        self._some.set()


def _leased(operation: TaskOperation, owner: str, now: float) -> TaskOperation:
    return msgspec.structs.replace(operation, owner=owner, lease_until=now + LEASE_S)

# SPDX-License-Identifier: AGPL-3.0-only
"""Lets items begin, as many as the nodes can bear, and sees each through to its outcome.

Before an item begins, its sandbox's id is in the store, together with its place in the quota.
From then on it is made under this id only, by whoever works on the batch: a node makes a sandbox
once for its id. Whatever is killed in between, the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import msgspec
import structlog

from opendsec_server.contract.errors import (
    BatchCancelled,
    Internal,
    NodeUnavailable,
    OpendsecError,
    PlatformError,
    SandboxNotFound,
    SandboxStartFailed,
    StartTimeout,
    StoreUnavailable,
)
from opendsec_server.contract.node import NodeClient
from opendsec_server.contract.states import State
from opendsec_server.control.creates import Creates, Started, failure
from opendsec_server.control.nodes import NodeNotReached
from opendsec_server.store import batches as rows
from opendsec_server.store.batches import Batch, Beginning, Begun, ErrorBody, Outcome
from opendsec_server.store.moves import move_create
from opendsec_server.store.records import SandboxRecord, StateChange
from opendsec_server.store.store import Store

from .fairness import FairQueue
from .outcomes import OutcomeWriter
from .running import RunningBatch
from .slots import StartSlots

log = structlog.get_logger(__name__)

TOGETHER_MIN = 32
TOGETHER_MAX = 128
"""Items that begin in one transaction: few at first, so that the first results come soon, and never
so many that other requests wait while their records are made."""
SETTLED_TOGETHER_MAX = 4_096
"""Items that end without having begun, in one transaction."""
STORE_RETRY_S = 0.5
NODES_RETRY_S = 1.0
"""After which nodes are looked for again while none that could take an item can be reached."""
UNKNOWN_RETRY_S: tuple[float, ...] = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses after which a node is asked again what became of a start. Then the item is given up: its
record ends, so that the node removes whatever there is of it."""


class Dispatcher:
    """The queue of all batches of this process.

    Args:
        store: Where.
        node: Asked whether it knows a sandbox.
        creates: Make the sandboxes.
        writer: Records outcomes.
        owner: Name of this process.
        cap_of: How many starts a node is given at one time.
        total_cap: The same for all nodes together.
        on_over: Called with a batch that this process has nothing more to do for.
        on_news: Called with the ids of batches of which more is known.
    """

    def __init__(
        self,
        *,
        store: Store,
        node: NodeClient,
        creates: Creates,
        writer: OutcomeWriter,
        owner: str,
        cap_of: Callable[[str], int],
        total_cap: Callable[[], int],
        on_over: Callable[[RunningBatch], None],
        on_news: Callable[[set[str]], None],
    ) -> None:
        self._store = store
        self._node = node
        self._creates = creates
        self._writer = writer
        self._owner = owner
        self._total_cap = total_cap
        self._on_over = on_over
        self._on_news = on_news
        self._queue: FairQueue[str] = FairQueue()
        self._batches: dict[str, RunningBatch] = {}
        self._wake = asyncio.Event()
        self._slots = StartSlots(cap_of, self.wake)
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._together = TOGETHER_MIN
        self._items: set[asyncio.Task[None]] = set()

    @property
    def batches(self) -> dict[str, RunningBatch]:
        """Those that this process works on, by id."""
        return self._batches

    def start(self) -> None:
        """Begin to work."""
        self._task = asyncio.create_task(self._run(), name="batches")

    async def stop(self, wait_s: float) -> None:
        """Let nothing more begin, and give what has begun a moment to end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        if self._items:
            _, late = await asyncio.wait(self._items, timeout=wait_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def wake(self) -> None:
        """Look again what could begin."""
        self._wake.set()

    def add(self, running: RunningBatch, begun: Sequence[tuple[int, SandboxRecord]] = ()) -> None:
        """Work on a batch from now on.

        Args:
            running: The batch.
            begun: Items that have begun and whose outcome is not known.
        """
        self._batches[running.batch_id] = running
        if running.waiting:
            self._queue.add(running.caller.project_id, running.batch_id)
        self._go_on(running, begun)
        self.wake()
        self._look_whether_over(running)

    def drop(self, batch_id: str) -> None:
        """Another process works on it now. What has begun here is seen through all the same."""
        running = self._batches.pop(batch_id, None)
        if running is not None:
            self._queue.remove(running.caller.project_id, batch_id)
            self._on_over(running)

    def update(self, batch: Batch) -> None:
        """Take over what the store says of a batch."""
        running = self._batches.get(batch.batch_id)
        if running is None:
            return
        running.batch = batch
        if batch.owner != self._owner and batch.finished_at is None:
            self.drop(batch.batch_id)
        elif not running.waiting:
            self._queue.remove(running.caller.project_id, batch.batch_id)
        self.wake()
        self._look_whether_over(running)

    # --- beginning ----------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while await self._step():
                    pass
            except StoreUnavailable as exc:
                log.warning("batches wait for the store", why=exc.message)
                await asyncio.sleep(STORE_RETRY_S)
                self.wake()
            except Exception:
                log.exception("batches could not go on")
                await asyncio.sleep(STORE_RETRY_S)
                self.wake()
            if self._timer is not None:
                self._timer.cancel()
            blocked = [r.blocked_until for r in self._batches.values() if r.waiting]
            later = [at for at in blocked if at > loop.time()]
            self._timer = loop.call_at(min(later), self.wake) if later else None

    async def _step(self) -> bool:
        """One transaction of beginnings. False: nothing can begin now."""
        ended = [r for r in self._batches.values() if r.waiting and _why_over(r) is not None]
        if ended:
            await self._begin([(r, self._rest(r)) for r in ended], {})
            return True
        now = asyncio.get_running_loop().time()
        free = min(self._together, self._total_cap() - self._slots.taken())
        turns = self._queue.pick(free, lambda name: self._batches[name].ready(now))
        if not turns:
            if not self._slots.taken():
                self._together = TOGETHER_MIN
            return False
        self._together = min(2 * self._together, TOGETHER_MAX)
        flying: dict[str, contextlib.ExitStack] = {}
        beginnings = []
        for batch_id, count in turns.items():
            running = self._batches[batch_id]
            items = self._next_items(running, count, flying)
            if items:
                first = running.batch.next_index
                beginning = Beginning(batch_id=batch_id, first=first, items=items)
                beginnings.append((running, beginning))
        if not beginnings:
            return False
        return await self._begin(beginnings, flying)

    def _rest(self, running: RunningBatch) -> Beginning:
        batch = running.batch
        error = _why_over(running)
        assert error is not None
        count = min(running.waiting, SETTLED_TOGETHER_MAX)
        return Beginning(
            batch_id=batch.batch_id, first=batch.next_index, items=[error.to_dict()] * count
        )

    def _next_items(
        self, running: RunningBatch, count: int, flying: dict[str, contextlib.ExitStack]
    ) -> list[SandboxRecord | ErrorBody]:
        """Records of up to ``count`` items, each with a place on its node; cut where the next must
        wait."""
        items: list[SandboxRecord | ErrorBody] = []
        first = running.batch.next_index
        assert running.params is not None
        for index in range(first, first + count):
            try:
                params = running.params.item(index)
            except msgspec.ValidationError:
                log.exception("an item cannot be read", batch_id=running.batch_id, index=index)
                items.append(unreadable().to_dict())
                continue
            origin = running.origin(params)
            if origin is None:
                break
            if isinstance(origin, OpendsecError):
                items.append(origin.to_dict())
                continue
            try:
                record = self._creates.record_for(running.caller, params, origin)
            except NodeNotReached:
                # They are being restarted, perhaps. Nothing has begun, and nothing need fail.
                running.blocked_until = asyncio.get_running_loop().time() + NODES_RETRY_S
                break
            except OpendsecError as exc:
                items.append(exc.to_dict())
                continue
            if not self._slots.take(record.node_id):
                break
            flying[record.sandbox_id] = contextlib.ExitStack()
            flying[record.sandbox_id].enter_context(self._creates.flying(record.sandbox_id))
            flying[record.sandbox_id].callback(self._slots.release, record.node_id)
            items.append(record)
        return items

    async def _begin(
        self,
        beginnings: Sequence[tuple[RunningBatch, Beginning]],
        flying: dict[str, contextlib.ExitStack],
    ) -> bool:
        """Returns whether anything moved on."""
        try:
            begun = await rows.begin_items(
                self._store, self._owner, [one for _, one in beginnings], now=time.time()
            )
        except BaseException as exc:
            for stack in flying.values():
                stack.close()
            if isinstance(exc, StoreUnavailable):
                # It may have been written all the same.
                await self._look_again([running for running, _ in beginnings])
            raise
        moved = False
        now = asyncio.get_running_loop().time()
        for (running, _), result in zip(beginnings, begun, strict=True):
            moved = moved or result.taken > 0
            for index, record in result.records:
                running.open += 1
                self._spawn(self._first(running, index, record, flying.pop(record.sandbox_id)))
            if result.wait_s is not None:
                running.blocked_until = now + result.wait_s
            self._take_over(running, result)
        # No place in the quota was left for these.
        for stack in flying.values():
            stack.close()
        settled = zip(beginnings, begun, strict=True)
        news = {r.batch_id for (r, _), b in settled if b.taken > len(b.records)}
        self._on_news(news)
        return moved

    def _take_over(self, running: RunningBatch, result: Begun) -> None:
        if result.batch is None:
            # Its project is gone, and it with that.
            self.drop(running.batch_id)
            return
        moved_on_elsewhere = not result.taken and result.wait_s is None
        self.update(result.batch)
        if moved_on_elsewhere and running.batch_id in self._batches:
            self._spawn(self._adopt(running))

    async def _look_again(self, doubtful: Sequence[RunningBatch]) -> None:
        """Find out what became of a transaction whose end was not seen."""
        while True:
            await asyncio.sleep(STORE_RETRY_S)
            try:
                for running in doubtful:
                    batch = await rows.get_batch(self._store, running.batch_id)
                    if batch is None:
                        self.drop(running.batch_id)
                    elif batch.next_index != running.batch.next_index:
                        self.update(batch)
                        await self._adopt(running)
                return
            except StoreUnavailable as exc:
                log.warning("batches wait for the store", why=exc.message)

    async def _adopt(self, running: RunningBatch) -> None:
        """See items through that have begun without this process knowing of it."""
        self._go_on(running, await rows.begun_items(self._store, running.batch_id))

    def _go_on(self, running: RunningBatch, begun: Sequence[tuple[int, SandboxRecord]]) -> None:
        for index, record in begun:
            # One that is in flight was this process's before, too.
            if not self._creates.in_flight(record.sandbox_id):
                running.open += 1
                flying = contextlib.ExitStack()
                flying.enter_context(self._creates.flying(record.sandbox_id))
                self._spawn(self._again(running, index, record, flying))

    # --- one item -----------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="batch-item")
        self._items.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._items.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            # It stays begun, and the next process goes on with it.
            log.error("an item of a batch was left", exc_info=defect)

    async def _first(
        self,
        running: RunningBatch,
        index: int,
        record: SandboxRecord,
        flying: contextlib.ExitStack,
    ) -> None:
        """Make the sandbox of an item whose place on the node is held."""
        with self._counted(running), flying:
            await self._see_through(running, index, record, flying)

    async def _again(
        self,
        running: RunningBatch,
        index: int,
        record: SandboxRecord,
        flying: contextlib.ExitStack,
    ) -> None:
        """Go on with an item that an earlier process had begun."""
        with self._counted(running), flying:
            await self._slots.acquire(record.node_id)
            flying.callback(self._slots.release, record.node_id)
            if record.state in (State.PENDING, State.STARTING):
                record = await self._unaged(record)
                await self._see_through(running, index, record, flying, cut_off=True)
                return
            error = None
            if record.state is State.FAILED:
                error = SandboxStartFailed(record.message or "it did not start").to_dict()
                error["fault"] = record.fault or error["fault"]
            await self._note(running, index, [], error)

    async def _see_through(
        self,
        running: RunningBatch,
        index: int,
        record: SandboxRecord,
        flying: contextlib.ExitStack,
        *,
        cut_off: bool = False,
    ) -> None:
        """Make a sandbox and note the outcome.

        Args:
            running: The batch.
            index: The item.
            record: Its sandbox.
            flying: Where the ids fly that it gets later.
            cut_off: An earlier attempt was cut off by the end of a process, which may have taken
                the start with it; then there is another.
        """
        first = record
        try:
            try:
                started = await self._made(running, index, record, flying)
            except PlatformError as exc:
                another = None
                if cut_off and exc.retryable and not isinstance(exc, NodeUnavailable):
                    another = await self._another(record, flying)
                if another is None:
                    raise
                record = another
                started = await self._made(running, index, record, flying)
        except OpendsecError as exc:
            record = await self._as_it_is(running, index, record)
            log.warning(
                "create failed", sandbox_id=record.sandbox_id, code=exc.code, message=exc.message
            )
            # Also if its outcome is not known: a node removes what has a record that ended.
            await self._note(running, index, [failure(record, exc, "create")], exc.to_dict())
            self._creates.given_up(first)
            self._creates.given_up(record)
            return
        await self._note(running, index, started.changes, None)
        self._creates.recorded(started.record)

    async def _as_it_is(
        self, running: RunningBatch, index: int, record: SandboxRecord
    ) -> SandboxRecord:
        """The record whose end is to be noted: that of the node to which the create went last."""
        while True:
            try:
                return await rows.begun_record(self._store, running.batch_id, index) or record
            except StoreUnavailable as exc:
                log.warning("batches wait for the store", why=exc.message)
                await asyncio.sleep(STORE_RETRY_S)

    async def _made(
        self,
        running: RunningBatch,
        index: int,
        record: SandboxRecord,
        flying: contextlib.ExitStack,
    ) -> Started:
        pauses = iter(UNKNOWN_RETRY_S)
        while True:
            try:
                return await self._creates.start(record, flying=flying)
            except NodeUnavailable:
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)
            with contextlib.suppress(StoreUnavailable):
                now = await rows.begun_record(self._store, running.batch_id, index)
                record = now or record
                if not self._creates.in_flight(record.sandbox_id):
                    # Another process let it go to another node.
                    flying.enter_context(self._creates.flying(record.sandbox_id))

    async def _another(
        self, record: SandboxRecord, flying: contextlib.ExitStack
    ) -> SandboxRecord | None:
        """A record in the place of one of which nothing is left. None: there can be none."""
        try:
            another = self._creates.another(record)
            flying.enter_context(self._creates.flying(another.sandbox_id))
            if await move_create(self._store, record.sandbox_id, another):
                return another
        except OpendsecError:
            pass
        return None

    async def _unaged(self, record: SandboxRecord) -> SandboxRecord:
        """Its time has not begun if its node has never heard of it."""
        try:
            await self._node.get(record.sandbox_id)
        except SandboxNotFound:
            return msgspec.structs.replace(record, end_at=time.time() + record.timeout_s)
        except OpendsecError:
            pass
        return record

    async def _note(
        self,
        running: RunningBatch,
        index: int,
        changes: Sequence[StateChange],
        error: ErrorBody | None,
    ) -> None:
        outcome = Outcome(batch_id=running.batch_id, index=index, error=error)
        await self._writer.note(changes, outcome)

    @contextlib.contextmanager
    def _counted(self, running: RunningBatch) -> Iterator[None]:
        """An item that is open until its outcome is noted, or a defect ends the work on it: then it
        is found in the store again, once nothing else is open."""
        try:
            yield
        except asyncio.CancelledError:
            # This process ends, and holds the batch until it says so.
            raise
        except BaseException:
            self._one_less(running)
            raise
        self._one_less(running)

    def _one_less(self, running: RunningBatch) -> None:
        running.open -= 1
        self._look_whether_over(running)

    def _look_whether_over(self, running: RunningBatch) -> None:
        if running.waiting or running.open or running.batch_id not in self._batches:
            return
        del self._batches[running.batch_id]
        self._on_over(running)


def unreadable() -> OpendsecError:
    """What is said of items of a batch of which this release can make nothing."""
    return Internal(
        "what the batch asked for cannot be read by the server that went on with it",
        remediation="Ask for the rest in another batch. A server of an older release than the one "
        "that took the batch may be why.",
    )


def _why_over(running: RunningBatch) -> OpendsecError | None:
    """Why no more items of a batch begin."""
    if running.params is None:
        return unreadable()
    if running.batch.cancelled_at is not None:
        return BatchCancelled("the batch was cancelled before this item's turn came")
    if asyncio.get_running_loop().time() >= running.begin_until:
        return StartTimeout(
            "the item waited for its turn for as long as the batch allows",
            remediation="Ask for the rest in another batch, or let items wait for longer.",
        )
    return None

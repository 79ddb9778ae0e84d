# SPDX-License-Identifier: AGPL-3.0-only
"""Batches as their callers see them, and which process works on which.

A batch belongs to one process at a time, by a lease in the store. When that process dies, another
takes it over: its own successor at once, any other when the lease is over. Two that both believe
to own a batch do no harm: beginnings are compared with the store, and outcomes are noted once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec
import structlog

from opendsec_server.config import Config
from opendsec_server.contract.errors import BatchNotFound, OpendsecError, StoreUnavailable
from opendsec_server.contract.ids import BATCH_ID_RE, new_batch_id, random_chars
from opendsec_server.contract.limits import ENDED_RECORDS_KEPT_S
from opendsec_server.control.creates import Creates
from opendsec_server.control.iam import Caller
from opendsec_server.control.ledger import Ledger
from opendsec_server.control.nodes import Fleet
from opendsec_server.control.origins import Origins
from opendsec_server.store import batches as rows
from opendsec_server.store.batches import Batch, Beginning, Failure, Item
from opendsec_server.store.records import IdempotencyClaim, SandboxRecord
from opendsec_server.store.store import Store

from .dispatcher import SETTLED_TOGETHER_MAX, Dispatcher, unreadable
from .outcomes import OutcomeWriter
from .params import BatchParams
from .running import RunningBatch

log = structlog.get_logger(__name__)

STARTS_PER_CORE = 4
"""Starts of batches that a node is given at one time, for each of its processors: twice as many
as it works on, so that it never waits for the next."""
STARTS_MIN = 4
LEASE_S = 15.0
RENEW_INTERVAL_S = 4.0
PAGE = 500
"""Outcomes that a reader is given at one time."""
LOOK_HERE_S = 5.0
LOOK_ELSEWHERE_S = 0.5
"""How often readers look for outcomes without being told: when another process works on the batch,
nobody tells them."""
STOP_WAIT_S = 5.0
PRUNE_INTERVAL_S = 3_600.0


def seat_of(config: Config) -> str:
    """Name of the place of a server: this machine and its state directory."""
    place = f"{socket.gethostname()}:{config.state_path}"
    return hashlib.sha256(place.encode()).hexdigest()[:16]


class Watched(msgspec.Struct, kw_only=True, frozen=True):
    """News of a batch: the outcomes that came since the last."""

    batch: Batch
    outcomes: Sequence[tuple[Item, SandboxRecord | None]]
    """Each with the sandbox that was made, as its record is now. None: none was, or its record is
    gone."""


class Batches:
    """Makes, finds, watches and cancels batches.

    Args:
        store: Where.
        fleet: The nodes.
        creates: Make the sandboxes.
        origins: Find what they start from.
        ledger: Records their states.
        seat: Name of this process's place; its successor has the same.
    """

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        creates: Creates,
        origins: Origins,
        ledger: Ledger,
        seat: str,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._origins = origins
        self._seat = f"{seat}:"
        self._owner = f"{seat}:{random_chars(12)}"
        self._readers: dict[str, set[asyncio.Event]] = {}
        """Of those that wait for news of a batch."""
        self._writer = OutcomeWriter(store, ledger, self._tell)
        self._queue = Dispatcher(
            store=store,
            node=fleet,
            creates=creates,
            writer=self._writer,
            owner=self._owner,
            cap_of=self._cap_of,
            total_cap=self._total_cap,
            on_over=self._over,
            on_news=self._tell,
        )
        self._keeping: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._pruned_at = time.monotonic()
        self._stopped = False

    async def start(self) -> None:
        """Go on with the batches of this place's earlier process. Call it before what is left
        half-way is settled elsewhere."""
        self._writer.start()
        self._queue.start()
        await self._take(await self._claim(self._seat))
        self._keeping = asyncio.create_task(self._keep(), name="batches-keep")

    async def stop(self) -> None:
        """Let nothing more begin; the next process goes on. Harmless when it has stopped."""
        if self._stopped:
            return
        self._stopped = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._queue.stop(STOP_WAIT_S)
        await self._writer.stop()
        with contextlib.suppress(StoreUnavailable):
            # Others need not wait for the end of the lease.
            held = list(self._queue.batches)
            await rows.renew_batches(self._store, self._owner, held, 0.0)
        for running in list(self._queue.batches.values()):
            await running.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def load(self) -> tuple[int, int]:
        """How many items wait for their turn here, and how many have begun."""
        running = self._queue.batches.values()
        return sum(one.waiting for one in running), sum(one.open for one in running)

    # --- callers ------------------------------------------------------------

    async def create(self, caller: Caller, params: BatchParams, *, key: str | None) -> Batch:
        """Ask for many sandboxes; returns when that is recorded. It goes on by itself.

        Args:
            caller: Whose sandboxes they will be.
            params: What is asked for.
            key: Idempotency key of the whole. The same key finds the same batch.

        Raises:
            IdempotencyMismatch: the key was used with other parameters.
            TemplateNotFound, InvalidRequest, …: nothing can start so.
            StoreUnavailable: nothing was asked for, or it is not known.
        """
        now = time.time()
        claim = None
        if key is not None:
            claim = IdempotencyClaim(key=key, params_sha256=params.sha256())
            earlier = await rows.find_batch(self._store, caller.project_id, claim, now)
            if earlier is not None:
                return await self.get(caller, earlier)
        if params.common.extra.image is None and not params.differing:
            # Found out before anything is promised; an image may have to be pulled first.
            async with self._origins.using(caller, params.common):
                pass
        batch = Batch(
            batch_id=new_batch_id(),
            project_id=caller.project_id,
            params=params.pack(),
            asked=params.count,
            created_at=now,
            begin_until=now + params.wait_s,
            owner=self._owner,
            lease_until=now + LEASE_S,
        )
        batch_id = await rows.insert_batch(self._store, batch, claim)
        if batch_id != batch.batch_id:
            return await self.get(caller, batch_id)
        log.info("batch asked for", batch_id=batch_id, count=params.count)
        if batch_id not in self._queue.batches:
            # Else it was found in the store before we were told that it is there.
            self._queue.add(self._running(batch, params, caller))
        return batch

    async def get(self, caller: Caller, batch_id: str) -> Batch:
        """One batch.

        Raises:
            BatchNotFound: not one of the caller's.
        """
        batch = None
        if BATCH_ID_RE.fullmatch(batch_id):
            batch = await rows.get_batch(self._store, batch_id)
        if batch is None or batch.project_id != caller.project_id:
            raise BatchNotFound(f"there is no batch `{batch_id[:64]}`")
        return batch

    async def failures(self, batch: Batch) -> Sequence[Failure]:
        """Its failed items by cause, most frequent first."""
        return await rows.failures_of(self._store, batch.batch_id) if batch.failed else []

    async def list(
        self, caller: Caller, *, after: tuple[float, str] | None, limit: int
    ) -> Sequence[Batch]:
        """The project's batches, newest first."""
        return await rows.list_batches(self._store, caller.project_id, after=after, limit=limit)

    async def cancel(self, caller: Caller, batch_id: str) -> Batch:
        """Let no more items begin. Those that have begun are made; end them by their batch.

        Raises:
            BatchNotFound: not one of the caller's.
        """
        await self.get(caller, batch_id)
        batch = await rows.cancel_batch(self._store, batch_id, time.time())
        if batch is None:
            raise BatchNotFound(f"there is no batch `{batch_id}`")
        self._queue.update(batch)
        log.info("batch cancelled", batch_id=batch_id, waiting=batch.asked - batch.next_index)
        return batch

    async def watch(
        self, caller: Caller, batch_id: str, *, after: int = 0, follow: bool = True
    ) -> AsyncGenerator[Watched, None]:
        """Outcomes in the order in which they came, until all are there.

        Args:
            caller: Who looks.
            batch_id: Which.
            after: ``seq`` of the last one that is known already.
            follow: Wait for more. False: only what is there now.

        Raises:
            BatchNotFound: not one of the caller's.
        """
        await self.get(caller, batch_id)
        news = asyncio.Event()
        readers = self._readers.setdefault(batch_id, set())
        readers.add(news)
        try:
            while True:
                news.clear()
                batch, items, records = await rows.outcomes_after(
                    self._store, batch_id, after, PAGE
                )
                if batch is None:
                    raise BatchNotFound(f"there is no batch `{batch_id}` any more")
                after = items[-1].seq if items else after
                yield Watched(
                    batch=batch,
                    outcomes=[
                        (item, records.get(item.sandbox_id) if item.sandbox_id else None)
                        for item in items
                    ],
                )
                if len(items) == PAGE:
                    continue
                if batch.finished_at is not None or not follow:
                    return
                here = batch_id in self._queue.batches
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_HERE_S if here else LOOK_ELSEWHERE_S):
                        await news.wait()
        finally:
            readers.discard(news)
            if not readers and self._readers.get(batch_id) is readers:
                del self._readers[batch_id]

    # --- work ---------------------------------------------------------------

    def _cap_of(self, node_id: str) -> int:
        member = self._fleet.find(node_id)
        if member is None or member.info is None:
            return STARTS_MIN
        return max(STARTS_MIN, STARTS_PER_CORE * member.info.cpu_count)

    def _total_cap(self) -> int:
        names = [m.node_id for m in self._fleet.members if m.node_id is not None]
        return sum(map(self._cap_of, names)) or STARTS_MIN

    def _running(self, batch: Batch, params: BatchParams | None, caller: Caller) -> RunningBatch:
        return RunningBatch(batch, params, caller, self._origins, self._queue.wake)

    def _tell(self, batch_ids: set[str]) -> None:
        for batch_id in batch_ids:
            for news in self._readers.get(batch_id, ()):
                news.set()

    def _over(self, running: RunningBatch) -> None:
        self._tell({running.batch_id})
        task = asyncio.create_task(running.close(), name="batch-close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _claim(self, seat: str | None) -> Sequence[Batch]:
        now = time.time()
        return await rows.claim_batches(
            self._store,
            self._owner,
            held=list(self._queue.batches),
            seat=seat,
            now=now,
            lease_until=now + LEASE_S,
        )

    async def _take(self, claimed: Sequence[Batch]) -> None:
        for batch in claimed:
            try:
                await self._take_one(batch)
            except StoreUnavailable:
                raise
            except Exception:
                # The others must not wait for it.
                log.exception("batch cannot be taken over", batch_id=batch.batch_id)
                await self._end_unread(batch)

    async def _end_unread(self, batch: Batch) -> None:
        """End all that is open of a batch whose items cannot be read: who waits for it must not
        wait for ever. What there is of its sandboxes is found by their records."""
        error = unreadable().to_dict()
        while batch.finished_at is None and batch.next_index < batch.asked:
            count = min(batch.asked - batch.next_index, SETTLED_TOGETHER_MAX)
            rest = Beginning(batch_id=batch.batch_id, first=batch.next_index, items=[error] * count)
            (begun,) = await rows.begin_items(self._store, self._owner, [rest], now=time.time())
            if begun.batch is None or not begun.taken:
                # It is gone, or another process has it.
                return
            batch = begun.batch
        await rows.settle_begun(self._store, batch.batch_id, error, now=time.time())
        self._tell({batch.batch_id})

    async def _take_one(self, batch: Batch) -> None:
        project = await rows.project_of(self._store, batch)
        if project is None:
            return
        caller = Caller(project=project, key_id="")
        params = None
        try:
            params = BatchParams.unpack(batch.params)
        except Exception:
            # What has begun is seen through all the same.
            log.exception("batch cannot be read", batch_id=batch.batch_id)
        running = self._running(batch, params, caller)
        begun = await rows.begun_items(self._store, batch.batch_id)
        if batch.batch_id in self._queue.batches:
            # It was asked for here while it was looked for, and is at work.
            return
        log.info(
            "batch taken over",
            batch_id=batch.batch_id,
            begun=len(begun),
            waiting=running.waiting,
        )
        self._queue.add(running, begun)

    async def _keep(self) -> None:
        """Keep own leases, and take over what others have left."""
        while True:
            await asyncio.sleep(RENEW_INTERVAL_S)
            try:
                await self._renew()
                await self._take(await self._claim(None))
                await self._prune()
            except OpendsecError as exc:
                log.warning("batches not looked after", code=exc.code, why=exc.message)
            except Exception:
                log.exception("batches not looked after")

    async def _renew(self) -> None:
        held = list(self._queue.batches)
        kept = await rows.renew_batches(self._store, self._owner, held, time.time() + LEASE_S)
        for batch in kept:
            self._queue.update(batch)
        for batch_id in set(held).difference(batch.batch_id for batch in kept):
            # Finished, or another process has it.
            now = await rows.get_batch(self._store, batch_id)
            if now is None:
                self._queue.drop(batch_id)
            else:
                self._queue.update(now)

    async def _prune(self) -> None:
        if time.monotonic() - self._pruned_at < PRUNE_INTERVAL_S:
            return
        self._pruned_at = time.monotonic()
        before = time.time() - ENDED_RECORDS_KEPT_S
        while await rows.prune_batches(self._store, finished_before=before) >= rows.PRUNE_BATCH:
            pass

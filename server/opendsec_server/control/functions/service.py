# SPDX-License-Identifier: AGPL-3.0-only
"""Function calls: pools, queues, and which call runs where.

Everything here runs on one event loop, so what has no ``await`` in it happens at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import structlog

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    FunctionCancelled,
    FunctionPoolNotFound,
    FunctionPoolUnusable,
    FunctionQueueFull,
    FunctionWorkerLost,
    Internal,
    InvalidRequest,
    OpendsecError,
    QuotaExceeded,
    StoreUnavailable,
)
from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.node import NodeClient
from opendsec_server.control.creates import Creates
from opendsec_server.control.iam import Caller
from opendsec_server.store import accounts, sandboxes
from opendsec_server.store import functions as store_functions
from opendsec_server.store.functions import PoolMark, PoolRecord, PoolSpec, WorkerRow
from opendsec_server.store.store import Store

from . import results
from .model import (
    DEFAULT_POOL,
    DEFAULT_SPEC,
    POOL_MODULES_BYTES_MAX,
    POOL_NAME_CHARS_MAX,
    POOL_PRELOAD_MAX,
    POOLS_MAX,
    QUEUED_BYTES_MAX,
    QUEUED_CALLS_MAX,
    Code,
    Limits,
    Outcome,
)
from .outcomes import Outcomes
from .pool import Job, Pool
from .shares import allocate
from .worker import LEASE_S, Worker, end_sandbox

log = structlog.get_logger(__name__)

TICK_S = 1.0
LOOK_S = 1.0
"""After which a pool is looked for in the store again: another gateway may have changed it."""
PROLONG_S = LEASE_S / 3
HOLD_S = 2.0
"""A worker is not taken from a project for another sooner than this after it was made: making one
costs more than most calls."""
STARTS_AT_ONCE_MAX = 8
ENDS_AT_ONCE_MAX = 16
"""Of workers left by an earlier life of the server."""
STOP_S = 10.0
POOL_KEEPER = "function-pools"
"""In place of a key's id: the server itself makes a worker."""
_NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MODULE_RE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


class PoolState(msgspec.Struct, kw_only=True, frozen=True):
    """A pool and what it does now, on this server."""

    record: PoolRecord
    idle: int = 0
    busy: int = 0
    starting: int = 0
    queued: int = 0
    finished: int = 0
    python: str = ""
    """Version of its workers'. Empty: none has started yet."""
    last_error: OpendsecError | None = None
    """Why the last worker could not be made."""


class Functions:
    """See the module."""

    def __init__(self, *, config: Config, store: Store, node: NodeClient, creates: Creates) -> None:
        self._store = store
        self._node = node
        self._creates = creates
        self._workers_max = config.function_workers_max
        self._owner = f"{socket.gethostname()}/{config.instance}"
        self._pools: dict[tuple[str, str], Pool] = {}
        self._served: defaultdict[str, float] = defaultdict(float)
        self._queued_bytes: defaultdict[str, int] = defaultdict(int)
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers: dict[Worker, Pool] = {}
        self._leftovers: dict[str, str | None] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._starting = 0
        self._stopping = False
        self._looked_at = -LOOK_S
        """Monotonic time at which the last look at the store began."""
        self._looking: asyncio.Task[None] | None = None
        self._changes = 0
        """Of pools, by this process: what was read before one is not right any more."""
        self._seen: dict[tuple[str, str], PoolMark] = {}
        """What the last look found."""

    async def start(self) -> None:
        """End the workers of this server's earlier life: nobody can speak with them any more."""
        for row, sandbox_id in await store_functions.workers_of(self._store, self._owner):
            self._leftovers[row.worker_id] = sandbox_id
        if self._leftovers:
            log.info("workers of an earlier run", count=len(self._leftovers))
        await self._look()
        self._ticking = asyncio.create_task(self._tick(), name="functions")

    # --- what other gateways change -----------------------------------------

    async def _up_to_date(self) -> None:
        """Know what is recorded of all pools, as of at most ``LOOK_S`` ago. While the store is
        away, what is known goes on."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_if_possible(), name="functions-look")
        await asyncio.wait({self._looking})

    async def _look_if_possible(self) -> None:
        try:
            await self._look()
        except StoreUnavailable as exc:
            self._looked_at = time.monotonic()
            log.warning("function pools are not looked for", why=exc.message)
        except Exception as exc:
            self._looked_at = time.monotonic()
            log.error("function pools are not looked for", exc_info=exc)
        finally:
            self._looking = None

    async def _look(self) -> None:
        began, changes = time.monotonic(), self._changes
        marks = await store_functions.pool_marks(self._store)
        records = {}
        for place, mark in marks.items():
            if self._seen.get(place) != mark:
                records[place] = await store_functions.get_pool(self._store, *place)
        if changes != self._changes:
            # The next look sees that, too.
            return
        self._looked_at, self._seen = began, marks
        for place, pool in list(self._pools.items()):
            record = records.get(place)
            if record is not None:
                self._change(pool, record)
            elif place not in marks and pool.kept:
                self._drop(pool)
        for place, record in records.items():
            if record is not None and record.spec.workers_min > 0 and place not in self._pools:
                await self._keep_ready(place, record)

    async def _keep_ready(self, place: tuple[str, str], record: PoolRecord) -> None:
        """A pool that is to have workers at any time gets them before the first call."""
        project = await accounts.get_project(self._store, record.project_id)
        if project is not None and project.closed_at is None:
            caller = Caller(project=project, key_id=POOL_KEEPER)
            self._pools.setdefault(place, Pool(record, caller))

    def _change(self, pool: Pool, record: PoolRecord) -> None:
        """Take over what is recorded now; workers of the old kind end when idle."""
        if pool.record != record:
            if pool.record.spec != record.spec:
                self._retire_all(pool)
                pool.start_worked()
            pool.record = record
        pool.kept = True

    def _drop(self, pool: Pool) -> None:
        """Forget a pool that was deleted."""
        record = pool.record
        self._pools.pop((record.project_id, record.name), None)
        pool.deleted = True
        gone = FunctionCancelled(f"the pool `{record.name}` was deleted")
        for job in pool.lanes.drop_all():
            self._finish(pool, job, Outcome(error=gone))
        self._retire_all(pool)
        for worker, job in list(pool.busy.items()):
            self._finish(pool, job, Outcome(error=gone))
            worker.cancel()

    async def stop(self) -> None:
        """End all workers; what waits or runs is answered with an error."""
        self._stopping = True
        at_work = [task for task in (self._ticking, self._looking) if task is not None]
        for task in at_work:
            task.cancel()
        await asyncio.gather(*at_work, return_exceptions=True)
        gone = FunctionWorkerLost("the server is stopping")
        for pool in self._pools.values():
            for job in [*pool.lanes.drop_all(), *pool.busy.values()]:
                self._finish(pool, job, Outcome(error=gone))
            pool.idle.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ends = [asyncio.create_task(self._end(worker)) for worker in list(self._workers)]
        if ends:
            _, late = await asyncio.wait(ends, timeout=STOP_S)
            for end in late:
                end.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # --- pools --------------------------------------------------------------

    async def put_pool(self, caller: Caller, name: str, spec: PoolSpec) -> PoolState:
        """Make a pool, or change the one of that name: workers of the old kind end when idle.

        Raises:
            InvalidRequest: a name or value makes no sense.
            QuotaExceeded: the project has as many pools as may be.
        """
        _check_pool(name, spec)
        record = PoolRecord(
            pool_id=f"f{random_chars(15)}",
            project_id=caller.project_id,
            name=name,
            spec=spec,
            created_at=time.time(),
        )
        kept = await store_functions.put_pool(self._store, record, pools_max=POOLS_MAX)
        if kept is None:
            raise QuotaExceeded(
                f"the project has {POOLS_MAX} function pools, as many as may be",
                remediation="Delete pools that are no longer needed.",
                details={"limit": "function_pools", "max": POOLS_MAX},
            )
        self._changes += 1
        pool = self._pools.get((caller.project_id, name))
        if pool is None:
            pool = self._pools[caller.project_id, name] = Pool(kept, caller)
        self._change(pool, kept)
        pool.caller = caller
        pool.start_worked()
        self._balance()
        return self._state_of(pool)

    async def pools(self, caller: Caller) -> list[PoolState]:
        """The project's pools, and ``default`` if it was used."""
        await self._up_to_date()
        records = await store_functions.list_pools(self._store, caller.project_id)
        found = {record.name: PoolState(record=record) for record in records}
        for (project_id, name), pool in self._pools.items():
            if project_id == caller.project_id and not pool.deleted:
                found[name] = self._state_of(pool)
        return [found[name] for name in sorted(found)]

    async def pool(self, caller: Caller, name: str) -> PoolState:
        """One pool.

        Raises:
            FunctionPoolNotFound: the project has none of that name.
        """
        return self._state_of(await self._pool(caller, name))

    async def delete_pool(self, caller: Caller, name: str) -> None:
        """End a pool's workers and forget it. Calls that wait or run end as cancelled.

        Raises:
            FunctionPoolNotFound: the project has none of that name.
        """
        pool = await self._pool(caller, name)
        await store_functions.delete_pool(self._store, pool.record.pool_id)
        self._changes += 1
        if not pool.deleted:
            self._drop(pool)
        self._balance()

    async def _pool(self, caller: Caller, name: str) -> Pool:
        await self._up_to_date()
        place = (caller.project_id, name)
        pool = self._pools.get(place)
        if pool is None:
            record = await store_functions.get_pool(self._store, *place)
            kept = record is not None
            if record is None:
                if name != DEFAULT_POOL:
                    raise FunctionPoolNotFound(f"there is no function pool `{name[:64]}`")
                record = PoolRecord(
                    pool_id=f"f{random_chars(15)}",
                    project_id=caller.project_id,
                    name=name,
                    spec=DEFAULT_SPEC,
                    created_at=time.time(),
                )
            # Another request may have been quicker.
            pool = self._pools.setdefault(place, Pool(record, caller, kept=kept))
        pool.caller = caller
        return pool

    def _state_of(self, pool: Pool) -> PoolState:
        return PoolState(
            record=pool.record,
            idle=len(pool.idle),
            busy=len(pool.busy),
            starting=pool.starting,
            queued=len(pool.lanes),
            finished=pool.finished,
            python=pool.python,
            last_error=pool.last_error,
        )

    # --- calls ----------------------------------------------------------------

    async def call(
        self, caller: Caller, pool_name: str, code: Code, item: bytes, limits: Limits
    ) -> Outcome:
        """Make one call. Given up when its caller goes away.

        Raises:
            FunctionPoolNotFound: the project has no such pool.
            FunctionQueueFull: as many calls of the project wait as may.
        """
        async with contextlib.aclosing(
            await self.map(caller, pool_name, code, [item], limits)
        ) as outcomes:
            async for _, outcome in outcomes:
                return outcome
        raise FunctionWorkerLost("the server is stopping")

    async def map(
        self,
        caller: Caller,
        pool_name: str,
        code: Code,
        items: Sequence[bytes],
        limits: Limits,
    ) -> Outcomes:
        """Make many calls; their outcomes as they come, each exactly once, with its index.

        What is not over is given up when the result is closed: nobody could read it.

        Raises:
            As ``call``.
        """
        pool = await self._pool(caller, pool_name)
        self._check_room(pool, code, items)
        lane = random_chars(12)
        outcomes = Outcomes(
            len(items),
            hold=lambda: pool.lanes.hold(lane),
            let_go=lambda: self._let_go(pool, lane),
            give_up=lambda: self._give_up(pool, lane),
        )
        # Not the outcomes themselves: who drops them must be the last one that has them.
        put = outcomes.putter()
        jobs = [
            Job(lane, code, item, limits, functools.partial(put, index))
            for index, item in enumerate(items)
        ]
        if jobs:
            # The code is kept as long as the last one waits.
            jobs[-1].size_bytes += len(code.text)
        if not self._has_work(pool.record.project_id):
            # Who was away does not come back with a credit.
            busy = [self._served[other] for other in self._working()]
            self._served[pool.record.project_id] = max(
                self._served[pool.record.project_id], min(busy, default=0.0)
            )
        for job in jobs:
            pool.lanes.add(lane, job)
            self._queued_bytes[pool.record.project_id] += job.size_bytes
        self._balance()
        return outcomes

    def _let_go(self, pool: Pool, lane: str) -> None:
        if pool.lanes.let_go(lane):
            self._balance()

    def _give_up(self, pool: Pool, lane: str) -> None:
        """Nobody reads what comes of these calls."""
        gone = FunctionCancelled("the caller went away")
        for job in pool.lanes.drop(lane):
            self._finish(pool, job, Outcome(error=gone))
        for worker, job in list(pool.busy.items()):
            if job.lane == lane and not job.over:
                worker.cancel()

    def _check_room(self, pool: Pool, code: Code, items: Sequence[bytes]) -> None:
        if self._stopping:
            raise FunctionWorkerLost("the server is stopping")
        project_id = pool.record.project_id
        queued = sum(len(p.lanes) + p.lanes.held for p in self._pools.values()
                     if p.record.project_id == project_id)  # fmt: skip
        size = self._queued_bytes[project_id] + sum(map(len, items)) + len(code.text)
        if queued + len(items) > QUEUED_CALLS_MAX or size > QUEUED_BYTES_MAX:
            raise FunctionQueueFull(
                f"{queued} calls of the project wait; {len(items)} more would be above "
                f"{QUEUED_CALLS_MAX} calls or {QUEUED_BYTES_MAX} bytes",
                details={"queued": queued, "limit": QUEUED_CALLS_MAX},
                retry_after_s=5,
            )

    def _finish(self, pool: Pool, job: Job, outcome: Outcome) -> None:
        if job.over:
            return
        self._queued_bytes[pool.record.project_id] -= job.size_bytes
        pool.finished += 1
        job.finish(outcome)

    # --- who runs where ---------------------------------------------------------

    def _has_work(self, project_id: str) -> bool:
        return any(
            len(pool.lanes) or pool.busy
            for pool in self._pools.values()
            if pool.record.project_id == project_id
        )

    def _working(self) -> set[str]:
        return {p.record.project_id for p in self._pools.values() if len(p.lanes) or p.busy}

    def _targets(self) -> dict[Pool, int]:
        wanted: defaultdict[str, dict[str, int]] = defaultdict(dict)
        by_id = {}
        for pool in self._pools.values():
            by_id[pool.record.pool_id] = pool
            wanted[pool.record.project_id][pool.record.pool_id] = pool.wanted
        given = allocate(wanted, self._workers_max, self._served)
        return {by_id[pool_id]: count for pool_id, count in given.items()}

    def _balance(self) -> None:
        """Give calls to idle workers, and make or end workers as the shares say."""
        if self._stopping:
            return
        for pool in self._pools.values():
            self._assign(pool)
        targets = self._targets()
        now = time.monotonic()
        lacking = [
            pool for pool, target in targets.items() if pool.live < target and now >= pool.retry_at
        ]
        room = self._workers_max - sum(pool.live + pool.ending for pool in self._known())
        for pool in lacking:
            for _ in range(targets[pool] - pool.live):
                if self._starting >= STARTS_AT_ONCE_MAX:
                    return
                if room <= 0:
                    if not self._make_room(targets):
                        return
                    # It is made when the other has ended.
                    continue
                room -= 1
                self._begin_start(pool)

    def _known(self) -> set[Pool]:
        return {*self._pools.values(), *self._workers.values()}

    def _make_room(self, targets: dict[Pool, int]) -> bool:
        """End an idle worker of a pool that has more than its share."""
        now = time.monotonic()
        for pool, target in targets.items():
            over = pool.live - target
            if over > 0 and pool.idle and now - pool.idle[0].started_at > HOLD_S:
                self._retire(pool, pool.idle.pop(0))
                return True
        return False

    def _assign(self, pool: Pool) -> None:
        while pool.idle and len(pool.lanes):
            # The last one that was idle: others can then be ended.
            worker = pool.idle.pop()
            if not worker.alive:
                self._retire(pool, worker)
                continue
            job = pool.lanes.take()
            assert job is not None
            pool.busy[worker] = job
            self._spawn(self._run(pool, worker, job))

    async def _run(self, pool: Pool, worker: Worker, job: Job) -> None:
        """One call after the other, as long as the worker may go on."""
        try:
            if await self._serve(pool, worker, job):
                return
        finally:
            # A stop ends all workers itself.
            if pool.busy.pop(worker, None) is not None and not self._stopping:
                self._retire(pool, worker)
        self._balance()

    async def _serve(self, pool: Pool, worker: Worker, job: Job) -> bool:
        """True: the worker is idle. Otherwise it has to go."""
        while True:
            began = time.monotonic()
            try:
                outcome = await worker.call(job.code, job.item, job.limits)
            except OpendsecError as exc:
                outcome = Outcome(error=exc, worker=worker.sandbox_id)
                lost = True
            except Exception as exc:
                log.error("a call broke", exc_info=exc)
                outcome = results.defect(exc)
                lost = True
            else:
                lost = False
            self._served[pool.record.project_id] += time.monotonic() - began
            self._finish(pool, job, outcome)
            usable = not lost and await worker.settle()
            if not usable or self._should_end(pool, worker):
                return False
            following = pool.lanes.take()
            if following is None:
                del pool.busy[worker]
                pool.idle.append(worker)
                return True
            job = following
            pool.busy[worker] = job

    def _should_end(self, pool: Pool, worker: Worker) -> bool:
        """Whether the worker is of an old kind, or somebody else's by now."""
        if pool.deleted or self._stopping or worker.spec != pool.record.spec:
            return True
        if len(self._pools) == 1 or time.monotonic() - worker.started_at < HOLD_S:
            return False
        if sum(p.live for p in self._pools.values()) < self._workers_max:
            return False
        return pool.live > self._targets().get(pool, 0)

    # --- workers --------------------------------------------------------------

    def _begin_start(self, pool: Pool) -> None:
        pool.starting += 1
        self._starting += 1
        self._spawn(self._start_worker(pool))

    async def _start_worker(self, pool: Pool) -> None:
        worker = Worker(worker_id=random_chars(20), node=self._node, spec=pool.record.spec)
        row = WorkerRow(
            worker_id=worker.worker_id,
            project_id=pool.record.project_id,
            owner=self._owner,
            created_at=time.time(),
        )
        failure: OpendsecError | None = None
        try:
            # Before anything can be cut off: whoever stops the server ends it.
            self._workers[worker] = pool
            await store_functions.add_worker(self._store, row)
            await worker.start(pool.caller, pool.record, self._creates)
        except OpendsecError as exc:
            failure = exc
        except TimeoutError:
            failure = FunctionPoolUnusable("a worker was not ready in time")
        except Exception as exc:
            log.error("a worker's start broke", exc_info=exc)
            failure = Internal("a worker could not be started because of a defect")
        finally:
            pool.starting -= 1
            self._starting -= 1
        if failure is None:
            pool.start_worked()
            pool.python = worker.python
            if self._should_end(pool, worker):
                self._retire(pool, worker)
            else:
                pool.idle.append(worker)
        else:
            log.info("worker not made", pool=pool.record.pool_id, code=failure.code,
                     why=failure.message)  # fmt: skip
            self._retire(pool, worker)
            if pool.start_failed(failure):
                self._fail_queue(pool, failure)
        self._balance()

    def _fail_queue(self, pool: Pool, error: OpendsecError) -> None:
        for job in pool.lanes.drop_all():
            self._finish(pool, job, Outcome(error=error))

    def _retire_all(self, pool: Pool) -> None:
        idle, pool.idle = pool.idle, []
        for worker in idle:
            self._retire(pool, worker)

    def _retire(self, pool: Pool, worker: Worker) -> None:
        if worker not in self._workers:
            return
        pool.ending += 1
        self._spawn(self._end_and_go_on(pool, worker))

    async def _end_and_go_on(self, pool: Pool, worker: Worker) -> None:
        try:
            await self._end(worker)
        finally:
            pool.ending -= 1
        self._balance()

    async def _end(self, worker: Worker) -> None:
        """End a worker and forget it; what cannot be done now is done later."""
        if await worker.end():
            with contextlib.suppress(OpendsecError):
                await store_functions.drop_worker(self._store, worker.worker_id)
                self._workers.pop(worker, None)
                return
        self._leftovers[worker.worker_id] = worker.sandbox_id
        self._workers.pop(worker, None)

    async def _end_leftovers(self) -> None:
        left = list(self._leftovers.items())[:ENDS_AT_ONCE_MAX]
        await asyncio.gather(*(self._end_leftover(*one) for one in left))

    async def _end_leftover(self, worker_id: str, sandbox_id: str | None) -> None:
        if sandbox_id is None:
            # Its create was asked for, and its outcome was not seen.
            with contextlib.suppress(OpendsecError):
                of_ours = await store_functions.workers_of(self._store, self._owner)
                sandbox_id = next((one for row, one in of_ours if row.worker_id == worker_id), None)
        if sandbox_id is not None and not await end_sandbox(self._node, sandbox_id):
            # Tried again, but after the others.
            self._leftovers[worker_id] = self._leftovers.pop(worker_id)
            return
        with contextlib.suppress(OpendsecError):
            await store_functions.drop_worker(self._store, worker_id)
            self._leftovers.pop(worker_id, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="function")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("functions broke", exc_info=failure)

    async def _tick(self) -> None:
        prolonged_at = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                await self._end_leftovers()
                await self._up_to_date()
                if now - prolonged_at > PROLONG_S:
                    prolonged_at = now
                    await self._prolong()
                for pool in list(self._pools.values()):
                    self._end_idle(pool, now)
                    error = pool.out_of_patience(now)
                    if error is not None:
                        self._fail_queue(pool, error)
                self._balance()
            except Exception as exc:
                log.error("functions: a round failed", exc_info=exc)
            await asyncio.sleep(TICK_S)

    def _end_idle(self, pool: Pool, now: float) -> None:
        spec = pool.record.spec
        for worker in list(pool.idle):
            spare = pool.live > max(spec.workers_min, len(pool.lanes))
            if worker.spec != spec or (spare and now - worker.idle_since > spec.idle_s):
                pool.idle.remove(worker)
                self._retire(pool, worker)

    async def _prolong(self) -> None:
        for worker, pool in list(self._workers.items()):
            if worker.sandbox_id is None:
                continue
            if await worker.prolong():
                with contextlib.suppress(OpendsecError):
                    await sandboxes.set_end_at(
                        self._store, worker.sandbox_id, time.time() + LEASE_S
                    )
            elif worker in pool.idle:
                # Gone while it had nothing to do: killed by hand, or its node was lost.
                pool.idle.remove(worker)
                self._retire(pool, worker)


def _check_pool(name: str, spec: PoolSpec) -> None:
    if not 0 < len(name) <= POOL_NAME_CHARS_MAX or _NAME_RE.fullmatch(name) is None:
        raise InvalidRequest(
            f"name: 1 to {POOL_NAME_CHARS_MAX} of [A-Za-z0-9._-], beginning with a letter or digit"
        )
    if spec.workers_min > spec.workers_max:
        raise InvalidRequest("workers_min: more than workers_max")
    if len(spec.preload) > POOL_PRELOAD_MAX:
        raise InvalidRequest(f"preload: at most {POOL_PRELOAD_MAX}")
    for module in (*spec.preload, *spec.modules):
        if len(module) > 200 or _MODULE_RE.fullmatch(module) is None:
            raise InvalidRequest(f"`{module[:64]}` is no name of a Python module")
    size = sum(len(text.encode(errors="replace")) for text in spec.modules.values())
    if size > POOL_MODULES_BYTES_MAX:
        raise InvalidRequest(f"modules: {size} bytes; at most {POOL_MODULES_BYTES_MAX}")

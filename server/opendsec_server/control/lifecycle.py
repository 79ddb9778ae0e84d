# SPDX-License-Identifier: AGPL-3.0-only
"""What a caller can do with a sandbox after its creation.

Every call first finds the sandbox in the caller's project. A foreign sandbox is answered like one
that does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import msgspec
import structlog

from opendsec_server.contract.errors import (
    NodeUnavailable,
    OpendsecError,
    QuotaExceeded,
    SandboxNotFound,
    StateConflict,
    StoreUnavailable,
)
from opendsec_server.contract.ids import is_sandbox_id
from opendsec_server.contract.node import (
    MetricSample,
    NetworkPolicy,
    NodeClient,
    PauseReport,
    SandboxStatus,
    StateMode,
)
from opendsec_server.contract.states import TERMINAL, EndReason, State
from opendsec_server.store import sandboxes
from opendsec_server.store.places import give_back_places, hold_places
from opendsec_server.store.records import SandboxExtra, SandboxRecord, StateChange, Transition
from opendsec_server.store.sandboxes import SandboxFilter
from opendsec_server.store.store import Store

from .attempts import Attempts
from .creates import Creates
from .iam import Caller
from .invalidations import Invalidations
from .ledger import PAUSES, Ledger, change_from_status, fault_of, with_status
from .metrics import ControlMetrics
from .params import check_network, check_timeout
from .task_deadlines import TaskDeadlines

log = structlog.get_logger(__name__)

CONNECT_TRIES = 3
"""A sandbox can pause while its life is being extended; it is resumed then."""


class Page(msgspec.Struct, kw_only=True, frozen=True):
    """One page of a list."""

    records: list[SandboxRecord]
    more: bool
    """Whether there is another page after the last record."""


class Connected(msgspec.Struct, kw_only=True, frozen=True):
    """A sandbox that runs."""

    record: SandboxRecord
    resumed: bool
    """It was not running before."""


class Paused(msgspec.Struct, kw_only=True, frozen=True):
    """A sandbox that was paused, and what that did."""

    record: SandboxRecord
    report: PauseReport


class Lifecycle:
    """Reading, extending, pausing, changing and ending sandboxes."""

    def __init__(
        self,
        *,
        store: Store,
        node: NodeClient,
        creates: Creates,
        ledger: Ledger,
        invalidations: Invalidations,
        metrics: ControlMetrics,
        deadlines: TaskDeadlines,
    ) -> None:
        self._store = store
        self._node = node
        self._creates = creates
        self._ledger = ledger
        self._invalidations = invalidations
        self._metrics = metrics
        self._deadlines = deadlines
        self._pauses: Attempts[Paused] = Attempts("pause")
        self._resumes: Attempts[Connected] = Attempts("resume")
        self._resuming: dict[str, asyncio.Task[Connected]] = {}
        self._places: Counter[str] = Counter()
        """Sandboxes that hold places in the quota, and for how many resumes."""
        self._left: Attempts[None] = Attempts("leave-place")

    async def stop(self) -> None:
        """Give pauses and resumes a moment to end. The node finishes what it has begun."""
        await self._pauses.stop()
        await self._resumes.stop()
        await self._left.stop()

    async def get(self, caller: Caller, sandbox_id: str) -> SandboxRecord:
        """The record of a sandbox, ended ones included.

        Raises:
            SandboxNotFound: not one of the caller's.
        """
        record = None
        if is_sandbox_id(sandbox_id):
            record = await sandboxes.get_sandbox(self._store, sandbox_id)
        if record is None or record.project_id != caller.project_id:
            raise _not_found(sandbox_id)
        return record

    async def with_trouble(self, record: SandboxRecord) -> SandboxRecord:
        """With what the node says of a running sandbox now, such as that the store of its image is
        lost."""
        if record.state is not State.RUNNING:
            return record
        try:
            status = await self._node.get(record.sandbox_id)
        except OpendsecError:
            return record
        if status.state is not State.RUNNING or status.message is None:
            return record
        return msgspec.structs.replace(record, message=status.message)

    async def page(self, wanted: SandboxFilter) -> Page:
        """One page of a project's sandboxes."""
        one_more = msgspec.structs.replace(wanted, limit=wanted.limit + 1)
        records = await sandboxes.list_sandboxes(self._store, one_more)
        return Page(records=records[: wanted.limit], more=len(records) > wanted.limit)

    async def count_running(self, caller: Caller) -> int:
        """How many of the project's sandboxes run."""
        return await sandboxes.count_in_states(self._store, caller.project_id, (State.RUNNING,))

    async def kill(self, caller: Caller, sandbox_id: str) -> tuple[SandboxRecord, bool]:
        """End a sandbox in any state; return when nothing of it runs.

        Returns:
            The record, and whether the sandbox was alive before.

        Raises:
            SandboxNotFound: not one of the caller's.
        """
        record = await self.get(caller, sandbox_id)
        if record.terminal:
            return record, False
        await self._ledger.apply([await self.end_on_node(record)])
        return await self.get(caller, sandbox_id), True

    async def end_on_node(
        self, record: SandboxRecord, reason: EndReason = EndReason.KILLED
    ) -> StateChange:
        """End a sandbox on its node; what that means for its record.

        Raises:
            NodeUnavailable: it may still run.
        """
        self._invalidations.publish(record.sandbox_id)
        try:
            return await self._kill_on_node(record.sandbox_id, reason)
        except SandboxNotFound:
            pass
        # The create may not have reached the node yet; once it has, there is something to kill.
        if await self._creates.wait_for(record.sandbox_id):
            try:
                return await self._kill_on_node(record.sandbox_id, reason)
            except SandboxNotFound:
                pass
        return lost(record.sandbox_id, cause="api")

    async def _kill_on_node(self, sandbox_id: str, reason: EndReason) -> StateChange:
        status = await self._node.kill(sandbox_id, reason)
        return change_from_status(status, cause="api", now=time.time())

    def end_in(self, record: SandboxRecord, timeout_s: float) -> float:
        """The end that a sandbox is told that may live ``timeout_s`` from now: no later than its
        task's. Unix seconds."""
        wanted = time.time() + timeout_s
        return self._deadlines.cap(record.project_id, record.task_id, wanted)

    async def set_timeout(self, caller: Caller, sandbox_id: str, timeout_s: int) -> SandboxRecord:
        """Let a sandbox end ``timeout_s`` from now, sooner or later than before.
        Zero or less ends it at once.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
            StateConflict: it is paused: a paused one has no end.
            InvalidRequest: longer than a sandbox may live.
        """
        check_timeout(timeout_s)
        record = await self.get_live(caller, sandbox_id)
        status = await self._node.get(sandbox_id)
        if status.state in PAUSES:
            raise StateConflict(
                f"sandbox `{sandbox_id}` is {status.state}: it has no end to set",
                remediation="Resume it; that sets a new end.",
                details={"state": status.state},
            )
        status = await self._node.set_end_at(sandbox_id, self.end_in(record, max(timeout_s, 0)))
        return await self._note_end_at(record, status)

    async def connect(
        self,
        caller: Caller,
        sandbox_id: str,
        timeout_s: int | None,
        *,
        reboot: bool = False,
        resume: bool = True,
    ) -> Connected:
        """Make sure that a sandbox runs for at least ``timeout_s`` more seconds.

        Never shortens its life. One that is paused is resumed, if there is a place for it.

        Args:
            caller: Whose it is.
            sandbox_id: Which.
            timeout_s: None: what it was created with.
            reboot: Start a paused one from its disk, without its memory.
            resume: False: only extend.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
            StateConflict: it is starting or ending, or paused and not to be resumed.
            InvalidRequest: longer than a sandbox may live.
            QuotaExceeded: as many of the project's sandboxes run as may.
            NodeFull, SnapshotIncompatible, SnapshotDamaged, ResumeFailed: it stays paused.
        """
        if timeout_s is not None:
            check_timeout(timeout_s)
        record = await self.get_started(caller, sandbox_id)
        wanted_s = record.timeout_s if timeout_s is None else timeout_s
        for _ in range(CONNECT_TRIES):
            status = await self._node.get(sandbox_id)
            if status.state in TERMINAL:
                raise _ended(sandbox_id, status.state, status.reason)
            if status.state is not State.RUNNING:
                if status.state in PAUSES and resume:
                    return await self.resume(record, wanted_s, reboot=reboot)
                break
            end_at = self.end_in(record, wanted_s)
            if end_at > status.end_at:
                status = await self._node.set_end_at(sandbox_id, end_at, only_extend=True)
                await self._note_end_at(record, status)
            if status.state is State.RUNNING:
                return Connected(record=with_status(record, status), resumed=False)
        raise StateConflict(
            f"sandbox `{sandbox_id}` is {status.state}", details={"state": status.state}
        )

    async def resume(
        self, record: SandboxRecord, timeout_s: float, *, reboot: bool = False
    ) -> Connected:
        """Let a paused sandbox run on, for ``timeout_s`` from now. Who asks was checked before.

        A paused sandbox does not count for the project's quota; it must find a place again.

        Raises:
            As ``connect``.
        """
        name = record.sandbox_id
        task = self._resuming.get(name)
        if task is None:
            task = self._resumes.spawn(self._resume(record, timeout_s, reboot=reboot))
            self._resuming[name] = task
            task.add_done_callback(lambda _: self._resuming.pop(name))
            return await asyncio.shield(task)
        connected = await asyncio.shield(task)
        # Another caller's resume, for another time.
        end_at = self.end_in(record, timeout_s)
        if end_at <= connected.record.end_at:
            return connected
        status = await self._node.set_end_at(name, end_at, only_extend=True)
        await self._note_end_at(record, status)
        return Connected(record=with_status(record, status), resumed=True)

    async def _resume(self, record: SandboxRecord, timeout_s: float, *, reboot: bool) -> Connected:
        name = record.sandbox_id
        async with self._place_for(record):
            end_at = self.end_in(record, timeout_s)
            async with self.recorded_if_failed(name):
                with self._metrics.timed("resume", record.backend):
                    status = await self._node.resume(name, end_at=end_at, reboot=reboot)
            # Its address may be another one now.
            self._invalidations.publish(name)
            await self._record(status)
        log.info("sandbox resumed", sandbox_id=name, reboot=reboot)
        return Connected(record=with_status(record, status), resumed=True)

    @contextlib.asynccontextmanager
    async def _place_for(self, record: SandboxRecord) -> AsyncIterator[None]:
        """Hold a place in the quota until the record says that the sandbox runs.

        Raises:
            QuotaExceeded: there is none.
        """
        refusal = (await self.take_places([record]))[0]
        if refusal is not None:
            raise refusal
        async with self.place_of(record.sandbox_id):
            yield

    async def take_places(self, records: Sequence[SandboxRecord]) -> list[QuotaExceeded | None]:
        """Hold places in the quota for many paused sandboxes, each to be used by ``place_of``.

        Returns:
            Why each got none; None: it has one.

        Raises:
            StoreUnavailable: none has one.
        """
        names = [record.sandbox_id for record in records]
        refused = await hold_places(self._store, names, now=time.time())
        self._places.update(name for name in names if name not in refused)
        return [refused.get(name) for name in names]

    @contextlib.asynccontextmanager
    async def place_of(self, sandbox_id: str) -> AsyncIterator[None]:
        """A resume, in the place that was taken for it. When it is done the record gives the place
        back; when it fails this does."""
        try:
            yield
        except NodeUnavailable:
            # It may be under way: the node's next word tells, or the place's time is over.
            self._places.subtract((sandbox_id,))
            raise
        except asyncio.CancelledError:
            self.leave_place(sandbox_id)
            raise
        except Exception:
            await self._leave(sandbox_id)
            raise
        else:
            self._places.subtract((sandbox_id,))
        finally:
            if self._places[sandbox_id] <= 0:
                del self._places[sandbox_id]

    def leave_place(self, sandbox_id: str) -> None:
        """Nobody waits for a resume any more, and perhaps it was not begun."""
        self._left.spawn(self._leave(sandbox_id))

    async def _leave(self, sandbox_id: str) -> None:
        self._places.subtract((sandbox_id,))
        if self._places[sandbox_id] > 0:
            return
        del self._places[sandbox_id]
        await self.refresh(sandbox_id)
        try:
            await give_back_places(self._store, [sandbox_id])
        except StoreUnavailable:
            log.warning("a place in the quota is held for a while", sandbox_id=sandbox_id)

    async def pause(self, caller: Caller, sandbox_id: str, mode: StateMode) -> Paused:
        """Free a sandbox's memory and keep the rest. A call during a pause shares it.

        It goes on when the caller goes away.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
            AlreadyPaused: it is.
            StateConflict: it is resuming or ending.
            NotSupported: the backend cannot keep memory.
            SnapshotFailed: it could not be saved; it goes on running.
        """
        record = await self.get_started(caller, sandbox_id)
        paused, _ = await self._pauses.run(
            lambda: self._pause(record, mode), project_id=caller.project_id
        )
        return paused

    async def _pause(self, record: SandboxRecord, mode: StateMode) -> Paused:
        name = record.sandbox_id
        self._invalidations.publish(name)
        async with self.recorded_if_failed(name):
            with self._metrics.timed("pause", record.backend):
                report = await self._node.pause(name, mode)
        self._invalidations.publish(name)
        await self._record(report.status)
        log.info(
            "sandbox paused",
            sandbox_id=name,
            mode=mode,
            freed_bytes=report.memory_freed_bytes,
            stored_bytes=report.stored_bytes,
        )
        return Paused(record=with_status(record, report.status), report=report)

    @contextlib.asynccontextmanager
    async def recorded_if_failed(self, sandbox_id: str) -> AsyncIterator[None]:
        """What failed may have moved the sandbox back and forth: who was told of the failure
        must not read of a state in between."""
        try:
            yield
        except OpendsecError:
            await self.refresh(sandbox_id)
            raise

    async def refresh(self, sandbox_id: str) -> None:
        """Bring a record up to date without waiting for the node's events. If that cannot be done
        now, they do it."""
        with contextlib.suppress(OpendsecError):
            await self._record(await self._node.get(sandbox_id))

    async def _record(self, status: SandboxStatus) -> None:
        """Note what the node has done. The answer is true also when the store does not take it:
        the node's events, or the next comparison, bring the record up to date."""
        change = change_from_status(status, cause="api", now=time.time(), again=True)
        try:
            await self._ledger.apply([change])
        except StoreUnavailable:
            log.warning("not recorded yet", sandbox_id=status.sandbox_id, state=status.state)

    async def set_network(
        self, caller: Caller, sandbox_id: str, policy: NetworkPolicy, extra: SandboxExtra
    ) -> SandboxRecord:
        """Replace the network policy of a running sandbox.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
            StateConflict: it is not running.
            InvalidRequest, NotSupported: the policy is malformed, or asks for too much.
        """
        check_network(policy)
        record = await self.get_live(caller, sandbox_id)
        await self._node.set_network(sandbox_id, policy)
        self._invalidations.publish(sandbox_id)
        await sandboxes.set_network(self._store, sandbox_id, policy, extra)
        return msgspec.structs.replace(record, network=policy, extra=extra)

    async def metrics(
        self, caller: Caller, sandbox_id: str, start: float, end: float
    ) -> list[MetricSample]:
        """Kept samples of a live sandbox, oldest first.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
        """
        await self.get_live(caller, sandbox_id)
        return await self._node.metrics(sandbox_id, start, end)

    async def latest_metrics(
        self, caller: Caller, sandbox_ids: list[str], since: float
    ) -> dict[str, MetricSample]:
        """The newest sample of each that is the caller's, alive, and has one."""
        records = await sandboxes.get_sandboxes(
            self._store, [sandbox_id for sandbox_id in sandbox_ids if is_sandbox_id(sandbox_id)]
        )
        latest: dict[str, MetricSample] = {}
        for sandbox_id, record in records.items():
            if record.project_id != caller.project_id or record.terminal:
                continue
            try:
                samples = await self._node.metrics(sandbox_id, since, time.time())
            except SandboxNotFound:
                continue
            if samples:
                latest[sandbox_id] = samples[-1]
        return latest

    async def transitions(
        self, caller: Caller, sandbox_id: str
    ) -> tuple[SandboxRecord, list[Transition]]:
        """A sandbox and its last changes of state, oldest first.

        Raises:
            SandboxNotFound: not one of the caller's.
        """
        record = await self.get(caller, sandbox_id)
        return record, await sandboxes.transitions_of(self._store, sandbox_id)

    async def get_live(self, caller: Caller, sandbox_id: str) -> SandboxRecord:
        """The record of a sandbox that has not ended.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
        """
        record = await self.get(caller, sandbox_id)
        if record.terminal:
            raise _ended(sandbox_id, record.state, record.end_reason)
        return record

    async def get_started(self, caller: Caller, sandbox_id: str) -> SandboxRecord:
        """As ``get_live``, after waiting for a create of it that is under way here."""
        record = await self.get_live(caller, sandbox_id)
        if record.state in (State.PENDING, State.STARTING) and await self._creates.wait_for(
            sandbox_id
        ):
            record = await self.get_live(caller, sandbox_id)
        return record

    async def state_now(self, caller: Caller, sandbox_id: str) -> State:
        """The state on the node, which the record may not have reached yet.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
        """
        await self.get_started(caller, sandbox_id)
        status = await self._node.get(sandbox_id)
        if status.state in TERMINAL:
            raise _ended(sandbox_id, status.state, status.reason)
        return status.state

    async def _note_end_at(self, record: SandboxRecord, status: SandboxStatus) -> SandboxRecord:
        await sandboxes.set_end_at(self._store, record.sandbox_id, status.end_at)
        return msgspec.structs.replace(record, end_at=status.end_at)


def lost(
    sandbox_id: str, *, cause: str, message: str = "the node does not know this sandbox any more"
) -> StateChange:
    """The change of a sandbox that its node does not know any more, or that was lost with it."""
    return StateChange(
        sandbox_id=sandbox_id,
        state=State.ENDED,
        at=time.time(),
        cause=cause,
        reason=EndReason.LOST,
        message=message,
        fault="platform",
    )


def _ended(sandbox_id: str, state: State, reason: EndReason | None = None) -> SandboxNotFound:
    error = SandboxNotFound(
        f"sandbox `{sandbox_id}` has ended", details={"state": state, "end_reason": reason}
    )
    # To look for one that we have lost is nobody else's fault.
    error.fault = fault_of(reason) or error.fault
    return error


def _not_found(sandbox_id: str) -> SandboxNotFound:
    return SandboxNotFound(f"there is no sandbox `{sandbox_id[:64]}`")

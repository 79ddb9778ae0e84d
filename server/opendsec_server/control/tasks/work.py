# SPDX-License-Identifier: AGPL-3.0-only
"""What is done to one sandbox of a task. Each can be done again without harm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from opendsec_server.contract.errors import (
    AlreadyPaused,
    Internal,
    NodeUnavailable,
    OpendsecError,
    QuotaExceeded,
    SandboxNotFound,
    StateConflict,
    StoreUnavailable,
)
from opendsec_server.contract.node import NodeClient
from opendsec_server.contract.states import State
from opendsec_server.control.creates import Creates
from opendsec_server.control.grouped import Grouped, GroupedLedger
from opendsec_server.control.invalidations import Invalidations
from opendsec_server.control.ledger import Ledger, change_from_status
from opendsec_server.control.lifecycle import Lifecycle, lost
from opendsec_server.control.metrics import ControlMetrics
from opendsec_server.store.records import SandboxRecord, StateChange
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store
from opendsec_server.store.task_operations import Noted, OperationParams, TaskOperation

log = structlog.get_logger(__name__)

CAUSE = "task"
TRIES = 8
PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 5.0
AWAY_S = 30.0
"""A node that is away, or a sandbox between two states, is asked again: for about 20 s in all."""


class Work:
    """Pauses, resumes and kills single sandboxes.

    Args:
        store: Where records are.
        node: Where sandboxes are.
        creates: Knows which are being made here.
        lifecycle: Gives places in the quota.
        ledger: Records states.
        invalidations: Tells edges.
        metrics: Times it.
    """

    def __init__(
        self,
        *,
        store: Store,
        node: NodeClient,
        creates: Creates,
        lifecycle: Lifecycle,
        ledger: Ledger,
        invalidations: Invalidations,
        metrics: ControlMetrics,
    ) -> None:
        self._store = store
        self._node = node
        self._creates = creates
        self._lifecycle = lifecycle
        self._ledger = GroupedLedger(ledger)
        self._places = Grouped[SandboxRecord, QuotaExceeded | None](
            lifecycle.take_places, lambda record: lifecycle.leave_place(record.sandbox_id)
        )
        self._invalidations = invalidations
        self._metrics = metrics
        self._away: dict[str, float] = {}
        """Nodes that did not answer, and until when they are asked once only."""

    async def do(self, operation: TaskOperation, record: SandboxRecord) -> Noted:
        """Do an operation to one of its sandboxes. Never raises: what fails is its outcome."""
        one = {"pause": self._pause, "resume": self._resume, "kill": self._kill}[operation.kind]
        # One that stayed away for another sandbox is not waited for again: it has thousands.
        away = self._away.get(record.node_id, 0.0) > time.monotonic()
        tries = 1 if away else TRIES
        try:
            return await _again_while_it_helps(lambda: one(record, operation.params), tries)
        except SandboxNotFound:
            return Noted(sandbox_id=record.sandbox_id, outcome="gone")
        except NodeUnavailable as exc:
            self._away[record.node_id] = time.monotonic() + AWAY_S
            error: OpendsecError = exc
        except OpendsecError as exc:
            error = exc
        except Exception as exc:
            log.exception(
                "operation on a sandbox of a task", kind=operation.kind, sandbox=record.sandbox_id
            )
            error = Internal(f"the {operation.kind} failed because of a defect: {exc!r}")
        return Noted(
            sandbox_id=record.sandbox_id,
            outcome="error",
            error=msgspec.json.encode(error.to_dict()).decode(),
        )

    async def _started(self, record: SandboxRecord) -> SandboxRecord:
        """The record after a create of it that is under way here."""
        if record.state not in (State.PENDING, State.STARTING):
            return record
        if not await self._creates.wait_for(record.sandbox_id):
            await self._creates.settle(record)
        return await self._read(record)

    async def _read(self, record: SandboxRecord) -> SandboxRecord:
        known = await get_sandbox(self._store, record.sandbox_id)
        if known is None or known.terminal:
            raise SandboxNotFound(f"sandbox `{record.sandbox_id}` has ended")
        return known

    async def _pause(self, record: SandboxRecord, params: OperationParams) -> Noted:
        record = await self._started(record)
        name = record.sandbox_id
        self._invalidations.publish(name)
        try:
            async with self._lifecycle.recorded_if_failed(name):
                with self._metrics.timed("pause", record.backend):
                    report = await self._node.pause(name, params.mode)
        except AlreadyPaused:
            return Noted(sandbox_id=name, outcome="already")
        self._invalidations.publish(name)
        await self._record(
            change_from_status(report.status, cause=CAUSE, now=time.time(), again=True)
        )
        return Noted(sandbox_id=name, outcome="done", memory_freed_bytes=report.memory_freed_bytes)

    async def _resume(self, record: SandboxRecord, params: OperationParams) -> Noted:
        record = await self._started(record)
        name = record.sandbox_id
        # The record of one that is just being paused may say that it runs.
        if record.state is State.RUNNING and (await self._node.get(name)).state is State.RUNNING:
            return Noted(sandbox_id=name, outcome="already")
        timeout_s = record.timeout_s if params.timeout_s is None else params.timeout_s
        refusal = await self._places.do(record)
        if refusal is not None:
            raise refusal
        async with self._lifecycle.place_of(name):
            async with self._lifecycle.recorded_if_failed(name):
                with self._metrics.timed("resume", record.backend):
                    end_at = self._lifecycle.end_in(record, timeout_s)
                    status = await self._node.resume(name, end_at=end_at)
            # Its address may be another one now.
            self._invalidations.publish(name)
            await self._record(change_from_status(status, cause=CAUSE, now=time.time(), again=True))
        return Noted(sandbox_id=name, outcome="done")

    async def _kill(self, record: SandboxRecord, params: OperationParams) -> Noted:
        name = record.sandbox_id
        self._invalidations.publish(name)
        try:
            change = await self._kill_on_node(name, params)
        except SandboxNotFound:
            # The create may not have reached the node yet; once it has, there is something to end.
            if await self._creates.wait_for(name):
                change = await self._kill_on_node(name, params)
            elif (await self._read(record)).state in (State.PENDING, State.STARTING):
                await self._creates.settle(record)
                change = await self._kill_on_node(name, params)
            else:
                await self._record(lost(name, cause=CAUSE))
                raise
        await self._record(change)
        return Noted(sandbox_id=name, outcome="done")

    async def _kill_on_node(self, sandbox_id: str, params: OperationParams) -> StateChange:
        status = await self._node.kill(sandbox_id, params.reason)
        return change_from_status(status, cause=CAUSE, now=time.time())

    async def _record(self, change: StateChange) -> None:
        """The outcome is true also when the store does not take it now: the node's events, or the
        next comparison, bring the record up to date."""
        try:
            await self._ledger.apply(change)
        except StoreUnavailable:
            log.warning("not recorded yet", sandbox_id=change.sandbox_id, state=change.state)


async def _again_while_it_helps(one: Callable[[], Awaitable[Noted]], tries: int) -> Noted:
    pause_s = PAUSE_FIRST_S
    for _ in range(tries - 1):
        try:
            return await one()
        except (NodeUnavailable, StoreUnavailable, StateConflict):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
    return await one()

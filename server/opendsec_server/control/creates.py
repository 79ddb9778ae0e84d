# SPDX-License-Identifier: AGPL-3.0-only
"""Creating sandboxes, exactly once per idempotency key.

One transaction before the node is called (quota, key, record in state ``pending``), one after it
(states, key settled). Whatever happens in between, the record names the sandbox, so that it can
be settled with the node later: adopted when it runs, failed otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog

from opendsec_server.contract.errors import (
    IdempotencyInProgress,
    IdempotencyMismatch,
    IdempotencyOutcomeUnknown,
    Internal,
    NodeUnavailable,
    NotSupported,
    OpendsecError,
    SandboxNotFound,
    StateConflict,
    StoreUnavailable,
)
from opendsec_server.contract.ids import new_sandbox_id
from opendsec_server.contract.limits import START_BUDGET_S
from opendsec_server.contract.node import NodeClient, NodeInfo, SandboxSpec
from opendsec_server.contract.states import TERMINAL, EndReason, State
from opendsec_server.store.creates import begin_create
from opendsec_server.store.records import (
    IdempotencyClaim,
    IdempotencyRow,
    SandboxRecord,
    StateChange,
    Template,
)
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store

from .iam import Caller
from .ledger import Ledger, change_from_status
from .metrics import ControlMetrics
from .params import CreateParams, check_params
from .templates import Templates
from .tokens import TokenMint

log = structlog.get_logger(__name__)

FOREIGN_ATTEMPT_S = 2 * START_BUDGET_S
"""A pending create of another process is left alone for this long."""
STOP_WAIT_S = 5.0
RECORDED_KEPT_MAX = 4_096
"""Starts remembered, until the node's events about them have come."""


class Created(msgspec.Struct, kw_only=True, frozen=True):
    """The sandbox of a create call."""

    record: SandboxRecord
    replayed: bool
    """It was made by an earlier call with the same key."""


class _Attempt(msgspec.Struct, kw_only=True, frozen=True):
    claim: IdempotencyClaim
    task: asyncio.Task[Created]


class Creates:
    """Makes sandboxes, and settles creates whose end was not seen."""

    def __init__(
        self,
        *,
        store: Store,
        node: NodeClient,
        node_info: NodeInfo,
        mint: TokenMint,
        templates: Templates,
        ledger: Ledger,
        metrics: ControlMetrics,
    ) -> None:
        self._store = store
        self._node = node
        self._node_info = node_info
        self._mint = mint
        self._templates = templates
        self._ledger = ledger
        self._metrics = metrics
        self._started_at = time.time()
        self._attempts: dict[tuple[str, str], _Attempt] = {}
        self._in_flight: dict[str, asyncio.Event] = {}
        self._unsettled: set[str] = set()
        self._recorded: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[Created]] = set()

    def records_start(self, sandbox_id: str) -> bool:
        """Whether this process itself records that the sandbox started, so that the node's
        event about it is no news."""
        return sandbox_id in self._in_flight or sandbox_id in self._recorded

    def in_flight(self, sandbox_id: str) -> bool:
        """Whether this process is making the sandbox right now, and will record the outcome."""
        return sandbox_id in self._in_flight

    async def wait_for(self, sandbox_id: str) -> bool:
        """Wait until a create in this process is over. False: there was none."""
        over = self._in_flight.get(sandbox_id)
        if over is None:
            return False
        await over.wait()
        return True

    async def create(
        self, caller: Caller, params: CreateParams, *, key: str | None = None, join: bool = True
    ) -> Created:
        """Make a sandbox; return when its guest agent answers.

        It goes on when the caller goes away: the outcome is recorded all the same.

        Args:
            caller: Whose sandbox it will be.
            params: Canonical parameters.
            key: Idempotency key, scoped to the caller's project.
            join: Wait for an attempt with the same key that is still running.

        Raises:
            InvalidRequest, NotSupported, TemplateNotFound: nothing was made.
            IdempotencyMismatch: the key was used with other parameters.
            IdempotencyInProgress: an attempt is running, and ``join`` is false.
            IdempotencyOutcomeUnknown: an earlier attempt cannot be settled now.
            QuotaExceeded, NodeFull, SandboxStartFailed, StartTimeout, StateConflict: nothing runs.
            StoreUnavailable: nothing was made.
            NodeUnavailable: the outcome is not known; it is settled later.
        """
        check_params(params)
        if key is None:
            return await asyncio.shield(self._spawn(self._create(caller, params, None)))
        claim = IdempotencyClaim(key=key, params_sha256=params.sha256())
        place = (caller.project_id, key)
        attempt = self._attempts.get(place)
        if attempt is not None:
            if attempt.claim != claim:
                raise IdempotencyMismatch("this idempotency key is in use with other parameters")
            if not join:
                raise IdempotencyInProgress(
                    "the first request with this idempotency key is still running",
                    retry_after_s=1,
                )
            created = await asyncio.shield(attempt.task)
            return msgspec.structs.replace(created, replayed=True)
        task = self._spawn(self._create(caller, params, claim))
        self._attempts[place] = _Attempt(claim=claim, task=task)
        task.add_done_callback(lambda _: self._attempts.pop(place))
        return await asyncio.shield(task)

    async def settle(self, record: SandboxRecord) -> SandboxRecord:
        """Ask the node what became of a create whose end was not seen, and record it.

        Raises:
            NodeUnavailable, StoreUnavailable: still not known.
        """
        try:
            status = await self._node.get(record.sandbox_id)
            if status.state in (State.PENDING, State.STARTING):
                # Idempotent by id: joins what is under way.
                status = await self._node.create(await self._spec(record))
            change = change_from_status(status, cause="reconcile", now=time.time())
        except (NodeUnavailable, StoreUnavailable):
            raise
        except SandboxNotFound:
            change = _failed(
                record, Internal("the server stopped before this sandbox was made"), "reconcile"
            )
        except OpendsecError as exc:
            change = _failed(record, exc, "reconcile")
        await self._ledger.apply([change])
        self._unsettled.discard(record.sandbox_id)
        settled = await get_sandbox(self._store, record.sandbox_id)
        assert settled is not None
        log.info("create settled", sandbox_id=record.sandbox_id, state=settled.state)
        return settled

    async def stop(self) -> None:
        """Give running creates a moment to end. Those that do not are settled at the next start."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOP_WAIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _backends(self) -> list[str]:
        return [backend.name for backend in self._node_info.backends]

    # --- one attempt --------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, Created]) -> asyncio.Task[Created]:
        task = asyncio.create_task(work, name="create")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Created]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Taken here, or asyncio complains when the caller has gone away.
            task.exception()

    async def _create(
        self, caller: Caller, params: CreateParams, claim: IdempotencyClaim | None
    ) -> Created:
        if params.backend not in self._backends():
            raise NotSupported(
                f"backend `{params.backend}` is not available on this server",
                details={"available": self._backends()},
            )
        template = await self._templates.resolve(caller, params.template)
        while True:
            record = self._new_record(caller, params, template)
            over = self._in_flight[record.sandbox_id] = asyncio.Event()
            try:
                earlier = await begin_create(self._store, record, claim)
                if earlier is None:
                    return Created(record=await self._make(record, template), replayed=False)
            finally:
                del self._in_flight[record.sandbox_id]
                over.set()
            known = await self._outcome_of(earlier)
            if not (earlier.outcome == "pending" and known.state in TERMINAL):
                return Created(record=known, replayed=True)
            # It is settled now that the earlier attempt made nothing: the key is free again.

    async def _outcome_of(self, earlier: IdempotencyRow) -> SandboxRecord:
        record = await get_sandbox(self._store, earlier.sandbox_id)
        if record is None:
            raise SandboxNotFound("the sandbox made with this idempotency key is no longer known")
        if earlier.outcome == "done" or record.state not in (State.PENDING, State.STARTING):
            return record
        now = time.time()
        foreign = record.created_at > self._started_at and record.sandbox_id not in self._unsettled
        if foreign and now - record.created_at < FOREIGN_ATTEMPT_S:
            raise IdempotencyInProgress(
                "the first request with this idempotency key is still running", retry_after_s=1
            )
        try:
            return await self.settle(record)
        except NodeUnavailable as exc:
            raise IdempotencyOutcomeUnknown(
                "the outcome of the first request with this idempotency key cannot be found out now"
            ) from exc

    def _new_record(
        self, caller: Caller, params: CreateParams, template: Template
    ) -> SandboxRecord:
        now = time.time()
        return SandboxRecord(
            sandbox_id=new_sandbox_id(self._node_info.node_id),
            project_id=caller.project_id,
            node_id=self._node_info.node_id,
            template_id=template.template_id,
            template=template.name,
            backend=params.backend,
            state=State.PENDING,
            cpu=template.cpu if params.cpu is None else params.cpu,
            memory_mb=template.memory_mb if params.memory_mb is None else params.memory_mb,
            disk_mb=template.disk_mb if params.disk_mb is None else params.disk_mb,
            env=params.env,
            metadata=params.metadata,
            labels=params.labels,
            task_id=params.task_id,
            created_at=now,
            end_at=now + params.timeout_s,
            idle_timeout_s=params.idle_timeout_s,
            on_timeout=params.on_timeout,
            network=params.network,
            extra=params.extra,
        )

    async def _spec(self, record: SandboxRecord, template: Template | None = None) -> SandboxSpec:
        template = template or await self._templates.by_id(record.template_id)
        return SandboxSpec(
            sandbox_id=record.sandbox_id,
            project_id=record.project_id,
            backend=record.backend,
            template_id=record.template_id,
            image=template.image if template else record.template,
            cpu=record.cpu,
            memory_mb=record.memory_mb,
            disk_mb=record.disk_mb,
            env=record.env,
            created_at=record.created_at,
            end_at=record.end_at,
            idle_timeout_s=record.idle_timeout_s,
            on_timeout=record.on_timeout,
            network=record.network,
            default_user=template.default_user if template else "user",
            default_workdir=template.default_workdir if template else None,
            access_token=self._mint.access(record.sandbox_id),
            traffic_token=self._mint.traffic(record.sandbox_id),
            control_token=self._mint.control(record.sandbox_id),
        )

    async def _make(self, record: SandboxRecord, template: Template) -> SandboxRecord:
        outcome = "unknown"
        called_at = time.time()
        try:
            status = await self._node.create(await self._spec(record, template))
            outcome = "ok"
        except (NodeUnavailable, asyncio.CancelledError):
            self._unsettled.add(record.sandbox_id)
            raise
        except OpendsecError as exc:
            outcome = exc.code
            await self._note_failure(record, exc)
            raise
        except Exception as exc:
            self._unsettled.add(record.sandbox_id)
            log.exception("create failed unexpectedly", sandbox_id=record.sandbox_id)
            raise Internal("the sandbox could not be made because of a defect") from exc
        finally:
            took_s = time.time() - record.created_at
            self._metrics.create_s.labels(record.backend, outcome).observe(took_s)
        started_at = status.started_at or time.time()
        changes = [
            StateChange(
                sandbox_id=record.sandbox_id, state=State.STARTING, at=called_at, cause="create"
            ),
            StateChange(
                sandbox_id=record.sandbox_id,
                state=State.RUNNING,
                at=started_at,
                cause="create",
                started_at=started_at,
                end_at=status.end_at,
            ),
        ]
        running = msgspec.structs.replace(
            record,
            state=State.RUNNING,
            started_at=started_at,
            end_at=status.end_at,
            transitions=len(changes),
        )
        try:
            applied = await self._ledger.apply(changes)
        except StoreUnavailable:
            # It runs, and its id is recorded: the answer is true, and the record follows.
            self._unsettled.add(record.sandbox_id)
            log.warning("create not recorded yet", sandbox_id=record.sandbox_id)
            return running
        log.info("sandbox created", sandbox_id=record.sandbox_id, took_ms=round(took_s * 1e3, 1))
        self._recorded[record.sandbox_id] = None
        if len(self._recorded) > RECORDED_KEPT_MAX:
            self._recorded.popitem(last=False)
        if len(applied) == len(changes):
            return running
        # It ended before we came to note that it ran.
        return await get_sandbox(self._store, record.sandbox_id) or running

    async def _note_failure(self, record: SandboxRecord, exc: OpendsecError) -> None:
        log.warning(
            "create failed", sandbox_id=record.sandbox_id, code=exc.code, message=exc.message
        )
        try:
            await self._ledger.apply([_failed(record, exc, "create")])
        except StoreUnavailable:
            self._unsettled.add(record.sandbox_id)


def _failed(record: SandboxRecord, exc: OpendsecError, cause: str) -> StateChange:
    killed = isinstance(exc, StateConflict)
    return StateChange(
        sandbox_id=record.sandbox_id,
        state=State.ENDED if killed else State.FAILED,
        at=time.time(),
        cause=cause,
        reason=EndReason.KILLED if killed else EndReason.START_FAILED,
        message=exc.message,
        fault=None if killed else exc.fault,
    )

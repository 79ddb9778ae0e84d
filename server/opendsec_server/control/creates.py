# SPDX-License-Identifier: AGPL-3.0-only
"""Creating sandboxes, exactly once per idempotency key.

One transaction before the node is called (quota, key, record in state ``pending``), one after it
(states, key settled). Whatever happens in between, the record names the sandbox, so that it can
be settled with the node later: adopted when it runs, failed otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator

import msgspec
import structlog

from opendsec_server.contract.errors import (
    IdempotencyInProgress,
    IdempotencyOutcomeUnknown,
    Internal,
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    NotSupported,
    OpendsecError,
    SandboxNotFound,
    StateConflict,
    StoreUnavailable,
)
from opendsec_server.contract.ids import new_sandbox_id
from opendsec_server.contract.limits import START_BUDGET_S
from opendsec_server.contract.node import Backend, NodeEvent, SandboxSpec
from opendsec_server.contract.states import TERMINAL, State
from opendsec_server.store.creates import begin_create, look_up
from opendsec_server.store.moves import move_create
from opendsec_server.store.records import (
    IdempotencyClaim,
    IdempotencyRow,
    SandboxRecord,
    StateChange,
)
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store

from .attempts import Attempts
from .backends import Backends
from .iam import Caller
from .ledger import Ledger, change_from_status, with_status
from .metrics import ControlMetrics
from .nodes import Fleet, NodeNotReached
from .origins import Origins, needs_layers
from .params import CreateParams, check_params
from .placement import Need
from .snapshots import Origin
from .start_causes import reason_of
from .task_deadlines import TaskDeadlines
from .templates import Templates
from .tokens import TokenMint

log = structlog.get_logger(__name__)

FOREIGN_ATTEMPT_S = 2 * START_BUDGET_S
"""A pending create of another process is left alone for this long."""
STARTED_SEQ = 2
"""``NodeEvent.seq`` of a sandbox's first ``running``: it was ``starting`` before."""
NODES_TRIED_MAX = 4
"""Nodes that are asked for one sandbox, until its create fails for want of room."""
RECORDED_KEPT_MAX = 4_096
"""Starts remembered, until the node's events about them have come."""


class Created(msgspec.Struct, kw_only=True, frozen=True):
    """The sandbox of a create call."""

    record: SandboxRecord
    replayed: bool
    """It was made by an earlier call with the same key."""


class Started(msgspec.Struct, kw_only=True, frozen=True):
    """A sandbox that its node has made, not recorded yet."""

    record: SandboxRecord
    """As it will be."""
    changes: list[StateChange]
    """What makes the record so."""


class _InFlight:
    """A create of this process that is under way."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.moved_on = False
        """The node told of a state that comes after the start."""


class Creates:
    """Makes sandboxes, and settles creates whose end was not seen."""

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        mint: TokenMint,
        templates: Templates,
        origins: Origins,
        backends: Backends,
        ledger: Ledger,
        metrics: ControlMetrics,
        deadlines: TaskDeadlines,
        alone: bool = True,
    ) -> None:
        self._store = store
        self._node = fleet
        self._alone = alone
        """No other gateway works on the same store."""
        self._mint = mint
        self._templates = templates
        self._origins = origins
        self._backends = backends
        self._ledger = ledger
        self._metrics = metrics
        self._deadlines = deadlines
        self._started_at = time.time()
        self.attempts: Attempts[Created] = Attempts("create")
        self._in_flight: dict[str, _InFlight] = {}
        self._unsettled: set[str] = set()
        self._recorded: OrderedDict[str, None] = OrderedDict()

    def is_own_start(self, event: NodeEvent) -> bool:
        """Whether an event tells of a start that this process records itself, together with its
        key, or that another gateway does. Call it with every event, in order: a later ``running``
        is the end of a pause."""
        name = event.sandbox_id
        in_flight = self._in_flight.get(name)
        if event.state not in (State.STARTING, State.RUNNING):
            self._recorded.pop(name, None)
            if in_flight is not None:
                in_flight.moved_on = True
            return False
        if in_flight is not None:
            return not in_flight.moved_on
        if not self._alone and 0 < event.seq <= STARTED_SEQ:
            # Should that gateway die before, the next comparison finds it.
            return True
        return name in self._recorded

    def is_anothers(self, record: SandboxRecord) -> bool:
        """Whether another gateway may be making it at this moment: its node need not know it
        yet."""
        return (
            not self._alone
            and record.sandbox_id not in self._unsettled
            and time.time() - record.created_at < FOREIGN_ATTEMPT_S
        )

    def in_flight(self, sandbox_id: str) -> bool:
        """Whether this process is making the sandbox right now, and will record the outcome."""
        return sandbox_id in self._in_flight

    async def wait_for(self, sandbox_id: str) -> bool:
        """Wait until a create in this process is over. False: there was none."""
        in_flight = self._in_flight.get(sandbox_id)
        if in_flight is None:
            return False
        await in_flight.over.wait()
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
        claim = None if key is None else IdempotencyClaim(key=key, params_sha256=params.sha256())
        created, joined = await self.attempts.run(
            lambda: self._create(caller, params, claim),
            project_id=caller.project_id,
            claim=claim,
            join=join,
        )
        return msgspec.structs.replace(created, replayed=True) if joined else created

    async def make_child(self, record: SandboxRecord) -> SandboxRecord:
        """Make a sandbox of a fork, from a record that the fork filled in.

        Raises:
            QuotaExceeded, NodeFull, SandboxStartFailed, StartTimeout, StateConflict,
                SnapshotNotFound, SnapshotDamaged, SnapshotIncompatible: nothing runs.
            StoreUnavailable: nothing was made.
            NodeUnavailable: the outcome is not known; it is settled later.
        """
        with self.flying(record.sandbox_id):
            await begin_create(self._store, record, None)
            return await self._make(record)

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
            change = failure(
                record, Internal("the server stopped before this sandbox was made"), "reconcile"
            )
        except OpendsecError as exc:
            change = failure(record, exc, "reconcile")
        await self._ledger.apply([change])
        self._unsettled.discard(record.sandbox_id)
        settled = await get_sandbox(self._store, record.sandbox_id)
        assert settled is not None
        log.info("create settled", sandbox_id=record.sandbox_id, state=settled.state)
        return settled

    async def stop(self) -> None:
        """Give running creates a moment to end. Those that do not are settled at the next start."""
        await self.attempts.stop()

    # --- one attempt --------------------------------------------------------

    @contextlib.contextmanager
    def flying(self, sandbox_id: str) -> Iterator[None]:
        """While it is made by this process, which will record the outcome."""
        in_flight = self._in_flight[sandbox_id] = _InFlight()
        try:
            yield
        finally:
            del self._in_flight[sandbox_id]
            in_flight.over.set()

    async def _create(
        self, caller: Caller, params: CreateParams, claim: IdempotencyClaim | None
    ) -> Created:
        if claim is not None and needs_layers(params.extra):
            # Before anything is pulled: the first request has decided what a tag means.
            earlier = await look_up(self._store, caller.project_id, claim)
            if earlier is not None:
                known = await self._outcome_of(earlier)
                if not (earlier.outcome == "pending" and known.state in TERMINAL):
                    return Created(record=known, replayed=True)
        async with self._origins.using(caller, params) as origin:
            backend = self._backend_of(params, origin)
            _check_sizes(params, origin)
            return await self._create_from(caller, params, origin, backend, claim)

    def record_for(self, caller: Caller, params: CreateParams, origin: Origin) -> SandboxRecord:
        """The record of a sandbox that is about to be made, on the node that is to make it.

        Raises:
            InvalidRequest, NotSupported: it cannot be made so.
        """
        backend = self._backend_of(params, origin)
        _check_sizes(params, origin)
        return self._new_record(caller, params, origin, backend)

    def _backend_of(self, params: CreateParams, origin: Origin) -> Backend:
        if origin.backend is None:
            known = self._backends.known(params.backend or self._backends.default)
            if known.capabilities.disk_images and needs_layers(params.extra):
                raise NotSupported(
                    f"image: backend `{known.name}` boots disk images, not layers",
                    remediation="Ask for the backend `container` or `microvm`.",
                )
            return known.name
        if params.backend not in (None, origin.backend):
            raise InvalidRequest(
                f"backend: `{origin.name}` was made by backend `{origin.backend}`, and "
                f"`{params.backend}` cannot start it",
                remediation=f"Leave backend out, or ask for `{origin.backend}`.",
                details={"backend": params.backend, "made_by": origin.backend},
            )
        return self._backends.known(origin.backend).name

    async def _create_from(
        self,
        caller: Caller,
        params: CreateParams,
        origin: Origin,
        backend: Backend,
        claim: IdempotencyClaim | None,
    ) -> Created:
        while True:
            try:
                record = self._new_record(caller, params, origin, backend)
            except OpendsecError:
                # There is no node for it now: but one that was made before needs none.
                earlier = None
                if claim is not None:
                    earlier = await look_up(self._store, caller.project_id, claim)
                if earlier is None:
                    raise
            else:
                with self.flying(record.sandbox_id):
                    earlier = await begin_create(self._store, record, claim)
                    if earlier is None:
                        return Created(record=await self._make(record), replayed=False)
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
        self, caller: Caller, params: CreateParams, origin: Origin, backend: Backend
    ) -> SandboxRecord:
        now = time.time()
        record = SandboxRecord(
            sandbox_id="",
            project_id=caller.project_id,
            node_id="",
            template_id=origin.template_id,
            template=origin.name,
            backend=backend,
            state=State.PENDING,
            cpu=origin.cpu if params.cpu is None else params.cpu,
            memory_mb=origin.memory_mb if params.memory_mb is None else params.memory_mb,
            disk_mb=origin.disk_mb if params.disk_mb is None else params.disk_mb,
            env={**origin.env, **params.env},
            metadata=params.metadata,
            labels=params.labels,
            task_id=params.task_id,
            created_at=now,
            end_at=now + params.timeout_s,
            timeout_s=params.timeout_s,
            idle_timeout_s=params.idle_timeout_s,
            on_timeout=params.on_timeout,
            pause_mode=params.pause_mode,
            auto_resume=params.auto_resume,
            network=params.network,
            extra=msgspec.structs.replace(params.extra, start=origin.start),
            snapshot_id=origin.snapshot_id,
            image=origin.image,
            default_user=origin.default_user,
            default_workdir=origin.default_workdir,
            gpu=0 if params.extra.vm is None else len(params.extra.vm.devices),
        )
        pinned = record.extra.node_id
        if pinned is not None and origin.node_id not in (None, pinned):
            raise NodeFull(
                f"`{origin.name}` is on another node than the sandboxes that this one belongs to",
                details={"node_id": origin.node_id, "needed": pinned},
            )
        return self._placed(record, only=origin.node_id or pinned)

    def _placed(
        self, record: SandboxRecord, *, only: str | None = None, avoid: Collection[str] = ()
    ) -> SandboxRecord:
        """The record with a node, and an id that names it.

        Raises:
            NodeFull, NodeNotReached: no node can be asked.
        """
        image = record.image or ""
        chosen = self._node.choose(
            Need(
                backend=record.backend,
                cpu=record.cpu,
                memory_mb=record.memory_mb,
                disk_mb=record.disk_mb,
                image=image,
                only=self._node.images.only_on(image) if only is None else frozenset((only,)),
                labels=record.extra.node_labels,
                task_id=record.task_id,
            ),
            avoid=avoid,
        )
        return msgspec.structs.replace(
            record, sandbox_id=new_sandbox_id(chosen.node_id), node_id=chosen.node_id
        )

    def another(self, record: SandboxRecord) -> SandboxRecord:
        """The record of a sandbox of which nothing was made, to be made under another id.

        Raises:
            NodeFull, NodeNotReached: no node can be asked.
        """
        now = time.time()
        fresh = msgspec.structs.replace(record, created_at=now, end_at=now + record.timeout_s)
        # A snapshot is on its node only.
        return self._placed(fresh, only=record.node_id if _stays(record) else None)

    async def _moved(
        self, record: SandboxRecord, refused_by: Collection[str], flying: contextlib.ExitStack
    ) -> SandboxRecord | None:
        """The record of a sandbox of which nothing was made, on another node; its id flies in the
        stack. None: there is none that may be asked."""
        if _stays(record) or len(refused_by) >= NODES_TRIED_MAX:
            return None
        try:
            moved = self._placed(record, avoid=refused_by)
            # Before it is in the store: a comparison must not find it left alone there.
            flying.enter_context(self.flying(moved.sandbox_id))
            if not await move_create(self._store, record.sandbox_id, moved):
                return None
        except OpendsecError:
            return None
        log.info(
            "create goes to another node",
            sandbox_id=moved.sandbox_id,
            was=record.sandbox_id,
            refused_by=list(refused_by),
        )
        return moved

    async def _spec(self, record: SandboxRecord) -> SandboxSpec:
        image, default_user = record.image, record.default_user
        if image is None:
            template = await self._templates.by_id(record.template_id)
            image = template.image if template else record.template
            default_user = template.default_user if template else None
        return SandboxSpec(
            sandbox_id=record.sandbox_id,
            project_id=record.project_id,
            backend=record.backend,
            template_id=record.template_id,
            image=image,
            start=record.extra.start,
            cpu=record.cpu,
            memory_mb=record.memory_mb,
            disk_mb=record.disk_mb,
            env=record.env,
            created_at=record.created_at,
            end_at=self._deadlines.cap(record.project_id, record.task_id, record.end_at),
            timeout_s=record.timeout_s,
            idle_timeout_s=record.idle_timeout_s,
            on_timeout=record.on_timeout,
            pause_mode=record.pause_mode,
            auto_resume=record.auto_resume,
            snapshot_id=record.snapshot_id,
            network=record.network,
            vm=record.extra.vm,
            group=record.extra.group,
            default_user=default_user or "user",
            default_workdir=record.default_workdir,
            access_token=self._mint.access(record.sandbox_id),
            traffic_token=self._mint.traffic(record.sandbox_id),
            control_token=self._mint.control(record.sandbox_id),
        )

    async def _make(self, record: SandboxRecord) -> SandboxRecord:
        try:
            started = await self.start(record)
        except OpendsecError as exc:
            if record.sandbox_id not in self._unsettled:
                await self._note_failure(record, exc)
            raise
        made = started.record
        try:
            applied = await self._ledger.apply(started.changes)
        except StoreUnavailable:
            # It runs, and its id is recorded: the answer is true, and the record follows.
            self._unsettled.add(record.sandbox_id)
            log.warning("create not recorded yet", sandbox_id=record.sandbox_id)
            return made
        self.recorded(made)
        if len(applied) == len(started.changes):
            return made
        # It moved on before we came to note that it ran.
        return await get_sandbox(self._store, made.sandbox_id) or made

    async def start(
        self,
        record: SandboxRecord,
        refused_by: Collection[str] = (),
        flying: contextlib.ExitStack | None = None,
    ) -> Started:
        """Have the node make a sandbox whose record is in the store. Idempotent by its id.

        When the node has no room or cannot be reached, the record moves to another one, with
        another id. Call it within ``flying``; then apply the changes and say ``recorded``.

        Args:
            record: What to make.
            refused_by: Nodes that are not asked again.
            flying: Where ids that it gets later fly on after this call. None: they do not.

        Raises:
            NodeFull, SandboxStartFailed, StartTimeout, StateConflict, …: nothing runs.
            NodeUnavailable, Internal: the outcome may not be known.
        """
        outcome = "unknown"
        called_at = time.time()
        try:
            status = await self._node.create(await self._spec(record))
            outcome = "ok"
        except (NodeFull, NodeNotReached) as exc:
            outcome = exc.code
            tried = (*refused_by, record.node_id)
            return await self._start_elsewhere(record, exc, tried, flying)
        except (NodeUnavailable, asyncio.CancelledError):
            self._unsettled.add(record.sandbox_id)
            raise
        except OpendsecError as exc:
            outcome = exc.code
            raise
        except Exception as exc:
            self._unsettled.add(record.sandbox_id)
            log.exception("create failed unexpectedly", sandbox_id=record.sandbox_id)
            raise Internal("the sandbox could not be made because of a defect") from exc
        finally:
            took_s = time.time() - record.created_at
            self._metrics.create_s.labels(record.backend, outcome).observe(took_s)
        started_at = status.started_at or time.time()
        running = status.state is State.RUNNING
        starting = StateChange(
            sandbox_id=record.sandbox_id,
            state=State.STARTING,
            at=called_at,
            cause="create",
            while_in=(State.PENDING,),
        )
        started = StateChange(
            sandbox_id=record.sandbox_id,
            state=State.RUNNING,
            at=started_at,
            cause="create",
            started_at=started_at,
            end_at=status.end_at,
            accelerator=status.accelerator,
            vmm=status.vmm,
            seq=status.seq if running else 0,
            while_in=(State.PENDING, State.STARTING),
        )
        changes = [starting, started]
        if not running:
            # Its time may be up already.
            changes.append(change_from_status(status, cause="node", now=time.time()))
        made = msgspec.structs.replace(
            with_status(record, status), started_at=started_at, transitions=len(changes)
        )
        return Started(record=made, changes=changes)

    async def _start_elsewhere(
        self,
        record: SandboxRecord,
        refusal: OpendsecError,
        refused_by: Collection[str],
        flying: contextlib.ExitStack | None,
    ) -> Started:
        with contextlib.ExitStack() as own:
            moved = await self._moved(record, refused_by, own if flying is None else flying)
            if moved is None:
                raise refusal
            try:
                return await self.start(moved, refused_by, flying)
            except OpendsecError as exc:
                # Who called knows the first id only.
                if moved.sandbox_id not in self._unsettled:
                    await self._note_failure(moved, exc)
                raise

    def given_up(self, record: SandboxRecord) -> None:
        """The record of a sandbox has ended, whatever its node has made."""
        self._unsettled.discard(record.sandbox_id)

    def recorded(self, record: SandboxRecord) -> None:
        """The start of a sandbox is in the store: the node's events about it are no news."""
        took_ms = round((time.time() - record.created_at) * 1e3, 1)
        log.info("sandbox created", sandbox_id=record.sandbox_id, took_ms=took_ms)
        self._unsettled.discard(record.sandbox_id)
        self._recorded[record.sandbox_id] = None
        if len(self._recorded) > RECORDED_KEPT_MAX:
            self._recorded.popitem(last=False)

    async def _note_failure(self, record: SandboxRecord, exc: OpendsecError) -> None:
        log.warning(
            "create failed", sandbox_id=record.sandbox_id, code=exc.code, message=exc.message
        )
        try:
            await self._ledger.apply([failure(record, exc, "create")])
        except StoreUnavailable:
            self._unsettled.add(record.sandbox_id)


def failure(record: SandboxRecord, exc: OpendsecError, cause: str) -> StateChange:
    """The change of a sandbox of which nothing runs, and why."""
    killed = isinstance(exc, StateConflict)
    return StateChange(
        sandbox_id=record.sandbox_id,
        state=State.ENDED if killed else State.FAILED,
        at=time.time(),
        cause=cause,
        reason=reason_of(exc),
        message=exc.message,
        fault=None if killed else exc.fault,
    )


def _stays(record: SandboxRecord) -> bool:
    """Whether no other node can make it: its snapshot, or its group, is there."""
    return record.snapshot_id is not None or record.extra.node_id is not None


def _check_sizes(params: CreateParams, origin: Origin) -> None:
    """A snapshot decides what the memory and disk in it need."""
    if origin.snapshot_id is None:
        return
    asked = {"cpu": params.cpu, "memory_mb": params.memory_mb, "disk_mb": params.disk_mb}
    held = {"cpu": origin.cpu, "memory_mb": origin.memory_mb, "disk_mb": origin.disk_mb}
    for name, value in asked.items():
        fixed = name == "disk_mb" or origin.mode == "full"
        if fixed and value not in (None, held[name]):
            raise InvalidRequest(
                f"{name}: the snapshot `{origin.name}` was taken with {held[name]}, "
                "and cannot start with another size",
                remediation=f"Leave {name} out.",
                details={"snapshot": held[name]},
            )

# SPDX-License-Identifier: AGPL-3.0-only
"""Snapshots and forks of sandboxes, exactly once per idempotency key.

Both write a snapshot's row before the node is called, so that nothing is left behind whatever
happens in between: what is not finished here is found at the next comparison with the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator

import msgspec
import structlog

from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    Conflict,
    IdempotencyInProgress,
    IdempotencyOutcomeUnknown,
    Internal,
    InvalidRequest,
    NodeUnavailable,
    OpendsecError,
    SandboxNotFound,
    SandboxStartFailed,
    SnapshotNotFound,
    StoreUnavailable,
    all_error_classes,
)
from opendsec_server.contract.ids import new_sandbox_id, new_snapshot_id
from opendsec_server.contract.limits import START_BUDGET_S
from opendsec_server.contract.node import NodeClient, StateMode
from opendsec_server.contract.node import Snapshot as NodeSnapshot
from opendsec_server.contract.states import State
from opendsec_server.store import snapshots as rows
from opendsec_server.store.records import (
    IdempotencyClaim,
    IdempotencyRow,
    SandboxRecord,
    Snapshot,
)
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store

from .attempts import Attempts
from .backends import Backends
from .creates import Creates
from .iam import Caller
from .lifecycle import Lifecycle
from .metrics import ControlMetrics
from .params import check_labels, check_map, check_timeout, digest
from .snapshots import Snapshots
from .templates import DEFAULT_TAG, Reference, Templates

log = structlog.get_logger(__name__)

FOREIGN_ATTEMPT_S = 2 * START_BUDGET_S
"""What another process is making is left alone for this long."""
_NAME_RE = re.compile(
    r"(?:(?P<scope>[a-z0-9_-]+)/)?(?P<name>[a-z0-9_-]+)(?::(?P<tag>[a-z0-9_.-]+))?"
)


class SnapshotParams(msgspec.Struct, kw_only=True, frozen=True):
    """What a snapshot request asks for."""

    mode: StateMode = "full"
    name: str | None = None
    """``name`` or ``name:tag``. An older snapshot of that name loses it, and keeps its id."""


class ForkParams(msgspec.Struct, kw_only=True, frozen=True):
    """What a fork request asks for."""

    count: int = 1
    mode: StateMode = "full"
    timeout_s: float | None = None
    """None: what the source was created with."""
    metadata: dict[str, str] | None = None
    """None: the source's."""
    labels: list[str] | None = None


class Saved(msgspec.Struct, kw_only=True, frozen=True):
    """The snapshot of a request."""

    snapshot: Snapshot
    replayed: bool


class Child(msgspec.Struct, kw_only=True, frozen=True):
    """One sandbox of a fork, or why it was not made."""

    record: SandboxRecord | None = None
    error: OpendsecError | None = None


class Forked(msgspec.Struct, kw_only=True, frozen=True):
    """The sandboxes of a fork, in order."""

    children: list[Child]
    replayed: bool


class _KeptError(msgspec.Struct, kw_only=True, frozen=True):
    code: str
    message: str
    remediation: str
    details: dict[str, object] = {}


class _KeptChild(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    sandbox_id: str
    error: _KeptError | None = None


_kept = msgspec.json.Decoder(list[_KeptChild])
_CLASSES: dict[str, type[OpendsecError]] = {}
for _class in all_error_classes():
    _CLASSES.setdefault(_class.code, _class)


class Saving:
    """Takes snapshots and makes forks, and settles those whose end was not seen."""

    def __init__(
        self,
        *,
        store: Store,
        node: NodeClient,
        creates: Creates,
        lifecycle: Lifecycle,
        templates: Templates,
        snapshots: Snapshots,
        backends: Backends,
        metrics: ControlMetrics,
    ) -> None:
        self._store = store
        self._node = node
        self._creates = creates
        self._lifecycle = lifecycle
        self._templates = templates
        self._snapshots = snapshots
        self._backends = backends
        self._metrics = metrics
        self._started_at = time.time()
        self._saves: Attempts[Saved] = Attempts("snapshot")
        self._forks: Attempts[Forked] = Attempts("fork")
        self._in_flight: set[str] = set()
        self._unsettled: set[str] = set()
        self._missed: set[str] = set()

    async def stop(self) -> None:
        """Give what is under way a moment to end. The rest is settled at the next start."""
        await self._saves.stop()
        await self._forks.stop()

    # --- snapshots ----------------------------------------------------------

    async def snapshot(
        self,
        caller: Caller,
        sandbox_id: str,
        params: SnapshotParams,
        *,
        key: str | None = None,
    ) -> Saved:
        """Save a running or paused sandbox's state of this instant; it goes on afterwards.

        Raises:
            InvalidRequest: the name is none.
            Conflict: a template has this name.
            SandboxNotFound: not one of the caller's, or ended.
            StateConflict: it is starting, resuming or ending.
            NotSupported: the backend cannot save this; the message says what it can.
            IdempotencyMismatch, IdempotencyOutcomeUnknown: as with a create.
            SnapshotFailed, NodeFull: nothing was saved; the sandbox goes on.
            NodeUnavailable, StoreUnavailable: not known; it is settled later.
        """
        name, tag = await self._free_name(caller, params.name)
        claim = _claim(key, params, "snapshot", sandbox_id)
        record = await self._source(caller, sandbox_id, claim)
        self._backends.check_saving(record.backend, params.mode)
        saved, joined = await self._saves.run(
            lambda: self._snapshot(record, params.mode, name, tag, claim),
            project_id=caller.project_id,
            claim=claim,
        )
        return msgspec.structs.replace(saved, replayed=True) if joined else saved

    async def _source(
        self, caller: Caller, sandbox_id: str, claim: IdempotencyClaim | None
    ) -> SandboxRecord:
        """The sandbox to save. One that has ended only for a caller who asks once more for what
        was made of it before."""
        try:
            return await self._lifecycle.get_started(caller, sandbox_id)
        except SandboxNotFound:
            if claim is None:
                raise
            record = await self._lifecycle.get(caller, sandbox_id)
            now = time.time()
            if await rows.find_request(self._store, caller.project_id, claim, now) is None:
                raise
            return record

    async def _free_name(self, caller: Caller, text: str | None) -> tuple[str | None, str]:
        if text is None:
            return None, DEFAULT_TAG
        parts = _NAME_RE.fullmatch(text[: limits.SNAPSHOT_NAME_CHARS_MAX + 1])
        if parts is None or len(text) > limits.SNAPSHOT_NAME_CHARS_MAX:
            raise InvalidRequest(
                f"name: `{text[:64]}` is not a snapshot's name",
                remediation="Use `name` or `name:tag`: lower-case letters, digits, `-`, `_`, and "
                f"`.` in tags; at most {limits.SNAPSHOT_NAME_CHARS_MAX} characters.",
            )
        if parts["scope"] not in (None, caller.project_id):
            raise InvalidRequest(
                f"name: `{parts['scope']}` is not this project",
                remediation=f"Leave the part before `/` out, or use `{caller.project_id}`.",
            )
        name = parts["name"]
        taken = await self._templates.find(caller, Reference(scope=None, name=name, tag=None))
        if taken is not None:
            raise Conflict(
                f"name: there is a template `{name}`", remediation="Choose another name."
            )
        return name, parts["tag"] or DEFAULT_TAG

    async def _snapshot(
        self,
        record: SandboxRecord,
        mode: StateMode,
        name: str | None,
        tag: str,
        claim: IdempotencyClaim | None,
    ) -> Saved:
        while True:
            wanted = await self._new_row(record, mode, name=name, tag=tag, keyed=claim is not None)
            with self._flying(wanted.snapshot_id):
                earlier = await rows.begin_snapshot(self._store, wanted, claim)
                if earlier is None:
                    return Saved(snapshot=await self._make(wanted), replayed=False)
            known = await self._outcome_of(earlier)
            if known is not None:
                return Saved(snapshot=known, replayed=True)
            # The earlier attempt made nothing, and its key is free again.

    async def _outcome_of(self, earlier: IdempotencyRow) -> Snapshot | None:
        row = await rows.get_snapshot(self._store, earlier.sandbox_id)
        if row is None:
            if earlier.outcome == "done":
                raise SnapshotNotFound("the snapshot made with this idempotency key was deleted")
            await rows.settle_request(self._store, earlier.sandbox_id, "failed")
            return None
        if row.state == "ready":
            return row
        if row.state == "deleting":
            raise SnapshotNotFound("the snapshot made with this idempotency key was deleted")
        self._refuse_foreign(row)
        try:
            with self._flying(row.snapshot_id):
                # The source may be gone by now; what was taken of it is not.
                for held in await self._node.snapshots():
                    if held.snapshot_id == row.snapshot_id:
                        return await self._finish(row, held)
                # Idempotent by id: joins what is under way, or makes it.
                return await self._make(row)
        except NodeUnavailable as exc:
            raise _unknown() from exc

    async def _make(self, wanted: Snapshot) -> Snapshot:
        """Let the node take it, and record it. On failure nothing of it is left."""
        name = wanted.snapshot_id
        try:
            # For as long the source may stand still.
            async with self._lifecycle.recorded_if_failed(wanted.source_id):
                with self._metrics.timed("snapshot", wanted.backend):
                    taken = await self._node.snapshot(
                        wanted.source_id, name, mode=wanted.mode, ephemeral=wanted.ephemeral
                    )
            await self._lifecycle.refresh(wanted.source_id)
        except (NodeUnavailable, asyncio.CancelledError):
            self._unsettled.add(name)
            raise
        except OpendsecError as exc:
            log.warning("snapshot failed", snapshot_id=name, code=exc.code, message=exc.message)
            await self._drop(name)
            raise
        except Exception as exc:
            self._unsettled.add(name)
            log.exception("snapshot failed unexpectedly", snapshot_id=name)
            raise Internal("the snapshot could not be taken because of a defect") from exc
        return await self._finish(wanted, taken)

    async def _finish(self, wanted: Snapshot, taken: NodeSnapshot) -> Snapshot:
        name = wanted.snapshot_id
        made = msgspec.structs.replace(
            wanted,
            state="ready",
            disk_bytes=taken.disk_bytes,
            memory_bytes=taken.memory_bytes,
            versions=taken.versions,
        )
        try:
            if not await rows.finish_snapshot(self._store, made):
                raise SnapshotNotFound("the snapshot was deleted while it was being made")
        except StoreUnavailable:
            self._unsettled.add(name)
            raise
        self._unsettled.discard(name)
        log.info(
            "snapshot taken",
            snapshot_id=name,
            sandbox_id=made.source_id,
            mode=made.mode,
            ephemeral=made.ephemeral,
            disk_bytes=made.disk_bytes,
            memory_bytes=made.memory_bytes,
        )
        return made

    async def _drop(self, snapshot_id: str) -> None:
        """Of a failed one nothing is left; of an attempt before it something may be."""
        try:
            await self._snapshots.remove(snapshot_id)
        except OpendsecError as exc:
            self._unsettled.add(snapshot_id)
            log.warning("snapshot removed later", snapshot_id=snapshot_id, why=exc.message)

    async def _new_row(
        self,
        record: SandboxRecord,
        mode: StateMode,
        *,
        name: str | None = None,
        tag: str = DEFAULT_TAG,
        keyed: bool,
        ephemeral: bool = False,
    ) -> Snapshot:
        image = record.image
        if image is None:
            # Made by an older release, or adopted.
            template = await self._templates.by_id(record.template_id)
            image = template.image if template else record.template
        return Snapshot(
            snapshot_id=new_snapshot_id(),
            project_id=record.project_id,
            node_id=record.node_id,
            source_id=record.sandbox_id,
            name=name,
            tag=tag,
            state="making",
            ephemeral=ephemeral,
            keyed=keyed,
            backend=record.backend,
            mode=mode,
            template_id=record.template_id,
            template=record.template,
            image=image,
            cpu=record.cpu,
            memory_mb=record.memory_mb,
            disk_mb=record.disk_mb,
            default_user=record.default_user or "user",
            default_workdir=record.default_workdir,
            created_at=time.time(),
        )

    # --- forks --------------------------------------------------------------

    async def fork(
        self, caller: Caller, sandbox_id: str, params: ForkParams, *, key: str | None = None
    ) -> Forked:
        """Make sandboxes that start with the disk, or disk and memory, that this one has now.

        The source stops for as short as possible and goes on. Each child succeeds or fails by
        itself; what concerns the source fails the whole call.

        Raises:
            InvalidRequest: a parameter is out of range.
            SandboxNotFound: not one of the caller's, or ended.
            StateConflict: it is starting, resuming or ending.
            NotSupported: the backend cannot save this; the message says what it can.
            IdempotencyMismatch, IdempotencyInProgress, IdempotencyOutcomeUnknown: as with creates.
            SnapshotFailed, NodeFull: the source could not be saved, and goes on.
            NodeUnavailable, StoreUnavailable: nothing was made, or it is settled later.
        """
        _check_fork(params)
        claim = _claim(key, params, "fork", sandbox_id)
        source = await self._source(caller, sandbox_id, claim)
        self._backends.check_saving(source.backend, params.mode)
        forked, joined = await self._forks.run(
            lambda: self._fork(source, params, claim), project_id=caller.project_id, claim=claim
        )
        return msgspec.structs.replace(forked, replayed=True) if joined else forked

    async def _fork(
        self, source: SandboxRecord, params: ForkParams, claim: IdempotencyClaim | None
    ) -> Forked:
        while True:
            base = await self._new_row(source, params.mode, keyed=claim is not None, ephemeral=True)
            names = [new_sandbox_id(source.node_id) for _ in range(params.count)]
            planned = _pack([_KeptChild(sandbox_id=name) for name in names])
            with self._flying(base.snapshot_id):
                earlier = await rows.begin_snapshot(self._store, base, claim, planned)
                if earlier is None:
                    with self._metrics.timed("fork", source.backend):
                        children = await self._make_children(source, base, params, names)
                    return Forked(children=children, replayed=False)
            children = await self._children_of(earlier)
            if children:
                return Forked(children=children, replayed=True)
            # The earlier attempt made nothing, and its key is free again.

    async def _make_children(
        self, source: SandboxRecord, base: Snapshot, params: ForkParams, names: list[str]
    ) -> list[Child]:
        settled = False
        try:
            await self._make(base)
            children = await asyncio.gather(
                *(self._make_child(_child_of(source, base, params, name)) for name in names)
            )
            kept = [_keep(name, child) for name, child in zip(names, children, strict=True)]
            # One that made nothing frees its key for another attempt.
            made = any(
                child.error is None or isinstance(child.error, NodeUnavailable)
                for child in children
            )
            settled = await self._settle(base.snapshot_id, kept if made else None)
            return children
        finally:
            if settled:
                await self._end_base(base.snapshot_id)

    async def _make_child(self, record: SandboxRecord) -> Child:
        try:
            return Child(record=await self._creates.make_child(record))
        except OpendsecError as exc:
            return Child(error=exc)

    async def _settle(self, snapshot_id: str, kept: list[_KeptChild] | None) -> bool:
        try:
            if kept is None:
                await rows.settle_request(self._store, snapshot_id, "failed")
            else:
                await rows.settle_request(self._store, snapshot_id, "done", _pack(kept))
        except StoreUnavailable:
            # The answer is true all the same; the next comparison settles the key.
            self._unsettled.add(snapshot_id)
            return False
        return True

    async def _end_base(self, snapshot_id: str) -> None:
        """Remove a fork's snapshot. What cannot be removed now is at the next comparison."""
        try:
            await self._snapshots.remove(snapshot_id)
        except OpendsecError as exc:
            self._unsettled.add(snapshot_id)
            log.warning("fork's snapshot removed later", snapshot_id=snapshot_id, why=exc.message)

    async def _children_of(self, earlier: IdempotencyRow) -> list[Child]:
        """What an earlier fork with the key made. Empty: nothing, and the key is free again."""
        if earlier.outcome == "pending":
            base = await rows.get_snapshot(self._store, earlier.sandbox_id)
            if base is not None:
                self._refuse_foreign(base)
            try:
                earlier = await self._settle_fork(earlier)
            except NodeUnavailable as exc:
                raise _unknown() from exc
            if earlier.outcome == "failed":
                return []
        children = []
        for kept in _kept.decode(earlier.result or "[]"):
            record = await get_sandbox(self._store, kept.sandbox_id)
            if record is not None and record.state is not State.FAILED:
                children.append(Child(record=record))
            elif kept.error is not None:
                children.append(Child(error=_error_of(kept.error)))
            elif record is not None:
                children.append(Child(error=_failure_of(record)))
            else:
                children.append(Child(error=_never_made()))
        return children

    async def _settle_fork(self, key: IdempotencyRow) -> IdempotencyRow:
        """Settle the key of a fork whose end was not seen, by what became of its children."""
        kept, made = [], False
        for child in _kept.decode(key.result or "[]"):
            record = await get_sandbox(self._store, child.sandbox_id)
            if record is not None and record.state in (State.PENDING, State.STARTING):
                if await self._creates.wait_for(record.sandbox_id):
                    record = await get_sandbox(self._store, child.sandbox_id)
                else:
                    record = await self._creates.settle(record)
            if record is None:
                kept.append(_keep(child.sandbox_id, Child(error=_never_made())))
            elif record.state is State.FAILED:
                kept.append(_keep(child.sandbox_id, Child(error=_failure_of(record))))
            else:
                made = True
                kept.append(_KeptChild(sandbox_id=child.sandbox_id))
        outcome, result = ("done", _pack(kept)) if made else ("failed", None)
        await rows.settle_request(self._store, key.sandbox_id, outcome, result)  # type: ignore[arg-type]
        return msgspec.structs.replace(key, outcome=outcome, result=result)

    # --- comparing ----------------------------------------------------------

    async def reconcile(self, node_id: str, node: NodeClient) -> None:
        """Finish or remove what was left half-way on a node, and look for what it lost.

        Raises:
            StoreUnavailable, NodeUnavailable: nothing more could be compared.
        """
        held = {snapshot.snapshot_id: snapshot for snapshot in await node.snapshots()}
        for row in await rows.unfinished_snapshots(self._store, node_id):
            if row.snapshot_id in self._in_flight or self._is_foreign(row):
                continue
            if row.ephemeral:
                key = await rows.key_of(self._store, row.snapshot_id)
                if key is not None and key.outcome == "pending":
                    await self._settle_fork(key)
                await self._snapshots.remove_half_made(row)
            elif row.state == "deleting":
                if not self._snapshots.in_use(row.snapshot_id):
                    await self._snapshots.remove_half_made(row)
            elif row.keyed and row.snapshot_id in held:
                # Its caller will ask again.
                await self._finish(row, held[row.snapshot_id])
            else:
                await self._snapshots.remove_half_made(row)
            self._unsettled.discard(row.snapshot_id)
            log.info("snapshot settled", snapshot_id=row.snapshot_id, was=row.state)
        lost = await rows.ids_of_ready(self._store, node_id) - set(held) - self._missed
        for snapshot_id in lost:
            # Its row is left: whoever starts from it learns of the loss, and may delete it.
            log.error("the node does not hold a snapshot any more", snapshot_id=snapshot_id)
        self._missed |= lost

    def _is_foreign(self, row: Snapshot) -> bool:
        """Whether another process may be at work on it."""
        return (
            row.created_at > self._started_at
            and row.snapshot_id not in self._unsettled
            and row.state != "deleting"
            and time.time() - row.created_at < FOREIGN_ATTEMPT_S
        )

    def _refuse_foreign(self, row: Snapshot) -> None:
        if row.snapshot_id in self._in_flight or self._is_foreign(row):
            raise IdempotencyInProgress(
                "the first request with this idempotency key is still running", retry_after_s=1
            )

    @contextlib.contextmanager
    def _flying(self, snapshot_id: str) -> Iterator[None]:
        self._in_flight.add(snapshot_id)
        try:
            yield
        finally:
            self._in_flight.discard(snapshot_id)


def _claim(
    key: str | None, params: msgspec.Struct, operation: str, sandbox_id: str
) -> IdempotencyClaim | None:
    if key is None:
        return None
    return IdempotencyClaim(key=key, params_sha256=digest(params, operation, sandbox_id))


def _check_fork(params: ForkParams) -> None:
    if not 1 <= params.count <= limits.FORK_COUNT_MAX:
        raise InvalidRequest(f"count: 1 to {limits.FORK_COUNT_MAX}")
    if params.timeout_s is not None:
        check_timeout(params.timeout_s)
    if params.metadata is not None:
        check_map("metadata", params.metadata)
    if params.labels is not None:
        check_labels(params.labels)


def _child_of(
    source: SandboxRecord, base: Snapshot, params: ForkParams, sandbox_id: str
) -> SandboxRecord:
    """A child inherits everything but identity, time and what the caller chose."""
    now = time.time()
    timeout_s = source.timeout_s if params.timeout_s is None else params.timeout_s
    return SandboxRecord(
        sandbox_id=sandbox_id,
        project_id=source.project_id,
        node_id=base.node_id,
        template_id=source.template_id,
        template=source.template,
        backend=source.backend,
        state=State.PENDING,
        cpu=source.cpu,
        memory_mb=source.memory_mb,
        disk_mb=source.disk_mb,
        env=source.env,
        metadata=source.metadata if params.metadata is None else params.metadata,
        labels=source.labels if params.labels is None else params.labels,
        task_id=source.task_id,
        created_at=now,
        end_at=now + timeout_s,
        timeout_s=timeout_s,
        idle_timeout_s=source.idle_timeout_s,
        on_timeout=source.on_timeout,
        pause_mode=source.pause_mode,
        auto_resume=source.auto_resume,
        network=source.network,
        # Of a member of a group: a copy is in none.
        extra=msgspec.structs.replace(source.extra, group=None, node_id=None),
        snapshot_id=base.snapshot_id,
        image=base.image,
        default_user=base.default_user,
        default_workdir=base.default_workdir,
    )


def _pack(children: list[_KeptChild]) -> str:
    return msgspec.json.encode(children).decode()


def _keep(sandbox_id: str, child: Child) -> _KeptChild:
    if child.error is None:
        return _KeptChild(sandbox_id=sandbox_id)
    error = child.error
    return _KeptChild(
        sandbox_id=sandbox_id,
        error=_KeptError(
            code=error.code,
            message=error.message,
            remediation=error.remediation,
            details=error.details,
        ),
    )


def _error_of(kept: _KeptError) -> OpendsecError:
    return _CLASSES.get(kept.code, Internal)(
        kept.message, remediation=kept.remediation, details=dict(kept.details)
    )


def _failure_of(record: SandboxRecord) -> OpendsecError:
    return SandboxStartFailed(
        record.message or "the sandbox could not be started",
        remediation="Fork again with another key: this child was used up by the failed start.",
    )


def _never_made() -> OpendsecError:
    return Internal(
        "the server stopped before this child was made",
        remediation="Fork again with another key, for as many as are missing.",
    )


def _unknown() -> IdempotencyOutcomeUnknown:
    return IdempotencyOutcomeUnknown(
        "the outcome of the first request with this idempotency key cannot be found out now"
    )

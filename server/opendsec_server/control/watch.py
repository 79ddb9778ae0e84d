# SPDX-License-Identifier: AGPL-3.0-only
"""Keeps the store in step with the nodes: by their events, and by comparing from time to time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import structlog

from opendsec_server.contract.errors import (
    NodeUnavailable,
    OpendsecError,
    SandboxNotFound,
    StoreUnavailable,
)
from opendsec_server.contract.limits import ENDED_RECORDS_KEPT_S
from opendsec_server.contract.node import NodeEvent, SandboxStatus
from opendsec_server.contract.states import State
from opendsec_server.store import sandboxes
from opendsec_server.store.places import end_places
from opendsec_server.store.records import SandboxRecord, StateChange
from opendsec_server.store.sandboxes import LiveMark
from opendsec_server.store.store import Store

from .builds.service import Builds
from .creates import Creates
from .invalidations import Invalidations
from .ledger import Ledger, change_from_status, fault_of
from .lifecycle import lost
from .nodes import Fleet, Member
from .saving import Saving
from .templates import Templates

log = structlog.get_logger(__name__)

EVENTS_QUEUED_MAX = 10_000
"""Above it events are dropped, and the next comparison makes up for them."""
EVENTS_BATCH_MAX = 500
RETRY_S = 1.0
RECONCILE_INTERVAL_S = 30.0
COMPARING_SHARE_MAX = 0.05
"""Of the time, that comparing takes: with very many sandboxes it is done less often."""
RECONCILE_INTERVAL_MAX_S = 120.0
"""However long comparing takes: what was missed is found in bounded time."""
PRUNE_INTERVAL_S = 3_600.0
END_AT_TOLERANCE_S = 0.001


class Watcher:
    """Background tasks between the nodes and the store."""

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        node_lost_after_s: float,
        creates: Creates,
        saving: Saving,
        builds: Builds,
        templates: Templates,
        ledger: Ledger,
        invalidations: Invalidations,
    ) -> None:
        self._store = store
        self._node = fleet
        self._node_lost_after_s = node_lost_after_s
        self._creates = creates
        self._saving = saving
        self._builds = builds
        self._templates = templates
        self._ledger = ledger
        self._invalidations = invalidations
        self._events: deque[NodeEvent] = deque(maxlen=EVENTS_QUEUED_MAX)
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._worked_s = 0.0
        """How long the nodes took that the last comparison went well with."""
        self._unreached: dict[str, float] = {}
        """Nodes with live records that were not reached since the start; since when (monotonic)
        it is known."""

    async def start(self) -> None:
        """Listen to the nodes, then compare once, so that nothing falls in between."""
        self._tasks = [
            *(
                asyncio.create_task(self._listen(member), name=f"node-events-{member.name}")
                for member in self._node.members
            ),
            asyncio.create_task(self._record(), name="node-events-record"),
        ]
        await asyncio.sleep(0)
        if self._store.is_sqlite:
            # Nobody but us can hold this database: no resume is under way.
            with contextlib.suppress(StoreUnavailable):
                await end_places(self._store, now=math.inf)
        await self._reconcile_or_log()
        self._tasks.append(asyncio.create_task(self._compare(), name="reconcile"))

    async def stop(self) -> None:
        """End the background tasks. What was not recorded is found at the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    # --- events -------------------------------------------------------------

    async def _listen(self, member: Member) -> None:
        while True:
            try:
                async for event in member.client.events():
                    if not member.speaks_of(event.sandbox_id):
                        continue
                    # Edges first: they must not wait for the store. What runs again after a
                    # pause may have another address.
                    if not self._creates.is_own_start(event):
                        self._invalidations.publish(event.sandbox_id)
                        self._events.append(event)
                        self._arrived.set()
            except NodeUnavailable as exc:
                if member.up:
                    log.warning("a node's events are missed", node=member.name, why=exc.message)
            except Exception:
                log.exception("the node's event stream broke", node=member.name)
            self._invalidations.publish_all()
            await asyncio.sleep(RETRY_S)
            while member.down:  # noqa: ASYNC110 - its health has no event
                await asyncio.sleep(RETRY_S)

    async def _record(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._events:
                batch = [
                    self._events.popleft() for _ in range(min(len(self._events), EVENTS_BATCH_MAX))
                ]
                try:
                    await self._ledger.apply(await self._changes(batch))
                except StoreUnavailable as exc:
                    self._events.extendleft(reversed(batch))
                    log.warning("events wait for the store", queued=len(self._events), why=str(exc))
                    await asyncio.sleep(RETRY_S)
                except Exception:
                    # A batch that cannot be recorded must not stop those after it.
                    log.exception("events dropped", count=len(batch))

    async def _changes(self, batch: Sequence[NodeEvent]) -> list[StateChange]:
        """What is news. Of what was asked for here, the answer was mostly recorded before: its
        node need not be asked once more."""
        known = await sandboxes.node_seqs(self._store, {event.sandbox_id for event in batch})
        return [
            await self._change(event)
            for event in batch
            if event.seq == 0 or event.seq > known.get(event.sandbox_id, -1)
        ]

    async def _change(self, event: NodeEvent) -> StateChange:
        """What an event means for the record. It does not say all that the node knows."""
        change = _change_of(event)
        if event.state not in (State.PAUSED, State.RUNNING):
            return change
        try:
            status = await self._node.get(event.sandbox_id)
        except OpendsecError:
            return change
        if status.state is not event.state or status.seq != event.seq:
            # It has moved on since; later events tell.
            return change
        return msgspec.structs.replace(
            change,
            paused_mode=status.pause_mode,
            end_at=status.end_at,
            accelerator=status.accelerator,
            vmm=status.vmm,
        )

    # --- comparing ----------------------------------------------------------

    async def _compare(self) -> None:
        pruned_at = float("-inf")
        while True:
            if time.monotonic() - pruned_at >= PRUNE_INTERVAL_S:
                pruned_at = time.monotonic()
                await self._prune()
            await asyncio.sleep(self._pause_s())
            await self._reconcile_or_log()

    def _pause_s(self) -> float:
        """Until the next comparison. A node that hangs does not put off that of the others."""
        wanted_s = max(RECONCILE_INTERVAL_S, self._worked_s / COMPARING_SHARE_MAX)
        return min(wanted_s, RECONCILE_INTERVAL_MAX_S)

    async def _prune(self) -> None:
        now = time.time()
        try:
            removed = sandboxes.PRUNE_BATCH
            while removed >= sandboxes.PRUNE_BATCH:
                removed = await sandboxes.prune(
                    self._store, ended_before=now - ENDED_RECORDS_KEPT_S, now=now
                )
        except StoreUnavailable as exc:
            log.warning("old records not removed", why=exc.message)
        except Exception:
            # It must not end the comparing.
            log.exception("old records not removed")

    async def _reconcile_or_log(self) -> None:
        try:
            await self.reconcile()
        except OpendsecError as exc:
            log.warning("store and node not compared", code=exc.code, why=exc.message)
        except Exception:
            log.exception("store and node not compared")

    async def reconcile(self) -> None:
        """Compare every live record with its node, and the other way round.

        Raises:
            StoreUnavailable: nothing more could be compared.
            OpendsecError: the first node that could not be compared; the others were.
        """
        failure: Exception | None = None
        self._worked_s = 0.0
        if await end_places(self._store, now=time.time()):
            log.warning("places in quotas were held by resumes that nobody sees through")
        for member in self._node.members:
            node_id = member.node_id
            # A node that is listed twice is one; its second member is never up.
            if node_id is None or self._node.find(node_id) is not member:
                continue
            began = time.monotonic()
            try:
                if member.down:
                    await self._give_up(node_id, member.unreached_for())
                else:
                    await self._compare_node(member, node_id)
            except StoreUnavailable:
                raise
            except Exception as exc:
                log.warning("a node was not compared", node=member.name, why=str(exc))
                failure = failure or exc
            else:
                self._worked_s += time.monotonic() - began
        await self._give_up_unreached()
        if failure is not None:
            raise failure

    async def _give_up(self, node_id: str, unreached_s: float) -> None:
        """Note what was lost with a node, once it has been away for long.

        Not what is paused: it lies on the node's disk, and is there again when the node is. What
        ran and is noted as lost is ended when the node comes back, so that its caller, who may
        have made another, never has two.
        """
        if unreached_s < self._node_lost_after_s:
            return
        why = f"its node {node_id} has not been reached for {unreached_s:.0f} s"
        await self._note_lost(node_id, why, paused_too=False)

    async def _give_up_unreached(self) -> None:
        """As ``_give_up``, for nodes that only the store knows: dead since before the start.

        Where more of them are known than were not reached yet, some are not listed here at all.
        Perhaps another gateway lists them, and they are well: they are left to an operator.
        """
        now = time.monotonic()
        known = await sandboxes.nodes_of_live(self._store)
        self._unreached = {
            node_id: self._unreached.get(node_id, now)
            for node_id in known
            if self._node.find(node_id) is None
        }
        listed = sum(member.node_id is None for member in self._node.members)
        if len(self._unreached) > listed:
            log.warning("nodes with live records are not listed", node_ids=sorted(self._unreached))
            return
        for node_id, since in self._unreached.items():
            await self._give_up(node_id, now - since)

    async def forget_node(self, node_id: str) -> int:
        """Note all sandboxes of a node as lost: an operator says that it does not come back.

        Returns:
            How many they were.
        """
        return await self._note_lost(node_id, f"its node {node_id} was given up", paused_too=True)

    async def _note_lost(self, node_id: str, why: str, *, paused_too: bool) -> int:
        records = await sandboxes.live_sandboxes(self._store, node_id)
        changes = [
            lost(record.sandbox_id, cause="node_lost", message=why)
            for record in records
            if (paused_too or record.state is not State.PAUSED)
            and not self._creates.in_flight(record.sandbox_id)
        ]
        if changes:
            log.error("sandboxes were lost with their node", node_id=node_id, count=len(changes))
            await self._ledger.apply(changes)
        return len(changes)

    async def _compare_node(self, member: Member, node_id: str) -> None:
        marks = await sandboxes.live_marks(self._store, node_id)
        on_node = {
            status.sandbox_id: status
            for status in await member.client.list()
            if member.speaks_of(status.sandbox_id)
        }
        changes: list[StateChange] = []
        for mark in marks:
            status = on_node.pop(mark.sandbox_id, None)
            if self._creates.in_flight(mark.sandbox_id):
                continue
            if mark.state in (State.PENDING, State.STARTING):
                record = await sandboxes.get_sandbox(self._store, mark.sandbox_id)
                if (
                    record is not None
                    and record.state in (State.PENDING, State.STARTING)
                    and not self._creates.is_anothers(record)
                ):
                    await self._creates.settle(record)
                continue
            change = await self._compare_one(mark, status)
            if change is not None:
                changes.append(change)
        await self._ledger.apply(changes)
        await self._look_at_unknown(node_id, on_node)
        await self._saving.reconcile(node_id, member.client)

    async def _compare_one(
        self, record: LiveMark, status: SandboxStatus | None
    ) -> StateChange | None:
        if status is None:
            try:
                status = await self._node.get(record.sandbox_id)
            except SandboxNotFound:
                return lost(record.sandbox_id, cause="reconcile")
        if status.state is not record.state or status.seq > record.node_seq:
            return change_from_status(status, cause="reconcile", now=time.time(), again=True)
        if status.state is State.PAUSED and status.pause_mode != record.paused_mode:
            # Its memory was lost while it was paused.
            await sandboxes.set_paused_mode(self._store, record.sandbox_id, status.pause_mode)
        if abs(status.end_at - record.end_at) > END_AT_TOLERANCE_S:
            await sandboxes.set_end_at(self._store, record.sandbox_id, status.end_at)
        return None

    async def _look_at_unknown(self, node_id: str, on_node: dict[str, SandboxStatus]) -> None:
        records = await sandboxes.get_sandboxes(self._store, list(on_node))
        for sandbox_id, status in on_node.items():
            if self._creates.in_flight(sandbox_id):
                continue
            if self._builds.is_builder(status):
                if self._builds.is_orphan(status):
                    log.warning("removing a builder sandbox without a build", sandbox_id=sandbox_id)
                    await self._node.kill(sandbox_id)
                continue
            record = records.get(sandbox_id)
            if record is None:
                await self._adopt(node_id, status)
            elif record.terminal:
                # Nobody can reach it through the API any more, and it holds memory and disk.
                log.warning("killing a sandbox whose record has ended", sandbox_id=sandbox_id)
                await self._node.kill(sandbox_id)

    async def _adopt(self, node_id: str, status: SandboxStatus) -> None:
        """Record a sandbox that the store does not know: it was restored from a backup."""
        template = await self._templates.by_id(status.template_id)
        record = SandboxRecord(
            sandbox_id=status.sandbox_id,
            project_id=status.project_id,
            node_id=node_id,
            template_id=status.template_id,
            template=template.name if template else status.template_id,
            backend=status.backend,
            state=status.state,
            cpu=template.cpu if template else 0,
            memory_mb=template.memory_mb if template else 0,
            disk_mb=template.disk_mb if template else 0,
            env={},
            metadata={},
            labels=[],
            task_id=None,
            created_at=status.created_at,
            started_at=status.started_at,
            end_at=status.end_at,
            message="adopted from the node: the store had no record of it",
            accelerator=status.accelerator,
            vmm=status.vmm,
            paused_mode=status.pause_mode,
            node_seq=status.seq,
        )
        if await sandboxes.insert_adopted(self._store, record):
            log.warning("sandbox adopted from the node", sandbox_id=status.sandbox_id)
        else:
            log.warning(
                "a sandbox on the node belongs to no known project; its time-out will end it",
                sandbox_id=status.sandbox_id,
            )


def _change_of(event: NodeEvent) -> StateChange:
    return StateChange(
        sandbox_id=event.sandbox_id,
        state=event.state,
        at=event.at,
        cause="node",
        reason=event.reason,
        message=event.message,
        fault=fault_of(event.reason),
        started_at=event.at if event.state is State.RUNNING else None,
        seq=event.seq,
        usage=event.usage,
    )

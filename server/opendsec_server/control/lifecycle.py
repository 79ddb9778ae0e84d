# SPDX-License-Identifier: AGPL-3.0-only
"""What a caller can do with a sandbox after its creation.

Every call first finds the sandbox in the caller's project. A foreign sandbox is answered like one
that does not exist.
"""

from __future__ import annotations

import time

import msgspec

from opendsec_server.contract.errors import SandboxNotFound, StateConflict
from opendsec_server.contract.ids import is_sandbox_id
from opendsec_server.contract.limits import TIMEOUT_S_DEFAULT
from opendsec_server.contract.node import MetricSample, NetworkPolicy, NodeClient, SandboxStatus
from opendsec_server.contract.states import EndReason, State
from opendsec_server.store import sandboxes
from opendsec_server.store.records import SandboxExtra, SandboxRecord, StateChange, Transition
from opendsec_server.store.sandboxes import SandboxFilter
from opendsec_server.store.store import Store

from .creates import Creates
from .iam import Caller
from .invalidations import Invalidations
from .ledger import Ledger, change_from_status
from .params import check_network, check_timeout


class Page(msgspec.Struct, kw_only=True, frozen=True):
    """One page of a list."""

    records: list[SandboxRecord]
    more: bool
    """Whether there is another page after the last record."""


class Lifecycle:
    """Reading, extending, changing and ending sandboxes."""

    def __init__(
        self,
        *,
        store: Store,
        node: NodeClient,
        creates: Creates,
        ledger: Ledger,
        invalidations: Invalidations,
    ) -> None:
        self._store = store
        self._node = node
        self._creates = creates
        self._ledger = ledger
        self._invalidations = invalidations

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
        self._invalidations.publish(sandbox_id)
        await self._ledger.apply([await self._end_on_node(record)])
        return await self.get(caller, sandbox_id), True

    async def _end_on_node(self, record: SandboxRecord) -> StateChange:
        try:
            return await self._kill_on_node(record.sandbox_id)
        except SandboxNotFound:
            pass
        # The create may not have reached the node yet; once it has, there is something to kill.
        if await self._creates.wait_for(record.sandbox_id):
            try:
                return await self._kill_on_node(record.sandbox_id)
            except SandboxNotFound:
                pass
        return lost(record.sandbox_id, cause="api")

    async def _kill_on_node(self, sandbox_id: str) -> StateChange:
        status = await self._node.kill(sandbox_id, EndReason.KILLED)
        return change_from_status(status, cause="api", now=time.time())

    async def set_timeout(self, caller: Caller, sandbox_id: str, timeout_s: int) -> SandboxRecord:
        """Let a sandbox end ``timeout_s`` from now, sooner or later than before.
        Zero or less ends it at once.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
            InvalidRequest: longer than a sandbox may live.
        """
        check_timeout(timeout_s)
        record = await self.get_live(caller, sandbox_id)
        status = await self._node.set_end_at(sandbox_id, time.time() + max(timeout_s, 0))
        return await self._note_end_at(record, status)

    async def connect(
        self, caller: Caller, sandbox_id: str, timeout_s: int | None
    ) -> SandboxRecord:
        """Make sure that a sandbox runs for at least ``timeout_s`` more seconds.

        Never shortens its life.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
            StateConflict: it is not running.
            InvalidRequest: longer than a sandbox may live.
        """
        timeout_s = TIMEOUT_S_DEFAULT if timeout_s is None else timeout_s
        check_timeout(timeout_s)
        record = await self.get_live(caller, sandbox_id)
        if record.state in (State.PENDING, State.STARTING):
            await self._creates.wait_for(sandbox_id)
            record = await self.get_live(caller, sandbox_id)
        if record.state is not State.RUNNING:
            raise StateConflict(
                f"sandbox `{sandbox_id}` is {record.state}", details={"state": record.state}
            )
        end_at = time.time() + timeout_s
        if end_at <= record.end_at:
            return record
        status = await self._node.set_end_at(sandbox_id, end_at, only_extend=True)
        return await self._note_end_at(record, status)

    async def set_network(
        self, caller: Caller, sandbox_id: str, policy: NetworkPolicy, extra: SandboxExtra
    ) -> SandboxRecord:
        """Replace the network policy of a running sandbox.

        Raises:
            SandboxNotFound: not one of the caller's, or ended.
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
            raise SandboxNotFound(
                f"sandbox `{sandbox_id}` has ended",
                details={"state": record.state, "end_reason": record.end_reason},
            )
        return record

    async def _note_end_at(self, record: SandboxRecord, status: SandboxStatus) -> SandboxRecord:
        await sandboxes.set_end_at(self._store, record.sandbox_id, status.end_at)
        return msgspec.structs.replace(record, end_at=status.end_at)


def lost(sandbox_id: str, *, cause: str) -> StateChange:
    """The change of a sandbox that its node does not know any more."""
    return StateChange(
        sandbox_id=sandbox_id,
        state=State.ENDED,
        at=time.time(),
        cause=cause,
        reason=EndReason.LOST,
        message="the node does not know this sandbox any more",
        fault="platform",
    )


def _not_found(sandbox_id: str) -> SandboxNotFound:
    return SandboxNotFound(f"there is no sandbox `{sandbox_id[:64]}`")

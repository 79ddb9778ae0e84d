# SPDX-License-Identifier: AGPL-3.0-only
"""A node without a machine: the contract's behaviour, with faults on demand. Tests only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec

from opendsec_server.contract.errors import OpendsecError, SandboxNotFound, StateConflict
from opendsec_server.contract.node import (
    BackendInfo,
    Capabilities,
    MetricSample,
    NetworkPolicy,
    NodeEvent,
    NodeInfo,
    Route,
    SandboxSpec,
    SandboxStatus,
)
from opendsec_server.contract.states import TERMINAL, EndReason, State

NODE_ID = "n0de"


class FakeNode:
    """Keeps sandboxes in memory. Survives a restart of the control plane, like a real node."""

    def __init__(self) -> None:
        self.specs: dict[str, SandboxSpec] = {}
        self.statuses: dict[str, SandboxStatus] = {}
        self.networks: dict[str, NetworkPolicy] = {}
        self.samples: dict[str, list[MetricSample]] = {}
        self.created = 0
        """How many sandboxes were really made."""
        self.fail_with: Exception | None = None
        """Raised by every create, before anything is made."""
        self.fail_after: Exception | None = None
        """Raised by every create, after the sandbox was made."""
        self.unreachable: OpendsecError | None = None
        """Raised by every call but events."""
        self.gate: asyncio.Event | None = None
        """Creates wait here after admission."""
        self.admitted = asyncio.Event()
        self._listeners: set[asyncio.Queue[NodeEvent]] = set()

    async def info(self) -> NodeInfo:
        self._reach()
        return NodeInfo(
            node_id=NODE_ID,
            hostname="test",
            version="0",
            backends=(
                BackendInfo(
                    name="container",
                    capabilities=Capabilities(
                        own_kernel=False,
                        memory_snapshot=False,
                        pause_survives_reboot=False,
                        fork=True,
                        disk_images=False,
                        console=False,
                        passthrough=False,
                    ),
                ),
            ),
            cpu_count=2,
            memory_total_bytes=1 << 34,
            disk_total_bytes=1 << 36,
            disk_free_bytes=1 << 35,
            sandboxes=len(self.statuses),
            sandboxes_max=4096,
        )

    async def create(self, spec: SandboxSpec) -> SandboxStatus:
        self._reach()
        if self.fail_with is not None:
            raise self.fail_with
        known = self.statuses.get(spec.sandbox_id)
        if known is None:
            self.specs[spec.sandbox_id] = spec
            self.networks[spec.sandbox_id] = spec.network
            self._set(
                SandboxStatus(
                    sandbox_id=spec.sandbox_id,
                    project_id=spec.project_id,
                    template_id=spec.template_id,
                    backend=spec.backend,
                    state=State.STARTING,
                    created_at=spec.created_at,
                    end_at=spec.end_at,
                )
            )
        self.admitted.set()
        if self.gate is not None:
            await self.gate.wait()
        known = self.statuses[spec.sandbox_id]
        if known.state in TERMINAL:
            raise StateConflict("killed while starting", details={"state": known.state})
        if known.state is State.STARTING:
            self.created += 1
            known = self._set(
                msgspec.structs.replace(known, state=State.RUNNING, started_at=time.time())
            )
        if self.fail_after is not None:
            raise self.fail_after
        return known

    async def get(self, sandbox_id: str) -> SandboxStatus:
        self._reach()
        return self._known(sandbox_id)

    async def kill(self, sandbox_id: str, reason: EndReason = EndReason.KILLED) -> SandboxStatus:
        self._reach()
        status = self._known(sandbox_id)
        if status.state in TERMINAL:
            return status
        return self.end(sandbox_id, reason)

    async def set_end_at(
        self, sandbox_id: str, end_at: float, *, only_extend: bool = False
    ) -> SandboxStatus:
        self._reach()
        status = self._live(sandbox_id)
        if not only_extend or end_at > status.end_at:
            status = msgspec.structs.replace(status, end_at=end_at)
            self.statuses[sandbox_id] = status
        if status.end_at <= time.time():
            return self.end(sandbox_id, EndReason.TIMEOUT)
        return status

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        self._reach()
        self._live(sandbox_id)
        self.networks[sandbox_id] = policy

    async def route(self, sandbox_id: str) -> Route:
        self._reach()
        status = self._live(sandbox_id)
        if status.state is not State.RUNNING:
            raise StateConflict(f"it is {status.state}", details={"state": status.state})
        spec = self.specs[sandbox_id]
        return Route(
            sandbox_id=sandbox_id,
            state=status.state,
            address="10.201.0.5",
            agent_port=49983,
            control_token=spec.control_token,
            traffic_token=spec.traffic_token,
        )

    async def route_by_signature(
        self, *, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route:
        self._reach()
        for sandbox_id, spec in self.specs.items():
            wanted = f"{path}:{operation}:{username}:{spec.access_token}:{expiration}"
            if signature == wanted:
                return await self.route(sandbox_id)
        raise SandboxNotFound("no running sandbox's token fits")

    async def metrics(self, sandbox_id: str, start: float, end: float) -> list[MetricSample]:
        self._reach()
        self._known(sandbox_id)
        return [s for s in self.samples.get(sandbox_id, []) if start <= s.at <= end]

    async def events(self) -> AsyncIterator[NodeEvent]:
        queue: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)

    async def list(self) -> list[SandboxStatus]:
        self._reach()
        return [status for status in self.statuses.values() if status.state not in TERMINAL]

    # --- for tests ----------------------------------------------------------

    def end(self, sandbox_id: str, reason: EndReason, message: str | None = None) -> SandboxStatus:
        """The sandbox ends by itself."""
        return self._set(
            msgspec.structs.replace(
                self.statuses[sandbox_id],
                state=State.ENDED,
                ended_at=time.time(),
                reason=reason,
                message=message,
            )
        )

    def forget(self, sandbox_id: str) -> None:
        """The node loses the sandbox without a word."""
        del self.statuses[sandbox_id]

    def sample(self, sandbox_id: str, at: float) -> None:
        """The node measures once."""
        self.samples.setdefault(sandbox_id, []).append(
            MetricSample(
                at=at,
                cpu_count=2.0,
                cpu_used_pct=12.5,
                memory_used_bytes=10,
                memory_total_bytes=100,
                memory_cache_bytes=5,
                disk_used_bytes=7,
                disk_total_bytes=70,
            )
        )

    def _set(self, status: SandboxStatus) -> SandboxStatus:
        self.statuses[status.sandbox_id] = status
        for queue in self._listeners:
            queue.put_nowait(
                NodeEvent(
                    sandbox_id=status.sandbox_id,
                    state=status.state,
                    at=time.time(),
                    reason=status.reason,
                    message=status.message,
                )
            )
        return status

    def _reach(self) -> None:
        if self.unreachable is not None:
            raise self.unreachable

    def _known(self, sandbox_id: str) -> SandboxStatus:
        try:
            return self.statuses[sandbox_id]
        except KeyError:
            raise SandboxNotFound(f"the journal does not know {sandbox_id}") from None

    def _live(self, sandbox_id: str) -> SandboxStatus:
        status = self._known(sandbox_id)
        if status.state in TERMINAL:
            raise SandboxNotFound(f"{sandbox_id} has ended")
        return status

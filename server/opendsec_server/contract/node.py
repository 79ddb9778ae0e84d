# SPDX-License-Identifier: AGPL-3.0-only
"""What the control plane asks of a node: structs and the ``NodeClient`` interface.

All times are Unix seconds (float, UTC). All sizes name their unit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec

from .states import EndReason, State

Backend = Literal["container", "microvm", "vm", "fncall"]
OnTimeout = Literal["kill", "pause"]


class NetworkPolicy(msgspec.Struct, kw_only=True, frozen=True):
    """Egress of one sandbox.

    ``allow`` beats ``deny``. Entries are IPv4 addresses or CIDRs. Private, CGNAT, loopback and
    link-local ranges are closed unless listed in ``allow`` (link-local metadata, other sandboxes
    and the node itself stay closed in any case). ``internet=False`` closes everything that
    ``allow`` does not open, DNS too.
    """

    internet: bool = True
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    allow_public_traffic: bool = True
    mask_request_host: str | None = None
    https_ports: tuple[int, ...] = ()


class SandboxSpec(msgspec.Struct, kw_only=True, frozen=True):
    """Everything a node needs to make one sandbox. Journalled before anything is made."""

    sandbox_id: str
    project_id: str
    backend: Backend = "container"
    template_id: str
    image: str
    """Name of a layer set that the node's image store can resolve (``base``)."""
    cpu: float
    memory_mb: int
    disk_mb: int
    env: dict[str, str] = {}
    created_at: float
    end_at: float
    idle_timeout_s: int | None = None
    on_timeout: OnTimeout = "kill"
    network: NetworkPolicy = NetworkPolicy()
    default_user: str = "user"
    default_workdir: str | None = None
    access_token: str
    """The data plane's token (E2B: ``envdAccessToken``)."""
    traffic_token: str
    """Opens user ports when ``allow_public_traffic`` is false."""
    control_token: str
    """Only node and edge hold it: opens the guest agent's internal routes."""


class SandboxStatus(msgspec.Struct, kw_only=True, frozen=True):
    """What the node says of one of its sandboxes."""

    sandbox_id: str
    project_id: str
    template_id: str
    backend: Backend
    state: State
    created_at: float
    started_at: float | None = None
    end_at: float
    ended_at: float | None = None
    reason: EndReason | None = None
    message: str | None = None
    """One sentence of evidence for ``reason`` (exit status, which limit)."""


class Route(msgspec.Struct, kw_only=True, frozen=True):
    """How the edge reaches a running sandbox."""

    sandbox_id: str
    state: State
    address: str
    agent_port: int
    control_token: str
    traffic_token: str
    allow_public_traffic: bool = True
    mask_request_host: str | None = None
    https_ports: tuple[int, ...] = ()


class MetricSample(msgspec.Struct, kw_only=True, frozen=True):
    """One reading, taken on the node from outside the sandbox."""

    at: float
    cpu_count: float
    cpu_used_pct: float
    memory_used_bytes: int
    memory_total_bytes: int
    memory_cache_bytes: int
    disk_used_bytes: int
    disk_total_bytes: int


MetricSamples = list[MetricSample]


class NodeInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The node's identity, abilities and load."""

    node_id: str
    hostname: str
    version: str
    backends: tuple[Backend, ...]
    cpu_count: int
    memory_total_bytes: int
    disk_total_bytes: int
    disk_free_bytes: int
    sandboxes: int
    sandboxes_max: int
    features: dict[str, Any] = {}
    """For people and doctor: cgroup version, oci runtime, user namespaces, quota kind."""


class NodeEvent(msgspec.Struct, kw_only=True, frozen=True):
    """A change of a sandbox's state, in the order it happened on the node."""

    sandbox_id: str
    state: State
    at: float
    reason: EndReason | None = None
    message: str | None = None


class NodeClient(Protocol):
    """The node as the control plane sees it: in-process or over HTTP."""

    async def info(self) -> NodeInfo:
        """Identity, abilities, load."""

    async def create(self, spec: SandboxSpec) -> SandboxStatus:
        """Make and start a sandbox; return when its guest agent answers.

        Idempotent by ``spec.sandbox_id``: a second call joins or returns the first.

        Raises:
            NodeFull: no slot, memory or disk.
            TemplateNotFound: ``spec.image`` is not on the node.
            StartTimeout, SandboxStartFailed: it did not come up; all of it was removed.
            StateConflict: it was killed while starting.
        """

    async def get(self, sandbox_id: str) -> SandboxStatus:
        """Status of one sandbox, ended ones included while the journal keeps them.

        Raises:
            SandboxNotFound: the journal does not know it.
        """

    async def list(self) -> list[SandboxStatus]:
        """Every sandbox that has not ended."""

    async def kill(self, sandbox_id: str, reason: EndReason = EndReason.KILLED) -> SandboxStatus:
        """End a sandbox in any state. Idempotent. Returns when nothing of it runs.

        Raises:
            SandboxNotFound: the journal does not know it.
        """

    async def set_end_at(
        self, sandbox_id: str, end_at: float, *, only_extend: bool = False
    ) -> SandboxStatus:
        """Replace the absolute end time. A time in the past triggers the time-out action at once.

        Raises:
            SandboxNotFound: unknown or ended.
        """

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        """Replace the egress policy of a running sandbox, atomically.

        Raises:
            SandboxNotFound: unknown or ended.
        """

    async def route(self, sandbox_id: str) -> Route:
        """How to reach a running sandbox. Waits while it is starting.

        Raises:
            SandboxNotFound: unknown or ended.
            StateConflict: known, but not running.
        """

    async def route_by_signature(
        self, *, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route:
        """The running sandbox whose access token made this signed file URL (E2B, signature v1).

        Raises:
            SandboxNotFound: no running sandbox's token fits.
        """

    async def metrics(self, sandbox_id: str, start: float, end: float) -> MetricSamples:
        """Kept samples with ``start <= at <= end``, oldest first.

        Raises:
            SandboxNotFound: unknown.
        """

    def events(self) -> AsyncIterator[NodeEvent]:
        """State changes from now on, in order. Ends only with the node."""

# SPDX-License-Identifier: AGPL-3.0-only
"""One node of the installation: its client, its last report, its health."""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from opendsec_server.contract.errors import NodeUnavailable, OpendsecError
from opendsec_server.contract.ids import node_id_of
from opendsec_server.contract.node import NodeClient, NodeInfo
from opendsec_server.control.placement import Standing

log = structlog.get_logger(__name__)

POLL_TIMEOUT_S = 5.0
MISSED_UNTIL_DOWN = 3
"""Polls that fail one after the other until calls to a node are refused without trying."""


class NodeNotReached(NodeUnavailable):
    """The node was not reached at all: nothing of the call has begun, so that another node may be
    asked."""


class NodeSource(msgspec.Struct, kw_only=True, frozen=True):
    """A node as the installation's settings name it."""

    name: str
    """For people and the log: ``local``, or its address."""
    client: NodeClient


class Member:
    """One node. Its id is known once it was reached."""

    def __init__(self, source: NodeSource) -> None:
        self.name = source.name
        self.client = source.client
        self.info: NodeInfo | None = None
        self.standing = Standing("")
        self.missed = 0
        """Polls that failed one after the other."""
        self.reached_at: float | None = None
        """Monotonic time of the last report. None: never."""
        self.unreached_since = time.monotonic()
        """Since when it has not been reached; of no meaning while it is."""
        self.trouble: str | None = None
        """Why the last poll failed."""
        self.poll_s: float | None = None
        """How long the last good poll took."""
        self.wake = asyncio.Event()
        """Set: poll at once."""
        self._marked_at = float("-inf")
        """Monotonic time at which its marks were last changed by this process."""

    @property
    def node_id(self) -> str | None:
        """None: it was not reached yet."""
        return None if self.info is None else self.info.node_id

    @property
    def up(self) -> bool:
        """The last poll was answered."""
        return self.standing.health == "up"

    @property
    def down(self) -> bool:
        """Several polls were not answered, or it was never reached."""
        return self.standing.health in ("unknown", "down")

    def speaks_of(self, sandbox_id: str) -> bool:
        """Whether a sandbox is this node's. What it says of others' is worth nothing."""
        return self.node_id is None or node_id_of(sandbox_id) == self.node_id

    def unreached_for(self) -> float:
        """Seconds since it was last reached; 0 while it is."""
        return 0.0 if self.up else time.monotonic() - self.unreached_since

    def check(self) -> None:
        """Refuse a call that would only wait.

        Raises:
            NodeNotReached: it is down.
        """
        if self.down:
            raise NodeNotReached(
                f"node {self.node_id or self.name} cannot be reached"
                + (f": {self.trouble}" if self.trouble else ""),
                remediation="Retry after a moment; sandboxes on this node may go on running.",
                details={"node_id": self.node_id, "node": self.name},
                retry_after_s=2,
            )

    def marked(self, info: NodeInfo) -> None:
        """Take over marks that were changed a moment ago. Reports that were asked for before do
        not say otherwise."""
        self._marked_at = time.monotonic()
        self.standing.labels = info.labels
        self.standing.draining = info.draining
        self.info = info

    async def poll(self) -> bool:
        """Ask for a report. True: its health has changed."""
        before = self.standing.health
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                info = await self.client.info()
        except TimeoutError:
            self._failed(asked_at, f"no answer within {POLL_TIMEOUT_S:.0f} s")
        except OpendsecError as exc:
            self._failed(asked_at, exc.message)
        except Exception as exc:
            log.exception("a node's report cannot be read", node=self.name)
            self._failed(asked_at, repr(exc))
        else:
            self._reported(info, asked_at)
        return self.standing.health != before

    def _failed(self, asked_at: float, why: str) -> None:
        if self.up:
            self.unreached_since = asked_at if self.reached_at is None else self.reached_at
        self.trouble = why
        self.missed += 1
        if self.info is not None:
            self.standing.health = "down" if self.missed >= MISSED_UNTIL_DOWN else "suspect"

    def _reported(self, info: NodeInfo, asked_at: float) -> None:
        if self.info is not None and info.node_id != self.info.node_id:
            # Another machine at the address: what was known of the first is not true of it.
            self._failed(asked_at, f"it says that it is node {info.node_id}")
            return
        if self.info is not None and asked_at < self._marked_at:
            info = msgspec.structs.replace(
                info, labels=self.info.labels, draining=self.info.draining
            )
        standing = self.standing
        standing.node_id = info.node_id
        standing.draining = info.draining
        standing.labels = info.labels
        standing.backends = frozenset(backend.name for backend in info.backends)
        standing.cpu_count = max(info.cpu_count, 1)
        standing.cpu_used = min(max(info.load.cpu_used, 0.0), 1.0)
        standing.memory_total_mb = info.memory_total_bytes >> 20
        available = info.load.memory_available_bytes
        standing.memory_free_mb = (
            standing.memory_total_mb if available is None else max(available, 0) >> 20
        )
        standing.disk_free_mb = info.disk_free_bytes >> 20
        standing.sandboxes = max(info.sandboxes, 0)
        standing.sandboxes_max = info.sandboxes_max
        standing.reported(asked_at)
        standing.health = "up"
        self.info = info
        self.missed = 0
        self.trouble = None
        self.reached_at = time.monotonic()
        self.poll_s = self.reached_at - asked_at

# SPDX-License-Identifier: AGPL-3.0-only
"""Is there room?"""

from __future__ import annotations

import time
from pathlib import Path

from opendsec_server.contract.errors import NodeFull
from opendsec_server.node import limits
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services


def memory_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """The kernel's estimate of memory that new programs can have without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


class Admit:
    """Refuses what the machine could not bear. Memory is overcommitted on purpose: sandboxes
    mostly wait; only the host's own safety is guarded here."""

    name = "admit"

    def __init__(self, services: Services) -> None:
        self._pool = services.pool
        self._checked_at = 0.0
        self._refusal: str | None = None

    async def setup(self, box: Sandbox) -> None:
        """See whether there is room.

        Raises:
            NodeFull: there is not.
        """
        self.check()

    def check(self) -> None:
        """The same for a paused sandbox that is to run again.

        Raises:
            NodeFull: there is no room.
        """
        now = time.monotonic()
        if now - self._checked_at > limits.CAPACITY_CHECK_INTERVAL_S:
            self._checked_at = now
            self._refusal = self._look()
        if self._refusal is not None:
            raise NodeFull(self._refusal, retry_after_s=10)

    def _look(self) -> str | None:
        memory = memory_available_bytes()
        if memory < limits.MEMORY_AVAILABLE_FLOOR_BYTES:
            return f"the node has only {memory >> 20} MiB of memory available"
        disk = self._pool.usage().free_bytes
        if disk < limits.DISK_FREE_FLOOR_BYTES:
            return f"the node's disk pool has only {disk >> 20} MiB free"
        return None

    async def teardown(self, box: Sandbox) -> None:
        """Nothing was made."""

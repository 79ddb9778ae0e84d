# SPDX-License-Identifier: AGPL-3.0-only
"""How busy the machine is."""

from __future__ import annotations

import time
from pathlib import Path

from opendsec_server.contract.node import NodeLoad

from .hooks.admit import memory_available_bytes

WINDOW_S_MIN = 1.0
"""Shorter ones say more of chance than of load."""


class MachineLoad:
    """Readings of the processors' time, and what was busy between two of them (proc(5), stat)."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._read_at = float("-inf")
        self._busy = self._total = 0
        self._used = 0.0

    def now(self) -> NodeLoad:
        """The load since the reading before, at least ``WINDOW_S_MIN`` ago."""
        at = time.monotonic()
        if at - self._read_at >= WINDOW_S_MIN:
            first = self._total == 0
            busy, total = self._read()
            if not first and total > self._total:
                share = (busy - self._busy) / (total - self._total)
                self._used = min(max(share, 0.0), 1.0)
            self._busy, self._total, self._read_at = busy, total, at
        return NodeLoad(cpu_used=self._used, memory_available_bytes=memory_available_bytes())

    def _read(self) -> tuple[int, int]:
        line = self._stat.read_text().split("\n", 1)[0]
        user, nice, system, idle, iowait, irq, softirq, steal = (
            int(part) for part in line.split()[1:9]
        )
        busy = user + nice + system + irq + softirq + steal
        return busy, busy + idle + iowait

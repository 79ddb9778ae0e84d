# SPDX-License-Identifier: AGPL-3.0-only
"""Control groups version 2 (Documentation/admin-guide/cgroup-v2)."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from .base import CgroupSet, Usage, kill_process, read_counter


class CgroupV2(CgroupSet):
    """One unified hierarchy."""

    kind = "v2"

    def __init__(self, root: str, mount_point: Path) -> None:
        super().__init__(root)
        self._mount_point = mount_point

    def hierarchies(self) -> list[Path]:
        return [self._mount_point]

    def swap_limited(self) -> bool:
        return True

    def usage(self, sandbox_id: str) -> Usage | None:
        directory = self._directory(self._mount_point, sandbox_id)
        try:
            cpu_us = read_counter(directory / "cpu.stat", "usage_usec")
            total = int((directory / "memory.current").read_text())
            cache = read_counter(directory / "memory.stat", "file")
        except OSError:
            return None
        return Usage(cpu_us, max(0, total - cache), cache)

    def oom_kills(self, sandbox_id: str) -> int:
        directory = self._directory(self._mount_point, sandbox_id)
        return read_counter(directory / "memory.events", "oom_kill")

    def lift_cpu_limit(self, sandbox_id: str) -> None:
        with contextlib.suppress(OSError):
            (self._directory(self._mount_point, sandbox_id) / "cpu.max").write_text("max")

    def set_frozen(self, sandbox_id: str, frozen: bool) -> None:
        directory = self._directory(self._mount_point, sandbox_id)
        (directory / "cgroup.freeze").write_text("1" if frozen else "0")

    def is_frozen(self, sandbox_id: str) -> bool:
        directory = self._directory(self._mount_point, sandbox_id)
        return read_counter(directory / "cgroup.events", "frozen") == 1

    def allow_swap(self, sandbox_id: str, allowed: bool) -> None:
        with contextlib.suppress(OSError):
            file = self._directory(self._mount_point, sandbox_id) / "memory.swap.max"
            file.write_text("max" if allowed else "0")

    async def reclaim(self, sandbox_id: str, bytes_wanted: int) -> None:
        file = self._directory(self._mount_point, sandbox_id) / "memory.reclaim"
        with contextlib.suppress(OSError):  # EAGAIN: it took what it could
            await asyncio.to_thread(file.write_text, str(bytes_wanted))

    def kill(self, sandbox_id: str) -> None:
        directory = self._directory(self._mount_point, sandbox_id)
        try:
            (directory / "cgroup.kill").write_text("1")
        except FileNotFoundError:  # gone, or a kernel before 5.14
            for pid in self.processes(sandbox_id):
                kill_process(pid, directory / "cgroup.procs")

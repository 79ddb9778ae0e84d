# SPDX-License-Identifier: AGPL-3.0-only
"""Control groups version 2 (Documentation/admin-guide/cgroup-v2)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from .base import (
    CPU_PERIOD_US,
    CgroupSet,
    Limits,
    MemoryNow,
    Usage,
    kill_process,
    read_counter,
)


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

    def create(self, sandbox_id: str, limits: Limits) -> list[Path]:
        parent = self._mount_point / self.root.lstrip("/")
        parent.mkdir(exist_ok=True)
        for above in (self._mount_point, parent):
            (above / "cgroup.subtree_control").write_text("+cpu +memory +pids")
        directory = parent / sandbox_id
        directory.mkdir(exist_ok=True)
        quota_us = round(limits.cpu * CPU_PERIOD_US)
        (directory / "cpu.max").write_text(f"{quota_us} {CPU_PERIOD_US}")
        (directory / "memory.max").write_text(str(limits.memory_bytes))
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap
            (directory / "memory.swap.max").write_text("0")
        (directory / "pids.max").write_text(str(limits.pids))
        return [directory]

    def set_frozen(self, sandbox_id: str, frozen: bool) -> None:
        directory = self._directory(self._mount_point, sandbox_id)
        (directory / "cgroup.freeze").write_text("1" if frozen else "0")

    def is_frozen(self, sandbox_id: str) -> bool:
        directory = self._directory(self._mount_point, sandbox_id)
        return read_counter(directory / "cgroup.events", "frozen") == 1

    def prepare(self) -> None:
        """Nothing to do: the OCI runtime sets ``memory.swap.max`` to 0."""

    def allow_swap(self, sandbox_id: str, allowed: bool) -> None:
        with contextlib.suppress(OSError):
            file = self._directory(self._mount_point, sandbox_id) / "memory.swap.max"
            file.write_text("max" if allowed else "0")

    def memory_now(self, sandbox_id: str) -> MemoryNow | None:
        directory = self._directory(self._mount_point, sandbox_id)
        try:
            resident = int((directory / "memory.current").read_text())
        except OSError:
            return None
        try:
            swapped = int((directory / "memory.swap.current").read_text())
        except OSError:
            swapped = 0
        stat = directory / "memory.stat"
        return MemoryNow(
            resident=resident,
            anonymous=read_counter(stat, "anon"),
            file=read_counter(stat, "file"),
            swapped=swapped,
        )

    def _reclaim_step(self, sandbox_id: str, step_bytes: int) -> None:
        file = self._directory(self._mount_point, sandbox_id) / "memory.reclaim"
        file.write_text(str(step_bytes))

    def kill(self, sandbox_id: str) -> None:
        directory = self._directory(self._mount_point, sandbox_id)
        try:
            (directory / "cgroup.kill").write_text("1")
        except FileNotFoundError:  # gone, or a kernel before 5.14
            for pid in self.processes(sandbox_id):
                kill_process(pid, directory / "cgroup.procs")

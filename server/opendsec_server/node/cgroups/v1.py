# SPDX-License-Identifier: AGPL-3.0-only
"""Control groups version 1, one hierarchy per controller (Documentation/admin-guide/cgroup-v1).

Hybrid hosts, where version 2 is mounted beside without controllers, are handled as version 1.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from opendsec_server.contract.errors import NotSupported

from .base import (
    CPU_PERIOD_US,
    CgroupSet,
    Limits,
    MemoryNow,
    Usage,
    kill_process,
    read_counter,
)

_SWAPPINESS_USUAL = "60"


class CgroupV1(CgroupSet):
    """Several hierarchies, each with the same group names.

    Args:
        root: See ``CgroupSet``.
        controllers: Mount point by controller (``memory``, ``cpuacct``, ``name=systemd``…).
        hybrid: Whether version 2 is mounted as well.
    """

    def __init__(self, root: str, controllers: dict[str, Path], *, hybrid: bool) -> None:
        super().__init__(root)
        self.kind = "hybrid" if hybrid else "v1"
        self._controllers = controllers
        self._hierarchies = sorted(set(controllers.values()))

    def hierarchies(self) -> list[Path]:
        return self._hierarchies

    def _file(self, controller: str, sandbox_id: str, name: str) -> Path:
        return self._directory(self._controllers[controller], sandbox_id) / name

    def swap_limited(self) -> bool:
        return (self._controllers["memory"] / "memory.memsw.limit_in_bytes").exists()

    def usage(self, sandbox_id: str) -> Usage | None:
        try:
            cpu_ns = int(self._file("cpuacct", sandbox_id, "cpuacct.usage").read_text())
            total = int(self._file("memory", sandbox_id, "memory.usage_in_bytes").read_text())
            cache = read_counter(self._file("memory", sandbox_id, "memory.stat"), "total_cache")
        except OSError:
            return None
        return Usage(cpu_ns // 1_000, max(0, total - cache), cache)

    def oom_kills(self, sandbox_id: str) -> int:
        return read_counter(self._file("memory", sandbox_id, "memory.oom_control"), "oom_kill")

    def lift_cpu_limit(self, sandbox_id: str) -> None:
        with contextlib.suppress(OSError):
            self._file("cpu", sandbox_id, "cpu.cfs_quota_us").write_text("-1")

    def create(self, sandbox_id: str, limits: Limits) -> list[Path]:
        for hierarchy in self._hierarchies:
            directory = self._directory(hierarchy, sandbox_id)
            directory.mkdir(parents=True, exist_ok=True)
            self._let_use_processors(hierarchy, directory)
        quota_us = round(limits.cpu * CPU_PERIOD_US)
        self._file("cpu", sandbox_id, "cpu.cfs_period_us").write_text(str(CPU_PERIOD_US))
        self._file("cpu", sandbox_id, "cpu.cfs_quota_us").write_text(str(quota_us))
        self._file("pids", sandbox_id, "pids.max").write_text(str(limits.pids))
        memory = str(limits.memory_bytes)
        self._file("memory", sandbox_id, "memory.limit_in_bytes").write_text(memory)
        if self.swap_limited():
            self._file("memory", sandbox_id, "memory.memsw.limit_in_bytes").write_text(memory)
        return [self._directory(hierarchy, sandbox_id) for hierarchy in self._hierarchies]

    @staticmethod
    def _let_use_processors(hierarchy: Path, directory: Path) -> None:
        """A new group of the cpuset hierarchy has no processor and no memory node at all."""
        for name in ("cpuset.cpus", "cpuset.mems"):
            if not (hierarchy / name).exists():
                return
            for level in (directory.parent, directory):
                if not (level / name).read_text().strip():
                    (level / name).write_text((hierarchy / name).read_text())

    def set_frozen(self, sandbox_id: str, frozen: bool) -> None:
        if "freezer" not in self._controllers:
            raise NotSupported(
                "the host cannot freeze containers: its freezer controller is not mounted",
                remediation="Mount it, or use control groups version 2.",
            )
        state = "FROZEN" if frozen else "THAWED"
        self._file("freezer", sandbox_id, "freezer.state").write_text(state)

    def is_frozen(self, sandbox_id: str) -> bool:
        if "freezer" not in self._controllers:
            return False
        try:
            state = self._file("freezer", sandbox_id, "freezer.state").read_text()
        except OSError:
            return False
        return state.strip() == "FROZEN"

    def prepare(self) -> None:
        """By the swappiness of the parent group, which new groups inherit. A limit on memory and
        swap together (``memsw``) would not do: swapping out leaves the sum as it is."""
        parent = self._controllers["memory"] / self.root.lstrip("/")
        parent.mkdir(exist_ok=True)
        (parent / "memory.swappiness").write_text("0")

    def allow_swap(self, sandbox_id: str, allowed: bool) -> None:
        with contextlib.suppress(OSError):
            self._file("memory", sandbox_id, "memory.swappiness").write_text(
                _SWAPPINESS_USUAL if allowed else "0"
            )

    def memory_now(self, sandbox_id: str) -> MemoryNow | None:
        try:
            resident = self._file("memory", sandbox_id, "memory.usage_in_bytes").read_text()
        except OSError:
            return None
        stat = self._file("memory", sandbox_id, "memory.stat")
        return MemoryNow(
            resident=int(resident),
            anonymous=read_counter(stat, "total_rss"),
            file=read_counter(stat, "total_cache"),
            swapped=read_counter(stat, "total_swap"),
        )

    def _reclaim_step(self, sandbox_id: str, step_bytes: int) -> None:
        """All at once: version 1 cannot be asked for a part of it, except by a lower limit, which
        a daemon that ends at the wrong moment would leave behind."""
        self._file("memory", sandbox_id, "memory.force_empty").write_text("0")

    def kill(self, sandbox_id: str) -> None:
        for directory in self.directories(sandbox_id):
            for procs in directory.rglob("cgroup.procs"):
                for pid in map(int, procs.read_text().split()):
                    kill_process(pid, procs)
        # A frozen process takes its SIGKILL only when it is thawed.
        with contextlib.suppress(OSError, NotSupported):
            self.set_frozen(sandbox_id, False)

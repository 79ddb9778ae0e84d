# SPDX-License-Identifier: AGPL-3.0-only
"""Control groups version 1, one hierarchy per controller (Documentation/admin-guide/cgroup-v1).

Hybrid hosts, where version 2 is mounted beside without controllers, are handled as version 1.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from .base import CgroupSet, Usage, kill_process, read_counter


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

    def set_frozen(self, sandbox_id: str, frozen: bool) -> None:
        if "freezer" not in self._controllers:
            raise FileNotFoundError("the freezer controller is not mounted")
        state = "FROZEN" if frozen else "THAWED"
        self._file("freezer", sandbox_id, "freezer.state").write_text(state)

    def is_frozen(self, sandbox_id: str) -> bool:
        state = self._file("freezer", sandbox_id, "freezer.state").read_text()
        return state.strip() == "FROZEN"

    def allow_swap(self, sandbox_id: str, allowed: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            limit = self._file("memory", sandbox_id, "memory.limit_in_bytes").read_text()
            self._file("memory", sandbox_id, "memory.memsw.limit_in_bytes").write_text(
                "-1" if allowed else limit
            )

    async def reclaim(self, sandbox_id: str, bytes_wanted: int) -> None:
        file = self._file("memory", sandbox_id, "memory.force_empty")
        with contextlib.suppress(OSError):  # EBUSY: it took what it could
            await asyncio.to_thread(file.write_text, "0")

    def kill(self, sandbox_id: str) -> None:
        for directory in self.directories(sandbox_id):
            for procs in directory.rglob("cgroup.procs"):
                for pid in map(int, procs.read_text().split()):
                    kill_process(pid, procs)
        # A frozen process takes its SIGKILL only when it is thawed.
        with contextlib.suppress(OSError):
            self.set_frozen(sandbox_id, False)

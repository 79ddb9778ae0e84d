# SPDX-License-Identifier: AGPL-3.0-only
"""What both versions of control groups offer here."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from opendsec_server.contract.errors import NotSupported
from opendsec_server.node.limits import (
    FREEZE_WAIT_S,
    RECLAIM_STEP_BYTES,
    RECLAIM_STEP_BYTES_MIN,
    RECLAIM_STEPS_MAX,
)
from opendsec_server.node.process import finish_in_thread

_LOOK_AGAIN_S = 0.001


@dataclass(frozen=True, slots=True)
class Usage:
    """One reading of a sandbox's group.

    Attributes:
        cpu_us: Processor time used so far, in microseconds.
        memory_bytes: Memory charged, without reclaimable file cache.
        cache_bytes: File cache charged.
    """

    cpu_us: int
    memory_bytes: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryNow:
    """Where a group's memory is, in bytes.

    Attributes:
        resident: Charged and in memory: the sum that pause wants small.
        anonymous: Of it, programs' own memory.
        file: Of it, file cache and shared memory.
        swapped: In swap, so not in ``resident``. 0 where swap is not accounted.
    """

    resident: int
    anonymous: int
    file: int
    swapped: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a group may use.

    Attributes:
        cpu: Processors, as a share of time.
        memory_bytes: Memory; no swap beside it.
        pids: Processes and threads.
    """

    cpu: float
    memory_bytes: int
    pids: int


CPU_PERIOD_US = 100_000


class CgroupSet(ABC):
    """Groups of one instance: ``/<root>/<sandbox id>`` in one or more hierarchies.

    Args:
        root: Absolute path inside each hierarchy, e.g. ``/opendsec-od``.
    """

    kind: str

    def __init__(self, root: str) -> None:
        self.root = root

    @abstractmethod
    def hierarchies(self) -> list[Path]:
        """Mount points of every hierarchy that has groups of ours."""

    @abstractmethod
    def swap_limited(self) -> bool:
        """Whether swap can be limited per group."""

    @abstractmethod
    def usage(self, sandbox_id: str) -> Usage | None:
        """A reading; None when the group is gone. Cheap: two or three small files."""

    @abstractmethod
    def oom_kills(self, sandbox_id: str) -> int:
        """How many processes of the group the kernel killed at the memory limit."""

    @abstractmethod
    def lift_cpu_limit(self, sandbox_id: str) -> None:
        """Let the group use every core. Thousands of processes that share a small quota would
        need minutes to die of their SIGKILL. No error when the group is gone."""

    @abstractmethod
    def kill(self, sandbox_id: str) -> None:
        """Send SIGKILL to every process of the group. Does not wait."""

    @abstractmethod
    def create(self, sandbox_id: str, limits: Limits) -> list[Path]:
        """Make the sandbox's group in every hierarchy; an existing one gets the limits.

        Returns:
            Its directories; a process written into the ``cgroup.procs`` of each is in the group.

        Raises:
            OSError: the kernel refused.
        """

    @abstractmethod
    def set_frozen(self, sandbox_id: str, frozen: bool) -> None:
        """Ask the kernel to stop or continue every process of the group. Does not wait.

        Raises:
            OSError: there is no such group.
            NotSupported: the host has no freezer. SIGSTOP would be no substitute: parents in the
                sandbox are told of it, new processes escape it, and nobody could tell afterwards
                which ones had been stopped by the sandbox itself.
        """

    @abstractmethod
    def is_frozen(self, sandbox_id: str) -> bool:
        """Whether every process of the group stands still. Not when the group is gone."""

    async def freeze(self, sandbox_id: str) -> None:
        """Stop every process of the group, and wait until all stand still. On failure they go on.

        Raises:
            OSError: there is no such group.
            NotSupported: the host has no freezer.
            TimeoutError: a process does not stop (it waits for a device).
        """
        self.set_frozen(sandbox_id, True)
        try:
            deadline = time.monotonic() + FREEZE_WAIT_S
            while not self.is_frozen(sandbox_id):
                if not self.directories(sandbox_id):
                    raise FileNotFoundError("the control group is gone")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not frozen within {FREEZE_WAIT_S:.0f} s")
                await asyncio.sleep(_LOOK_AGAIN_S)
        except BaseException:
            await self.thaw(sandbox_id)
            raise

    async def thaw(self, sandbox_id: str) -> None:
        """Continue every process of the group. No error when it is gone, or cannot be frozen."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, NotSupported):
            self.set_frozen(sandbox_id, False)

    @abstractmethod
    def prepare(self) -> None:
        """Make groups made from now on unable to swap, unless ``allow_swap`` lets them."""

    @abstractmethod
    def allow_swap(self, sandbox_id: str, allowed: bool) -> None:
        """Let the group's memory be swapped out, or not. What is in swap already comes back when
        it is used. No error when the group is gone."""

    @abstractmethod
    def memory_now(self, sandbox_id: str) -> MemoryNow | None:
        """Where the group's memory is; None when the group is gone."""

    @abstractmethod
    def _reclaim_step(self, sandbox_id: str, step_bytes: int) -> None:
        """Have the kernel take some memory. Blocks, for as long as that takes.

        Raises:
            OSError: it took less than asked for, or the group is gone.
        """

    async def reclaim(self, sandbox_id: str, bytes_wanted: int) -> int:
        """Have the kernel take memory from the group, as much as it can of what is wanted.

        File cache is dropped and, where ``allow_swap`` lets it and there is swap, programs' memory
        is swapped out. Ends when a step brought next to nothing.

        Returns:
            Bytes by which the group's resident memory became smaller.
        """
        before = self.memory_now(sandbox_id)
        if before is None:
            return 0
        now = before
        for _ in range(RECLAIM_STEPS_MAX):
            wanted = bytes_wanted - (before.resident - now.resident)
            if wanted <= 0:
                break
            with contextlib.suppress(OSError):  # it took what it could
                step_bytes = min(wanted, RECLAIM_STEP_BYTES)
                await finish_in_thread(self._reclaim_step, sandbox_id, step_bytes)
            last, now = now, self.memory_now(sandbox_id) or now
            if last.resident - now.resident < RECLAIM_STEP_BYTES_MIN:
                break
        return max(0, before.resident - now.resident)

    def _directory(self, hierarchy: Path, sandbox_id: str) -> Path:
        return hierarchy / self.root.lstrip("/") / sandbox_id

    def directories(self, sandbox_id: str) -> list[Path]:
        """The sandbox's group in each hierarchy where it exists."""
        candidates = (self._directory(h, sandbox_id) for h in self.hierarchies())
        return [d for d in candidates if d.is_dir()]

    def processes(self, sandbox_id: str) -> set[int]:
        """Processes in the sandbox's groups, children groups included."""
        found: set[int] = set()
        for directory in self.directories(sandbox_id):
            for path, _dirs, _files in os.walk(directory):
                with contextlib.suppress(OSError):
                    found.update(map(int, Path(path, "cgroup.procs").read_text().split()))
        return found

    def contains(self, sandbox_id: str, pid: int) -> bool:
        """Whether a process is in the sandbox's group."""
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError:
            return False
        wanted = f"{self.root}/{sandbox_id}"
        return any(
            path == wanted or path.startswith(wanted + "/")
            for path in (line.split(":", 2)[2] for line in lines)
        )

    def remove(self, sandbox_id: str) -> bool:
        """Remove the sandbox's groups; False while processes are left. Idempotent."""
        done = True
        for directory in self.directories(sandbox_id):
            for path, _dirs, _files in os.walk(directory, topdown=False):
                done = _rmdir(Path(path)) and done
        return done

    def known(self) -> set[str]:
        """Ids of all sandboxes that have a group."""
        found: set[str] = set()
        for hierarchy in self.hierarchies():
            base = hierarchy / self.root.lstrip("/")
            if base.is_dir():
                found.update(entry.name for entry in base.iterdir() if entry.is_dir())
        return found

    def remove_root(self) -> None:
        """Remove the instance's parent groups once they are empty."""
        for hierarchy in self.hierarchies():
            _rmdir(hierarchy / self.root.lstrip("/"))


def _rmdir(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as exc:
        if exc.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True


def kill_process(pid: int, still_in_group: Path) -> None:
    """SIGKILL one process, unless its number has passed to a stranger since it was read."""
    with contextlib.suppress(ProcessLookupError, OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if str(pid) in still_in_group.read_text().split():
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def read_counter(path: Path, name: str) -> int:
    """Value of a ``name value`` line; 0 when there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0

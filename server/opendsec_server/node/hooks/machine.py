# SPDX-License-Identifier: AGPL-3.0-only
"""A virtual machine's VMM process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

from opendsec_server.contract.errors import SandboxStartFailed
from opendsec_server.node import limits, process
from opendsec_server.node.cgroups.base import Limits
from opendsec_server.node.machines.guest import vm_config
from opendsec_server.node.machines.guests import Guests
from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.storage.reflink import clone_file
from opendsec_server.node.vmm.base import VmConfig, Vmm

_LOOK_AGAIN_S = 0.005
_MIB = 1024 * 1024


class Machine:
    """Boots the machine, or continues saved memory; ends its VMM."""

    name = "machine"

    def __init__(self, services: Services, vmm: Vmm, guests: Guests) -> None:
        self._services = services
        self._paths = services.paths
        self._cgroups = services.cgroups
        self._vmm = vmm
        self._guests = guests

    async def setup(self, box: Sandbox) -> None:
        """Start the VMM, and learn its process so that it cannot be confused with another."""
        spec = box.spec
        run_dir = self._paths.machine_run(spec.sandbox_id)
        run_dir.mkdir(mode=0o700)
        memory_mb = spec.memory_mb + self._vmm.info.overhead_mb
        cgroups = self._cgroups.create(
            spec.sandbox_id, Limits(spec.cpu, memory_mb * _MIB, limits.VMM_PIDS_MAX)
        )
        config = await self._config(box, tuple(cgroups))
        if box.restore_from is None:
            box.record.ram_base = None
            pid = await self._vmm.boot(config)
        else:
            await finish_in_thread(self._protect_disk, box)
            # Noted before the process maps it, so that nobody removes it under the process.
            box.record.ram_base = str(box.restore_from)
            pid = await self._vmm.restore(config, box.restore_from)
        box.pidfd = os.pidfd_open(pid)
        box.record.pid = pid
        box.record.pid_ticks = process.start_ticks_of(pid)
        box.record.boot_id = self._services.boot_id
        if box.record.pid_ticks is None:
            raise SandboxStartFailed(f"the VMM ended at once: {self._vmm.console_tail(run_dir)}")

    async def _config(self, box: Sandbox, cgroups: tuple[Path, ...]) -> VmConfig:
        await self._services.layers.resolve_remote(box.spec.image)
        return vm_config(self._services, box, await self._guests.get(), cgroups)

    def _protect_disk(self, box: Sandbox) -> None:
        """Memory and disk belong together: what a failed resume writes to the disk is undone by
        the next one."""
        if box.restore_from != self._paths.saved_memory(box.sandbox_id):
            return
        disk, kept = self._paths.machine_disk(box.sandbox_id), self._paths.kept_disk(box.sandbox_id)
        if not kept.exists():
            half = kept.with_suffix(".new")
            half.unlink(missing_ok=True)
            clone_file(disk, half)
            half.rename(kept)
            return
        half = disk.with_suffix(".new")
        half.unlink(missing_ok=True)
        clone_file(kept, half)
        half.rename(disk)

    async def teardown(self, box: Sandbox) -> None:
        """Kill the VMM, wait for it, remove its group and directory."""
        deadline = time.monotonic() + limits.KILL_WAIT_S
        self._cgroups.lift_cpu_limit(box.sandbox_id)
        if box.pidfd is not None:
            process.send_signal(box.pidfd, signal.SIGKILL)
            await process.wait_readable(box.pidfd, limits.KILL_WAIT_S)
            code = process.reap(box.pidfd)
            if box.exit_code is None:
                box.exit_code = code
            os.close(box.pidfd)
            box.pidfd = None
        while self._cgroups.processes(box.sandbox_id):
            if time.monotonic() > deadline:
                raise RuntimeError("processes survive SIGKILL (waiting for a device?)")
            self._cgroups.kill(box.sandbox_id)
            await asyncio.sleep(_LOOK_AGAIN_S)
        while not self._cgroups.remove(box.sandbox_id):
            if time.monotonic() > deadline:
                raise RuntimeError("the control group cannot be removed")
            await asyncio.sleep(_LOOK_AGAIN_S)
        run_dir = self._paths.machine_run(box.sandbox_id)
        self._vmm.release(run_dir)
        await finish_in_thread(_remove, run_dir)


def _remove(run_dir: Path) -> None:
    if run_dir.exists():
        shutil.rmtree(run_dir)

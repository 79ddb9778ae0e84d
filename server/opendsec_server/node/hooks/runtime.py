# SPDX-License-Identifier: AGPL-3.0-only
"""The sandbox's processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from opendsec_server.contract.errors import SandboxStartFailed
from opendsec_server.node import limits, process
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.storage.rootfs import unmount_rootfs

_AGENT_NICE = -20
_OOM_SCORE_AGENT = "-999"
_LOOK_AGAIN_S = 0.005


class Runtime:
    """Starts the guest agent as the first process of a container; ends all of them."""

    name = "runtime"

    def __init__(self, services: Services) -> None:
        self._paths = services.paths
        self._runtime = services.runtime
        self._cgroups = services.cgroups
        self._boot_id = services.boot_id

    async def setup(self, box: Sandbox) -> None:
        """Start, and learn the first process so that it cannot be confused with another."""
        bundle = self._paths.bundle(box.sandbox_id)
        log = self._paths.disk(box.sandbox_id) / "agent.log"
        pid = await self._runtime.start(box.sandbox_id, bundle, log)
        # The process is our child (we are its subreaper): until reaped, its number is its own.
        box.pidfd = os.pidfd_open(pid)
        box.record.pid = pid
        box.record.pid_ticks = process.start_ticks_of(pid)
        box.record.boot_id = self._boot_id
        if box.record.pid_ticks is None:
            raise SandboxStartFailed(f"the guest agent ended at once: {log_tail(log)}")
        # Both need rights that a nested host may lack; without them we go on.
        with contextlib.suppress(OSError):
            _protect_from_oom_killer(pid)
            # Among thousands of busy programs the agent must still get its turn, to end them.
            # Those it starts get the usual priority.
            os.setpriority(os.PRIO_PROCESS, pid, _AGENT_NICE)
        # The container has its own copy of the mount; ours would only make the table longer.
        unmount_rootfs(bundle)

    async def teardown(self, box: Sandbox) -> None:
        """Kill everything, wait for it, have the runtime forget it, remove the groups."""
        deadline = time.monotonic() + limits.KILL_WAIT_S
        self._cgroups.lift_cpu_limit(box.sandbox_id)
        if box.pidfd is not None:
            # The first process of a pid namespace takes all others with it.
            process.send_signal(box.pidfd, signal.SIGKILL)
            with contextlib.suppress(OSError):
                await self._cgroups.thaw(box.sandbox_id)
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
        await self._runtime.delete(box.sandbox_id)
        while not self._cgroups.remove(box.sandbox_id):
            if time.monotonic() > deadline:
                raise RuntimeError("the control group cannot be removed")
            await asyncio.sleep(_LOOK_AGAIN_S)


def _protect_from_oom_killer(pid: int) -> None:
    Path(f"/proc/{pid}/oom_score_adj").write_text(_OOM_SCORE_AGENT)


def log_tail(log: Path, bytes_max: int = 2_000) -> str:
    """The end of a sandbox's agent log, for error messages."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - bytes_max))
            text = file.read().decode(errors="replace").strip()
    except OSError:
        text = ""
    return text or "(it printed nothing)"

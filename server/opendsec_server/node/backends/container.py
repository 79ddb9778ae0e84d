# SPDX-License-Identifier: AGPL-3.0-only
"""Containers: processes of the host's kernel in namespaces of their own."""

from __future__ import annotations

import contextlib
from pathlib import Path

from opendsec_server.contract.errors import NotSupported, SnapshotFailed
from opendsec_server.contract.limits import START_BUDGET_S
from opendsec_server.contract.node import BackendInfo, Capabilities, ConsoleKind
from opendsec_server.contract.states import EndReason
from opendsec_server.node.adoption import take_back
from opendsec_server.node.cgroups.base import CgroupSet
from opendsec_server.node.hooks import Hook
from opendsec_server.node.hooks.admit import Admit
from opendsec_server.node.hooks.agent import Agent
from opendsec_server.node.hooks.bundle import Bundle
from opendsec_server.node.hooks.disk import Disk
from opendsec_server.node.hooks.layers import Layers
from opendsec_server.node.hooks.metering import Metering
from opendsec_server.node.hooks.names import Names
from opendsec_server.node.hooks.network import Network
from opendsec_server.node.hooks.rootfs import Rootfs
from opendsec_server.node.hooks.runtime import Runtime
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services

CAPABILITIES = Capabilities(
    own_kernel=False,
    memory_snapshot=False,
    pause_survives_reboot=False,
    fork=True,
    disk_images=False,
    console=False,
    passthrough=False,
)


class ContainerBackend:
    """See ``Backend``. A full pause freezes the processes and gives back what memory it can."""

    budget_s = START_BUDGET_S

    def __init__(self, services: Services) -> None:
        self._services = services
        self._cgroups = services.cgroups
        self.info = BackendInfo(name="container", capabilities=CAPABILITIES)
        self.keep_hooks: list[Hook] = [Admit(services), Disk(services)]
        self.run_hooks: list[Hook] = [
            Layers(services),
            Network(services),
            Bundle(services),
            Rootfs(services),
            Runtime(services),
            Agent(services),
            Names(services),
            Metering(services),
        ]

    async def prepare(self, box: Sandbox) -> None:
        """Nothing is shared but layers, and those are quick."""

    async def settle(self, box: Sandbox) -> None:
        """Its files are the host's: nothing waits inside."""

    async def disconnect(self, box: Sandbox) -> None:
        """Frozen connections wait; those of a run that ends are ended by its teardown."""

    async def freeze(self, box: Sandbox) -> None:
        """By the control group's freezer."""
        try:
            await self._cgroups.freeze(box.sandbox_id)
        except (OSError, TimeoutError) as exc:
            with contextlib.suppress(OSError, TimeoutError):
                await self._cgroups.thaw(box.sandbox_id)
            raise SnapshotFailed(f"its processes cannot be frozen: {exc}") from exc

    async def thaw(self, box: Sandbox) -> None:
        """By the control group's freezer."""
        await self._cgroups.thaw(box.sandbox_id)

    async def save_memory(self, box: Sandbox, target: Path) -> int:
        """Containers have no memory snapshot."""
        raise NotSupported("a container's memory cannot be saved")

    async def seal_memory(self, directory: Path, *, durable: bool) -> None:
        """Containers have no memory snapshot."""
        raise NotSupported("a container's memory cannot be saved")

    async def check_memory(self, directory: Path) -> None:
        """Containers have no memory snapshot."""
        raise NotSupported("a container's memory cannot be saved")

    async def put_away(self, box: Sandbox) -> None:
        """Let it be swapped out, and have the kernel take what it can."""
        self._cgroups.allow_swap(box.sandbox_id, True)
        await self._cgroups.reclaim(box.sandbox_id, self.memory_bytes(box))

    async def take_up(self, box: Sandbox) -> None:
        """Swap no more."""
        self._cgroups.allow_swap(box.sandbox_id, False)

    def memory_bytes(self, box: Sandbox) -> int:
        """What its control group is charged."""
        now = self._cgroups.memory_now(box.sandbox_id)
        return 0 if now is None else now.resident

    def adopt(self, box: Sandbox) -> bool:
        """By process identity and control group."""
        return take_back(self._services, box)

    def why_ended(self, box: Sandbox) -> tuple[EndReason, str]:
        """By the memory limit, by a signal, or by itself."""
        return why_ended(self._cgroups, box)

    def memory_kills(self, box: Sandbox) -> int:
        """By its control group."""
        return self._cgroups.oom_kills(box.sandbox_id)

    def console_socket(self, box: Sandbox, kind: ConsoleKind) -> Path:
        """Never asked: there is none."""
        raise NotImplementedError

    def console_tail(self, box: Sandbox) -> str:
        """Never asked."""
        raise NotImplementedError

    async def keep_house(self, memory_in_use: set[Path]) -> None:
        """Nothing is kept."""

    def known(self) -> set[str]:
        """Control groups, run directories and what the OCI runtime remembers."""
        services = self._services
        return (
            services.cgroups.known()
            | set(services.runtime.known())
            | {entry.name for entry in services.paths.bundles.iterdir()}
        )


def why_ended(groups: CgroupSet, box: Sandbox) -> tuple[EndReason, str]:
    """Why a first process ended by itself, with the evidence in a sentence."""
    kills = groups.oom_kills(box.sandbox_id)
    code = box.exit_code
    if kills and code in (-9, None):
        return (
            EndReason.OOM,
            f"the kernel killed {kills} process(es) at the limit of {box.spec.memory_mb} MiB, "
            "the guest agent among them",
        )
    if code is None:
        return EndReason.EXITED, "its first process ended"
    if code < 0:
        return EndReason.EXITED, f"its first process was ended by signal {-code}"
    return EndReason.EXITED, f"its first process exited with status {code}"

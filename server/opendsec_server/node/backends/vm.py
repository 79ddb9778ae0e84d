# SPDX-License-Identifier: AGPL-3.0-only
"""Full virtual machines: disk images with their own kernel, boot loader and init.

The guest agent is a service there, installed by cloud-init from the seed. Everything about saving,
freezing and ending is as with microVMs.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from opendsec_server.contract.errors import OpendsecError
from opendsec_server.contract.limits import START_BUDGET_S
from opendsec_server.contract.node import BackendInfo, Capabilities, ConsoleKind
from opendsec_server.images.disk_images import DiskImages
from opendsec_server.node import limits
from opendsec_server.node.hooks import Hook
from opendsec_server.node.hooks.admit import Admit
from opendsec_server.node.hooks.machine_agent import MachineAgent
from opendsec_server.node.hooks.machine_network import MachineNetwork
from opendsec_server.node.hooks.metering import Metering
from opendsec_server.node.hooks.names import Names
from opendsec_server.node.hooks.vm_disks import VmDisks
from opendsec_server.node.hooks.vm_machine import VmMachine
from opendsec_server.node.machines.guests import Guests
from opendsec_server.node.machines.vm_files import DiskBases
from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.vmm.qemu_pc import CONSOLE_SOCKET, SCREEN_SOCKET, QemuPcVmm

from .microvm import MicrovmBackend

CAPABILITIES = Capabilities(
    own_kernel=True,
    memory_snapshot=True,
    pause_survives_reboot=True,
    fork=True,
    disk_images=True,
    console=True,
    passthrough=True,
)

_SAY_WHY_S = 2.0
"""The agent is waited for no longer than this before the end of the budget, to tell what the
console says instead of only that time is over."""

_SOCKETS: dict[ConsoleKind, str] = {"console": CONSOLE_SOCKET, "vnc": SCREEN_SOCKET}


class VmBackend(MicrovmBackend):
    """See ``Backend``.

    Args:
        services: The node's parts.
        vmm: A driver that was probed.
        guests: Not used for a guest: these bring their own kernels.
    """

    def __init__(self, services: Services, vmm: QemuPcVmm, guests: Guests) -> None:
        super().__init__(services, vmm, guests)
        info = vmm.info
        self.info = BackendInfo(
            name="vm",
            capabilities=CAPABILITIES,
            accelerator=info.accelerator,
            vmm=f"{info.name} {info.version}",
        )
        # A distribution takes longer to boot than a microVM.
        emulated = info.accelerator == "tcg"
        small = limits.START_BUDGET_EMULATED_S if emulated else START_BUDGET_S
        self.budget_s = small * limits.VM_START_BUDGET_FACTOR
        images = DiskImages(services.paths.images)
        self._bases = DiskBases(services.paths.disk_bases, images)
        self._machine = VmMachine(services, vmm, guests)
        self.keep_hooks: list[Hook] = [Admit(services), VmDisks(services, images, self._bases)]
        self.run_hooks: list[Hook] = [
            MachineNetwork(services),
            self._machine,
            MachineAgent(services, vmm, self.budget_s - _SAY_WHY_S),
            Names(services),
            Metering(services),
        ]

    async def prepare(self, box: Sandbox) -> None:
        """Each boots by itself."""

    async def freeze(self, box: Sandbox) -> None:
        """By the VMM. With passed-through devices it is refused."""
        self._machine.refuse_devices(box)
        await super().freeze(box)

    def adopt(self, box: Sandbox) -> bool:
        """As a microVM; it keeps its devices."""
        if not super().adopt(box):
            return False
        with contextlib.suppress(OpendsecError):
            # A device may have gone meanwhile; the machine lives on without it.
            self._machine.claim(box)
        return True

    def console_socket(self, box: Sandbox, kind: ConsoleKind) -> Path:
        """In its run directory."""
        return self._paths.machine_run(box.sandbox_id) / _SOCKETS[kind]

    async def keep_house(self, memory_in_use: set[Path]) -> None:
        """Copies of images that are gone go too."""
        await finish_in_thread(self._bases.sweep)

# SPDX-License-Identifier: AGPL-3.0-only
"""Which backends this machine can offer."""

from __future__ import annotations

import shutil

import structlog

from opendsec_server.config import ConfigError
from opendsec_server.node.machines.guests import Guests
from opendsec_server.node.services import Services
from opendsec_server.node.vmm.base import Accelerator, Vmm
from opendsec_server.node.vmm.choice import find_vmm
from opendsec_server.node.vmm.qemu_pc import QemuPcVmm

from .base import Backend
from .container import ContainerBackend
from .microvm import MicrovmBackend
from .vm import VmBackend

log = structlog.get_logger("opendsec.node")


async def find_backends(services: Services) -> dict[str, Backend]:
    """Every backend that works here, by name, the simplest first."""
    found: list[Backend] = [ContainerBackend(services)]
    guests = Guests(services.config, services.paths.images, services.traits.agent)
    vmm = await _vmm(services, guests)
    if vmm is not None:
        found.append(MicrovmBackend(services, vmm, guests))
    pc = await _pc(services, "tcg" if vmm is None else vmm.info.accelerator)
    if pc is not None:
        found.append(VmBackend(services, pc, guests))
    return {backend.info.name: backend for backend in found}


async def _vmm(services: Services, guests: Guests) -> Vmm | None:
    try:
        return await find_vmm(services.config, guests)
    except ConfigError as exc:
        if services.config.vmm != "auto":
            raise
        log.warning("no microVMs", why=str(exc))
        return None


async def _pc(services: Services, accelerator: Accelerator) -> QemuPcVmm | None:
    """For full machines: QEMU, on the KVM that was found to work, if any."""
    pc = QemuPcVmm(services.config, accelerator)
    try:
        if shutil.which("xorriso") is None:
            raise ConfigError("xorriso is not installed. Install the package xorriso.")
        await pc.probe()
    except ConfigError as exc:
        log.warning("no full virtual machines", why=str(exc))
        return None
    return pc

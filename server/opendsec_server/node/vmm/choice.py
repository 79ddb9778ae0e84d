# SPDX-License-Identifier: AGPL-3.0-only
"""Which VMM runs microVMs on this machine."""

from __future__ import annotations

import asyncio

import structlog

from opendsec_server.config import Config, ConfigError
from opendsec_server.node.machines.guests import Guests
from opendsec_server.ops.kvm_probe import probe_kvm

from .base import Vmm
from .firecracker import FirecrackerVmm
from .qemu import QemuVmm

log = structlog.get_logger("opendsec.node")


async def find_vmm(config: Config, guests: Guests) -> Vmm:
    """Firecracker where it and a KVM that really runs guests exist; else QEMU, on that KVM or
    emulated. The probe of KVM is bounded and its answer remembered.

    Args:
        config: Settings.
        guests: Gives the kernel that KVM is probed with, where there is no other.

    Raises:
        ConfigError: neither can be used, or the one that the settings name cannot.
    """
    kvm = await asyncio.to_thread(probe_kvm, config.state_path)
    if not kvm.probed:
        try:
            await guests.get()
        except ConfigError as exc:
            log.warning("KVM is not probed", why=str(exc))
        else:
            kvm = await asyncio.to_thread(probe_kvm, config.state_path)
    if config.vmm != "qemu" and (kvm.usable or config.vmm == "firecracker"):
        firecracker = FirecrackerVmm(config)
        try:
            await firecracker.probe()
        except ConfigError as exc:
            if config.vmm == "firecracker":
                raise
            log.info("no Firecracker", why=str(exc))
        else:
            return firecracker
    qemu = QemuVmm(config, "kvm" if kvm.usable else "tcg")
    await qemu.probe()
    return qemu

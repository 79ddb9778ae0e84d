# SPDX-License-Identifier: AGPL-3.0-only
"""How a sandbox is described to a VMM and to the guest's init."""

from __future__ import annotations

import math
from pathlib import Path

from opendsec_server.images.guest import GuestImage, guest_cmdline
from opendsec_server.images.guest.cmdline import DISK_SERIAL, MODULES_SERIAL, layer_serial
from opendsec_server.node.network.tap import GUEST_MAC, TAP
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.vmm.base import VmConfig, VmDisk


def vm_config(
    services: Services, box: Sandbox, guest: GuestImage, cgroups: tuple[Path, ...]
) -> VmConfig:
    """The machine of a sandbox. The same for all that share saved memory, but for paths and ids."""
    assert box.slot is not None
    spec = box.spec
    layers = services.layers.files(spec.image)
    disks = [VmDisk(serial=layer_serial(i), path=path) for i, path in enumerate(layers)]
    disks.append(VmDisk(serial=MODULES_SERIAL, path=guest.modules_erofs))
    own = services.paths.machine_disk(spec.sandbox_id)
    disks.append(VmDisk(serial=DISK_SERIAL, path=own, read_only=False))
    return VmConfig(
        sandbox_id=spec.sandbox_id,
        vcpus=max(1, math.ceil(spec.cpu)),
        memory_mb=spec.memory_mb,
        kernel=guest.kernel,
        kernel_elf=guest.kernel_elf,
        initramfs=guest.initramfs,
        cmdline=guest_cmdline(layers=len(layers)),
        disks=tuple(disks),
        tap=TAP,
        guest_mac=GUEST_MAC.hex(":"),
        netns_fd=box.slot.netns_fd,
        run_dir=services.paths.machine_run(spec.sandbox_id),
        cgroups=cgroups,
        uid=box.slot.id_base,
        gid=box.slot.id_base,
        kernel_id=guest.kernel_version,
        agent_id=guest.agent_sha256,
    )

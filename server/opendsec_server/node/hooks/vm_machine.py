# SPDX-License-Identifier: AGPL-3.0-only
"""A full virtual machine's VMM process, and the devices of the host that it is given."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import msgspec

from opendsec_server.contract.errors import NotSupported, SandboxStartFailed
from opendsec_server.images.disk_images import INITRD_FILE, KERNEL_FILE
from opendsec_server.node.machines import vm_files
from opendsec_server.node.machines.firmware import find_uefi
from opendsec_server.node.machines.guests import Guests
from opendsec_server.node.machines.passthrough import HostDevice, check_addresses, host_devices
from opendsec_server.node.network.tap import GUEST_MAC, TAP
from opendsec_server.node.paths import MACHINE_DISK
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.storage.reflink import clone_file
from opendsec_server.node.vmm.base import VmConfig, VmDisk
from opendsec_server.node.vmm.qemu_pc import PcConfig, QemuPcVmm

from .machine import Machine


class VmMachine(Machine):
    """As ``Machine``, described by the files in its subvolume."""

    def __init__(self, services: Services, vmm: QemuPcVmm, guests: Guests) -> None:
        super().__init__(services, vmm, guests)
        self._pc = vmm
        self._given: dict[str, list[HostDevice]] = {}

    def claim(self, box: Sandbox) -> None:
        """Of a machine that runs on from before: note the devices that it has.

        Raises:
            NotSupported: a device that it has is gone.
        """
        self._take_devices(box)

    def _take_devices(self, box: Sandbox) -> list[HostDevice]:
        addresses = () if box.spec.vm is None else box.spec.vm.devices
        if not addresses:
            return []
        check_addresses(addresses)
        others = (given for owner, given in self._given.items() if owner != box.sandbox_id)
        found = host_devices(
            addresses,
            allowed=self._services.config.passthrough_devices,
            in_use={device.address for given in others for device in given},
        )
        self._given[box.sandbox_id] = found
        return found

    async def _config(self, box: Sandbox, cgroups: tuple[Path, ...]) -> VmConfig:
        assert box.slot is not None
        spec, slot = box.spec, box.slot
        folder = self._paths.disk(spec.sandbox_id)
        try:
            facts = vm_files.read_facts(folder)
        except (OSError, msgspec.MsgspecError) as exc:
            raise SandboxStartFailed(f"the machine's files are damaged: {exc}") from exc
        devices = self._take_devices(box)
        for device in devices:
            os.chown(device.group_node, slot.id_base, slot.id_base)
        disks = [
            VmDisk(serial=vm_files.BOOT_SERIAL, path=folder / MACHINE_DISK, read_only=False),
            VmDisk(serial=vm_files.SEED_SERIAL, path=folder / vm_files.SEED_FILE),
        ]
        for number in range(1, facts.data_disks + 1):
            name = vm_files.data_disk(number)
            disks.append(VmDisk(serial=name, path=folder / name, read_only=False))
        is_uefi = facts.firmware == "uefi"
        return PcConfig(
            sandbox_id=spec.sandbox_id,
            vcpus=max(1, math.ceil(spec.cpu)),
            memory_mb=spec.memory_mb,
            kernel=folder / KERNEL_FILE,
            kernel_elf=folder / KERNEL_FILE,
            initramfs=folder / INITRD_FILE,
            cmdline=facts.cmdline,
            disks=tuple(disks),
            tap=TAP,
            guest_mac=GUEST_MAC.hex(":"),
            netns_fd=slot.netns_fd,
            run_dir=self._paths.machine_run(spec.sandbox_id),
            cgroups=cgroups,
            uid=slot.id_base,
            gid=slot.id_base,
            kernel_id=f"image {facts.image}",
            firmware=find_uefi(self._services.config.firmware_dir).code
            if is_uefi
            else self._pc.bios,
            variables=folder / vm_files.VARIABLES_FILE if is_uefi else None,
            direct=facts.firmware == "direct",
            devices=tuple(device.address for device in devices),
        )

    def _protect_disk(self, box: Sandbox) -> None:
        """All that the guest can write to belongs to the memory."""
        memory = self._paths.saved_memory(box.sandbox_id)
        if box.restore_from != memory:
            return
        folder = self._paths.disk(box.sandbox_id)
        if not self._paths.kept_disk(box.sandbox_id).exists():
            for stale in self._paths.kept_disks(box.sandbox_id):
                stale.unlink()
            # The first disk comes last: with it, the rest is there too.
            for name in reversed(_written_by_guest(folder)):
                _replace(folder / name, memory / name)
            return
        for kept in self._paths.kept_disks(box.sandbox_id):
            _replace(kept, folder / kept.name)

    async def teardown(self, box: Sandbox) -> None:
        """As ``Machine``; then the devices are the host's again."""
        await super().teardown(box)
        for device in self._given.pop(box.sandbox_id, []):
            with contextlib.suppress(FileNotFoundError):
                os.chown(device.group_node, 0, 0)

    def refuse_devices(self, box: Sandbox) -> None:
        """Whether the machine can be frozen and saved.

        Raises:
            NotSupported: it has devices of the host, whose state nobody can save.
        """
        if box.spec.vm is not None and box.spec.vm.devices:
            raise NotSupported(
                "the memory of a machine with passed-through devices cannot be saved",
                remediation="Ask for the mode `filesystem`.",
            )


def _written_by_guest(folder: Path) -> list[str]:
    """Names of the disks, the first disk first."""
    facts = vm_files.read_facts(folder)
    names = [MACHINE_DISK]
    names += [vm_files.data_disk(number) for number in range(1, facts.data_disks + 1)]
    if facts.firmware == "uefi":
        names.append(vm_files.VARIABLES_FILE)
    return names


def _replace(source: Path, target: Path) -> None:
    half = target.with_suffix(".half")
    half.unlink(missing_ok=True)
    clone_file(source, half)
    half.rename(target)

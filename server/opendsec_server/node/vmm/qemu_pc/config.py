# SPDX-License-Identifier: AGPL-3.0-only
"""What QEMU needs to know of a full virtual machine beyond ``VmConfig``."""

from __future__ import annotations

from pathlib import Path

from opendsec_server.node.vmm.base import VmConfig


class PcConfig(VmConfig, frozen=True, kw_only=True):
    """One full virtual machine. The first disk is the one it boots from.

    ``kernel``, ``initramfs`` and ``cmdline`` are used with ``direct`` alone; ``initramfs`` may be
    missing there. ``kernel_elf`` is not used.

    Attributes:
        firmware: Program in flash memory; shared, never written.
        variables: The machine's own store of UEFI variables; None: the firmware has none.
        direct: QEMU starts the kernel, not a boot loader.
        devices: PCI addresses of host devices to pass through, checked by the caller.
    """

    firmware: Path
    variables: Path | None = None
    direct: bool = False
    devices: tuple[str, ...] = ()

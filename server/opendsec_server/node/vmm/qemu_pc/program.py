# SPDX-License-Identifier: AGPL-3.0-only
"""The command line of one full virtual machine."""

from __future__ import annotations

from pathlib import Path

from opendsec_server.config import ConfigError
from opendsec_server.node.vmm.base import Accelerator
from opendsec_server.node.vmm.qemu.program import TB_CACHE_MB, VmDescriptors

from .config import PcConfig

MACHINE = "q35"
OVERHEAD_MB = 320
"""Beside the guest's RAM: program, translated code, video memory, disk buffers, seen at most."""
VIDEO_MB = 16

_BIOS_FILES = (
    Path("/usr/share/seabios/bios-256k.bin"),
    Path("/usr/share/qemu/bios-256k.bin"),
    Path("/usr/local/share/qemu/bios-256k.bin"),
)


class PcDescriptors(VmDescriptors, frozen=True, kw_only=True):
    """Numbers of the open files in the QEMU process.

    Attributes:
        firmware: In flash memory.
        variables: UEFI's; None: none.
        console: Listening socket of the serial console.
        console_log: What the console prints goes there too.
    """

    firmware: int
    variables: int | None
    console: int
    console_log: int


def find_bios() -> Path:
    """SeaBIOS.

    Raises:
        ConfigError: it is nowhere.
    """
    for path in _BIOS_FILES:
        if path.is_file():
            return path
    raise ConfigError("SeaBIOS (bios-256k.bin) was not found. Install the package seabios.")


def command_line(
    qemu: Path, config: PcConfig, accelerator: Accelerator, fds: PcDescriptors
) -> list[str]:
    """The whole command line. Every file is given as an open descriptor, so that QEMU needs no
    access to any path but its own libraries and option ROMs (and VFIO's, if devices are passed
    through).

    Args:
        qemu: The program.
        config: The machine.
        accelerator: ``kvm`` or ``tcg``.
        fds: Open files.
    """
    files: list[str] = []

    def file_set(fd: int) -> str:
        number = len(files) // 2
        files.extend(("-add-fd", f"fd={fd},set={number}"))
        return f"/dev/fdset/{number}"

    def flash(name: str, fd: int, *, read_only: bool) -> list[str]:
        return [
            "-blockdev",
            f"driver=file,node-name={name},filename={file_set(fd)}"
            + (",read-only=on" if read_only else ",read-only=off"),
        ]

    # BIOS lies in flash memory as well: there QEMU loads it at every start, also before a restore.
    # Elsewhere it would come from a migration only, and the guest could never restart itself.
    flashes = flash("flash0", fds.firmware, read_only=True)
    machine = (
        f"{MACHINE},suppress-vmdesc=on,memory-backend=ram,dump-guest-core=off,mem-merge=off,"
        "smm=off,vmport=off,usb=off,pflash0=flash0"
    )
    if fds.variables is not None:
        flashes += flash("flash1", fds.variables, read_only=False)
        machine += ",pflash1=flash1"

    # A kernel given by us has the boot index 0.
    disks: list[str] = []
    for index, (disk, fd) in enumerate(zip(config.disks, fds.disks, strict=True)):
        # As in microVMs: a running machine does not survive its host, so its fsync need not reach
        # the medium.
        disks += [
            "-blockdev",
            f"driver=file,node-name=disk{index},filename={file_set(fd)},aio=threads,"
            + ("read-only=on" if disk.read_only else "read-only=off,discard=unmap")
            + ",cache.direct=off,cache.no-flush=on",
            "-device",
            f"virtio-blk-pci,drive=disk{index},serial={disk.serial}"
            + ",num-queues=1,rerror=report,werror=report"
            + (",bootindex=1" if index == 0 else ""),
        ]
    passed: list[str] = []
    for index, address in enumerate(config.devices):
        passed += [
            *("-device", f"pcie-root-port,id=port{index},chassis={index + 1}"),
            *("-device", f"vfio-pci,host={address},bus=port{index}"),
        ]
    if accelerator == "tcg":
        engine = ["-accel", f"tcg,thread=multi,tb-size={TB_CACHE_MB}", "-cpu", "max"]
    else:
        engine = ["-accel", "kvm", "-cpu", "host,migratable=on"]
    kernel: list[str] = []
    if fds.kernel is not None:
        # Also before a restore: the guest may restart itself later.
        kernel = ["-kernel", f"/proc/self/fd/{fds.kernel}", "-append", config.cmdline]
        if fds.initramfs is not None:
            kernel += ["-initrd", f"/proc/self/fd/{fds.initramfs}"]
    log = file_set(fds.console_log)
    return [
        str(qemu),
        *("-name", f"guest=opendsec-{config.sandbox_id},debug-threads=on"),
        *("-nodefaults", "-no-user-config", "-display", "none"),
        *(
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        ),
        *("-machine", machine),
        # What xen-save-devices-state writes has no configuration section.
        *("-global", "migration.send-configuration=off"),
        # The guest agent tells by the serial number whether it is still the same sandbox.
        *("-smbios", f"type=1,manufacturer=OpenDsec,product=Sandbox,serial={config.sandbox_id}"),
        *engine,
        *("-smp", str(config.vcpus), "-m", f"{config.memory_mb}M"),
        *("-object", f"memory-backend-ram,id=ram,size={config.memory_mb}M"),
        *("-rtc", "base=utc"),
        *files,
        *flashes,
        *("-chardev", f"socket,id=control,fd={fds.control},server=on,wait=off"),
        *("-mon", "chardev=control,mode=control"),
        *(
            "-chardev",
            f"socket,id=console,fd={fds.console},server=on,wait=off,logfile={log},logappend=on",
        ),
        *("-serial", "chardev:console"),
        *disks,
        *("-netdev", f"tap,id=net,fd={fds.tap}"),
        *("-device", f"virtio-net-pci,netdev=net,mac={config.guest_mac},romfile="),
        *("-object", "rng-builtin,id=rng", "-device", "virtio-rng-pci,rng=rng"),
        *("-device", "virtio-balloon-pci,free-page-reporting=on,deflate-on-oom=on"),
        # Served from the moment that the driver hands the socket over.
        *("-vnc", "none"),
        *("-device", f"VGA,id=screen,vgamem_mb={VIDEO_MB}"),
        # A guest that panics says so, and ends.
        *("-device", "pvpanic"),
        *("-device", "qemu-xhci,id=usb", "-device", "usb-tablet,bus=usb.0"),
        *passed,
        *kernel,
        *(("-S", "-incoming", "defer") if fds.devices is not None else ()),
    ]

# SPDX-License-Identifier: AGPL-3.0-only
"""QEMU's program: where it is, what it can do, and the command line of one VM."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
from pathlib import Path

import msgspec

from opendsec_server.config import ConfigError
from opendsec_server.node.process import Finished, ProgramTimeout, run
from opendsec_server.node.vmm.base import Accelerator, VmConfig

MACHINE = "microvm"
VERSION_MIN = (7, 0)
_PROBE_TIMEOUT_S = 20.0
TB_CACHE_MB = 64
"""Bound of what an emulated VM's translated code may take; QEMU's own default is up to 1 GiB."""
OVERHEAD_TCG_MB = 192
OVERHEAD_KVM_MB = 96
"""Beside the guest's RAM: program, kernel image, device buffers, translated code."""
KVM_DEVICE = Path("/dev/kvm")
_INSTALL = "Install QEMU 7.0 or newer: apt-get install qemu-system-x86"


class VmDescriptors(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the open files in the QEMU process.

    Attributes:
        netns: Network namespace; closed before QEMU runs.
        tap: The tap.
        control: Listening socket of the control protocol.
        disks: In order.
        kernel, initramfs: For a boot.
        ram, devices: For a restore, open for reading.
    """

    netns: int
    tap: int
    control: int
    disks: tuple[int, ...]
    kernel: int | None = None
    initramfs: int | None = None
    ram: int | None = None
    devices: int | None = None


def find_qemu(configured: str | None) -> Path:
    """The program: the setting, ``OPENDSEC_QEMU``, PATH.

    Raises:
        ConfigError: there is none, or this processor has no ``microvm`` machine.
    """
    if platform.machine() != "x86_64":
        raise ConfigError(
            f"QEMU's {MACHINE} machine exists for x86_64 only; this host is {platform.machine()}."
        )
    for source, value in (
        ("the setting qemu_path", configured),
        ("OPENDSEC_QEMU", os.environ.get("OPENDSEC_QEMU")),
    ):
        if value:
            path = Path(value)
            if not (path.is_file() and os.access(path, os.X_OK)):
                raise ConfigError(f"{source} names {value}, which is not executable.")
            return path.resolve()
    found = shutil.which("qemu-system-x86_64")
    if found is None:
        raise ConfigError(f"QEMU is not installed. {_INSTALL}")
    return Path(found).resolve()


async def _ask(qemu: Path, *arguments: str) -> Finished:
    try:
        done = await run([str(qemu), *arguments], timeout_s=_PROBE_TIMEOUT_S)
    except (OSError, ProgramTimeout) as exc:
        raise ConfigError(f"QEMU does not run: {exc}") from exc
    if done.code != 0:
        raise ConfigError(f"{qemu} {' '.join(arguments)} failed: {done.output[-500:]}")
    return done


async def version_of(qemu: Path) -> str:
    """The version, e.g. ``7.2.22``.

    Raises:
        ConfigError: the program does not run, hangs, is too old, or has no ``microvm`` machine.
    """
    done = await _ask(qemu, "--version")
    match = re.search(r"version (\d+)\.(\d+)[.\d]*", done.output)
    if match is None:
        raise ConfigError(f"{qemu} does not tell its version: {done.output[:200]!r}")
    if (int(match[1]), int(match[2])) < VERSION_MIN:
        raise ConfigError(f"{qemu} is {match[0]}, which is too old. {_INSTALL}")
    machines = await _ask(qemu, "-machine", "help")
    if not re.search(rf"^{MACHINE}\s", machines.output, re.M):
        raise ConfigError(f"{qemu} was built without the {MACHINE} machine. {_INSTALL}")
    return match[0].removeprefix("version ")


def cpu_model(accelerator: Accelerator) -> str:
    """What the guest sees of the processor. Emulated: ``max``, which is the same everywhere for
    one version of QEMU. KVM: the host's, named by what distinguishes it."""
    if accelerator == "tcg":
        return "max"
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags")
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            fields.setdefault(name.strip(), " ".join(sorted(value.split())))
        elif not line.strip():
            break
    digest = hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()
    return f"host-{digest[:16]}"


def kvm_groups() -> tuple[int, ...]:
    """Groups that a process without rights needs to open ``/dev/kvm``.

    Raises:
        ConfigError: only root can open it.
    """
    status = KVM_DEVICE.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o006 == 0o006:
        return ()
    if mode & 0o060 == 0o060 and status.st_gid != 0:
        return (status.st_gid,)
    raise ConfigError(
        "Only root may open /dev/kvm, and QEMU does not run as root here. "
        "Give it to a group: groupadd -f kvm; chgrp kvm /dev/kvm; chmod 660 /dev/kvm"
    )


def _file_driver(path: Path) -> str:
    """QEMU takes files and block devices by different drivers."""
    return "host_device" if path.is_block_device() else "file"


def command_line(
    qemu: Path, config: VmConfig, accelerator: Accelerator, fds: VmDescriptors, tsc_khz: int
) -> list[str]:
    """The whole command line. Every file is given as an open descriptor, so that QEMU needs no
    access to any path but its own libraries and firmware.

    Args:
        qemu: The program.
        config: The VM.
        accelerator: ``kvm`` or ``tcg``.
        fds: Open files.
        tsc_khz: Rate of the time stamp counter that an emulated guest is told; 0: nothing is told.
    """
    restoring = fds.devices is not None
    files: list[str] = []

    def file_set(fd: int) -> str:
        number = len(files) // 2
        files.extend(("-add-fd", f"fd={fd},set={number}"))
        return f"/dev/fdset/{number}"

    disks: list[str] = []
    for index, (disk, fd) in enumerate(zip(config.disks, fds.disks, strict=True)):
        node = f"disk{index}"
        # cache.no-flush: a running VM does not survive its host, so its fsync need not reach the
        # medium; who saves a disk makes it durable. werror: a full host disk is told to the guest
        # and does not stop the VM.
        disks += [
            "-blockdev",
            f"driver={_file_driver(disk.path)},node-name={node},filename={file_set(fd)},aio=threads,"
            + ("read-only=on" if disk.read_only else "read-only=off,discard=unmap")
            + ",cache.direct=off,cache.no-flush=on",
            "-device",
            f"virtio-blk-device,drive={node},serial={disk.serial}"
            + ",num-queues=1,rerror=report,werror=report",
        ]
    if accelerator == "tcg":
        engine = ["-accel", f"tcg,thread=multi,tb-size={TB_CACHE_MB}", "-cpu", "max"]
    else:
        engine = ["-accel", "kvm", "-cpu", "host,migratable=on"]
    if restoring:
        start = ["-S", "-incoming", "defer"]
    else:
        told = f" tsc_early_khz={tsc_khz} tsc=reliable" if tsc_khz else ""
        start = [
            *("-kernel", f"/proc/self/fd/{fds.kernel}"),
            *("-initrd", f"/proc/self/fd/{fds.initramfs}"),
            *("-append", config.cmdline + told),
        ]
    return [
        str(qemu),
        *("-name", f"guest=opendsec-{config.sandbox_id},debug-threads=on"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *(
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        ),
        *(
            "-machine",
            f"{MACHINE},auto-kernel-cmdline=off,suppress-vmdesc=on,"
            "memory-backend=ram,dump-guest-core=off,mem-merge=off,"
            "acpi=on,rtc=on,pit=on,pic=on,ioapic2=on,isa-serial=on",
        ),
        # What xen-save-devices-state writes has no configuration section.
        *("-global", "migration.send-configuration=off"),
        *engine,
        *("-smp", str(config.vcpus), "-m", f"{config.memory_mb}M"),
        *("-object", f"memory-backend-ram,id=ram,size={config.memory_mb}M"),
        *files,
        *("-chardev", f"socket,id=control,fd={fds.control},server=on,wait=off"),
        *("-mon", "chardev=control,mode=control"),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
        *disks,
        *("-netdev", f"tap,id=net,fd={fds.tap}"),
        *("-device", f"virtio-net-device,netdev=net,mac={config.guest_mac}"),
        *("-object", "rng-builtin,id=rng", "-device", "virtio-rng-device,rng=rng"),
        *("-device", "virtio-balloon-device,free-page-reporting=on,deflate-on-oom=on"),
        *start,
    ]

# SPDX-License-Identifier: AGPL-3.0-only
"""Small machines for tests of the driver: a kernel, an init that counts, a namespace with a tap."""

from __future__ import annotations

import asyncio
import os
import re
import select
import shutil
import signal
import socket
import struct
import time
from pathlib import Path

import msgspec

from opendsec_server.images.guest import GuestImage
from opendsec_server.node import process, syscalls
from opendsec_server.node.network.tap import GUEST_ADDRESS, GUEST_MAC, TAP
from opendsec_server.node.vmm.base import VmConfig, VmDisk
from opendsec_server.node.vmm.firecracker.tests.vms import Net, in_namespace, sh
from opendsec_server.node.vmm.qemu import QemuVmm

MEMORY_MB = 256
DISK_BYTES = 4 * 1024 * 1024
SECTOR = 512
UID_BASE = 0x7200_0000
WAIT_S = 240.0
"""An emulated guest on a busy machine may take this long to boot."""
CMDLINE = "console=ttyS0 quiet panic=-1 reboot=t"


class TestMachine:
    """One machine and all that a node would have made for it."""

    __test__ = False
    _count = 0

    def __init__(self, scratch: Path, guest: GuestImage, initramfs: Path) -> None:
        TestMachine._count += 1
        self.uid = UID_BASE + TestMachine._count
        self.pid = 0
        self.net = Net(self.uid)
        self.dir = scratch / f"m{TestMachine._count}"
        self.run_dir = self.dir / "run"
        self.run_dir.mkdir(mode=0o700, parents=True)
        self.disk = self.dir / "disk"
        layer = scratch / "layer"
        for path, size in ((self.disk, DISK_BYTES), (layer, 64 * 1024)):
            with path.open("ab") as out:
                out.truncate(size)
        self.config = VmConfig(
            sandbox_id=f"test-{self.net.name}",
            vcpus=1,
            memory_mb=MEMORY_MB,
            kernel=guest.kernel,
            kernel_elf=guest.kernel_elf,
            initramfs=initramfs,
            cmdline=CMDLINE,
            disks=(
                VmDisk(serial="layer0", path=layer),
                VmDisk(serial="disk", path=self.disk, read_only=False),
            ),
            tap=TAP,
            guest_mac=GUEST_MAC.hex(":"),
            netns_fd=self.net.fd,
            run_dir=self.run_dir,
            cgroups=(),
            uid=self.uid,
            gid=self.uid,
            kernel_id=guest.kernel_version,
            agent_id="test",
        )

    def change(self, **fields: object) -> None:
        """Another configuration."""
        self.config = msgspec.structs.replace(self.config, **fields)

    async def boot(self, vmm: QemuVmm) -> None:
        """From the kernel."""
        self.pid = await vmm.boot(self.config)

    async def restore(self, vmm: QemuVmm, memory: Path, disk: Path) -> None:
        """From saved memory, with a copy of the disk of that time."""
        copy(disk, self.disk)
        self.pid = await vmm.restore(self.config, memory)

    def counts(self, vmm: QemuVmm) -> list[int]:
        """What the guest has said so far."""
        text = vmm.console_tail(self.run_dir)
        assert "BAD" not in text, text
        return [int(number) for number in re.findall(r"count (\d+)\r?\n", text)]

    async def until_count(self, vmm: QemuVmm, wanted: int) -> list[int]:
        """Wait until the guest has counted so far; what it said."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = self.counts(vmm)
            if found and found[-1] >= wanted:
                return found
            console = vmm.console_tail(self.run_dir)
            assert process.start_ticks_of(self.pid) is not None, f"QEMU has ended: {console}"
            assert time.monotonic() < deadline, f"the guest does not count: {console}"
            await asyncio.sleep(0.02)

    async def save(self, vmm: QemuVmm, target: Path, base: Path | None) -> int:
        """Freeze, save memory and a copy of the disk, thaw, seal; the bytes written."""
        target.mkdir()
        await vmm.freeze(self.run_dir)
        saved = await vmm.save(self.run_dir, self.pid, target, base)
        copy(self.disk, target.with_suffix(".disk"))
        await vmm.thaw(self.run_dir)
        await vmm.seal(target, durable=False)
        assert saved.ram_bytes == MEMORY_MB << 20
        return saved.dirty_bytes

    def on_disk(self) -> list[int]:
        """The numbers that the guest has written to its disk."""
        return numbers_on(self.disk)

    def answers_ping(self) -> bool:
        """Whether the guest answers an ICMP echo request, in a few tries."""

        def ping() -> bool:
            with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
                body = struct.pack("!BBHHH", 8, 0, 0, 7, 7)
                check = ~sum(struct.unpack("!4H", body)) & 0xFFFF
                body = struct.pack("!BBHHH", 8, 0, check, 7, 7)
                for _ in range(30):
                    raw.sendto(body, (GUEST_ADDRESS, 0))
                    if select.select([raw], [], [], 1.0)[0] and raw.recv(100)[20] == 0:
                        return True
            return False

        return bool(in_namespace(self.net.fd, syscalls.CLONE_NEWNET, ping))

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def close(self, vmm: QemuVmm) -> None:
        """Remove everything."""
        self.kill()
        vmm.release(self.run_dir)
        self.net.close()
        shutil.rmtree(self.dir)


def copy(source: Path, target: Path) -> None:
    """A copy that shares blocks where it can."""
    sh("cp", "--reflink=auto", "--sparse=always", str(source), str(target))


def numbers_on(disk: Path) -> list[int]:
    """The numbers that a guest has written to a disk, one per sector."""
    found = []
    data = disk.read_bytes()
    for at in range(SECTOR, len(data), SECTOR):
        text = data[at : at + SECTOR].rstrip(b"\0")
        if not text:
            break
        found.append(int(text))
    return found

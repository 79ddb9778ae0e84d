# SPDX-License-Identifier: AGPL-3.0-only
"""Real machines for tests of the driver: a network namespace, disks, and the guest agent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

from opendsec_server.images.guest import GuestImage, guest_cmdline
from opendsec_server.node import process, syscalls
from opendsec_server.node.network.tap import GUEST_ADDRESS, GUEST_MAC, TAP, TAP_ADDRESS
from opendsec_server.node.vmm.base import VmConfig, VmDisk
from opendsec_server.node.vmm.firecracker import FirecrackerVmm
from opendsec_server.node.vmm.firecracker.driver import OVERHEAD_MB

AGENT_PORT = 49983
BOOT_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 2.0
MEMORY_MB = 256
DISK_MB = 128
UID_BASE = 0x7100_0000


def sh(*argv: str) -> str:
    """Run a program, bounded; its output."""
    return subprocess.run(
        argv, check=True, capture_output=True, text=True, timeout=CALL_TIMEOUT_S
    ).stdout


def in_namespace(fd: int, kind: int, function: Callable[[], Any]) -> Any:
    """Run in another network namespace, in a thread that is thrown away."""
    found: list[Any] = []

    def body() -> None:
        try:
            syscalls.setns(fd, kind)
            found.append(function())
        except BaseException as exc:
            found.append(exc)

    thread = Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class Net:
    """A namespace with a tap, as a slot has it."""

    def __init__(self, uid: int) -> None:
        self.name = f"odfc{secrets.token_hex(3)}"
        sh("ip", "netns", "add", self.name)
        inside = ("ip", "-n", self.name)
        sh(*inside, "tuntap", "add", TAP, "mode", "tap", "user", str(uid), "vnet_hdr")
        sh(*inside, "addr", "add", f"{TAP_ADDRESS}/30", "dev", TAP)
        sh(*inside, "link", "set", TAP, "up")
        self.fd = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Remove it."""
        os.close(self.fd)
        sh("ip", "netns", "delete", self.name)

    def socket(self) -> socket.socket:
        """A TCP socket that lives in it."""
        made: socket.socket = in_namespace(
            self.fd, syscalls.CLONE_NEWNET, lambda: socket.socket(socket.AF_INET)
        )
        return made


class Machine:
    """One VM with what a node gives it. ``stop`` removes all of it."""

    _count = 0

    def __init__(self, driver: FirecrackerVmm, scratch: Path, guest: GuestImage, layer: Path):
        Machine._count += 1
        self.uid = UID_BASE + Machine._count
        self.driver = driver
        self.pid = 0
        self.control = secrets.token_hex(16)
        self.access = secrets.token_hex(16)
        self.net = Net(self.uid)
        self.dir = scratch / f"vm{Machine._count}"
        self.dir.mkdir(mode=0o700)
        self.run_dir = self.dir / "run"
        self.run_dir.mkdir(mode=0o700)
        self.disk = self.dir / "disk.ext4"
        self.cgroups = _make_groups(f"odfc-test/{self.net.name}")
        self.config = VmConfig(
            sandbox_id=f"test_{self.net.name}",
            vcpus=1,
            memory_mb=MEMORY_MB,
            kernel=guest.kernel,
            kernel_elf=guest.kernel_elf,
            initramfs=guest.initramfs,
            cmdline=guest_cmdline(layers=1, modules=False),
            disks=(
                VmDisk(serial="layer0", path=layer),
                VmDisk(serial="disk", path=self.disk, read_only=False),
            ),
            tap=TAP,
            guest_mac=GUEST_MAC.hex(":"),
            netns_fd=self.net.fd,
            run_dir=self.run_dir,
            cgroups=self.cgroups,
            uid=self.uid,
            gid=self.uid,
            kernel_id=guest.kernel_version,
            agent_id=guest.agent_sha256,
        )

    def make_disk(self, copy_of: Path | None = None) -> None:
        """A fresh disk, or a copy of another."""
        if copy_of is not None:
            sh("cp", "--reflink=auto", "--sparse=always", str(copy_of), str(self.disk))
            return
        with self.disk.open("wb") as out:
            out.truncate(DISK_MB << 20)
        sh("mkfs.ext4", "-q", "-F", str(self.disk))

    async def boot(self) -> None:
        """Boot and give the agent its identity."""
        self.make_disk()
        self.pid = await self.driver.boot(self.config)
        await self.init(self.control, {})

    async def restore(self, memory: Path, *, control_was: str) -> None:
        """Restore, and give the agent a new identity."""
        self.pid = await self.driver.restore(self.config, memory)
        await self.init(control_was, {"restored": True})

    async def init(self, control: str, more: dict[str, Any]) -> None:
        """``POST /init`` until the agent listens, bounded."""

        def body() -> dict[str, Any]:
            """Anew for each attempt: it has the time in it."""
            return {
                "accessToken": self.access,
                "controlToken": self.control,
                "sandboxId": self.config.sandbox_id,
                "hostname": self.net.name,
                "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
                "entropy": base64.b64encode(secrets.token_bytes(64)).decode(),
                **more,
            }

        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while True:
            try:
                status, answer = await asyncio.to_thread(
                    self._request,
                    "/init",
                    json.dumps(body()).encode(),
                    {
                        "Content-Type": "application/json",
                        "X-Opendsec-Control": control,
                    },
                )
            except OSError as exc:
                said = self.driver.console_tail(self.run_dir)
                assert process.start_ticks_of(self.pid) is not None, f"the VMM ended:\n{said}"
                assert time.monotonic() < deadline, f"no agent ({exc}):\n{said}"
                await asyncio.sleep(0.05)
            else:
                assert status < 300, answer
                return

    def _request(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        with self.net.socket() as channel:
            channel.settimeout(CONNECT_TIMEOUT_S)
            channel.connect((GUEST_ADDRESS, AGENT_PORT))
            channel.settimeout(CALL_TIMEOUT_S)
            lines = [f"POST {path} HTTP/1.1", f"Host: {GUEST_ADDRESS}", "Connection: close"]
            lines += [f"{k}: {v}" for k, v in headers.items()]
            lines += [f"Content-Length: {len(body)}", "", ""]
            channel.sendall("\r\n".join(lines).encode() + body)
            data = b""
            while chunk := channel.recv(65_536):
                data += chunk
        head, _, rest = data.partition(b"\r\n\r\n")
        if b"chunked" in head.lower():
            rest = _join_chunks(rest)
        return int(head.split(b" ", 2)[1]), rest

    async def sh(self, command: str) -> str:
        """Run a shell command in the guest; its output. Fails when it fails."""
        message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", command]}}).encode()
        status, data = await asyncio.to_thread(
            self._request,
            "/process.Process/Start",
            b"\0" + struct.pack(">I", len(message)) + message,
            {
                "Content-Type": "application/connect+json",
                "Connect-Protocol-Version": "1",
                "X-Access-Token": self.access,
                "Authorization": "Basic " + base64.b64encode(b"root:").decode(),
            },
        )
        assert status == 200, data
        output, code = b"", None
        while data:
            _flags, length = struct.unpack(">BI", data[:5])
            event = json.loads(data[5 : 5 + length] or b"{}").get("event", {})
            data = data[5 + length :]
            for part in event.get("data", {}).values():
                output += base64.b64decode(part)
            if "end" in event:
                code = event["end"].get("exitCode", 0)
        text = output.decode(errors="replace")
        assert code == 0, f"{command}: {code}: {text}"
        return text

    async def save(self, memory: Path, *, base: Path | None = None) -> Any:
        """Freeze and save into a new directory; it stays frozen."""
        memory.mkdir(mode=0o700)
        await self.driver.freeze(self.run_dir)
        return await self.driver.save(self.run_dir, self.pid, memory, base)

    async def kill(self) -> None:
        """End the process as a node does."""
        if not self.pid:
            return
        pidfd = os.pidfd_open(self.pid)
        process.send_signal(pidfd, signal.SIGKILL)
        assert await process.wait_readable(pidfd, CALL_TIMEOUT_S)
        process.reap(pidfd)
        os.close(pidfd)
        self.pid = 0
        self.driver.release(self.run_dir)

    def clear_run(self) -> None:
        """What the caller of a driver does before a start."""
        shutil.rmtree(self.run_dir)
        self.run_dir.mkdir(mode=0o700)

    async def stop(self) -> None:
        """End it and remove everything; fails when something of it is left."""
        await self.kill()
        self.driver.release(self.run_dir)
        assert str(self.run_dir) not in Path("/proc/self/mountinfo").read_text()
        shutil.rmtree(self.dir)
        self.net.close()
        deadline = time.monotonic() + CALL_TIMEOUT_S
        for group in self.cgroups:
            while True:
                with contextlib.suppress(OSError):
                    group.rmdir()
                if not group.exists():
                    break
                assert time.monotonic() < deadline, f"{group} stays busy"
                await asyncio.sleep(0.05)


def _make_groups(name: str) -> tuple[Path, ...]:
    """Groups with the memory limit that a node sets."""
    root = Path("/sys/fs/cgroup")
    limit = str((MEMORY_MB + OVERHEAD_MB) << 20)
    if (root / "cgroup.controllers").exists():
        group = root / name
        group.parent.mkdir(exist_ok=True)
        for parent in (root, group.parent):
            (parent / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        (group / "memory.max").write_text(limit)
        return (group,)
    groups = (root / "memory" / name, root / "pids" / name)
    for group in groups:
        group.mkdir(parents=True)
    (groups[0] / "memory.limit_in_bytes").write_text(limit)
    return groups


def _join_chunks(data: bytes) -> bytes:
    joined = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            break
        joined += data[:length]
        data = data[length + 2 :]
    return joined

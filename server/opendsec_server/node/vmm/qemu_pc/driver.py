# SPDX-License-Identifier: AGPL-3.0-only
"""The driver. Process, control protocol, the console's bound, freeze and save are those of the
microVM driver; machine, firmware, screen and interactive console are its own."""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path

import msgspec

from opendsec_server.contract.errors import SandboxStartFailed, SnapshotFailed
from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.vmm import manifest as saved
from opendsec_server.node.vmm import ramtool
from opendsec_server.node.vmm.base import (
    DEVICES_FILE,
    RAM_FILE,
    SUMS_FILE,
    SavedMemory,
    VmConfig,
    VmmInfo,
)
from opendsec_server.node.vmm.launch import Descriptors
from opendsec_server.node.vmm.qemu.driver import (
    COMMAND_TIMEOUT_S,
    CONTROL_SOCKET,
    Notes,
    QemuVmm,
    _Start,
    _until_loaded,
)
from opendsec_server.node.vmm.qemu.program import VmDescriptors
from opendsec_server.node.vmm.qemu.qmp import Qmp, QmpError, listen

from .config import PcConfig
from .program import MACHINE, OVERHEAD_MB, PcDescriptors, command_line, find_bios
from .screen import restore_screen, save_screen

CONSOLE_SOCKET = "console.sock"
SCREEN_SOCKET = "vnc.sock"
_SCREEN = "screen"


class QemuPcVmm(QemuVmm):
    """See ``Vmm``. Its configurations are ``PcConfig``."""

    bios: Path
    """SeaBIOS, once ``probe`` has run."""

    async def probe(self) -> VmmInfo:
        """Find QEMU and its firmware."""
        info = await super().probe()
        self.bios = find_bios()
        self._info = msgspec.structs.replace(info, overhead_mb=OVERHEAD_MB)
        return self._info

    async def boot(self, config: VmConfig) -> int:
        """From the first disk, or from the kernel."""
        async with _PcStart(self, config, None) as start:
            async with start.control() as qmp:
                start.let_console_wrap()
                await _serve_screen(qmp, config.run_dir)
            start.keep()
        return start.pid

    async def restore(self, config: VmConfig, memory: Path) -> int:
        """From saved memory."""
        found = saved.read_manifest(memory)
        saved.require_compatible(
            found, self.info, machine=MACHINE, tsc_khz=self._tsc_khz, config=config
        )
        saved.require_whole(memory, found)
        async with _PcStart(self, config, memory) as start:
            async with start.control() as qmp:
                start.let_console_wrap()
                assert start.fds.ram is not None
                await ramtool.map_file(
                    SandboxStartFailed,
                    pid=start.pid,
                    ram_bytes=config.ram_bytes,
                    fd=start.fds.ram,
                )
                await qmp.execute("migrate-incoming", uri=f"fd:{start.fds.devices}")
                await _until_loaded(qmp)
                await restore_screen(qmp, start.pid, memory)
                await _serve_screen(qmp, config.run_dir)
                await qmp.execute("cont")
            start.keep()
        return start.pid

    async def save(self, run_dir: Path, pid: int, memory: Path, base: Path | None) -> SavedMemory:
        """As small machines; the screen too."""
        report = await super().save(run_dir, pid, memory, base)
        try:
            async with Qmp(run_dir / CONTROL_SOCKET, COMMAND_TIMEOUT_S) as qmp:
                await save_screen(qmp, pid, memory)
        except (OSError, QmpError) as exc:
            raise SnapshotFailed(f"the screen cannot be saved: {exc}") from exc
        return report

    async def check(self, memory: Path) -> None:
        """Everything."""
        found = saved.read_manifest(memory)
        saved.require_compatible(found, self.info, machine=MACHINE, tsc_khz=self._tsc_khz)
        await finish_in_thread(saved.require_whole, memory, found)
        await finish_in_thread(saved.require_sums_whole, memory, found)
        await ramtool.check(memory / RAM_FILE, memory / SUMS_FILE)

    def new_notes(self, config: VmConfig, ram_fd: int | None) -> Notes:
        """What to note of a machine."""
        described = saved.new_manifest(self.info, config, machine=MACHINE, tsc_khz=self._tsc_khz)
        return Notes(manifest=described, ram_fd=ram_fd)

    def command_line(self, config: VmConfig, fds: VmDescriptors) -> list[str]:
        """QEMU's arguments for a machine."""
        assert isinstance(config, PcConfig)
        assert isinstance(fds, PcDescriptors)
        return command_line(self.info.path, config, self._accelerator, fds)


class _PcStart(_Start):
    """Opens what a full machine has beyond a small one."""

    async def __aenter__(self) -> _PcStart:
        await super().__aenter__()
        return self

    def let_console_wrap(self) -> None:
        """QEMU has opened the console's log for appending, its only way that leaves the file as
        it is. ``BoundedLog`` needs the place where writing goes on to be free; the flag belongs to
        the open file, which we share."""
        assert self._console is not None
        flags = fcntl.fcntl(self._console.writer, fcntl.F_GETFL)
        fcntl.fcntl(self._console.writer, fcntl.F_SETFL, flags & ~os.O_APPEND)

    def _open_files(self, given: Descriptors, control: int) -> PcDescriptors:
        config = self._config
        assert isinstance(config, PcConfig)
        assert self._console is not None
        kernel = initramfs = ram = devices = variables = None
        if config.direct:
            kernel = given.open(config.kernel, os.O_RDONLY)
            if config.initramfs.exists():
                initramfs = given.open(config.initramfs, os.O_RDONLY)
        if config.variables is not None:
            variables = given.open(config.variables, os.O_RDWR)
        if self._memory is not None:
            ram = given.open(self._memory / RAM_FILE, os.O_RDONLY)
            devices = given.open(self._memory / DEVICES_FILE, os.O_RDONLY)
        if config.devices:
            # The device reads and writes the guest's memory: all of it stays where it is.
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, unlimited)
        with listen(config.run_dir / CONSOLE_SOCKET) as server:
            console = given.add(server.fileno())
        return PcDescriptors(
            netns=given.add(config.netns_fd),
            tap=given.reserve(),
            control=given.add(control),
            disks=tuple(
                given.open(disk.path, os.O_RDONLY if disk.read_only else os.O_RDWR)
                for disk in config.disks
            ),
            kernel=kernel,
            initramfs=initramfs,
            ram=ram,
            devices=devices,
            firmware=given.open(config.firmware, os.O_RDONLY),
            variables=variables,
            console=console,
            console_log=given.add(self._console.writer),
        )


async def _serve_screen(qmp: Qmp, run_dir: Path) -> None:
    """The option ``-vnc`` takes no open socket; the control protocol does."""
    with listen(run_dir / SCREEN_SOCKET) as server:
        await qmp.execute("getfd", fds=(server.fileno(),), fdname=_SCREEN)
        place = {"type": "fd", "str": _SCREEN}
        await qmp.execute("display-update", type="vnc", addresses=[place])

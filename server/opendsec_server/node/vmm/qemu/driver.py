# SPDX-License-Identifier: AGPL-3.0-only
"""The QEMU driver.

How memory is kept: RAM is one private mapping, anonymous at first, of the saved file after a
restore. A save stops the processors, has QEMU write its devices (``xen-save-devices-state``: all
but RAM; nothing of Xen is needed for it), and takes the changed pages from outside. A restore
starts QEMU waiting for a migration, puts the saved file under its RAM, and gives it the devices as
the incoming migration. So neither side copies RAM that did not change, and RAM is shared by all
that were restored from it.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from pathlib import Path

import msgspec

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import (
    ResumeFailed,
    SandboxStartFailed,
    SnapshotFailed,
)
from opendsec_server.node import process
from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.vmm import manifest as saved
from opendsec_server.node.vmm import ramtool
from opendsec_server.node.vmm.base import (
    DEVICES_FILE,
    RAM_FILE,
    SUMS_FILE,
    Accelerator,
    SavedMemory,
    VmConfig,
    VmmInfo,
)
from opendsec_server.node.vmm.console import CONSOLE_BYTES, ERRORS_BYTES, BoundedLog
from opendsec_server.node.vmm.launch import Descriptors, launch

from . import program
from .program import MACHINE, VmDescriptors, command_line
from .qmp import Qmp, QmpError, listen

CONTROL_SOCKET = "qmp.sock"
NOTES_FILE = "vm.json"
CONSOLE_NAME = "opendsec-console"
ERRORS_NAME = "opendsec-errors"

START_TIMEOUT_S = 30.0
"""Until QEMU answers for the first time; a busy host needs some of it."""
COMMAND_TIMEOUT_S = 15.0
LOAD_TIMEOUT_S = 30.0
_LOOK_AGAIN_S = 0.0005
_LOOK_AGAIN_MAX_S = 0.02
_ENDED_WAIT_S = 5.0
_MESSAGE_CHARS_MAX = 1_000


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver must know of a running VM, kept in its ``run_dir``.

    Attributes:
        manifest: What a manifest of it says, but for checksums.
        ram_fd: Number, in the QEMU process, of the file under its RAM; None: it was booted.
    """

    manifest: saved.Manifest
    ram_fd: int | None


class QemuVmm:
    """See ``Vmm``.

    Args:
        config: The node's settings.
        accelerator: ``kvm`` where guests have been seen to run on it; else ``tcg``.
    """

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        self._configured = config.qemu_path
        self._accelerator = accelerator
        self._info: VmmInfo | None = None
        self._tsc_khz = 0
        self._groups: tuple[int, ...] = ()
        self._consoles: dict[Path, BoundedLog] = {}

    @property
    def info(self) -> VmmInfo:
        """The program."""
        assert self._info is not None, "probe() has not run"
        return self._info

    async def probe(self) -> VmmInfo:
        """Find QEMU and learn what guests need to be told."""
        qemu = program.find_qemu(self._configured)
        version = await program.version_of(qemu)
        if self._accelerator == "kvm":
            self._groups = program.kvm_groups()
        else:
            try:
                self._tsc_khz = await ramtool.tsc_khz(SandboxStartFailed)
            except SandboxStartFailed as exc:
                raise ConfigError(exc.message) from exc
        self._info = VmmInfo(
            name="qemu",
            version=version,
            path=qemu,
            accelerator=self._accelerator,
            cpu_model=program.cpu_model(self._accelerator),
            overhead_mb=program.OVERHEAD_KVM_MB
            if self._accelerator == "kvm"
            else program.OVERHEAD_TCG_MB,
        )
        return self._info

    # --- start ---------------------------------------------------------------

    async def boot(self, config: VmConfig) -> int:
        """From the kernel."""
        async with _Start(self, config, None) as start:
            async with start.control():
                pass
            start.keep()
        return start.pid

    async def restore(self, config: VmConfig, memory: Path) -> int:
        """From saved memory."""
        found = saved.read_manifest(memory)
        saved.require_compatible(
            found, self.info, machine=MACHINE, tsc_khz=self._tsc_khz, config=config
        )
        saved.require_whole(memory, found)
        async with _Start(self, config, memory) as start:
            async with start.control() as qmp:
                assert start.fds.ram is not None
                await ramtool.map_file(
                    SandboxStartFailed,
                    pid=start.pid,
                    ram_bytes=config.ram_bytes,
                    fd=start.fds.ram,
                )
                await qmp.execute("migrate-incoming", uri=f"fd:{start.fds.devices}")
                await _until_loaded(qmp)
                await qmp.execute("cont")
            start.keep()
        return start.pid

    def keep_console(self, run_dir: Path, console: BoundedLog) -> None:
        """Remember a VM's console until ``release``."""
        self.release(run_dir)
        self._consoles[run_dir] = console

    def new_notes(self, config: VmConfig, ram_fd: int | None) -> Notes:
        """What to note of a VM. Raises ``OSError`` if a disk is missing."""
        described = saved.new_manifest(self.info, config, machine=MACHINE, tsc_khz=self._tsc_khz)
        return Notes(manifest=described, ram_fd=ram_fd)

    def command_line(self, config: VmConfig, fds: VmDescriptors) -> list[str]:
        """QEMU's arguments for a VM."""
        return command_line(self.info.path, config, self._accelerator, fds, self._tsc_khz)

    @property
    def groups(self) -> tuple[int, ...]:
        """Further groups that QEMU needs."""
        return self._groups

    # --- freeze and save -----------------------------------------------------

    async def freeze(self, run_dir: Path) -> None:
        """Stop the processors; QEMU also waits for the disks' requests that are under way."""
        try:
            async with Qmp(run_dir / CONTROL_SOCKET, COMMAND_TIMEOUT_S) as qmp:
                await qmp.execute("stop")
                status = (await qmp.execute("query-status"))["status"]
        except QmpError as exc:
            raise SnapshotFailed(f"the VM cannot be frozen: {exc}") from exc
        if status not in ("paused", "prelaunch"):
            raise SnapshotFailed(f"the VM cannot be frozen: QEMU says that it is {status}")

    async def thaw(self, run_dir: Path) -> None:
        """Let them go on."""
        try:
            async with Qmp(run_dir / CONTROL_SOCKET, COMMAND_TIMEOUT_S) as qmp:
                await qmp.execute("cont")
                status = (await qmp.execute("query-status"))["status"]
        except QmpError as exc:
            raise ResumeFailed(f"the VM cannot be thawed: {exc}") from exc
        if status != "running":
            raise ResumeFailed(f"the VM cannot be thawed: QEMU says that it is {status}")

    async def save(self, run_dir: Path, pid: int, memory: Path, base: Path | None) -> SavedMemory:
        """Devices by QEMU, RAM by ``opendsec-ram``."""
        started = time.monotonic()
        try:
            notes = msgspec.json.decode((run_dir / NOTES_FILE).read_bytes(), type=Notes)
            await self._save_devices(run_dir, memory / DEVICES_FILE)
            saved.write_draft(memory, notes.manifest)
            mapped, sums = _mapped(pid, notes, base)
        except (OSError, msgspec.MsgspecError, QmpError) as exc:
            raise SnapshotFailed(f"the VM cannot be saved: {exc}") from exc
        report = await ramtool.save(
            SnapshotFailed,
            pid=pid,
            ram_bytes=notes.manifest.ram_bytes,
            mapped_file=mapped,
            base_sums=sums,
            out=memory / RAM_FILE,
            sums=memory / SUMS_FILE,
        )
        return SavedMemory(
            ram_bytes=report.total_bytes,
            ram_bytes_on_disk=report.disk_bytes,
            dirty_bytes=report.written_bytes,
            zero_bytes=report.zero_bytes,
            took_s=time.monotonic() - started,
        )

    async def _save_devices(self, run_dir: Path, target: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(target, flags, 0o600)
        try:
            async with Qmp(run_dir / CONTROL_SOCKET, COMMAND_TIMEOUT_S) as qmp:
                status = (await qmp.execute("query-status"))["status"]
                if status == "running":
                    raise QmpError("it is not frozen")
                number = (await qmp.execute("add-fd", fds=(fd,)))["fdset-id"]
                # Not "live": with it QEMU would give up its disks, as if the VM were to move.
                await qmp.execute(
                    "xen-save-devices-state", filename=f"/dev/fdset/{number}", live=False
                )
                await qmp.execute("remove-fd", fdset_id=number)
        finally:
            os.close(fd)

    async def seal(self, memory: Path, *, durable: bool) -> None:
        """In a thread."""
        try:
            await finish_in_thread(saved.seal, memory, durable=durable)
        except (OSError, msgspec.MsgspecError) as exc:
            raise SnapshotFailed(f"the saved memory cannot be completed: {exc}") from exc

    async def check(self, memory: Path) -> None:
        """Everything."""
        found = saved.read_manifest(memory)
        saved.require_compatible(found, self.info, machine=MACHINE, tsc_khz=self._tsc_khz)
        await finish_in_thread(saved.require_whole, memory, found)
        await finish_in_thread(saved.require_sums_whole, memory, found)
        await ramtool.check(memory / RAM_FILE, memory / SUMS_FILE)

    # --- console -------------------------------------------------------------

    def console_tail(self, run_dir: Path) -> str:
        """From the memory file."""
        console = self._consoles.get(run_dir)
        return "" if console is None else console.tail()

    def adopt(self, run_dir: Path, pid: int) -> None:
        """Take a copy of QEMU's descriptor of the console."""
        console = BoundedLog.of_process(pid, CONSOLE_NAME)
        if console is not None:
            self.keep_console(run_dir, console)

    def release(self, run_dir: Path) -> None:
        """Close it."""
        console = self._consoles.pop(run_dir, None)
        if console is not None:
            console.close()


def _mapped(pid: int, notes: Notes, base: Path | None) -> tuple[Path | None, Path | None]:
    """The file under the RAM, by the process's own descriptor (it may have been renamed or
    removed), and its page checksums if ``base`` is where it came from."""
    if notes.ram_fd is None:
        return None, None
    mapped = Path(f"/proc/{pid}/fd/{notes.ram_fd}")
    sums = None
    if base is not None and (base / RAM_FILE).exists():
        here, there = mapped.stat(), (base / RAM_FILE).stat()
        if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
            sums = base / SUMS_FILE
    return mapped, sums if sums is not None and sums.exists() else None


async def _until_loaded(qmp: Qmp) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LOAD_TIMEOUT_S
    pause_s = _LOOK_AGAIN_S
    while loop.time() < deadline:
        answer = await qmp.execute("query-migrate")
        status = answer.get("status", "none")
        if status == "completed":
            return
        if status in ("failed", "cancelled"):
            reason = answer.get("error-desc", "no reason given")
            raise QmpError(f"QEMU cannot load the devices: {reason}")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_AGAIN_MAX_S)
    raise QmpError(f"QEMU did not load the devices in {LOAD_TIMEOUT_S:.0f} s")


class _Start:
    """One attempt to start QEMU: an async context manager that leaves no process behind unless
    ``keep`` was called."""

    def __init__(self, vmm: QemuVmm, config: VmConfig, memory: Path | None) -> None:
        self._vmm = vmm
        self._config = config
        self._memory = memory
        self._kept = False
        self._pidfd = -1
        self._console: BoundedLog | None = None
        self._errors: BoundedLog | None = None
        self.pid = 0
        self.fds = VmDescriptors(netns=0, tap=0, control=0, disks=())

    async def __aenter__(self) -> _Start:
        try:
            self._launch()
        except BaseException as exc:
            self._close()
            if isinstance(exc, OSError):
                raise SandboxStartFailed(f"QEMU cannot be started: {exc}") from exc
            raise
        return self

    def _launch(self) -> None:
        config = self._config
        self._console = BoundedLog.create(CONSOLE_NAME, CONSOLE_BYTES)
        self._errors = BoundedLog.create(ERRORS_NAME, ERRORS_BYTES)
        with Descriptors() as given, listen(config.run_dir / CONTROL_SOCKET) as control:
            self.fds = self._open_files(given, control.fileno())
            notes = self._vmm.new_notes(config, self.fds.ram)
            (config.run_dir / NOTES_FILE).write_bytes(msgspec.json.encode(notes))
            self.pid = launch(
                self._vmm.command_line(config, self.fds),
                given,
                netns=self.fds.netns,
                tap=(config.tap, self.fds.tap),
                cgroups=config.cgroups,
                uid=config.uid,
                gid=config.gid,
                groups=self._vmm.groups,
                output_fd=self._console.writer,
                errors_fd=self._errors.writer,
            )
            self._pidfd = os.pidfd_open(self.pid)

    def _open_files(self, given: Descriptors, control: int) -> VmDescriptors:
        config = self._config
        kernel = initramfs = ram = devices = None
        if self._memory is None:
            kernel = given.open(config.kernel, os.O_RDONLY)
            initramfs = given.open(config.initramfs, os.O_RDONLY)
        else:
            ram = given.open(self._memory / RAM_FILE, os.O_RDONLY)
            devices = given.open(self._memory / DEVICES_FILE, os.O_RDONLY)
        return VmDescriptors(
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
        )

    def control(self) -> Qmp:
        """A connection to the starting QEMU. If QEMU ends instead of answering, so does this: the
        process is the only one that holds the listening socket."""
        return Qmp(self._config.run_dir / CONTROL_SOCKET, START_TIMEOUT_S)

    def keep(self) -> None:
        """The VM runs: leave it."""
        self._kept = True

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._console is not None and self._errors is not None
        if self._kept:
            self._vmm.keep_console(self._config.run_dir, self._console)
            self._console = None
            self._close()
            return
        await finish_in_thread(_end, self._pidfd)
        said = self._errors.tail(_MESSAGE_CHARS_MAX).strip()
        printed = self._console.tail(_MESSAGE_CHARS_MAX).strip()
        self._close()
        if isinstance(error, QmpError):
            message = f"QEMU cannot be started: {said or error}"
            details = {"console": printed} if printed else None
            raise SandboxStartFailed(message, details=details) from error

    def _close(self) -> None:
        for log in (self._console, self._errors):
            if log is not None:
                log.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)


def _end(pidfd: int) -> None:
    """Kill and reap; gives up on a process that hangs in the kernel."""
    process.send_signal(pidfd, signal.SIGKILL)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll(_ENDED_WAIT_S * 1_000)
    process.reap(pidfd)

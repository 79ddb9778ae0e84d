# SPDX-License-Identifier: AGPL-3.0-only
"""The driver of Firecracker: see ``vmm.base`` for what each method does.

Each VM is one process: the jailer, which becomes Firecracker. It has its own user, its own root
(``jail``), the slot's network namespace, the sandbox's control groups, and Firecracker's seccomp
filters. The daemon puts the process into its groups itself, right after it starts and before it
is told to make a machine: the jailer's own way differs between versions 1 and 2, and on version 2
it would move a VM without explicit values into the parent group, which refuses it (EBUSY).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import ResumeFailed, SandboxStartFailed, SnapshotFailed
from opendsec_server.node import process
from opendsec_server.node.vmm import manifest, ramtool
from opendsec_server.node.vmm.base import (
    DEVICES_FILE,
    RAM_FILE,
    SUMS_FILE,
    SavedMemory,
    VmConfig,
    VmmInfo,
)

from . import api, files, jail, machine, saved
from .api import ApiError
from .console import Consoles
from .jail import JailFile
from .program import SECCOMP_ENV, Programs, find_programs

log = structlog.get_logger()

JAIL_TIMEOUT_S = 20.0
"""From the start of the jailer until Firecracker listens."""
START_TIMEOUT_S = 30.0
"""A request that builds a machine or loads a snapshot."""
SAVE_TIMEOUT_S = 60.0
SAVE_BYTES_PER_S_MIN = 20 * 1024 * 1024
"""A disk slower than this fails a save."""
STATE_TIMEOUT_S = 10.0
"""Stopping or continuing the processors."""
KILL_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.001
_DIFF_RAM_MAX_BYTES = 3 * 1024 * 1024 * 1024
MACHINE = "firecracker"
OVERHEAD_MB = 32
"""Firecracker itself, its copy in the jail, page tables; seen: about 12."""
_SECCOMP_FILTERED = "2"
_SECCOMP_NAME = "seccomp"


class FirecrackerVmm:
    """Firecracker under its jailer.

    Args:
        config: The node's settings.
        rates: Bounds on each VM's devices.
        pmem: Attach read-only disks as memory where the version can. The guest needs the drivers.
    """

    def __init__(
        self,
        config: Config,
        *,
        rates: machine.RateLimits | None = None,
        pmem: bool = True,
    ) -> None:
        self._config = config
        self._rates = rates or machine.RateLimits()
        self._pmem = pmem
        self._programs: Programs | None = None
        self._info: VmmInfo | None = None
        self._consoles = Consoles()
        self._bases = saved.Bases()
        self._seccomp_seen = False

    @property
    def info(self) -> VmmInfo:
        assert self._info is not None, "probe has not run"
        return self._info

    @property
    def programs(self) -> Programs:
        """The programs that ``probe`` found."""
        assert self._programs is not None, "probe has not run"
        return self._programs

    async def probe(self) -> VmmInfo:
        programs = await find_programs(self._config)
        if not os.access("/dev/kvm", os.R_OK | os.W_OK):
            raise ConfigError(
                "Firecracker needs /dev/kvm, which is missing or closed to this user. "
                "Enable virtualisation, or use QEMU, which can emulate."
            )
        self._programs = programs
        self._info = VmmInfo(
            name="firecracker",
            version=programs.version,
            path=programs.firecracker,
            accelerator="kvm",
            cpu_model=host_cpu_model(),
            overhead_mb=OVERHEAD_MB,
        )
        return self._info

    # --- start ---------------------------------------------------------------

    async def boot(self, config: VmConfig) -> int:
        features = self.programs.features
        requests = machine.boot_requests(config, features, self._rates, pmem=self._pmem)
        shown = [
            JailFile(config.kernel_elf, machine.KERNEL),
            JailFile(config.initramfs, machine.INITRAMFS),
        ]
        return await self._start(config, shown, requests, self._notes(config, "boot", None))

    async def restore(self, config: VmConfig, memory: Path) -> int:
        await asyncio.to_thread(self._verify, memory, config)
        features = self.programs.features
        ram, devices = memory / RAM_FILE, memory / DEVICES_FILE
        try:
            mark = self._bases.keep(config.run_dir, ram)
        except OSError as exc:
            raise SandboxStartFailed(f"cannot open {ram}: {exc.strerror}") from exc
        notes = self._notes(config, "file", mark)
        requests = [
            *machine.serial_requests(features),
            machine.restore_request(config, RAM_FILE, DEVICES_FILE),
        ]
        shown = [JailFile(ram, RAM_FILE), JailFile(devices, DEVICES_FILE)]
        try:
            return await self._start(config, shown, requests, notes)
        except BaseException:
            self._bases.forget(config.run_dir)
            raise

    async def _start(
        self,
        config: VmConfig,
        shown: list[JailFile],
        requests: list[machine.Request],
        notes: saved.Notes,
    ) -> int:
        run_dir = config.run_dir
        shown += [
            JailFile(disk.path, machine.disk_path(disk.serial), disk.read_only)
            for disk in config.disks
        ]
        if self.programs.seccomp_filter is not None:
            shown.append(JailFile(self.programs.seccomp_filter, _SECCOMP_NAME))
        pid: int | None = None
        try:
            saved.write_notes(run_dir, notes)
            built = await process.finish_in_thread(self._prepare, config, shown)
            pid = self._spawn(config, built)
            for group in config.cgroups:
                (group / "cgroup.procs").write_text(str(pid))
            pidfd = os.pidfd_open(pid)
            try:
                await self._wait_for_api(run_dir, pidfd)
                await process.finish_in_thread(jail.detach, run_dir)
                for method, target, body in requests:
                    await api.call(
                        jail.socket_of(run_dir), method, target, body, timeout_s=START_TIMEOUT_S
                    )
            finally:
                os.close(pidfd)
            self._check_seccomp(pid)
        except BaseException as exc:
            said = self._consoles.tail(run_dir).strip()[-1_000:]
            if pid is not None:
                await _end(pid)
            await process.finish_in_thread(jail.detach, run_dir)
            self._consoles.close(run_dir)
            if isinstance(exc, ApiError | OSError):
                detail = f" It said: {said}" if said else ""
                raise SandboxStartFailed(f"Firecracker could not start: {exc}.{detail}") from exc
            raise
        return pid

    def _prepare(self, config: VmConfig, shown: list[JailFile]) -> jail.Jail:
        for disk in config.disks:
            if not disk.read_only:
                os.chown(disk.path, config.uid, config.gid)
        return jail.build(config.run_dir, config.sandbox_id, self.programs.firecracker, shown)

    def _spawn(self, config: VmConfig, built: jail.Jail) -> int:
        out_fd = self._consoles.open(config.run_dir)
        argv = [
            *(str(self.programs.jailer), "--id", built.vm_id),
            *("--exec-file", str(self.programs.firecracker)),
            *("--uid", str(config.uid), "--gid", str(config.gid)),
            *("--chroot-base-dir", str(built.base)),
            # The jailer closes what it inherits, so it opens the namespace through us.
            *("--netns", f"/proc/{os.getpid()}/fd/{config.netns_fd}"),
            *("--", "--api-sock", f"/run/{jail.SOCKET_NAME}", "--level", "Warning"),
        ]
        if self.programs.seccomp_filter is not None:
            argv += ["--seccomp-filter", f"/{_SECCOMP_NAME}"]
        return os.posix_spawn(
            argv[0],
            argv,
            {},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out_fd, 1),
                (os.POSIX_SPAWN_DUP2, out_fd, 2),
            ],
            setsid=True,
        )

    async def _wait_for_api(self, run_dir: Path, pidfd: int) -> None:
        deadline = time.monotonic() + JAIL_TIMEOUT_S
        while not await api.can_connect(jail.socket_of(run_dir)):
            if process.has_ended(pidfd):
                raise ApiError("it ended before it listened", refused=False)
            if time.monotonic() > deadline:
                raise ApiError(f"it did not listen within {JAIL_TIMEOUT_S:.0f} s", refused=False)
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _check_seccomp(self, pid: int) -> None:
        """Refuse a Firecracker without filters; looked at once, since it is a fact of the build."""
        if self._seccomp_seen:
            return
        for task in Path(f"/proc/{pid}/task").iterdir():
            status = (task / "status").read_text()
            mode = next((line for line in status.splitlines() if line.startswith("Seccomp:")), "")
            if mode.split()[-1:] != [_SECCOMP_FILTERED]:
                raise SandboxStartFailed(
                    f"{self.programs.firecracker} runs without system call filters",
                    remediation="Use a release build of Firecracker, or set "
                    f"{SECCOMP_ENV} to a filter made by seccompiler-bin.",
                )
        self._seccomp_seen = True

    # --- stop, continue, save ------------------------------------------------

    async def freeze(self, run_dir: Path) -> None:
        try:
            await self._set_state(run_dir, "Paused")
        except ApiError as exc:
            raise SnapshotFailed(f"the VM could not be stopped: {exc}") from exc

    async def thaw(self, run_dir: Path) -> None:
        try:
            await self._set_state(run_dir, "Resumed")
        except ApiError as exc:
            raise ResumeFailed(f"the VM could not be continued: {exc}") from exc

    async def _set_state(self, run_dir: Path, state: str) -> None:
        await api.call(
            jail.socket_of(run_dir), "PATCH", "/vm", {"state": state}, timeout_s=STATE_TIMEOUT_S
        )

    async def save(self, run_dir: Path, pid: int, memory: Path, base: Path | None) -> SavedMemory:
        started = time.monotonic()
        try:
            notes = saved.read_notes(run_dir)
        except (OSError, msgspec.DecodeError) as exc:
            raise SnapshotFailed(f"the VM's notes cannot be read: {exc}") from exc
        ram, devices = memory / RAM_FILE, memory / DEVICES_FILE
        ram_bytes = notes.ram_bytes
        try:
            kind = await process.finish_in_thread(self._lay_base, run_dir, notes, ram)
            # Changed pages are counted anew even by a save that fails: until this one is known to
            # be whole, nothing may be laid over an older file.
            saved.write_notes(run_dir, msgspec.structs.replace(notes, since="unknown", mark=None))
            await self._write_memory(run_dir, pid, memory, kind, notes)
            zero_bytes = await process.finish_in_thread(files.dig_holes, ram)
            found = await process.finish_in_thread(_finish_files, ram, devices, ram_bytes)
            mark = self._bases.keep(run_dir, ram)
            saved.write_notes(run_dir, msgspec.structs.replace(notes, since="file", mark=mark))
            manifest.write_draft(memory, notes.manifest)
        except (ApiError, OSError, process.ProgramTimeout) as exc:
            raise SnapshotFailed(f"the VM's memory could not be saved: {exc}") from exc
        on_disk, own = found
        return SavedMemory(
            ram_bytes=ram_bytes,
            ram_bytes_on_disk=on_disk,
            dirty_bytes=own,
            zero_bytes=zero_bytes,
            took_s=time.monotonic() - started,
        )

    def _lay_base(self, run_dir: Path, notes: saved.Notes, ram: Path) -> Literal["Full", "Diff"]:
        """Prepare the RAM file; which kind of save can be written to it."""
        features = self.programs.features
        if not features.diff_of_any_size and notes.ram_bytes > _DIFF_RAM_MAX_BYTES:
            return "Full"
        if notes.since == "boot":
            return "Diff"
        if notes.since == "file" and notes.mark is not None:
            base_fd = self._bases.find(run_dir, notes.mark)
            if base_fd is not None and saved.clone_file(base_fd, ram):
                return "Diff"
        return "Full"

    async def _write_memory(
        self, run_dir: Path, pid: int, memory: Path, kind: str, notes: saved.Notes
    ) -> None:
        """Have Firecracker, which is another user in another root, write to ``memory``."""
        await process.finish_in_thread(_give_to, memory, notes.uid, notes.gid)
        await process.finish_in_thread(jail.show_memory, pid, memory)
        try:
            await api.call(
                jail.socket_of(run_dir),
                "PUT",
                "/snapshot/create",
                {
                    "snapshot_type": kind,
                    "snapshot_path": f"/{jail.MEMORY_POINT}/{DEVICES_FILE}",
                    "mem_file_path": f"/{jail.MEMORY_POINT}/{RAM_FILE}",
                },
                timeout_s=SAVE_TIMEOUT_S + notes.ram_bytes / SAVE_BYTES_PER_S_MIN,
            )
        finally:
            await process.finish_in_thread(jail.hide_memory, pid)
            await process.finish_in_thread(_give_to, memory, os.geteuid(), os.getegid())

    async def seal(self, memory: Path, *, durable: bool) -> None:
        ram = memory / RAM_FILE
        try:
            await ramtool.compute_sums(SnapshotFailed, ram, memory / SUMS_FILE)
            await process.finish_in_thread(_seal, memory, durable)
        except (OSError, msgspec.DecodeError, process.ProgramTimeout) as exc:
            raise SnapshotFailed(f"the saved memory could not be sealed: {exc}") from exc

    async def check(self, memory: Path) -> None:
        found = await process.finish_in_thread(self._verify, memory, None)
        await process.finish_in_thread(manifest.require_sums_whole, memory, found)
        await ramtool.check(memory / RAM_FILE, memory / SUMS_FILE)

    def _verify(self, memory: Path, config: VmConfig | None) -> manifest.Manifest:
        found = manifest.read_manifest(memory)
        manifest.require_compatible(found, self.info, machine=MACHINE, config=config)
        manifest.require_whole(memory, found)
        return found

    def _notes(self, config: VmConfig, since: saved.Since, mark: saved.Mark | None) -> saved.Notes:
        try:
            described = manifest.new_manifest(self.info, config, machine=MACHINE)
        except OSError as exc:
            raise SandboxStartFailed(f"a disk of the VM is missing: {exc}") from exc
        return saved.Notes(
            uid=config.uid, gid=config.gid, since=since, mark=mark, manifest=described
        )

    # --- console and notes ---------------------------------------------------

    def console_tail(self, run_dir: Path) -> str:
        return self._consoles.tail(run_dir)

    def adopt(self, run_dir: Path, pid: int) -> None:
        with contextlib.suppress(OSError):
            self._consoles.open(run_dir)

    def release(self, run_dir: Path) -> None:
        self._consoles.close(run_dir)
        self._bases.forget(run_dir)
        jail.detach(run_dir)


def _seal(memory: Path, durable: bool) -> None:
    manifest.seal(memory, durable=durable)


def host_cpu_model() -> str:
    """What saved processors are bound to: Firecracker gives guests those of the host."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "model name")
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if not line.strip():
            break
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return " ".join(found.get(name, "?") for name in wanted)


def _give_to(memory: Path, uid: int, gid: int) -> None:
    for path in (memory, *memory.iterdir()):
        os.chown(path, uid, gid)


def _finish_files(ram: Path, devices: Path, ram_bytes: int) -> tuple[int, int]:
    """Make what was written readable for the next VM's user (the folder above is closed to
    others) and unchangeable. Returns bytes on disk, and those not shared with the base."""
    size = ram.stat().st_size
    if size != ram_bytes:
        raise OSError(f"Firecracker wrote {size} bytes of RAM instead of {ram_bytes}")
    for path in (ram, devices):
        path.chmod(0o444)
    return ram.stat().st_blocks * 512, files.own_bytes(ram)


async def _end(pid: int) -> None:
    """Kill a child of ours and wait for its end, bounded."""
    pidfd = os.pidfd_open(pid)
    try:
        process.send_signal(pidfd, signal.SIGKILL)
        if await process.wait_readable(pidfd, KILL_TIMEOUT_S):
            process.reap(pidfd)
        else:
            log.error("firecracker_survives_sigkill", pid=pid)
    finally:
        os.close(pidfd)

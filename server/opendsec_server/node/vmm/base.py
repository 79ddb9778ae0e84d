# SPDX-License-Identifier: AGPL-3.0-only
"""What the node asks of a virtual machine monitor (VMM): Firecracker or QEMU.

A driver starts, stops and saves machines. It decides nothing: network slot, disks, directories and
control groups are made by the caller, and removed by the caller after the process has ended.

Life of a VM::

    boot ─┐
          ├─> runs ──freeze──> frozen ──save──> frozen ──thaw──> runs
    restore                                └──seal(memory)   (at any time after save)

The process is ended by the caller: SIGKILL by pidfd, then ``release``. A driver holds nothing that
must be released for that, so a crash of the daemon loses no VM and leaks nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import msgspec

Accelerator = Literal["kvm", "tcg"]

RAM_FILE = "ram"
DEVICES_FILE = "devices"
SUMS_FILE = "ram.sums"
MANIFEST_FILE = "manifest.json"
"""Files of a directory of saved memory. The manifest is written last: a directory without one is
incomplete and counts as damaged."""


class VmDisk(msgspec.Struct, frozen=True, kw_only=True):
    """One virtio block device.

    Attributes:
        serial: What the guest finds it by (``/dev/disk/by-id``, ``/sys/block/*/serial``). At most
            20 bytes; unique in the VM.
        path: Raw file. Its size is the device's.
        read_only: Whether the guest may only read. Such a file may be shared by many VMs.
    """

    serial: str
    path: Path
    read_only: bool = True


class VmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a VMM needs to know to run one VM.

    For ``restore`` it must describe the same machine that was saved (vcpus, memory, number, order,
    serials and sizes of disks). Paths, tap, namespace, ids and ``run_dir`` may be others.

    Attributes:
        sandbox_id: Names the VM in the process list and in messages.
        vcpus: Processors, 1 or more.
        memory_mb: RAM in MiB.
        kernel: Compressed kernel image (``vmlinuz``), for QEMU.
        kernel_elf: The same kernel as ELF (``vmlinux``), for Firecracker.
        initramfs: Initial file system. The VMM process must be able to read kernel and initramfs
            with ``uid``: they are world-readable files (the folders above them need not be).
        cmdline: Kernel command line, complete.
        disks: In the order in which they are attached.
        tap: Name of the tap device in the namespace. It exists and is persistent.
        guest_mac: The guest's address on it.
        netns_fd: Network namespace that the VMM process lives in. Stays the caller's.
        run_dir: The VM's own directory, existing, mode 0700, emptied by the caller before a start
            and removed after the end. Holds sockets and the driver's notes; of no use after a
            reboot.
        cgroups: Directories (one per hierarchy) whose ``cgroup.procs`` the process is put in
            before it starts to allocate. May be empty.
        uid: User that the process runs as; never 0. Should be this VM's alone.
        gid: Group of it; never 0.
        kernel_id: Version of the guest kernel, for the manifest (e.g. ``6.1.0-57-cloud-amd64``).
        agent_id: Identity of the guest agent, for the manifest (e.g. its sha256).
    """

    sandbox_id: str
    vcpus: int
    memory_mb: int
    kernel: Path
    kernel_elf: Path
    initramfs: Path
    cmdline: str
    disks: tuple[VmDisk, ...]
    tap: str
    guest_mac: str
    netns_fd: int
    run_dir: Path
    cgroups: tuple[Path, ...]
    uid: int
    gid: int
    kernel_id: str = ""
    agent_id: str = ""

    @property
    def ram_bytes(self) -> int:
        """RAM in bytes."""
        return self.memory_mb * 1024 * 1024


class VmmInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The program behind a driver.

    Attributes:
        name: ``qemu`` or ``firecracker``.
        version: Its version, e.g. ``7.2.22``.
        path: Where it is.
        accelerator: ``kvm``: guests run on the processor; ``tcg``: they are emulated.
        cpu_model: What saved memory is bound to besides the version: restoring it under another
            model is refused.
        overhead_mb: Memory in MiB that one VMM process needs besides the guest's RAM; to be added
            to the limit of its control group.
    """

    name: str
    version: str
    path: Path
    accelerator: Accelerator
    cpu_model: str
    overhead_mb: int = 0


class SavedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What ``save`` wrote.

    Attributes:
        ram_bytes: Size of the guest's RAM (the RAM file's length).
        ram_bytes_on_disk: What the RAM file occupies, blocks shared with ``base`` included.
        dirty_bytes: What had to be written, i.e. was not shared with ``base`` and not zero.
        zero_bytes: Pages found to be all zero, kept as holes.
        took_s: Seconds that the guest had to stay frozen for it.
    """

    ram_bytes: int
    ram_bytes_on_disk: int
    dirty_bytes: int
    zero_bytes: int
    took_s: float


class Vmm(Protocol):
    """One driver, shared by all VMs of a node. Methods of different VMs may run at once; calls for
    one VM are made one after another (the node's lifecycle sees to that).

    Every method is bounded in time. None of them ends a VMM process that it did not start in the
    same call.
    """

    @property
    def info(self) -> VmmInfo:
        """The program; known once ``probe`` has run."""

    async def probe(self) -> VmmInfo:
        """Find the program and try it. Called once at the daemon's start.

        Raises:
            ConfigError: it is missing, too old, or does not run; says what to install.
        """

    async def boot(self, config: VmConfig) -> int:
        """Start a VM from its kernel.

        Returns:
            Pid of the VMM process, which is a child of this process, once it has started. The
            guest boots meanwhile.

        Raises:
            SandboxStartFailed: it could not be started; no process is left.
        """

    async def restore(self, config: VmConfig, memory: Path) -> int:
        """Start a VM from saved memory. Its processors run on return.

        ``memory/ram`` is mapped privately: it is never written to, is shared with all other VMs
        restored from it, and must exist for as long as any of them runs. Nothing is verified but
        what is cheap (manifest, sizes, the devices' checksum); call ``check`` for the rest.

        Args:
            config: The same machine; see ``VmConfig``.
            memory: Directory that ``save`` and ``seal`` wrote.

        Returns:
            Pid, as ``boot``.

        Raises:
            SnapshotDamaged: the memory is incomplete or its checksums do not fit.
            SnapshotIncompatible: it needs another VMM, version, CPU model or machine.
            SandboxStartFailed: anything else; no process is left.
        """

    async def freeze(self, run_dir: Path) -> None:
        """Stop the processors. What the guest has written to its disks is then in the files (as
        seen by other readers on this host; not yet on the medium). No error if frozen already.

        Raises:
            SnapshotFailed: the VMM does not answer or refuses; the caller should thaw or kill.
        """

    async def thaw(self, run_dir: Path) -> None:
        """Let the processors go on. No error if they run already.

        Raises:
            ResumeFailed: the VMM does not answer or refuses.
        """

    async def save(self, run_dir: Path, pid: int, memory: Path, base: Path | None) -> SavedMemory:
        """Write RAM and devices of a frozen VM to ``memory``. Afterwards it can go on or be killed.

        What is written is in the host's page cache, not yet durable, and has no manifest: follow
        with ``seal``, which may be after ``thaw`` or after the end of the process.

        Args:
            run_dir: The VM.
            pid: Its process.
            memory: Directory to write to. Exists and is empty.
            base: Directory that the VM was restored from, if it was: unchanged pages are shared
                with it by reflink where the file system can. None: it was booted.

        Raises:
            SnapshotFailed: it did not work. ``memory`` may hold part of it; the VM is still frozen
                and can be thawed.
        """

    async def seal(self, memory: Path, *, durable: bool) -> None:
        """Add checksums and the manifest to what ``save`` wrote; then it can be restored.

        Args:
            memory: What ``save`` wrote.
            durable: Wait until all of it is on the medium. False for snapshots that need not
                survive a crash of the host (forks).

        Raises:
            SnapshotFailed: the disk failed or is full.
        """

    async def check(self, memory: Path) -> None:
        """Read saved memory completely and compare it with its checksums and with this VMM.

        Raises:
            SnapshotDamaged: a file is missing, cut short or changed.
            SnapshotIncompatible: it needs another VMM, version or CPU model.
        """

    def console_tail(self, run_dir: Path) -> str:
        """The end of what the guest printed on its console: at most 64 KiB of text, whatever the
        guest printed. Works while it runs and after its end until ``release``. Empty if unknown."""

    def adopt(self, run_dir: Path, pid: int) -> None:
        """Take over a VM that an earlier daemon started, so that its console is kept beyond its
        end. No error if it has just ended."""

    def release(self, run_dir: Path) -> None:
        """Forget a VM whose process has ended. Idempotent."""

# SPDX-License-Identifier: AGPL-3.0-only
"""A VM's jail: the directory that Firecracker sees as its root.

It is a file system in memory that only the VM's own process holds: it is mounted, filled by bind
mounts of exactly the files that the VM needs, handed to the jailer, and detached here as soon as
the jailer has moved into it. So the end of the process is the end of the jail, whoever kills it,
and nothing of it can be left behind. Bind mounts, because hard links cannot cross subvolumes, and
copies (reflinked or not) of the memory file would not share pages between siblings.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opendsec_server.node import syscalls

JAIL_DIR = "jail"
RUN_DIR = "api"
SOCKET_NAME = "api.sock"
MEMORY_POINT = "memory"
_ID_LENGTH_MAX = 64
_TMPFS_SPARE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class JailFile:
    """One file shown in the jail.

    Attributes:
        source: The file.
        name: Its path in the jail, without leading slash; one folder deep at most.
        read_only: Whether the VM may only read it.
    """

    source: Path
    name: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Jail:
    """Where things are.

    Attributes:
        base: The jailer's ``--chroot-base-dir``.
        vm_id: Its ``--id``.
        root: The jail as seen from here, while it is mounted here.
    """

    base: Path
    vm_id: str
    root: Path


def socket_of(run_dir: Path) -> Path:
    """The API's socket, as long as the VM lives."""
    return run_dir / RUN_DIR / SOCKET_NAME


def vm_id_of(sandbox_id: str) -> str:
    """The jailer's rules for ids: letters, digits and hyphens."""
    return re.sub(r"[^0-9A-Za-z-]", "-", sandbox_id)[:_ID_LENGTH_MAX]


def build(run_dir: Path, sandbox_id: str, program: Path, files: list[JailFile]) -> Jail:
    """Mount and fill a jail. Blocks shortly.

    Raises:
        OSError: a file is missing, or the kernel refuses a mount; ``detach`` cleans up.
    """
    base, vm_id = run_dir / JAIL_DIR, vm_id_of(sandbox_id)
    jail = Jail(base, vm_id, base / program.name / vm_id / "root")
    jail.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    run = run_dir / RUN_DIR
    run.mkdir(mode=0o700, exist_ok=True)
    socket_of(run_dir).unlink(missing_ok=True)  # of a start that failed
    size = program.stat().st_size + _TMPFS_SPARE_BYTES
    # Devices must work in it: the jailer makes /dev/kvm there.
    syscalls.mount(
        "tmpfs", str(jail.root), "tmpfs", syscalls.MS_NOSUID, f"mode=0755,size={size},nr_inodes=128"
    )
    # Private, or unmounting the files here would reach the copies in the VM's namespace.
    syscalls.mount("none", str(jail.root), None, syscalls.MS_PRIVATE)
    (jail.root / MEMORY_POINT).mkdir()
    _bind(run, jail.root / "run", read_only=False, directory=True)
    for file in files:
        _bind(file.source, jail.root / file.name, read_only=file.read_only, directory=False)
    return jail


def _bind(source: Path, target: Path, *, read_only: bool, directory: bool) -> None:
    if directory:
        target.mkdir()
    else:
        target.parent.mkdir(exist_ok=True)
        target.touch()
    syscalls.mount(str(source), str(target), None, syscalls.MS_BIND)
    if read_only:
        flags = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID
        syscalls.mount("none", str(target), None, flags)


def detach(run_dir: Path) -> None:
    """Let go of a VM's jail here; the VM, if it runs, keeps it. Idempotent."""
    for root in (run_dir / JAIL_DIR).glob("*/*/root"):
        with contextlib.suppress(OSError):
            if os.path.ismount(root):
                syscalls.umount(str(root))


def show_memory(pid: int, memory: Path) -> None:
    """Make a directory visible to a running VM, as ``/memory`` in its jail. Blocks shortly."""
    tree_fd = syscalls.open_tree_clone(str(memory))
    try:
        with _mount_namespace(pid) as namespace_fd:
            syscalls.in_mount_namespace(
                namespace_fd, lambda: syscalls.move_mount(tree_fd, f"/{MEMORY_POINT}")
            )
    finally:
        os.close(tree_fd)


def hide_memory(pid: int) -> None:
    """Undo ``show_memory``. No error when the VM has ended."""
    with (
        contextlib.suppress(FileNotFoundError, ProcessLookupError),
        _mount_namespace(pid) as namespace_fd,
    ):
        syscalls.in_mount_namespace(namespace_fd, lambda: syscalls.umount(f"/{MEMORY_POINT}"))


@contextlib.contextmanager
def _mount_namespace(pid: int) -> Iterator[int]:
    fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)

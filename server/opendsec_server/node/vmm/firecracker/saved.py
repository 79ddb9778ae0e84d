# SPDX-License-Identifier: AGPL-3.0-only
"""Which file holds a running VM's memory as of its last save, so that the next one writes only
what changed since.

Firecracker counts changed pages from the last time it wrote or loaded memory, whatever that was
for. So the next save must be laid over exactly that file, not over the one that the VM was once
restored from. Its descriptor is kept open: a fork's memory is deleted as soon as its children
run, and can still be the base of the next save.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Literal

import msgspec

from opendsec_server.node.vmm.manifest import Manifest

Since = Literal["boot", "file", "unknown"]

NOTES_FILE = "vm.json"
_FICLONE = 0x40049409


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A file of RAM, known again after a restart of the daemon.

    Attributes:
        path: Where it was.
        inode: Its inode.
        modified_ns: Its time of last change; nobody writes to it afterwards.
    """

    path: str
    inode: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path, fd: int) -> Mark:
        """The mark of an open file."""
        found = os.fstat(fd)
        return cls(path=str(path), inode=found.st_ino, modified_ns=found.st_mtime_ns)


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver must know of a VM that it did not start itself, kept in its ``run_dir``.

    Attributes:
        uid: User of the process.
        gid: Group of the process.
        since: What changed pages are counted from: ``boot`` (everything else is zero), ``file``
            (see ``mark``), or ``unknown`` after a save that broke off.
        mark: With ``file``: which.
        manifest: Of the next save, as far as it is known.
    """

    uid: int
    gid: int
    since: Since
    mark: Mark | None
    manifest: Manifest

    @property
    def ram_bytes(self) -> int:
        """RAM in bytes."""
        return self.manifest.ram_bytes


def read_notes(run_dir: Path) -> Notes:
    """The notes of a VM.

    Raises:
        OSError, msgspec.DecodeError: there are none, or they are damaged.
    """
    return msgspec.json.decode((run_dir / NOTES_FILE).read_bytes(), type=Notes)


def write_notes(run_dir: Path, notes: Notes) -> None:
    """Replace a VM's notes. ``run_dir`` does not outlive the host, so nothing is synced."""
    fresh = run_dir / f"{NOTES_FILE}.new"
    fresh.write_bytes(msgspec.json.encode(notes))
    fresh.replace(run_dir / NOTES_FILE)


class Bases:
    """The open base files of all VMs of this daemon."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def keep(self, run_dir: Path, ram: Path) -> Mark:
        """Keep ``ram`` as the VM's base, instead of the one before.

        Raises:
            OSError: it cannot be opened.
        """
        fd = os.open(ram, os.O_RDONLY | os.O_CLOEXEC)
        self.forget(run_dir)
        self._open[run_dir] = fd
        return Mark.of(ram, fd)

    def find(self, run_dir: Path, mark: Mark) -> int | None:
        """A descriptor of the marked file, which stays ours; None when it does not exist any
        more (only after a restart of the daemon)."""
        fd = self._open.get(run_dir)
        if fd is None:
            try:
                fd = os.open(mark.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
            self._open[run_dir] = fd
        if Mark.of(Path(mark.path), fd) != mark:
            self.forget(run_dir)
            return None
        return fd

    def forget(self, run_dir: Path) -> None:
        """Close a VM's base. Idempotent."""
        fd = self._open.pop(run_dir, None)
        if fd is not None:
            os.close(fd)


def clone_file(source_fd: int, target: Path) -> bool:
    """Make ``target`` share all blocks with a file; False where the file system cannot."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.ioctl(fd, _FICLONE, source_fd)
    except OSError:
        with contextlib.suppress(OSError):
            target.unlink()
        return False
    finally:
        os.close(fd)
    return True

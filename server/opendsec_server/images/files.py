# SPDX-License-Identifier: AGPL-3.0-only
"""Small things done to files, so that a crash leaves the old or the new one."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hex. Blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file, whole or not at all, readable by its owner only."""
    half = path.with_name(f".{path.name}.new")
    fd = os.open(half, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    half.rename(path)


def copy_or_link(source: Path, target: Path) -> None:
    """A hard link where that is possible, else a copy, written out."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError as exc:
        if exc.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        shutil.copyfile(source, target)
        sync(target)


def sync(path: Path) -> None:
    """Have a file's contents on the disk. Blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)

# SPDX-License-Identifier: AGPL-3.0-only
"""Btrfs subvolumes and quotas by ioctl: tens of microseconds each, no program started.

Layouts and numbers are those of ``linux/btrfs.h`` (see btrfs-ioctl in its documentation).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = 0x94
_SUBVOL_NAME_BYTES = 4088
FIRST_FREE_OBJECTID = 256


def _io(direction: int, number: int, size: int) -> int:
    return (direction << 30) | (size << 16) | (_MAGIC << 8) | number


_WRITE, _READ = 1, 2
_SUBVOL_CREATE = _io(_WRITE, 14, 4096)
_SNAP_DESTROY = _io(_WRITE, 15, 4096)
_SNAP_CREATE_V2 = _io(_WRITE, 23, 4096)
_INO_LOOKUP = _io(_READ | _WRITE, 18, 4096)
_FS_INFO = _io(_READ, 31, 1024)
_QUOTA_CTL = _io(_READ | _WRITE, 40, 16)
_QGROUP_CREATE = _io(_WRITE, 42, 16)
_QGROUP_LIMIT = _io(_READ, 43, 48)

_QUOTA_ENABLE = 1
_QUOTA_ENABLE_SIMPLE = 4
_LIMIT_MAX_REFERENCED = 1
_SUBVOL_RDONLY = 1 << 1


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _named(name: str) -> bytearray:
    raw = os.fsencode(name)
    assert len(raw) < _SUBVOL_NAME_BYTES and b"/" not in raw
    # A bytearray, because fcntl.ioctl refuses immutable arguments above 1,024 bytes.
    return bytearray(struct.pack("=q", 0) + raw.ljust(_SUBVOL_NAME_BYTES, b"\0"))


def create_subvolume(parent: Path, name: str) -> None:
    """Make a subvolume.

    Raises:
        FileExistsError: something of that name is there.
    """
    with _opened(parent) as fd:
        fcntl.ioctl(fd, _SUBVOL_CREATE, _named(name))


def snapshot_subvolume(source: Path, parent: Path, name: str, *, read_only: bool) -> None:
    """Make ``parent/name`` hold what ``source`` holds at this instant; the blocks are shared.

    What programs wrote to ``source`` before the call is in it, also if it is only in memory yet.

    Raises:
        FileExistsError: something of that name is there.
    """
    raw = os.fsencode(name)
    with _opened(source) as source_fd, _opened(parent) as fd:
        request = struct.pack(
            "=qQQ4Q", source_fd, 0, _SUBVOL_RDONLY if read_only else 0, 0, 0, 0, 0
        )
        fcntl.ioctl(fd, _SNAP_CREATE_V2, bytearray(request + raw.ljust(4096 - len(request), b"\0")))


def destroy_subvolume(parent: Path, name: str) -> bool:
    """Remove a subvolume with all that is in it; False when there is none."""
    with _opened(parent) as fd:
        try:
            fcntl.ioctl(fd, _SNAP_DESTROY, _named(name))
        except FileNotFoundError:
            return False
    return True


def subvolume_id(path: Path) -> int:
    """Id of a subvolume; its quota group is ``0/<id>``."""
    buffer = bytearray(4096)
    struct.pack_into("=QQ", buffer, 0, 0, FIRST_FREE_OBJECTID)
    with _opened(path) as fd:
        fcntl.ioctl(fd, _INO_LOOKUP, buffer)
    found: int = struct.unpack_from("=Q", buffer)[0]
    return found


def limit_subvolume(path: Path, bytes_max: int) -> None:
    """Limit what a subvolume may hold. Above it, writes fail with EDQUOT."""
    request = struct.pack("=QQQQQQ", 0, _LIMIT_MAX_REFERENCED, bytes_max, 0, 0, 0)
    with _opened(path) as fd:
        fcntl.ioctl(fd, _QGROUP_LIMIT, request)


def remove_qgroup(path: Path, subvolume: int) -> bool:
    """Remove the quota group of a removed subvolume; False when it must wait or is gone.

    Newer kernels do it themselves with the subvolume's last extent.
    """
    with _opened(path) as fd:
        try:
            fcntl.ioctl(fd, _QGROUP_CREATE, struct.pack("=QQ", 0, subvolume))
        except OSError as exc:
            return exc.errno == errno.ENOENT
    return True


def enable_quota(path: Path) -> str:
    """Switch quotas on; returns ``simple`` (kernel 6.7 and later) or ``full``.

    Raises:
        OSError: neither is offered.
    """
    with _opened(path) as fd:
        for kind, command in (("simple", _QUOTA_ENABLE_SIMPLE), ("full", _QUOTA_ENABLE)):
            try:
                fcntl.ioctl(fd, _QUOTA_CTL, struct.pack("=QQ", command, 0))
            except OSError as exc:
                if exc.errno == errno.EEXIST or (kind == "full" and exc.errno == errno.EALREADY):
                    return kind
                if kind == "full":
                    raise
            else:
                return kind
    raise AssertionError


def filesystem_uuid(path: Path) -> str:
    """The file system's UUID, as named under /sys/fs/btrfs."""
    buffer = bytearray(1024)
    with _opened(path) as fd:
        fcntl.ioctl(fd, _FS_INFO, buffer)
    raw = buffer[16:32].hex()
    return f"{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"


def is_btrfs(path: Path) -> bool:
    """Whether ``path`` lies on btrfs."""
    try:
        filesystem_uuid(path)
    except OSError:
        return False
    return True

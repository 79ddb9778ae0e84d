# SPDX-License-Identifier: AGPL-3.0-only
"""Files of saved memory: holes for zero pages, and what of a file is shared with others."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = 4096
DIG_TIMEOUT_S = 120.0
_CHUNK_BYTES = 1024 * 1024
_ZERO_PAGE = bytes(PAGE_BYTES)
_FALLOC_FL_KEEP_SIZE = 0x1
_FALLOC_FL_PUNCH_HOLE = 0x2

_FS_IOC_FIEMAP = 0xC020660B
_FIEMAP_HEADER = struct.Struct("=QQIIII")
_FIEMAP_EXTENT = struct.Struct("=QQQQQIIII")
_FIEMAP_FLAG_SYNC = 0x1
_EXTENT_LAST = 0x1
_EXTENT_SHARED = 0x2000
_EXTENTS_PER_CALL = 512
_CALLS_MAX = 100_000

_libc = ctypes.CDLL(None, use_errno=True)


def own_extents(path: Path) -> list[tuple[int, int]]:
    """Start and length of what a file has on disk and shares with no other file, in bytes. Where
    the file system cannot tell: the whole file."""
    found: list[tuple[int, int]] = []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = 0
        for _ in range(_CALLS_MAX):
            request = bytearray(_FIEMAP_HEADER.size + _EXTENTS_PER_CALL * _FIEMAP_EXTENT.size)
            _FIEMAP_HEADER.pack_into(
                request, 0, start, max(0, size - start), _FIEMAP_FLAG_SYNC, 0, _EXTENTS_PER_CALL, 0
            )
            try:
                fcntl.ioctl(file.fileno(), _FS_IOC_FIEMAP, request)
            except OSError:
                return [(0, size)]
            count = _FIEMAP_HEADER.unpack_from(request)[3]
            last = count == 0
            for number in range(count):
                extent = _FIEMAP_EXTENT.unpack_from(
                    request, _FIEMAP_HEADER.size + number * _FIEMAP_EXTENT.size
                )
                logical, length, flags = extent[0], extent[2], extent[5]
                if not flags & _EXTENT_SHARED:
                    found.append((logical, length))
                start = logical + length
                last = last or bool(flags & _EXTENT_LAST)
            if last or start >= size:
                break
    return found


def own_bytes(path: Path) -> int:
    """Bytes on disk that no other file shares, at most those that it has there at all."""
    return min(sum(length for _, length in own_extents(path)), path.stat().st_blocks * 512)


def dig_holes(path: Path) -> int:
    """Give back the blocks of zero pages, where they are not shared. What the file reads as, and
    its time of change, stay. Blocks.

    Returns:
        Bytes of zero pages that were found.

    Raises:
        OSError: it could not be done, or not within ``DIG_TIMEOUT_S``.
    """
    deadline = time.monotonic() + DIG_TIMEOUT_S
    dug = 0
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.fstat(fd)
        for start, length in own_extents(path):
            for at, size in _zero_runs(fd, start, min(start + length, before.st_size)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no holes within {DIG_TIMEOUT_S:.0f} s: the disk hangs")
                _punch(fd, at, size)
                dug += size
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
    finally:
        os.close(fd)
    return dug


def _zero_runs(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Position and length of runs of zero pages between two positions."""
    for base in range(start, end, _CHUNK_BYTES):
        chunk = os.pread(fd, min(_CHUNK_BYTES, end - base), base)
        run = 0
        for at in range(0, len(chunk), PAGE_BYTES):
            if chunk[at : at + PAGE_BYTES] == _ZERO_PAGE:
                run += PAGE_BYTES
            elif run:
                yield base + at - run, run
                run = 0
        if run:
            yield base + len(chunk) - run, run


def _punch(fd: int, start: int, length: int) -> None:
    result = _libc.fallocate(
        ctypes.c_int(fd),
        ctypes.c_int(_FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE),
        ctypes.c_int64(start),
        ctypes.c_int64(length),
    )
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"punching a hole: {os.strerror(errno)}")

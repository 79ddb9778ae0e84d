# SPDX-License-Identifier: AGPL-3.0-only
"""Files of saved memory: holes for zero pages, and what of a file is shared with others."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from pathlib import Path

from opendsec_server.node.process import run

DIG_BYTES_PER_S_MIN = 50 * 1024 * 1024
DIG_TIMEOUT_S = 30.0
_FS_IOC_FIEMAP = 0xC020660B
_FIEMAP_HEADER = struct.Struct("=QQIIII")
_FIEMAP_EXTENT = struct.Struct("=QQQQQIIII")
_FIEMAP_FLAG_SYNC = 0x1
_EXTENT_LAST = 0x1
_EXTENT_SHARED = 0x2000
_EXTENTS_PER_CALL = 512
_CALLS_MAX = 100_000


async def dig_holes(path: Path) -> int:
    """Give back the blocks of zero pages. What the file reads as, and its time of change, stay.

    Returns:
        Bytes on disk that were freed.

    Raises:
        OSError: it could not be done. ProgramTimeout: the disk is too slow.
    """
    before = await asyncio.to_thread(path.stat)
    timeout_s = DIG_TIMEOUT_S + before.st_size / DIG_BYTES_PER_S_MIN
    done = await run(["fallocate", "--dig-holes", str(path)], timeout_s=timeout_s)
    if done.code != 0:
        raise OSError(f"fallocate --dig-holes failed: {done.output[:500]}")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = await asyncio.to_thread(path.stat)
    return max(0, before.st_blocks - after.st_blocks) * 512


def own_bytes(path: Path) -> int:
    """Bytes on disk that no other file shares. All of them where the file system cannot tell."""
    own = 0
    with path.open("rb") as file:
        start, length = 0, os.fstat(file.fileno()).st_size
        for _ in range(_CALLS_MAX):
            request = bytearray(_FIEMAP_HEADER.size + _EXTENTS_PER_CALL * _FIEMAP_EXTENT.size)
            _FIEMAP_HEADER.pack_into(
                request, 0, start, length, _FIEMAP_FLAG_SYNC, 0, _EXTENTS_PER_CALL, 0
            )
            try:
                fcntl.ioctl(file.fileno(), _FS_IOC_FIEMAP, request)
            except OSError:
                return path.stat().st_blocks * 512
            count = _FIEMAP_HEADER.unpack_from(request)[3]
            if count == 0:
                return own
            for number in range(count):
                extent = _FIEMAP_EXTENT.unpack_from(
                    request, _FIEMAP_HEADER.size + number * _FIEMAP_EXTENT.size
                )
                logical, size, flags = extent[0], extent[2], extent[5]
                own += 0 if flags & _EXTENT_SHARED else size
                start = logical + size
                if flags & _EXTENT_LAST:
                    return own
            length = max(0, os.fstat(file.fileno()).st_size - start)
    return own

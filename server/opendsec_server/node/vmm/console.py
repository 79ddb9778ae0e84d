# SPDX-License-Identifier: AGPL-3.0-only
"""What a VM prints, kept in a memory file that cannot grow.

A guest may print for ever. Writes beyond the end of a memfd that is sealed against growth fail, and
VMMs drop what they cannot write, so the bound holds whether or not the daemon is there. The place
where the writer goes on is part of the open file that both sides share: whenever the daemon looks
and the end is near, it sets that place back to the start, so that the newest output is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from pathlib import Path

CONSOLE_BYTES = 256 * 1024
ERRORS_BYTES = 64 * 1024
TAIL_BYTES = 64 * 1024

_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # no further seals, no shrinking, no growing
_SYS_PIDFD_GETFD = 438

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class BoundedLog:
    """One such file: ``writer`` goes to the program.

    Args:
        reader: Descriptor to read by; closed by ``close``.
        writer: Descriptor whose open file the program shares; closed by ``close``.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    def create(cls, name: str, size: int) -> BoundedLog:
        """A new one of ``size`` bytes; ``name`` shows in the program's /proc/pid/fd.

        Raises:
            OSError: out of memory or descriptors.
        """
        reader = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(reader, size)
            fcntl.fcntl(reader, _F_ADD_SEALS, _SEALS)
            # For writing only: QEMU wants exactly that.
            writer = os.open(f"/proc/self/fd/{reader}", os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(reader)
            raise
        return cls(reader, writer)

    @classmethod
    def of_process(cls, pid: int, name: str) -> BoundedLog | None:
        """The one that a running program writes to; None: it has none, or has ended."""
        folder = Path(f"/proc/{pid}/fd")
        try:
            for entry in folder.iterdir():
                link = entry.readlink().name
                flags = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text().split("flags:")[1]
                writes = int(flags.split()[0], 8) & os.O_ACCMODE == os.O_WRONLY
                if writes and link.removesuffix(" (deleted)") == f"memfd:{name}":
                    return cls._take(pid, int(entry.name))
        except OSError:
            return None
        return None

    @classmethod
    def _take(cls, pid: int, number: int) -> BoundedLog:
        pidfd = os.pidfd_open(pid)
        try:
            writer = _libc.syscall(
                ctypes.c_long(_SYS_PIDFD_GETFD),
                ctypes.c_int(pidfd),
                ctypes.c_int(number),
                ctypes.c_uint(0),
            )
            if writer < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
        finally:
            os.close(pidfd)
        try:
            reader = os.open(f"/proc/self/fd/{writer}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(writer)
            raise
        return cls(reader, writer)

    def tail(self, limit: int = TAIL_BYTES) -> str:
        """The newest output, at most ``limit`` bytes of it."""
        size = os.fstat(self._reader).st_size
        place = os.lseek(self.writer, 0, os.SEEK_CUR)
        data = os.pread(self._reader, size, 0)
        if place > size - size // 4:
            os.lseek(self.writer, 0, os.SEEK_SET)
        newest = (data[place:] + data[:place]).replace(b"\0", b"")[-limit:]
        return newest.decode(errors="replace")

    def close(self) -> None:
        """Let go of it; the program keeps its side."""
        for fd in (self._reader, self.writer):
            with contextlib.suppress(OSError):
                os.close(fd)

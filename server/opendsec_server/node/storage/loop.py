# SPDX-License-Identifier: AGPL-3.0-only
"""Loop devices that go with whoever uses them (loop(4)).

losetup(8) cannot ask for that at once: a daemon that is killed between attaching and mounting
would leave the device behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CHANGE_FD = 0x4C06
_READ_ONLY, _AUTOCLEAR, _DIRECT_IO = 1, 4, 16
_ATTEMPTS_MAX = 64
_CONFIG = struct.Struct("=II 5Q 4I 64s 64s 32s 2Q 8Q")
"""``struct loop_config``: descriptor, block size, ``loop_info64``, room to grow."""


@contextlib.contextmanager
def loop_device(file: Path) -> Iterator[str]:
    """A read-only device on a file. It stays as long as something is mounted from it.

    Raises:
        OSError: the kernel has none, or refuses.
    """
    backing = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with loop_device_on(backing) as path:
            yield path
    finally:
        os.close(backing)


@contextlib.contextmanager
def loop_device_on(backing: int, *, direct_io: bool = False) -> Iterator[str]:
    """``loop_device`` of an open file.

    Args:
        backing: Its descriptor.
        direct_io: Reads go past the file's page cache, and several at once.
    """
    device, path = _attach(backing, _DIRECT_IO if direct_io else 0)
    try:
        yield path
    finally:
        os.close(device)


def change_backing(path: str, backing: int) -> None:
    """Let a read-only device go on with another file of the same length.

    Raises:
        OSError: no such device, or the length differs.
    """
    device = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _LOOP_CHANGE_FD, backing)
    finally:
        os.close(device)


def _attach(backing: int, flags: int) -> tuple[int, str]:
    zeros = (0,) * 5
    config = _CONFIG.pack(
        backing, 0, *zeros, 0, 0, 0, _READ_ONLY | _AUTOCLEAR | flags, b"", b"", b"", 0, 0, *(0,) * 8
    )
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _attempt in range(_ATTEMPTS_MAX):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            device = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as exc:
                os.close(device)
                if exc.errno != errno.EBUSY:  # somebody else was faster
                    raise
            else:
                return device, path
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no free loop device")

# SPDX-License-Identifier: AGPL-3.0-only
"""Writes cpio archives as the kernel unpacks them (format "newc"; the kernel's
``Documentation/driver-api/early-userspace/buffer-format.rst``).

Reproducible: no times, no owners, no inode numbers of the host, names in order.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field

_MAGIC = b"070701"
_TRAILER = "TRAILER!!!"
_ALIGN = 4
_BLOCK = 512


def _pad(data: bytearray, to: int) -> None:
    data.extend(b"\0" * (-len(data) % to))


@dataclass(slots=True)
class Archive:
    """An archive in memory.

    Entries come out in the order of their names, so a directory before what is in it.
    """

    _entries: dict[str, tuple[int, bytes, tuple[int, int]]] = field(default_factory=dict)

    def directory(self, name: str, mode: int = 0o755) -> None:
        """Add a directory. ``name`` has no leading slash."""
        self._entries[name] = (stat.S_IFDIR | mode, b"", (0, 0))

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Add a regular file."""
        self._entries[name] = (stat.S_IFREG | mode, data, (0, 0))

    def character_device(self, name: str, major: int, minor: int, mode: int = 0o600) -> None:
        """Add a device node."""
        self._entries[name] = (stat.S_IFCHR | mode, b"", (major, minor))

    def to_bytes(self) -> bytes:
        """The whole archive."""
        out = bytearray()
        for inode, name in enumerate(sorted(self._entries), start=1):
            mode, data, device = self._entries[name]
            _append(out, inode, name, mode, data, device)
        _append(out, 0, _TRAILER, 0, b"", (0, 0))
        _pad(out, _BLOCK)
        return bytes(out)


def _append(
    out: bytearray, inode: int, name: str, mode: int, data: bytes, device: tuple[int, int]
) -> None:
    links = 2 if stat.S_ISDIR(mode) else 1
    raw_name = name.encode() + b"\0"
    fields = (inode, mode, 0, 0, links, 0, len(data), 0, 0, *device, len(raw_name), 0)
    out += _MAGIC + b"".join(b"%08X" % value for value in fields)
    out += raw_name
    _pad(out, _ALIGN)
    out += data
    _pad(out, _ALIGN)

# SPDX-License-Identifier: AGPL-3.0-only
"""Takes the kernel proper out of a packaged ``vmlinuz``.

Firecracker boots an uncompressed ELF file only, and QEMU starts one faster. The boot header says
where the compressed kernel lies (the kernel's ``Documentation/arch/x86/boot.rst``).
"""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Protocol

from .tools import GuestBuildError, run

_SETUP_SECTORS_AT = 0x1F1
_MAGIC_AT = 0x202
_PROTOCOL_AT = 0x206
_VERSION_AT = 0x20E
_PAYLOAD_AT = 0x248
_PROTOCOL_WITH_PAYLOAD = 0x208
_SECTOR = 512
_SETUP_SECTORS_DEFAULT = 4
_HEADER_BYTES = 0x250
_VERSION_BYTES_MAX = 256
_TIMEOUT_S = 120.0
_SIZE_MAX = 512 * 1024 * 1024


def kernel_release(vmlinuz: bytes) -> str:
    """The release of a kernel, ``6.1.0-57-cloud-amd64``, as ``uname -r`` will say.

    Raises:
        GuestBuildError: not an x86 kernel image.
    """
    _check(vmlinuz)
    (pointer,) = struct.unpack_from("<H", vmlinuz, _VERSION_AT)
    start = pointer + _SECTOR
    text = vmlinuz[start : start + _VERSION_BYTES_MAX].split(b"\0", 1)[0].decode(errors="replace")
    words = text.split()
    if not pointer or not words or "/" in words[0]:
        raise GuestBuildError("the kernel image does not say which version it is")
    return words[0]


def extract_vmlinux(vmlinuz: bytes) -> bytes:
    """The ELF file inside a ``vmlinuz``. Blocks for a second or two.

    Raises:
        GuestBuildError: not an x86 kernel image, or packed in a way that is not known.
    """
    _check(vmlinuz)
    sectors = vmlinuz[_SETUP_SECTORS_AT] or _SETUP_SECTORS_DEFAULT
    offset, length = struct.unpack_from("<II", vmlinuz, _PAYLOAD_AT)
    start = (sectors + 1) * _SECTOR + offset
    payload = vmlinuz[start : start + length]
    if len(payload) != length or not length:
        raise GuestBuildError("the kernel image is cut short")
    unpack = next((unpack for magic, unpack in _UNPACKERS if payload.startswith(magic)), None)
    if unpack is None:
        raise GuestBuildError(f"the kernel is packed in an unknown way (it begins {payload[:6]!r})")
    try:
        elf = unpack(payload)
    except (zlib.error, lzma.LZMAError, OSError, ValueError) as exc:
        raise GuestBuildError(f"the kernel image is damaged: {exc}") from exc
    if not elf.startswith(b"\x7fELF"):
        raise GuestBuildError("what is in the kernel image is no ELF file")
    return elf


def _check(vmlinuz: bytes) -> None:
    if len(vmlinuz) < _HEADER_BYTES or vmlinuz[_MAGIC_AT : _MAGIC_AT + 4] != b"HdrS":
        raise GuestBuildError("not a Linux kernel image for x86 (no boot header)")
    (protocol,) = struct.unpack_from("<H", vmlinuz, _PROTOCOL_AT)
    if protocol < _PROTOCOL_WITH_PAYLOAD:
        raise GuestBuildError("the kernel is too old: its boot header does not name the payload")


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _by_library(make: Callable[[], _Decompressor]) -> Callable[[bytes], bytes]:
    def unpack(payload: bytes) -> bytes:
        decompressor = make()
        elf = decompressor.decompress(payload, _SIZE_MAX)
        if not decompressor.eof:
            raise ValueError("it ends early")
        return elf

    return unpack


def _without_size(payload: bytes) -> bytes:
    """All but gzip is followed by four bytes: the size of what comes out."""
    return payload[:-4]


def _by_program(*argv: str) -> Callable[[bytes], bytes]:
    def unpack(payload: bytes) -> bytes:
        packed = _without_size(payload)
        return run("unpacking the kernel", argv, timeout_s=_TIMEOUT_S, stdin=packed)

    return unpack


_UNPACKERS: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\x1f\x8b", _by_library(lambda: zlib.decompressobj(wbits=31))),
    (b"\xfd7zXZ\0", _by_library(lzma.LZMADecompressor)),
    (b"\x5d\0\0", _by_library(lzma.LZMADecompressor)),
    (b"BZh", _by_library(bz2.BZ2Decompressor)),
    (b"\x02\x21\x4c\x18", _by_program("lz4", "-d", "-c", "-q")),
    (b"\x28\xb5\x2f\xfd", _by_program("zstd", "-d", "-c", "-q")),
)

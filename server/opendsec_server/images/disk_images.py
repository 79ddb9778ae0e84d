# SPDX-License-Identifier: AGPL-3.0-only
"""Disk images on this machine: whole disks that full virtual machines begin as.

::

    images/disks/index.json               name → digest, written whole and renamed into place
    images/disks/<sha256>/disk.raw        the disk, sparse
    images/disks/<sha256>/kernel, initrd  of one that starts without a boot loader
    images/disks/<sha256>/manifest.json   what it is

Kept raw, whatever they were imported as: a sandbox's disk is then a copy that shares blocks, and
no format that a guest could have written is ever parsed by a machine monitor.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from opendsec_server.contract.node import Firmware

from .files import write_atomically

ImportedFormat = Literal["raw", "qcow2"]

DISK_FILE = "disk.raw"
KERNEL_FILE = "kernel"
INITRD_FILE = "initrd"
NAME_RE = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
VIRTUAL_BYTES_MAX = 1 << 40
BOOT_SECTOR_BYTES = 512
CMDLINE_DEFAULT = "root=/dev/vda1 rw console=tty0 console=ttyS0,115200"

_MANIFEST_FILE = "manifest.json"
_BOOT_CODE_BYTES = 440
_BOOT_MARK = b"\x55\xaa"
_QCOW2_MAGIC = b"QFI\xfb"
_SECTOR = 512
_MIB = 1024 * 1024
_INSPECT_TIMEOUT_S = 30
_CONVERT_TIMEOUT_S = 3_600
_HASH_CHUNK_BYTES = 1 << 20
_CPU_LIMIT_S = 30
_MEMORY_LIMIT_BYTES = 1 << 30


class DiskImageError(Exception):
    """An image cannot be imported; the message says why and what to do."""


class DiskImageNotFound(Exception):
    """No disk image of that name is on this machine."""


class DiskImage(msgspec.Struct, kw_only=True, frozen=True):
    """What an imported disk image is.

    Attributes:
        digest: SHA-256 of everything that it is made of, hex.
        virtual_bytes: Size of the disk that the guest sees.
        firmware: How it starts.
        cmdline: Kernel command line of ``direct``; else empty.
        source_format: What was imported.
        created_at: Unix seconds.
    """

    digest: str
    virtual_bytes: int
    firmware: Firmware
    cmdline: str
    source_format: ImportedFormat
    created_at: float

    @property
    def size_mb(self) -> int:
        """Size in MiB, rounded up."""
        return -(-self.virtual_bytes // _MIB)


class DiskImages:
    """The disk images of one node.

    Args:
        root: ``<state_dir>/images``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root / "disks"
        self._index = self._root / "index.json"

    def names(self) -> dict[str, str]:
        """The table of names: name → digest."""
        try:
            return msgspec.json.decode(self._index.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}

    def find(self, name: str) -> DiskImage:
        """The image of a name.

        Raises:
            DiskImageNotFound: none, or its files are gone.
        """
        digest = self.names().get(name)
        if digest is None:
            raise DiskImageNotFound(f"no disk image named {name!r}")
        try:
            raw = (self._root / digest / _MANIFEST_FILE).read_bytes()
        except FileNotFoundError as exc:
            raise DiskImageNotFound(f"the files of disk image {name!r} are missing") from exc
        return msgspec.json.decode(raw, type=DiskImage)

    def disk(self, image: DiskImage) -> Path:
        """Its disk."""
        return self._root / image.digest / DISK_FILE

    def kernel(self, image: DiskImage) -> Path:
        """Its kernel, if it starts by ``direct``."""
        return self._root / image.digest / KERNEL_FILE

    def initrd(self, image: DiskImage) -> Path:
        """Its initial file system; there may be none."""
        return self._root / image.digest / INITRD_FILE

    def add(
        self,
        name: str,
        file: Path,
        *,
        at: float,
        firmware: Firmware | None = None,
        kernel: Path | None = None,
        initrd: Path | None = None,
        cmdline: str | None = None,
    ) -> DiskImage:
        """Import a raw or qcow2 file. Blocks: seconds to minutes.

        The name moves to the new image if it is taken; sandboxes of the old one go on.

        Args:
            name: Lower-case letters, digits, ``-`` and ``_``; at most 63.
            file: The image. It is only read.
            at: Unix seconds, kept.
            firmware: How it starts. None: ``direct`` with a kernel, else ``bios`` if its first
                sector holds a program, else ``uefi``.
            kernel: Kernel of ``direct``.
            initrd: Its initial file system.
            cmdline: Its command line; None: root on the first partition, serial console.

        Raises:
            DiskImageError: a name or file that cannot be taken, or a program that failed.
        """
        if NAME_RE.fullmatch(name) is None:
            raise DiskImageError(
                f"{name!r} is no name for an image: lower-case letters, digits, - and _, "
                "at most 63, beginning with a letter or digit"
            )
        if (firmware == "direct" or firmware is None) and kernel is not None:
            firmware = "direct"
        elif firmware == "direct":
            raise DiskImageError("firmware direct needs a kernel")
        elif kernel is not None or initrd is not None or cmdline is not None:
            raise DiskImageError("kernel, initrd and command line belong to firmware direct")
        with self._locked():
            half = Path(tempfile.mkdtemp(prefix=".new-", dir=self._root))
            try:
                found, virtual_bytes = _convert(file, half / DISK_FILE)
                for source, target in ((kernel, KERNEL_FILE), (initrd, INITRD_FILE)):
                    if source is not None:
                        copy_sparse(source, half / target)
                starts = firmware or _guess_firmware(half / DISK_FILE)
                cmdline = (cmdline or CMDLINE_DEFAULT) if starts == "direct" else ""
                image = DiskImage(
                    digest=_digest(half, starts, cmdline),
                    virtual_bytes=virtual_bytes,
                    firmware=starts,
                    cmdline=cmdline,
                    source_format=found,
                    created_at=at,
                )
                self._keep(name, image, half)
            finally:
                shutil.rmtree(half, ignore_errors=True)
        return image

    def _keep(self, name: str, image: DiskImage, half: Path) -> None:
        target = self._root / image.digest
        if target.exists():
            write_atomically(target / _MANIFEST_FILE, msgspec.json.encode(image))
        else:
            for file in half.iterdir():
                # Read by machine monitors that run as users of their own.
                file.chmod(0o444)
            write_atomically(half / _MANIFEST_FILE, msgspec.json.encode(image))
            half.rename(target)
        names = {**self.names(), name: image.digest}
        write_atomically(self._index, msgspec.json.encode(names))
        for entry in self._root.iterdir():
            if entry.is_dir() and entry.name not in names.values() and entry.name[0] != ".":
                shutil.rmtree(entry, ignore_errors=True)

    def remove(self, name: str) -> bool:
        """Forget a name, and the image's files if it has no other; False: there is none.

        Sandboxes made of it have their own copies of its blocks.
        """
        with self._locked():
            names = self.names()
            digest = names.pop(name, None)
            if digest is None:
                return False
            write_atomically(self._index, msgspec.json.encode(names))
            if digest not in names.values():
                shutil.rmtree(self._root / digest, ignore_errors=True)
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _convert(file: Path, target: Path) -> tuple[ImportedFormat, int]:
    """Write the disk as a sparse raw file; what it was, and its size."""
    try:
        with file.open("rb") as source:
            is_qcow2 = source.read(len(_QCOW2_MAGIC)) == _QCOW2_MAGIC
            size = source.seek(0, os.SEEK_END)
    except OSError as exc:
        raise DiskImageError(f"cannot read {file}: {exc.strerror}") from exc
    if size == 0:
        raise DiskImageError(f"{file} is empty")
    if is_qcow2:
        _check_qcow2(file)
    found: ImportedFormat = "qcow2" if is_qcow2 else "raw"
    if found == "raw":
        copy_sparse(file, target)
    else:
        _qemu_img("convert", "-f", "qcow2", "-O", "raw", str(file), str(target),
                  timeout_s=_CONVERT_TIMEOUT_S)  # fmt: skip
    virtual = target.stat().st_size
    if virtual > VIRTUAL_BYTES_MAX:
        raise DiskImageError(f"{file}: a disk of {virtual >> 30} GiB; at most 1024 GiB")
    if virtual % _SECTOR:
        os.truncate(target, virtual + _SECTOR - virtual % _SECTOR)
    return found, target.stat().st_size


def _check_qcow2(file: Path) -> None:
    """A qcow2 file can name other files of the host to read from: none of those is imported."""
    text = _qemu_img(
        "info", "--output=json", "-f", "qcow2", str(file), timeout_s=_INSPECT_TIMEOUT_S
    )
    try:
        info = json.loads(text)
        virtual, details = int(info["virtual-size"]), info["format-specific"]["data"]
    except (ValueError, KeyError, TypeError) as exc:
        raise DiskImageError(f"{file}: qemu-img says nothing usable of it") from exc
    if "backing-filename" in info or "full-backing-filename" in info:
        raise DiskImageError(
            f"{file} is only the difference to another image. Join them first: "
            "qemu-img convert -O qcow2 FILE WHOLE"
        )
    if "data-file" in details:
        raise DiskImageError(f"{file} keeps its data in another file; convert it first")
    if "encrypt" in details:
        raise DiskImageError(f"{file} is encrypted")
    if virtual > VIRTUAL_BYTES_MAX:
        raise DiskImageError(f"{file}: a disk of {virtual >> 30} GiB; at most 1024 GiB")


def _qemu_img(*arguments: str, timeout_s: float) -> str:
    """With limits on processor time and memory where it only looks: images come from anywhere."""
    argv = ["qemu-img", *arguments]
    if arguments[0] == "info":
        argv = ["prlimit", f"--cpu={_CPU_LIMIT_S}", f"--as={_MEMORY_LIMIT_BYTES}", *argv]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace"
        )
    except FileNotFoundError as exc:
        raise DiskImageError(
            f"{exc.filename} is not installed. Install the package qemu-utils."
        ) from exc
    except subprocess.TimeoutExpired as exc:
        raise DiskImageError(
            f"qemu-img {arguments[0]} was not finished in {timeout_s:.0f} s"
        ) from exc
    if done.returncode != 0:
        raise DiskImageError(f"qemu-img {arguments[0]}: {done.stderr.strip()[-500:]}")
    return done.stdout


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file without its holes, sharing blocks where the file system can. Blocks.

    Raises:
        DiskImageError: it cannot be read, or there is no room.
    """
    done = subprocess.run(
        ["cp", "--sparse=always", "--reflink=auto", "--", str(source), str(target)],
        capture_output=True,
        text=True,
        timeout=_CONVERT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise DiskImageError(f"cannot copy {source}: {done.stderr.strip()[-500:]}")


def _guess_firmware(disk: Path) -> Firmware:
    with disk.open("rb") as file:
        sector = file.read(BOOT_SECTOR_BYTES)
    boots = sector[510:512] == _BOOT_MARK and any(sector[:_BOOT_CODE_BYTES])
    return "bios" if boots else "uefi"


def _digest(directory: Path, *settings: str) -> str:
    digest = hashlib.sha256("\0".join(settings).encode())
    for name in (DISK_FILE, KERNEL_FILE, INITRD_FILE):
        path = directory / name
        digest.update(f"\0{name}\0".encode())
        if not path.exists():
            continue
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()

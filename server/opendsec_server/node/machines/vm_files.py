# SPDX-License-Identifier: AGPL-3.0-only
"""The files of one full virtual machine, all in its subvolume: so a snapshot has everything, and
needs neither the image nor the firmware that the machine was made of."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import msgspec

from opendsec_server.contract.node import Firmware
from opendsec_server.images.disk_images import (
    INITRD_FILE,
    KERNEL_FILE,
    DiskImage,
    DiskImages,
    copy_sparse,
)
from opendsec_server.node.paths import MACHINE_DISK
from opendsec_server.node.storage.reflink import clone_file

FACTS_FILE = "machine.json"
SEED_FILE = "seed.iso"
VARIABLES_FILE = "uefi-variables.fd"
BOOT_SERIAL = "disk"
SEED_SERIAL = "seed"


class Facts(msgspec.Struct, kw_only=True, frozen=True):
    """What must be known of a machine to start it again.

    Attributes:
        image: Digest of the disk image that it began as.
        firmware: How it starts.
        cmdline: Kernel command line of ``direct``.
        data_disks: How many disks it has beside the first.
    """

    image: str
    firmware: Firmware
    cmdline: str
    data_disks: int


def data_disk(number: int) -> str:
    """File and serial of a further disk; the first is 1."""
    return f"data{number}"


def write_facts(folder: Path, facts: Facts) -> None:
    """Keep them in the machine's subvolume."""
    (folder / FACTS_FILE).write_bytes(msgspec.json.encode(facts))


def read_facts(folder: Path) -> Facts:
    """Those of the machine whose subvolume this is.

    Raises:
        OSError, msgspec.MsgspecError: it has none.
    """
    return msgspec.json.decode((folder / FACTS_FILE).read_bytes(), type=Facts)


class DiskBases:
    """Disk images inside the disk pool, where machines' disks can share their blocks.

    Args:
        root: Their directory in the pool.
        images: Where they come from.
    """

    def __init__(self, root: Path, images: DiskImages) -> None:
        self._root = root
        self._images = images
        self._lock = threading.Lock()

    def clone(self, image: DiskImage, folder: Path, name: str, size_bytes: int) -> None:
        """Make a disk that begins as an image, and is as large as is asked for. Blocks; the first
        time for the image it is copied, later its blocks are shared.

        Raises:
            OSError, DiskImageError: the disk is full, or the image's files are gone.
        """
        base = self._base(image)
        clone_file(base / MACHINE_DISK, folder / name)
        if size_bytes > image.virtual_bytes:
            with (folder / name).open("r+b") as file:
                file.truncate(size_bytes)

    def clone_kernel(self, image: DiskImage, folder: Path) -> None:
        """The same for kernel and initial file system."""
        base = self._base(image)
        for name in (KERNEL_FILE, INITRD_FILE):
            if (base / name).exists():
                clone_file(base / name, folder / name)
                # QEMU opens these by name once more, as a user of its own.
                (folder / name).chmod(0o444)

    def _base(self, image: DiskImage) -> Path:
        with self._lock:
            base = self._root / image.digest
            if not base.is_dir():
                self._make(image, base)
        return base

    def _make(self, image: DiskImage, base: Path) -> None:
        half = base.with_suffix(".new")
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(mode=0o700, parents=True)
        try:
            copy_sparse(self._images.disk(image), half / MACHINE_DISK)
            for source, name in (
                (self._images.kernel(image), KERNEL_FILE),
                (self._images.initrd(image), INITRD_FILE),
            ):
                if source.exists():
                    copy_sparse(source, half / name)
            half.rename(base)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise

    def sweep(self) -> None:
        """Remove those whose image is gone. Machines made of them keep their blocks."""
        if not self._root.is_dir():
            return
        with self._lock:
            wanted = set(self._images.names().values())
            for entry in self._root.iterdir():
                if entry.name not in wanted:
                    shutil.rmtree(entry, ignore_errors=True)

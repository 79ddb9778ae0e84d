# SPDX-License-Identifier: AGPL-3.0-only
"""Which modules a guest's kernel needs to reach its disks and its network, and in which order."""

from __future__ import annotations

import gzip
import lzma
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .tools import GuestBuildError, run

REQUIRED = ("virtio_mmio", "virtio_blk", "virtio_net", "erofs", "ext4", "overlay")
"""Without one of these no sandbox runs. They may be built in."""

OPTIONAL = (
    "virtio_pci", "virtio_rng", "virtio_balloon", "virtio_console", "vmgenid", "crc32c_generic",
    "af_packet", "rtc_cmos", "nd_virtio", "virtio_pmem", "nd_pmem", "dax",
)  # fmt: skip
"""Taken where the kernel has them: balloon, console and persistent memory of some VMMs."""

_KEPT = (
    "arch", "block", "crypto", "fs", "lib", "mm", "net", "security", "virt",
    "drivers/block", "drivers/char", "drivers/dax", "drivers/md", "drivers/net",
    "drivers/nvdimm", "drivers/vhost", "drivers/virtio",
)  # fmt: skip
"""What a guest can use: containers and their networks, file systems. Hardware is left out."""

_LEFT_OUT = (
    "drivers/net/arcnet", "drivers/net/can", "drivers/net/dsa", "drivers/net/ethernet",
    "drivers/net/fddi", "drivers/net/hamradio", "drivers/net/hyperv", "drivers/net/ieee802154",
    "drivers/net/mdio", "drivers/net/pcs", "drivers/net/phy", "drivers/net/usb",
    "drivers/net/wan", "drivers/net/wireless", "drivers/net/wwan", "net/bluetooth", "net/mac80211",
    "net/wireless",
)  # fmt: skip

_TABLES = ("modules.builtin", "modules.builtin.modinfo", "modules.order")
_SUFFIXES = (".ko", ".ko.xz", ".ko.zst", ".ko.gz")
_TOOL_TIMEOUT_S = 120.0
_LAYER_OPTIONS = (
    "-zlz4hc,9", "-C65536", "-T0", "--all-root", "-U0d5ec000-0000-4000-8000-000000000002",
)  # fmt: skip


def _name(path: str) -> str:
    base = path.rpartition("/")[2]
    for suffix in _SUFFIXES:
        if base.endswith(suffix):
            return base.removesuffix(suffix).replace("-", "_")
    raise GuestBuildError(f"{path} is no kernel module")


def load_order(modules_dir: Path) -> list[Path]:
    """Files of the modules that a guest loads, each after those it needs.

    Args:
        modules_dir: ``/lib/modules/<version>`` with the tables of depmod(8).

    Raises:
        GuestBuildError: the kernel lacks a module that is required, or its tables are not there.
    """
    try:
        dependencies = (modules_dir / "modules.dep").read_text()
        builtin = (modules_dir / "modules.builtin").read_text()
    except OSError as exc:
        raise GuestBuildError(f"the kernel's modules are not complete: {exc}") from exc
    built_in = {_name(line) for line in builtin.split()}
    needs: dict[str, list[str]] = {}
    path_of: dict[str, str] = {}
    for line in dependencies.splitlines():
        path, _, needed = line.partition(":")
        path_of[_name(path)] = path
        needs[_name(path)] = [_name(other) for other in needed.split()]
    missing = [name for name in REQUIRED if name not in path_of and name not in built_in]
    if missing:
        raise GuestBuildError(
            f"the kernel in {modules_dir} lacks {', '.join(missing)}. Set guest_kernel_path to a "
            "distribution kernel for virtual machines."
        )
    order: list[str] = []
    for name in (*REQUIRED, *OPTIONAL):
        if name in path_of:
            # The table names what is needed with the innermost last.
            order += [*reversed(needs[name]), name]
    return [modules_dir / path_of[name] for name in dict.fromkeys(order)]


def boot_modules(modules_dir: Path) -> dict[str, bytes]:
    """Modules for the initramfs: file name (``03-virtio_blk.ko``, in the order of loading) and
    uncompressed content.

    Raises:
        GuestBuildError: as ``load_order``; a file is damaged or cannot be unpacked.
    """
    found = {}
    for index, path in enumerate(load_order(modules_dir)):
        found[f"{index:02d}-{_name(path.name)}.ko"] = _unpacked(path)
    return found


def _unpacked(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        if path.suffix == ".xz":
            raw = lzma.decompress(raw)
        elif path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, lzma.LZMAError) as exc:
        raise GuestBuildError(f"the module {path} cannot be read: {exc}") from exc
    if path.suffix == ".zst":
        what = f"unpacking {path.name}"
        raw = run(what, ["zstd", "-d", "-c", "-q"], timeout_s=_TOOL_TIMEOUT_S, stdin=raw)
    if not raw.startswith(b"\x7fELF"):
        raise GuestBuildError(f"the module {path} is damaged")
    return raw


@dataclass(slots=True)
class ModuleTree:
    """A ``lib/modules/<version>`` below a folder of its own, as depmod(8) wants it."""

    root: Path
    version: str
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.root / "lib/modules" / self.version
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Newer depmod looks below /usr.
        (self.root / "usr").mkdir(exist_ok=True)
        usr_lib = self.root / "usr/lib"
        if not usr_lib.is_symlink():
            usr_lib.symlink_to("../lib")

    def index(self) -> None:
        """Make the tables.

        Raises:
            GuestBuildError: depmod is not there or failed.
        """
        argv: list[str | Path] = ["depmod", "-b", self.root, self.version]
        run("listing the kernel's modules", argv, timeout_s=_TOOL_TIMEOUT_S)


def pack_modules(source: Path, version: str, scratch: Path, image: Path) -> None:
    """Make the EROFS image that a guest mounts at ``/lib/modules/<version>``.

    Args:
        source: The kernel's whole modules directory.
        version: The kernel's release.
        scratch: Empty folder to work in.
        image: File to make.

    Raises:
        GuestBuildError: a program is not there or failed.
    """
    tree = ModuleTree(scratch, version)
    tree.path.mkdir()
    for part in _KEPT:
        if (source / "kernel" / part).is_dir():
            target = tree.path / "kernel" / part
            copy = _link_or_copy()
            shutil.copytree(
                source / "kernel" / part,
                target,
                copy_function=copy,
                ignore=_ignore(source / "kernel"),
            )
    for name in _TABLES:
        if (source / name).is_file():
            shutil.copyfile(source / name, tree.path / name)
    tree.index()
    argv: list[str | Path] = ["mkfs.erofs", *_LAYER_OPTIONS, image, tree.path]
    run("packing the kernel's modules", argv, timeout_s=_TOOL_TIMEOUT_S)


def _ignore(kernel: Path) -> Callable[[str, list[str]], list[str]]:
    left_out = {kernel / part for part in _LEFT_OUT}

    def ignore(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder) / name in left_out]

    return ignore


def _link_or_copy() -> Callable[[str, str], None]:
    def place(source: str, target: str) -> None:
        try:
            Path(target).hardlink_to(source)
        except OSError:
            shutil.copyfile(source, target)

    return place

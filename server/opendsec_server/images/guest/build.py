# SPDX-License-Identifier: AGPL-3.0-only
"""Makes what a microVM boots, once, and keeps it.

::

    images/guest/kernels/<release>-<hash>/     vmlinuz, vmlinux, modules.erofs, boot/, kernel.json
    images/guest/<release>-<agent's hash>/     vmlinuz, vmlinux, modules.erofs, initramfs.cpio,
                                               guest.json
    images/guest/.lock                         one builder at a time, across processes

Both are made under a temporary name and renamed. A new agent gets a new initramfs, and that is
when a newer kernel of the distribution is taken; until then the kernel stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from opendsec_server.config import Config
from opendsec_server.images.files import sha256_of

from . import package
from .cpio import Archive
from .modules import boot_modules, pack_modules
from .tools import GuestBuildError, Progress
from .vmlinux import extract_vmlinux, kernel_release

T = TypeVar("T", bound=msgspec.Struct)

FORMAT = 1
"""Raise it when something changes what comes out of the same kernel and agent."""

_KERNEL_FILES = ("vmlinuz", "vmlinux", "modules.erofs")
_CONFIGURED = "guest_kernel_path"
_INITRAMFS = "initramfs.cpio"
_BOOT_MODULES = "boot"
_AGENT_HASH_SHOWN = 12
_KERNEL_HASH_SHOWN = 8
_LOCK_TIMEOUT_S = 1_800.0
_LOCK_PAUSE_S = 0.1
_KEPT = 2
"""Guests kept: the one in use, and the one before it (a daemon may be rolled back)."""


@dataclass(frozen=True, slots=True)
class GuestImage:
    """What a microVM boots.

    Attributes:
        kernel: ``vmlinuz``, as packaged.
        kernel_elf: The same, uncompressed.
        initramfs: The agent and the modules it loads, uncompressed cpio.
        modules_erofs: The kernel's modules for ``modprobe``: the disk ``modules``.
        kernel_version: Release, as ``uname -r`` says.
        agent_sha256: Of the agent inside.
    """

    kernel: Path
    kernel_elf: Path
    initramfs: Path
    modules_erofs: Path
    kernel_version: str
    agent_sha256: str


class _KernelRecord(msgspec.Struct, kw_only=True, frozen=True):
    """``kernel.json``."""

    format: int
    release: str
    source: str
    vmlinuz_sha256: str
    created_at: float


class _GuestRecord(msgspec.Struct, kw_only=True, frozen=True):
    """``guest.json``."""

    format: int
    release: str
    source: str
    vmlinuz_sha256: str
    agent_sha256: str
    created_at: float


async def ensure_guest(
    config: Config, images_dir: Path, agent: Path, progress: Progress | None = None
) -> GuestImage:
    """Have the guest of microVMs; make it if it is not there (seconds; needs the distribution's
    archive the first time). Concurrent calls, also of other processes, make it once.

    Args:
        config: ``guest_kernel_path``.
        images_dir: ``<state_dir>/images``.
        agent: The guest agent's binary.
        progress: Gets one line for people at each stage; called from a thread.

    ``OPENDSEC_IMAGE_CACHE`` names a directory where kernels are kept and found again by any
    instance.

    Raises:
        GuestBuildError: it is not there and cannot be made (a ``ConfigError``).
    """
    return await asyncio.to_thread(
        _ensure, config, images_dir / "guest", agent, progress or _silent
    )


def _silent(_line: str) -> None:
    """Nobody watches."""


def _ensure(config: Config, root: Path, agent: Path, progress: Progress) -> GuestImage:
    if platform.machine() != "x86_64":
        raise GuestBuildError(
            f"microVMs need an x86-64 machine, this is {platform.machine()}. Use the backend "
            "container."
        )
    try:
        agent_sha256 = sha256_of(agent)
    except OSError as exc:
        raise GuestBuildError(f"cannot read the guest agent {agent}: {exc.strerror}") from exc
    wanted = _configured_sha256(config)
    found = _find(root, agent_sha256, wanted)
    if found is not None:
        return found
    try:
        with _locked(root):
            found = _find(root, agent_sha256, wanted)
            if found is None:
                found = _build(config, root, agent, agent_sha256, progress)
                _prune(root, found)
            return found
    except OSError as exc:
        raise GuestBuildError(f"making the guest of microVMs in {root}: {exc}") from exc


def _configured_sha256(config: Config) -> str | None:
    if config.guest_kernel_path is None:
        return None
    try:
        return sha256_of(Path(config.guest_kernel_path))
    except OSError as exc:
        raise GuestBuildError(
            f"guest_kernel_path: cannot read {config.guest_kernel_path}: {exc.strerror}"
        ) from exc


def _find(root: Path, agent_sha256: str, vmlinuz_sha256: str | None) -> GuestImage | None:
    """The newest finished guest of this agent, and of the configured kernel if there is one."""
    best: tuple[float, GuestImage] | None = None
    for path in root.glob("*/guest.json"):
        record = _read(path, _GuestRecord)
        if record is None or record.format != FORMAT or record.agent_sha256 != agent_sha256:
            continue
        if vmlinuz_sha256 is None and record.source == _CONFIGURED:
            continue
        if vmlinuz_sha256 is not None and record.vmlinuz_sha256 != vmlinuz_sha256:
            continue
        if best is None or record.created_at > best[0]:
            best = (record.created_at, _image(path.parent, record))
    return None if best is None else best[1]


def _image(folder: Path, record: _GuestRecord) -> GuestImage:
    return GuestImage(
        kernel=folder / "vmlinuz",
        kernel_elf=folder / "vmlinux",
        initramfs=folder / _INITRAMFS,
        modules_erofs=folder / "modules.erofs",
        kernel_version=record.release,
        agent_sha256=record.agent_sha256,
    )


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise GuestBuildError(
                        f"another process makes the guest of microVMs in {root} and does not end"
                    ) from None
                time.sleep(_LOCK_PAUSE_S)
        yield


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build(
    config: Config, root: Path, agent: Path, agent_sha256: str, progress: Progress
) -> GuestImage:
    for leftover in root.glob(".new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    began = time.monotonic()
    progress("Making the guest of microVMs (once per version)")
    kernel = _kernel(config, root / "kernels", progress)
    record = _read(kernel / "kernel.json", _KernelRecord)
    if record is None:
        raise GuestBuildError(f"{kernel} is damaged: remove it")
    guest = _GuestRecord(
        format=FORMAT,
        release=record.release,
        source=record.source,
        vmlinuz_sha256=record.vmlinuz_sha256,
        agent_sha256=agent_sha256,
        created_at=time.time(),
    )
    target = root / f"{record.release}-{agent_sha256[:_AGENT_HASH_SHOWN]}"
    with _scratch(root) as half:
        for name in _KERNEL_FILES:
            _place(kernel / name, half / name)
        _write(half / _INITRAMFS, _initramfs(agent, kernel / _BOOT_MODULES))
        _write(half / "guest.json", msgspec.json.encode(guest))
        _publish(half, target)
    image = _image(target, guest)
    size = (image.kernel.stat().st_size + image.initramfs.stat().st_size) >> 20
    progress(
        f"guest kernel {record.release} is ready: {size} MiB, {time.monotonic() - began:.0f} s"
    )
    return image


def _initramfs(agent: Path, modules: Path) -> bytes:
    """The agent as ``/init``, the modules it loads, and the places where it mounts.

    Not compressed: it is small, and unpacking costs an emulated processor more than reading.
    """
    archive = Archive()
    for name in ("dev", "modules", "newroot", "proc", "sys"):
        archive.directory(name)
    archive.character_device("dev/console", 5, 1)
    archive.character_device("dev/null", 1, 3, 0o666)
    archive.file("init", agent.read_bytes(), 0o755)
    names = sorted(path.name for path in modules.iterdir())
    for name in names:
        archive.file(f"modules/{name}", (modules / name).read_bytes())
    archive.file("modules.list", "".join(f"{name}\n" for name in names).encode())
    return archive.to_bytes()


def _kernel(config: Config, kernels: Path, progress: Progress) -> Path:
    """The folder of the kernel to use, made if need be."""
    kernels.mkdir(mode=0o700, exist_ok=True)
    if config.guest_kernel_path is not None:
        tree = package.configured(Path(config.guest_kernel_path))
        return _keep_kernel(tree, kernels, _CONFIGURED, progress)
    cache = os.environ.get("OPENDSEC_IMAGE_CACHE")
    stores = [kernels] if cache is None else [kernels, Path(cache) / "guest/kernels"]
    with _scratch(kernels) as scratch:
        try:
            return _packaged_kernel(scratch, stores, progress)
        except GuestBuildError as exc:
            kept = _newest_kernel(stores)
            if kept is None:
                raise
            progress(f"keeping the kernel that is there: {exc}")
            return _into(kept, kernels)


def _packaged_kernel(scratch: Path, stores: list[Path], progress: Progress) -> Path:
    found = package.find_package(scratch, fresh=False)
    for attempt in ("host", "fresh"):
        source = f"{found.name}={found.version}"
        for store in stores:
            kept = _kernel_of(store, source)
            if kept is not None:
                return _into(kept, stores[0])
        folder = scratch / attempt
        folder.mkdir()
        try:
            tree = package.fetch(found, folder, progress)
        except GuestBuildError:
            if attempt == "fresh":
                raise
            # The host's lists may name a version that the archive has no more.
            found = package.find_package(scratch, fresh=True)
            continue
        if len(stores) == 1:
            return _keep_kernel(tree, stores[0], source, progress)
        with _locked(stores[1]):
            kept = _keep_kernel(tree, stores[1], source, progress)
        return _into(kept, stores[0])
    raise AssertionError("unreachable")


def _kernel_of(store: Path, source: str) -> Path | None:
    for path in store.glob("*/kernel.json"):
        record = _read(path, _KernelRecord)
        if record is not None and record.format == FORMAT and record.source == source:
            return path.parent
    return None


def _newest_kernel(stores: list[Path]) -> Path | None:
    found = []
    for store in stores:
        for path in store.glob("*/kernel.json"):
            record = _read(path, _KernelRecord)
            if record is None or record.format != FORMAT or record.source == _CONFIGURED:
                continue
            found.append((record.created_at, path.parent))
    return max(found)[1] if found else None


def _keep_kernel(tree: package.KernelTree, kernels: Path, source: str, progress: Progress) -> Path:
    """Take a kernel into a store."""
    vmlinuz = tree.vmlinuz.read_bytes()
    release = kernel_release(vmlinuz)
    if release != tree.release:
        raise GuestBuildError(f"{tree.vmlinuz} is {release} and not {tree.release}")
    digest = hashlib.sha256(vmlinuz).hexdigest()
    target = kernels / f"{release}-{digest[:_KERNEL_HASH_SHOWN]}"
    record = _read(target / "kernel.json", _KernelRecord)
    if record is not None and record.format == FORMAT and record.source == source:
        return target
    progress(f"unpacking the kernel {release} and packing its modules")
    with _scratch(kernels) as half, _scratch(kernels) as work:
        _write(half / "vmlinuz", vmlinuz)
        _write(half / "vmlinux", extract_vmlinux(vmlinuz))
        (half / _BOOT_MODULES).mkdir()
        for name, data in boot_modules(tree.modules_dir).items():
            _write(half / _BOOT_MODULES / name, data)
        pack_modules(tree.modules_dir, release, work, half / "modules.erofs")
        made = _KernelRecord(
            format=FORMAT,
            release=release,
            source=source,
            vmlinuz_sha256=digest,
            created_at=time.time(),
        )
        _write(half / "kernel.json", msgspec.json.encode(made))
        _publish(half, target)
    return target


def _into(kept: Path, kernels: Path) -> Path:
    """The kernel in this store; taken from another one if need be."""
    if kept.parent == kernels:
        return kept
    target = kernels / kept.name
    if _read(target / "kernel.json", _KernelRecord) is None:
        with _scratch(kernels) as half:
            shutil.copytree(kept, half, copy_function=_place, dirs_exist_ok=True)
            _publish(half, target)
    return target


def _place(source: str | Path, target: str | Path) -> None:
    """The same file at another place: linked where that is possible."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _publish(half: Path, target: Path) -> None:
    """Rename a finished folder into place, for good also after a power cut."""
    half.chmod(0o755)
    if target.exists():
        # Of another format, or damaged.
        shutil.rmtree(target)
    half.rename(target)
    fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _prune(root: Path, used: GuestImage) -> None:
    """Remove guests and kernels that no daemon will start again. Running VMs have theirs loaded."""
    records = []
    for path in root.glob("*/guest.json"):
        record = _read(path, _GuestRecord)
        if record is None or record.format != FORMAT:
            shutil.rmtree(path.parent, ignore_errors=True)
        elif path.parent != used.kernel.parent:
            records.append((record.created_at, path.parent))
    for _, folder in sorted(records, reverse=True)[_KEPT - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)
    needed = {
        record.vmlinuz_sha256
        for path in root.glob("*/guest.json")
        if (record := _read(path, _GuestRecord)) is not None
    }
    for path in (root / "kernels").glob("*/kernel.json"):
        kernel = _read(path, _KernelRecord)
        if kernel is None or kernel.vmlinuz_sha256 not in needed:
            shutil.rmtree(path.parent, ignore_errors=True)

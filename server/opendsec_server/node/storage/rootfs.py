# SPDX-License-Identifier: AGPL-3.0-only
"""A sandbox's root file system: overlay of read-only layers and its own subvolume.

Both sides are handed to the overlay as id-mapped mounts, so that files carry ids 0..65535 on
disk whatever id range the sandbox runs in. The overlay is ``volatile``: a running sandbox's disk
does not survive a crash of the host anyway, so fsync need not reach the device. A pause and a
snapshot write everything out themselves.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from opendsec_server.node import syscalls

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_FILE_BYTES_MAX = 64 * 1024

HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{name}\n"


def prepare_upper(disk: Path, *, hostname: str, resolvers: tuple[str, ...]) -> None:
    """Lay out a fresh subvolume and write the files that name the sandbox.

    They are ordinary files of the writable layer: programs in the sandbox may change them.
    """
    (disk / "work").mkdir(mode=0o700)
    upper = disk / "upper"
    upper.mkdir()
    upper.chmod(0o755)
    etc = upper / "etc"
    etc.mkdir()
    etc.chmod(0o755)
    _write(etc / "hostname", f"{hostname}\n")
    _write(etc / "hosts", HOSTS.format(name=hostname))
    lines = "".join(f"nameserver {ip}\n" for ip in resolvers)
    _write(etc / "resolv.conf", f"{lines}options timeout:2 attempts:3\n")


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        os.fchmod(fd, 0o644)
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def rename_host(upper: Path, *, old: str, new: str) -> None:
    """Give a copied disk its own host name, where the files still have the old one.

    The tree was written by a hostile root: every step refuses links, and only plain files that
    have no other name are replaced.
    """
    try:
        etc = os.open(upper / "etc", _DIRECTORY)
    except OSError:
        return
    try:
        for name in ("hostname", "hosts"):
            _replace_word(etc, name, old, new)
    finally:
        os.close(etc)


def _replace_word(directory: int, name: str, old: str, new: str) -> None:
    try:
        fd = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
        )
    except OSError:
        return
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _NAME_FILE_BYTES_MAX:
            return
        text = os.read(fd, _NAME_FILE_BYTES_MAX)
    finally:
        os.close(fd)
    if old.encode() not in text:
        return
    os.unlink(name, dir_fd=directory)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=directory)
    try:
        os.fchown(fd, info.st_uid, info.st_gid)
        os.fchmod(fd, stat.S_IMODE(info.st_mode) & 0o777)
        os.write(fd, text.replace(old.encode(), new.encode()))
    finally:
        os.close(fd)


def forget_last_mount(disk: Path) -> None:
    """Let a disk be mounted again: a ``volatile`` overlay leaves a mark in its work directory.

    The mark warns of lost writes. There are none: we wrote everything out before we unmounted.
    """
    work = disk / "work"
    if (work / "work").exists():
        shutil.rmtree(work)
        work.mkdir(mode=0o700)


def mount_rootfs(
    layers: list[Path], disk: Path, bundle: Path, userns_fd: int | None, id_base: int
) -> Path:
    """Mount the overlay at ``bundle/rootfs`` in the daemon's namespace.

    Args:
        layers: Mounted read-only layers, the topmost first.
        disk: The prepared subvolume.
        bundle: Existing directory of the sandbox.
        userns_fd: Id map; None: ids are taken as they are.
        id_base: Host id of the sandbox's root; 0 without a map.

    Raises:
        OSError: the kernel refused; nothing stays mounted but what ``unmount_rootfs`` removes.
    """
    rootfs = bundle / "rootfs"
    rootfs.mkdir()
    with contextlib.ExitStack() as held:
        if userns_fd is None:
            *lowers, writable = [_by_descriptor(path, held) for path in (*layers, disk)]
            _mount_overlay(rootfs, lowers, writable, id_base)
            return rootfs
        copies = [_mapped_copy(path, userns_fd, held) for path in (*layers, disk)]
        try:
            *lowers, writable = [Path(f"/proc/self/fd/{fd}") for fd in copies]
            _mount_overlay(rootfs, lowers, writable, id_base)
        except OSError as exc:
            # Before Linux 6.15 the parts of an overlay must be attached somewhere.
            if exc.errno != errno.EINVAL:
                raise
            *lowers, writable = [
                _attached(fd, bundle / f"part{index}", held) for index, fd in enumerate(copies)
            ]
            _mount_overlay(rootfs, lowers, writable, id_base)
    return rootfs


def _mount_overlay(rootfs: Path, lowers: list[Path], writable: Path, id_base: int) -> None:
    options = (
        f"lowerdir={':'.join(map(str, lowers))},upperdir={writable}/upper,"
        f"workdir={writable}/work,volatile"
    )
    # The overlay works with the ids of who mounts it; those must exist in the id map.
    with syscalls.file_system_ids(id_base, id_base):
        syscalls.mount("overlay", str(rootfs), "overlay", syscalls.MS_NODEV, options)


def _mapped_copy(source: Path, userns_fd: int, held: contextlib.ExitStack) -> int:
    """A detached copy of the mount at ``source``, seen through the id map. The overlay keeps its
    own reference, so the copy is only needed while the overlay is being made."""
    tree_fd = syscalls.open_tree_clone(str(source))
    held.callback(os.close, tree_fd)
    syscalls.idmap_mount(tree_fd, userns_fd)
    return tree_fd


def _attached(tree_fd: int, target: Path, held: contextlib.ExitStack) -> Path:
    """The copy attached at ``target`` until the stack unwinds."""
    target.mkdir()
    syscalls.move_mount(tree_fd, str(target))
    held.callback(_drop, target)
    return _by_descriptor(target, held)


def _by_descriptor(path: Path, held: contextlib.ExitStack) -> Path:
    """A short name of a directory: the options of a mount have room for 4096 characters, and an
    overlay has up to 64 layers."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    held.callback(os.close, fd)
    return Path(f"/proc/self/fd/{fd}")


def _drop(target: Path) -> None:
    syscalls.umount(str(target))
    target.rmdir()


def unmount_rootfs(bundle: Path) -> None:
    """Detach whatever is mounted below a bundle. The container keeps its own copy. Idempotent."""
    if not bundle.is_dir():
        return
    for entry in bundle.iterdir():
        if entry.is_dir() and os.path.ismount(entry):
            syscalls.umount(str(entry))

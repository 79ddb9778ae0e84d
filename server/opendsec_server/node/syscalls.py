# SPDX-License-Identifier: AGPL-3.0-only
"""The few system calls that Python does not offer, by ctypes.

Numbers are those of the generic table, equal on x86_64 and arm64. Every function raises
``OSError`` with the kernel's errno. See mount_setattr(2), open_tree(2), move_mount(2),
setns(2), unshare(2), prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_MOUNT_SETATTR = 442

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_FS = 0x00000200

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 0x2

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 0x1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOUNT_ATTR_IDMAP = 0x00100000

_PR_SET_CHILD_SUBREAPER = 36


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _check(result: int, what: str) -> int:
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces named by ``flags`` for fresh ones (this thread only)."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    """Join the namespace behind ``fd`` (this thread only)."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, fstype: str | None, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    _check(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            os.fsencode(fstype) if fstype else None,
            ctypes.c_ulong(flags),
            data.encode() if data else None,
        ),
        f"mount {fstype or ''} {source} on {target}",
    )


def umount(target: str, flags: int = MNT_DETACH) -> None:
    """umount2(2); detaches by default."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), f"umount {target}")


def open_tree_clone(path: str) -> int:
    """A file descriptor of a detached copy of the mount at ``path``."""
    return _check(
        _libc.syscall(
            ctypes.c_long(_SYS_OPEN_TREE),
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC),
        ),
        f"open_tree {path}",
    )


def move_mount(mount_fd: int, target: str) -> None:
    """Attach a detached mount at ``target``."""
    _check(
        _libc.syscall(
            ctypes.c_long(_SYS_MOVE_MOUNT),
            ctypes.c_int(mount_fd),
            ctypes.c_char_p(b""),
            ctypes.c_int(_AT_FDCWD),
            ctypes.c_char_p(os.fsencode(target)),
            ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
        ),
        f"move_mount to {target}",
    )


def idmap_mount(mount_fd: int, userns_fd: int) -> None:
    """Map the ids of a detached mount through a user namespace."""
    attr = _MountAttr(_MOUNT_ATTR_IDMAP, 0, 0, userns_fd)
    _check(
        _libc.syscall(
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            ctypes.c_int(mount_fd),
            ctypes.c_char_p(b""),
            ctypes.c_uint(_AT_EMPTY_PATH),
            ctypes.byref(attr),
            ctypes.c_size_t(ctypes.sizeof(attr)),
        ),
        "mount_setattr",
    )


def syncfs(fd: int) -> None:
    """Write out everything of the file system that ``fd`` is on (syncfs(2))."""
    _check(_libc.syncfs(fd), "syncfs")


def set_child_subreaper() -> None:
    """Orphaned descendants become children of this process, so that it learns how they ended."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


_CAPABILITY_VERSION_3 = 0x20080522


@contextlib.contextmanager
def file_system_ids(uid: int, gid: int) -> Iterator[None]:
    """Use other ids for file access in this thread, but keep root's capabilities.

    setfsuid(2) away from 0 drops the file capabilities from the effective set; they are put
    back from the permitted one.
    """
    _libc.setfsgid(ctypes.c_uint(gid))
    _libc.setfsuid(ctypes.c_uint(uid))
    try:
        header = _CapHeader(_CAPABILITY_VERSION_3, 0)
        data = (_CapData * 2)()
        _check(_libc.capget(ctypes.byref(header), data), "capget")
        for word in data:
            word.effective = word.permitted
        _check(_libc.capset(ctypes.byref(header), data), "capset")
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint(0))
        _libc.setfsgid(ctypes.c_uint(0))


def in_mount_namespace(namespace_fd: int, function: Callable[[], T]) -> T:
    """Run ``function`` in another mount namespace and return its result. Blocks.

    setns(2) refuses a mount namespace to a thread that shares its file system attributes, and
    the change cannot be undone cleanly; so a thread of its own is used and thrown away.
    """
    done: Future[T] = Future()

    def body() -> None:
        try:
            unshare(CLONE_FS)
            setns(namespace_fd, CLONE_NEWNS)
            done.set_result(function())
        except BaseException as exc:
            done.set_exception(exc)

    thread = Thread(target=body, name="opendsec-setns", daemon=True)
    thread.start()
    thread.join()
    return done.result()

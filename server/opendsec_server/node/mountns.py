# SPDX-License-Identifier: AGPL-3.0-only
"""The daemon's own mount namespace.

Why: overlays of sandboxes must not show up on the host; a mount table of constant length keeps
creates fast with a thousand sandboxes live (each new mount namespace copies its parent's table);
and crun 1.8 refuses hosts with hybrid cgroups as long as it sees ``/sys/fs/cgroup/unified``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from opendsec_server.images.store import LAYER_FILE

from . import syscalls
from .paths import POOL_IMAGE_NAME, POOL_NAME

T = TypeVar("T")

_HYBRID_UNIFIED = "/sys/fs/cgroup/unified"

_host_namespace_fd: int | None = None


def enter_private_mount_namespace() -> None:
    """Give this process its own mount namespace; call it once, before any thread starts.

    Mounts made on the host later still arrive here where the host's tree is shared.

    Raises:
        OSError: not root, or the kernel refuses.
    """
    global _host_namespace_fd
    if _host_namespace_fd is not None:
        return
    _host_namespace_fd = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    if os.path.ismount(_HYBRID_UNIFIED):
        syscalls.umount(_HYBRID_UNIFIED)
    _drop_copies()


def _drop_copies() -> None:
    """Let go of every node's pool and layers that came along with the copy of the mount table.

    Where the host's tree is not shared, the copies would keep another instance's pool busy after
    it was unmounted. This node shows itself its own again (``show_here``).
    """
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point, source = Path(left.split()[4]), right.split()[1]
        is_pool = point.name == POOL_NAME and (point.parent / POOL_IMAGE_NAME).exists()
        if is_pool or source.endswith(f"/{LAYER_FILE}"):
            syscalls.umount(str(point))


def is_private() -> bool:
    """Whether this process has left the host's mount namespace."""
    return _host_namespace_fd is not None


def on_host(function: Callable[[], T]) -> T:
    """Run ``function`` in the namespace the daemon was started in, here called the host's: for
    mounts that must outlive the daemon. Blocks.

    A service manager must not give the daemon a mount namespace of its own (systemd: no
    ``PrivateMounts``, ``PrivateTmp``, ``ProtectSystem`` and the like), or they do not.
    """
    if _host_namespace_fd is None:
        return function()
    return syscalls.in_mount_namespace(_host_namespace_fd, function)


def show_here(target: Path) -> None:
    """Make the host's mount at ``target`` visible in this namespace as well."""
    if not is_private() or os.path.ismount(target):
        return
    tree_fd = on_host(lambda: syscalls.open_tree_clone(str(target)))
    try:
        syscalls.move_mount(tree_fd, str(target))
    finally:
        os.close(tree_fd)


def make_directory(path: Path) -> None:
    """Make a mount point."""
    path.mkdir(mode=0o700, exist_ok=True)


def is_mounted_on_host(target: Path) -> bool:
    """Whether something is mounted at ``target`` on the host."""
    return on_host(lambda: os.path.ismount(target))


def unmount_everywhere(target: Path) -> None:
    """Detach the mount at ``target`` here and on the host. Idempotent."""

    def detach() -> None:
        if os.path.ismount(target):
            syscalls.umount(str(target))

    detach()
    on_host(detach)

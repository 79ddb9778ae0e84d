# SPDX-License-Identifier: AGPL-3.0-only
"""Whether this kernel can give each sandbox its own user ids."""

from __future__ import annotations

import os
from pathlib import Path

from opendsec_server.node import syscalls
from opendsec_server.node.paths import NodePaths


def user_namespaces_usable(paths: NodePaths) -> bool:
    """Whether user namespaces exist and mounts of the pool can be id-mapped: tried, not guessed.

    The attempt needs no real map: a refusal for lack of support comes before the map is looked
    at, and the initial namespace is refused with EPERM only where the feature exists.
    """
    if not Path("/proc/self/ns/user").exists() or _zero("/proc/sys/user/max_user_namespaces"):
        return False
    try:
        tree_fd = syscalls.open_tree_clone(str(paths.disks))
    except OSError:
        return False
    userns_fd = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.idmap_mount(tree_fd, userns_fd)
    except PermissionError:
        return True
    except OSError:
        return False
    finally:
        os.close(userns_fd)
        os.close(tree_fd)
    return True


def _zero(path: str) -> bool:
    try:
        return Path(path).read_text().strip() == "0"
    except OSError:
        return False

# SPDX-License-Identifier: AGPL-3.0-only
"""Which control groups this host has."""

from __future__ import annotations

from pathlib import Path

from opendsec_server.config import ConfigError
from opendsec_server.node import mountns

from .base import CgroupSet
from .v1 import CgroupV1
from .v2 import CgroupV2

_NEEDED_V1 = ("memory", "cpu", "cpuacct", "pids")


def host_mount_table() -> str:
    """The host's mount table; the daemon hides parts of it from itself."""
    return mountns.on_host(Path("/proc/thread-self/mountinfo").read_text)


def detect(root: str, mount_table: str) -> CgroupSet:
    """The host's control groups.

    Args:
        root: The instance's parent group.
        mount_table: Text of a ``mountinfo`` file, see proc(5).

    Raises:
        ConfigError: a controller that limits need is not mounted.
    """
    unified: Path | None = None
    controllers: dict[str, Path] = {}
    for line in mount_table.splitlines():
        left, _, right = line.partition(" - ")
        point = Path(left.split()[4])
        kind, _source, options = right.split()[:3]
        if kind == "cgroup2":
            unified = point
        elif kind == "cgroup":
            for option in options.split(","):
                controllers[option] = point
    if all(name in controllers for name in _NEEDED_V1):
        known = {
            name: point
            for name, point in controllers.items()
            if point.is_dir() and (name.startswith("name=") or name not in ("rw", "ro"))
        }
        return CgroupV1(root, known, hybrid=unified is not None)
    if unified is not None:
        return CgroupV2(root, unified)
    raise ConfigError(
        "no usable control groups: neither version 2 nor the controllers "
        f"{', '.join(_NEEDED_V1)} of version 1 are mounted"
    )

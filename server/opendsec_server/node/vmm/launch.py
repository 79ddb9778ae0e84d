# SPDX-License-Identifier: AGPL-3.0-only
"""Starts a VMM: our child, in the VM's namespace and groups, never as root, with nothing open but
what it is given.

``opendsec-ram exec`` does what must happen between fork and exec, and becomes the VMM.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from opendsec_server.binaries import find_ram

FIRST_FD = 3
_ABOVE = 256
"""Descriptors are moved up here first, so that placing one never overwrites another."""


class Descriptors:
    """Open files for a program, numbered from ``FIRST_FD``; a context manager that closes ours."""

    def __init__(self) -> None:
        self._ours: list[int] = []
        self._reserved: set[int] = set()

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_exc: object) -> None:
        for fd in self._ours:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def add(self, fd: int) -> int:
        """Give the program a copy of ``fd``; returns its number there."""
        self._ours.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE))
        return FIRST_FD + len(self._ours) - 1

    def open(self, path: Path, flags: int) -> int:
        """Open a file for the program; returns its number there. Raises ``OSError``."""
        fd = os.open(path, flags | os.O_CLOEXEC)
        try:
            return self.add(fd)
        finally:
            os.close(fd)

    def reserve(self) -> int:
        """A number that ``opendsec-ram exec`` itself fills."""
        self._ours.append(-1)
        return FIRST_FD + len(self._ours) - 1

    def actions(self) -> list[tuple[int, int, int]]:
        """For posix_spawn(3)."""
        return [
            (os.POSIX_SPAWN_DUP2, fd, FIRST_FD + index)
            for index, fd in enumerate(self._ours)
            if fd >= 0
        ]


def launch(
    argv: Sequence[str],
    descriptors: Descriptors,
    *,
    netns: int,
    tap: tuple[str, int],
    cgroups: Sequence[Path],
    uid: int,
    gid: int,
    groups: Sequence[int],
    output_fd: int,
    errors_fd: int,
) -> int:
    """Start it; returns its pid.

    Args:
        argv: The VMM's path and arguments.
        descriptors: What it gets.
        netns: Number there of the network namespace's descriptor; closed before the VMM runs.
        tap: Name of the tap, and the (reserved) number there that the VMM gets it at.
        cgroups: Directories of control groups to join.
        uid: User.
        gid: Group.
        groups: Further groups.
        output_fd: Its standard output.
        errors_fd: Its standard error.

    Raises:
        OSError: it cannot be started.
    """
    helper = str(find_ram())
    command = [helper, "exec", "--netns", str(netns), "--tap", f"{tap[0]}={tap[1]}"]
    command += ["--uid", str(uid), "--gid", str(gid)]
    for group in groups:
        command += ["--group", str(group)]
    for cgroup in cgroups:
        command += ["--cgroup", str(cgroup)]
    return os.posix_spawn(
        helper,
        [*command, "--", *argv],
        {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output_fd, 1),
            (os.POSIX_SPAWN_DUP2, errors_fd, 2),
            *descriptors.actions(),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)],
    )

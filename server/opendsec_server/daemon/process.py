# SPDX-License-Identifier: AGPL-3.0-only
"""Identity of processes that outlive us: pid files that a recycled pid cannot fool."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec

from opendsec_server.node.process import start_ticks_of


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process is the same one only if pid and start time both match (proc(5), field 22)."""

    pid: int
    start_ticks: int


def identity_of(pid: int) -> ProcessIdentity | None:
    """The identity of a living process."""
    ticks = start_ticks_of(pid)
    return None if ticks is None else ProcessIdentity(pid, ticks)


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still lives."""
    return start_ticks_of(identity.pid) == identity.start_ticks


def write_identity(path: Path, identity: ProcessIdentity) -> None:
    """Write a pid file, atomically, readable by its owner only."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(identity))
    temporary.chmod(0o600)
    temporary.replace(path)


def read_identity(path: Path) -> ProcessIdentity | None:
    """The living process that a pid file names. None: no file, malformed, or gone."""
    try:
        identity = msgspec.json.decode(path.read_bytes(), type=ProcessIdentity)
    except (OSError, msgspec.DecodeError):
        return None
    return identity if is_alive(identity) else None


def stop_process(identity: ProcessIdentity, *, grace_s: float) -> bool:
    """Send SIGTERM, wait, then SIGKILL. Uses a pidfd, so a recycled pid is never hit.

    Returns:
        True if it ended by itself within ``grace_s``.
    """
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return True
    try:
        if not is_alive(identity):
            return True
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while time.monotonic() < until:
            if not is_alive(identity):
                return True
            time.sleep(0.02)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for _ in range(250):
            if not is_alive(identity):
                break
            time.sleep(0.02)
        return False
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)

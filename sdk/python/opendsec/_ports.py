# SPDX-License-Identifier: Apache-2.0
"""Which TCP ports are listened on, read from the kernel's tables (``man 5 proc``, ``net/tcp``)."""

from __future__ import annotations

LISTENERS_COMMAND = ("/bin/cat", "/proc/net/tcp", "/proc/net/tcp6")

_LISTEN_STATE = "0A"


def is_listening(tables: str, port: int) -> bool:
    """Whether a line of ``/proc/net/tcp`` or ``tcp6`` is a listener on ``port``."""
    wanted = f"{port:04X}"
    for line in tables.splitlines():
        fields = line.split()
        if (
            len(fields) > 3
            and fields[3] == _LISTEN_STATE
            and fields[1].rpartition(":")[2] == wanted
        ):
            return True
    return False

# SPDX-License-Identifier: AGPL-3.0-only
"""What a guest prints on its serial console, and Firecracker on its own account: the end of it.

Firecracker's output is a named pipe that never blocks it and that the daemon empties as it fills.
So whatever a guest prints costs at most one pipe and ``KEPT_BYTES`` of memory; a file would grow
for ever, or would keep the beginning instead of the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

KEPT_BYTES = 64 * 1024
PIPE_NAME = "console"
_READ_BYTES = 64 * 1024


class _Console:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.kept = bytearray()

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, _READ_BYTES)
            self.kept += data
            if len(self.kept) > KEPT_BYTES:
                del self.kept[: len(self.kept) - KEPT_BYTES]


class Consoles:
    """The consoles of all VMs of this daemon."""

    def __init__(self) -> None:
        self._open: dict[Path, _Console] = {}

    def open(self, run_dir: Path) -> int:
        """Make or reopen a VM's pipe and keep it empty from now on.

        Returns:
            A descriptor for the VMM's output. It stays ours: a process that is started with it
            gets its own copy.
        """
        known = self._open.get(run_dir)
        if known is not None:
            return known.fd
        path = run_dir / PIPE_NAME
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Opened for both, so that it has a reader and a writer whoever else is there: Firecracker
        # meets neither SIGPIPE nor an end, and a full pipe makes it drop output instead of wait.
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        console = self._open[run_dir] = _Console(fd)
        asyncio.get_running_loop().add_reader(fd, console.drain)
        return fd

    def tail(self, run_dir: Path) -> str:
        """The last ``KEPT_BYTES`` as text; empty when the VM is not known."""
        console = self._open.get(run_dir)
        if console is None:
            return ""
        console.drain()
        return console.kept.decode(errors="replace")

    def close(self, run_dir: Path) -> None:
        """Forget a VM's console. Idempotent."""
        console = self._open.pop(run_dir, None)
        if console is None:
            return
        with contextlib.suppress(RuntimeError):  # no loop runs any more
            asyncio.get_running_loop().remove_reader(console.fd)
        os.close(console.fd)

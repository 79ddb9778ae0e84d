# SPDX-License-Identifier: Apache-2.0
"""A program on a terminal in the sandbox, joined to the terminal here."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from opendsec import OpendsecError, Pty, Sandbox

from . import _exit

READ_BYTES = 16 * 1024
SIZE_UNKNOWN = (80, 24)
"""Taken for a terminal that does not tell its size, such as a serial line."""
_RESIZE = b"w"
_STOP = b"q"


def interactive(
    sandbox: Sandbox,
    command: Sequence[str] | None,
    *,
    user: str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> int:
    """Run until the program ends; return its exit code. The terminal is always restored."""
    if not os.isatty(0):
        raise _exit.Refused("standard input is not a terminal; leave out -t.")
    size = cols, rows = _size()
    term = os.environ.get("TERM", "xterm-256color")
    pty = sandbox.pty(
        command,
        cols=cols,
        rows=rows,
        user=user,
        cwd=cwd,
        env={"TERM": term, **(env or {})},
        timeout_s=timeout_s,
    )
    with pty, _raw_mode(), _keyboard(pty, size):
        for event in pty:
            _write_all(event.data)
    result = pty.result
    assert result is not None
    return result.exit_code


def _size() -> tuple[int, int]:
    """Columns and rows of the terminal itself. ``COLUMNS`` and ``LINES`` are not asked: whoever
    exported them does not change them when the window changes."""
    cols, rows = os.get_terminal_size(0)
    return (cols, rows) if cols and rows else SIZE_UNKNOWN


@contextmanager
def _raw_mode() -> Iterator[None]:
    """Every key goes to the sandbox, Ctrl-C too; undone in every case."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # The default would throw away what was typed ahead.
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextmanager
def _keyboard(pty: Pty, size: tuple[int, int]) -> Iterator[None]:
    """Send keys and window sizes from a thread of their own while the block reads output.

    Args:
        pty: Where to.
        size: What it has been told.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)

    def on_resize(number: int, frame: FrameType | None) -> None:
        # No network call here: the interrupted code may hold the connection pool's lock.
        with suppress(BlockingIOError):  # Then a wake-up is waiting already.
            os.write(wake_write, _RESIZE)

    thread = threading.Thread(
        target=_send_keys, args=(pty, wake_read), name="opendsec-keyboard", daemon=True
    )
    before = signal.signal(signal.SIGWINCH, on_resize)
    if _size() != size:  # It changed before there was someone to hear of it.
        os.write(wake_write, _RESIZE)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.set_blocking(wake_write, True)
        os.write(wake_write, _STOP)
        thread.join(1.0)
        if not thread.is_alive():
            os.close(wake_read)
            os.close(wake_write)


def _send_keys(pty: Pty, wake_read: int) -> None:
    try:
        while True:
            ready, _, _ = select.select([0, wake_read], [], [])
            if wake_read in ready:
                wakes = os.read(wake_read, READ_BYTES)
                if _STOP in wakes:
                    return
                pty.resize(*_size())
            if 0 in ready:
                keys = os.read(0, READ_BYTES)
                if not keys:
                    return
                pty.write(keys)
    except OpendsecError:
        return  # The program has ended, or the output side reports the lost connection.


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    fd = sys.stdout.fileno()
    while view:
        view = view[os.write(fd, view) :]

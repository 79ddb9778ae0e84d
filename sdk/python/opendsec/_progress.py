# SPDX-License-Identifier: Apache-2.0
"""How far many things are, on one line for people."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24
INTERVAL_S = 0.1


class ProgressBar:
    """Draws itself anew, at most ten times a second; nothing where nobody looks.

    Args:
        total: How many there will be.
        stream: Where to draw. None: standard error, if it is a terminal.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = stream or (sys.stderr if sys.stderr.isatty() else None)
        self._started = time.monotonic()
        self._drawn = 0.0
        self._first: int | None = None

    def update(self, good: int, failed: int) -> None:
        """So many are done by now."""
        if self._first is None:
            self._first = good + failed
        now = time.monotonic()
        if self._stream is not None and now - self._drawn >= INTERVAL_S:
            self._drawn = now
            self._draw(good, failed, now)

    def finish(self, good: int, failed: int) -> None:
        """Draw the end, and leave the line."""
        if self._stream is not None:
            self._draw(good, failed, time.monotonic())
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, good: int, failed: int, now: float) -> None:
        assert self._stream is not None
        done = good + failed
        share = done / self._total if self._total else 1.0
        bar = "#" * int(share * WIDTH)
        rate = (done - (self._first or 0)) / max(now - self._started, 0.001)
        text = f"[{bar:<{WIDTH}}] {done}/{self._total}, {rate:.0f}/s"
        if failed:
            text += f", {failed} failed"
        self._stream.write(f"\r{text}\x1b[K")
        self._stream.flush()

# SPDX-License-Identifier: Apache-2.0
"""Bounded collection of a command's output."""

from __future__ import annotations

import codecs


class BoundedBuffer:
    """Keeps the first ``limit_bytes`` of what is written to it, and knows if more came."""

    def __init__(self, limit_bytes: int) -> None:
        self._chunks: list[bytes] = []
        self._room_bytes = limit_bytes
        self.truncated = False

    def write(self, data: bytes) -> None:
        """Keep as much of ``data`` as there is room for."""
        if len(data) > self._room_bytes:
            self.truncated = True
            data = data[: self._room_bytes]
        if data:
            self._chunks.append(data)
            self._room_bytes -= len(data)

    def getvalue(self) -> bytes:
        """What was kept."""
        return b"".join(self._chunks)

    def text(self) -> str:
        """What was kept, as text; what is not UTF-8 becomes U+FFFD."""
        return self.getvalue().decode("utf-8", "replace")


class TextDecoder:
    """Turns a byte stream into text without breaking characters that span two chunks."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Text that is complete after ``data``; may be empty."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What an unfinished character at the end becomes."""
        return self._decoder.decode(b"", final=True)

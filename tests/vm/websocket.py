# SPDX-License-Identifier: AGPL-3.0-only
"""As much of a WebSocket client (RFC 6455) as looking at a console needs."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import struct
import time

_BINARY, _CLOSE, _PING = 0x2, 0x8, 0x9


class Refused(Exception):
    """The answer to the handshake was no 101; its first line and body."""


class WebSocket:
    """One connection; a context manager.

    Args:
        address: Host and port, as in ``127.0.0.1:80``.
        path: What to ask for.
        headers: Sent with the handshake.
        timeout_s: For every wait.
    """

    def __init__(
        self, address: str, path: str, headers: dict[str, str], timeout_s: float = 30
    ) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._received = b""
        self.data = bytearray()
        key = base64.b64encode(os.urandom(16)).decode()
        fields = {
            "Host": address,
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": key,
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._socket.sendall(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        while b"\r\n\r\n" not in self._received:
            self._receive()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101"):
            self._socket.settimeout(1)
            with contextlib.suppress(OSError, EOFError):
                self._receive()
            self._socket.close()
            raise Refused(f"{head.splitlines()[0].decode()}: {self._received.decode()}")

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def _receive(self) -> None:
        block = self._socket.recv(65_536)
        if not block:
            raise EOFError("the server closed the connection")
        self._received += block

    def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            self._receive()
        taken, self._received = self._received[:count], self._received[count:]
        return taken

    def send(self, data: bytes) -> None:
        """One binary message of less than 64 KiB."""
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))
        head = bytes([0x80 | _BINARY])
        if len(data) < 126:
            head += bytes([0x80 | len(data)])
        else:
            head += bytes([0x80 | 126]) + struct.pack(">H", len(data))
        self._socket.sendall(head + mask + masked)

    def read(self, count: int) -> bytes:
        """Exactly so many bytes of data, whatever messages they come in.

        Raises:
            EOFError: the other end has closed.
        """
        while len(self.data) < count:
            self._message()
        taken = bytes(self.data[:count])
        del self.data[:count]
        return taken

    def until(self, wanted: bytes, within_s: float) -> bytes:
        """All data up to and with ``wanted``.

        Raises:
            TimeoutError: it did not come in time.
            EOFError: the other end has closed.
        """
        deadline = time.monotonic() + within_s
        while wanted not in self.data:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no {wanted!r} in {bytes(self.data[-500:])!r}")
            self._socket.settimeout(left_s)
            self._message()
        return self.read(self.data.index(wanted) + len(wanted))

    def _message(self) -> None:
        first, second = self._take(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack(">H", self._take(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", self._take(8))
        payload = self._take(length)
        if first & 0xF == _CLOSE:
            raise EOFError("the server closed the WebSocket")
        if first & 0xF != _PING:
            self.data += payload

# SPDX-License-Identifier: AGPL-3.0-only
"""The connection to a worker's front: through the guest agent's tunnel, then frames.

A frame is the length of a JSON head and of a body (4 bytes each, big-endian), then both.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec

from opendsec_server.contract.errors import FunctionWorkerLost
from opendsec_server.contract.node import Route

CONNECT_TIMEOUT_S = 10.0
HEAD_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 64 << 20
_SIZES = struct.Struct("!II")
_BROKEN = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError,
           ValueError, IndexError, RecursionError, msgspec.DecodeError)  # fmt: skip
"""What a broken connection or a malformed frame raises."""

_heads = msgspec.json.Decoder(dict[str, Any])


class Link:
    """Frames to and from a worker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, route: Route, port: int, secret: str) -> Link:
        """Connect to a port on the loopback of a sandbox, and show that it is us.

        Raises:
            FunctionWorkerLost: nothing listens there, or the agent does not answer.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(route.address, route.agent_port)
                link = cls(reader, writer)
                try:
                    writer.write(
                        f"GET /opendsec/tunnel?port={port} HTTP/1.1\r\nHost: {route.address}\r\n"
                        f"X-Opendsec-Control: {route.control_token}\r\nConnection: Upgrade\r\n"
                        "Upgrade: opendsec-tunnel\r\n\r\n".encode()
                    )
                    head = await reader.readuntil(b"\r\n\r\n")
                    if int(head.split(b" ", 2)[1]) != 101:
                        raise ValueError("the agent refused the tunnel")
                    writer.write(secret.encode())
                except BaseException:
                    link.close()
                    raise
        except _BROKEN as exc:
            raise FunctionWorkerLost(f"the worker does not answer: {exc!r}") from exc
        return link

    def send(self, head: dict[str, Any], *body: bytes) -> None:
        """Send a frame; it is buffered as long as the worker does not read."""
        text = msgspec.json.encode(head)
        sizes = _SIZES.pack(len(text), sum(len(part) for part in body))
        self._writer.writelines((sizes, text, *body))

    async def receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """The next frame.

        Raises:
            FunctionWorkerLost: the connection ended, a frame makes no sense, or none came in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                head_len, body_len = _SIZES.unpack(await self._reader.readexactly(_SIZES.size))
                if head_len > HEAD_BYTES_MAX or body_len > BODY_BYTES_MAX:
                    raise ValueError("a frame of absurd size")
                head = _heads.decode(await self._reader.readexactly(head_len))
                body = await self._reader.readexactly(body_len) if body_len else b""
        except _BROKEN as exc:
            raise FunctionWorkerLost(f"the worker went away: {exc!r}") from exc
        return head, body

    def close(self) -> None:
        """End the connection; the worker ends with it."""
        self._writer.close()

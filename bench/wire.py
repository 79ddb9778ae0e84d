# SPDX-License-Identifier: AGPL-3.0-only
"""A small HTTP/1.1 client over asyncio streams, so that the client is not what is measured."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any


class Connection:
    """One keep-alive connection."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> tuple[int, bytes]:
        """Send one request, read the whole answer."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self.host, self.port)
        assert self._reader is not None
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append(f"Content-Length: {len(body)}")
        self._writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + body)
        status, answer_headers = await _read_head(self._reader)
        return status, await _read_body(self._reader, status, answer_headers)

    async def close(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.close()
            self._reader = self._writer = None


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
    return int(head[0].split()[1]), {name.lower(): value for name, value in headers.items()}


async def _read_body(reader: asyncio.StreamReader, status: int, headers: dict[str, str]) -> bytes:
    if status == 204:
        return b""
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    parts = []
    while True:
        size = int((await reader.readline()).strip() or b"0", 16)
        chunk = await reader.readexactly(size + 2)
        if size == 0:
            return b"".join(parts)
        parts.append(chunk[:-2])


def start_request(command: str) -> bytes:
    """The framed body of process.Process/Start for a command."""
    message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", command]}}).encode()
    return struct.pack(">BI", 0, len(message)) + message


def end_event(body: bytes) -> dict[str, Any]:
    """The end event of a framed answer. Raises if the stream did not end well."""
    offset, end = 0, None
    while offset < len(body):
        flags, size = struct.unpack_from(">BI", body, offset)
        message = json.loads(body[offset + 5 : offset + 5 + size])
        offset += 5 + size
        if flags & 2:
            if "error" in message:
                raise RuntimeError(f"stream error: {message['error']}")
        elif "end" in message.get("event", {}):
            end = message["event"]["end"]
    if end is None:
        raise RuntimeError("no end event")
    return dict(end)


def basic(user: str) -> str:
    """Authorization header value that names a user."""
    return "Basic " + base64.b64encode(f"{user}:".encode()).decode()

# SPDX-License-Identifier: AGPL-3.0-only
"""Firecracker's API: small JSON requests over HTTP/1.1 on a Unix socket, one connection each."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import msgspec

from opendsec_server.node.http_answer import read_answer

_ANSWER_BYTES_MAX = 256 * 1024
CALL_TIMEOUT_S = 10.0
"""Bound on a request that only changes settings."""


class ApiError(Exception):
    """Firecracker refused a request, or did not answer.

    Attributes:
        refused: It answered, with the reason that is this error's text.
    """

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class _Fault(msgspec.Struct):
    fault_message: str = ""


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect whatever the path's length: a socket's address holds 107 bytes only."""
    folder_fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # Connecting to a Unix socket never waits, unless its queue is full: then EAGAIN.
            channel.connect(f"/proc/self/fd/{folder_fd}/{path.name}")
        except BaseException:
            channel.close()
            raise
    finally:
        os.close(folder_fd)
    return await asyncio.open_unix_connection(sock=channel, limit=_ANSWER_BYTES_MAX)


async def can_connect(path: Path) -> bool:
    """Whether something listens there."""
    try:
        _reader, writer = await _connect(path)
    except OSError:
        return False
    writer.close()
    return True


async def _exchange(path: Path, method: str, target: str, body: bytes) -> tuple[int, bytes]:
    reader, writer = await _connect(path)
    try:
        writer.write(
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return await read_answer(reader, _ANSWER_BYTES_MAX)
    finally:
        writer.close()


async def call(
    path: Path,
    method: str,
    target: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float = CALL_TIMEOUT_S,
) -> bytes:
    """One request.

    Args:
        path: The API's socket.
        method: HTTP method.
        target: Resource, such as ``/vm``.
        body: Encoded as JSON; None: empty.
        timeout_s: Bound on the whole exchange.

    Returns:
        The answer's body.

    Raises:
        ApiError: refused, or no proper answer in time.
    """
    data = b"" if body is None else msgspec.json.encode(body)
    try:
        async with asyncio.timeout(timeout_s):
            status, answer = await _exchange(path, method, target, data)
    except TimeoutError as exc:
        raise ApiError(
            f"Firecracker did not answer {method} {target} within {timeout_s:.0f} s", refused=False
        ) from exc
    except (OSError, asyncio.IncompleteReadError, ValueError, IndexError) as exc:
        raise ApiError(
            f"Firecracker broke off at {method} {target}: {exc!r}", refused=False
        ) from exc
    if status >= 300:
        try:
            text = msgspec.json.decode(answer, type=_Fault).fault_message
        except msgspec.DecodeError:
            text = answer.decode(errors="replace")
        raise ApiError(f"Firecracker refused {method} {target}: {text[:1_000]}", refused=True)
    return answer

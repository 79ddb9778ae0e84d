# SPDX-License-Identifier: AGPL-3.0-only
"""QEMU's control protocol (QMP), as far as the driver needs it.

Own code, since the driver must pass descriptors (``add-fd``), bounds every wait and every answer,
and connects anew for each operation; the published client does none of these. A VM that misbehaves
can at most make its own operation fail.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

ANSWER_BYTES_MAX = 1024 * 1024
_RECEIVE_BYTES = 64 * 1024
_CONNECT_PAUSE_S = 0.005
_LINES_PER_COMMAND_MAX = 1_000


class QmpError(Exception):
    """QEMU refused a command, answered nonsense, did not answer in time, or is gone."""


class Qmp:
    """One connection; an async context manager.

    QEMU serves one client at a time: a second one waits until the first has left.

    Args:
        socket_path: Where QEMU listens.
        timeout_s: The most that connecting, or any one command, may take.
    """

    def __init__(self, socket_path: Path, timeout_s: float) -> None:
        self._path = socket_path
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._received = bytearray()

    async def __aenter__(self) -> Qmp:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connect()
                await self._message()
        except (OSError, TimeoutError) as exc:
            self._socket.close()
            raise QmpError(f"QEMU does not answer: {exc!r}") from exc
        except BaseException:
            self._socket.close()
            raise
        try:
            await self.execute("qmp_capabilities")
        except BaseException:
            self._socket.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    async def _connect(self) -> None:
        # Through the directory's descriptor: the path may be longer than a socket address.
        folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            address = f"/proc/self/fd/{folder}/{self._path.name}"
            while True:
                # QEMU lets few wait. A full queue is EAGAIN here, which asyncio takes for "under
                # way". The caller bounds the time.
                try:
                    self._socket.connect(address)
                except BlockingIOError:
                    await asyncio.sleep(_CONNECT_PAUSE_S)
                else:
                    return
        finally:
            os.close(folder)

    async def execute(self, command: str, *, fds: tuple[int, ...] = (), **arguments: Any) -> Any:
        """Run a command and return its answer.

        Args:
            command: Its name.
            fds: Descriptors that go with it.
            arguments: As QEMU names them, with ``_`` for ``-``.

        Raises:
            QmpError: see there.
        """
        request: dict[str, Any] = {"execute": command}
        if arguments:
            request["arguments"] = {k.replace("_", "-"): v for k, v in arguments.items()}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(msgspec.json.encode(request) + b"\n", fds)
                for _ in range(_LINES_PER_COMMAND_MAX):
                    message = await self._message()
                    if "return" in message:
                        return message["return"]
                    if "error" in message:
                        reason = message["error"].get("desc", "no reason given")
                        raise QmpError(f"QEMU refused {command}: {reason}")
        except TimeoutError as exc:
            raise QmpError(f"QEMU did not answer {command} in {self._timeout_s:.0f} s") from exc
        except OSError as exc:
            raise QmpError(f"QEMU broke off at {command}: {exc!r}") from exc
        raise QmpError(f"QEMU talks without answering {command}")

    async def _send(self, data: bytes, fds: tuple[int, ...]) -> None:
        if fds:
            # The first request on an empty socket buffer: it is taken whole.
            if socket.send_fds(self._socket, [data], fds) != len(data):
                raise QmpError("QEMU takes no requests")
            return
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def _message(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            if len(self._received) > ANSWER_BYTES_MAX:
                raise QmpError("QEMU's answer is too long")
            loop = asyncio.get_running_loop()
            block = await loop.sock_recv(self._socket, _RECEIVE_BYTES)
            if not block:
                raise QmpError("QEMU closed the connection")
            self._received += block
        line, _, rest = self._received.partition(b"\n")
        self._received = rest
        try:
            message = msgspec.json.decode(bytes(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise QmpError(f"QEMU's answer makes no sense: {exc}") from exc
        if not isinstance(message, dict):
            raise QmpError("QEMU's answer makes no sense")
        return message


def listen(socket_path: Path) -> socket.socket:
    """A listening socket for QEMU to serve, for root only. Raises ``OSError``."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    folder = os.open(socket_path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A socket file gets its mode from the umask; its directory is closed to others anyway.
        server.bind(f"/proc/self/fd/{folder}/{socket_path.name}")
        socket_path.chmod(0o600)
        server.listen(8)
    except BaseException:
        server.close()
        raise
    finally:
        os.close(folder)
    return server

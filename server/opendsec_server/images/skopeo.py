# SPDX-License-Identifier: AGPL-3.0-only
"""Skopeo as the transport of images.

For pulls it is run as a proxy (``skopeo experimental-image-proxy``, the protocol that bootc uses):
requests as JSON over a socket, contents through pipes. A layer's bytes so go from the registry
into the program that unpacks it, and are never on the disk in their compressed form. Skopeo checks
the digest of each manifest and blob that it hands out.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import limits
from .children import tied

_POLICY = Path("/etc/containers/policy.json")
_REPLY_BYTES_MAX = 256 * 1024
_END_WAIT_S = 2.0
_ERROR_CHARS_MAX = 2_000


class SkopeoError(Exception):
    """Skopeo reports a failure; the text is its own."""


class SkopeoTimeout(Exception):
    """It did not answer in time."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Contents on their way.

    Attributes:
        fd: To read them from; whoever has it closes it.
        pipe: Skopeo's number of it, for ``finish``.
        size_bytes: Their length; -1 if it is not known.
    """

    fd: int
    pipe: int
    size_bytes: int


class Proxy:
    """One running proxy: one call, and one piece of contents, at a time."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: socket.socket, complaints: int
    ) -> None:
        self._process = process
        self._socket = channel
        self._complaints = complaints
        self._lock = asyncio.Lock()

    async def open(self, image: str, timeout_s: float) -> int:
        """Open an image by skopeo's name of it; for a list, the one for this machine.

        Raises:
            SkopeoError, SkopeoTimeout
        """
        value, _fd, _pipe = await self._call("OpenImage", [image], timeout_s)
        return int(value)

    async def manifest(self, image: int, timeout_s: float) -> tuple[str, bytes]:
        """Its digest as the registry has it, and the manifest, as OCI.

        Raises:
            SkopeoError, SkopeoTimeout
        """
        value, fd, pipe = await self._call("GetManifest", [image], timeout_s)
        return str(value), await self._read(fd, pipe, timeout_s)

    async def config(self, image: int, timeout_s: float) -> bytes:
        """Its whole configuration.

        Raises:
            SkopeoError, SkopeoTimeout
        """
        _value, fd, pipe = await self._call("GetFullConfig", [image], timeout_s)
        return await self._read(fd, pipe, timeout_s)

    async def blob(self, image: int, digest: str, size_bytes: int, timeout_s: float) -> Blob:
        """Begin to get a layer.

        Raises:
            SkopeoError, SkopeoTimeout
        """
        value, fd, pipe = await self._call("GetBlob", [image, digest, size_bytes], timeout_s)
        if fd is None:
            raise SkopeoError("skopeo gave no pipe")
        return Blob(fd, pipe, int(value))

    async def finish(self, pipe: int, timeout_s: float) -> None:
        """Wait until contents were sent, whole and right. They must be read meanwhile: skopeo
        closes its end of the pipe here and not before.

        Raises:
            SkopeoError, SkopeoTimeout
        """
        await self._call("FinishPipe", [pipe], timeout_s)

    async def _read(self, fd: int | None, pipe: int, timeout_s: float) -> bytes:
        if fd is None:
            raise SkopeoError("skopeo gave no pipe")
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
                data = tasks.create_task(_read_all(fd))
                tasks.create_task(self.finish(pipe, timeout_s))
        except* SkopeoError as group:
            raise group.exceptions[0] from group
        except* TimeoutError as group:
            raise SkopeoTimeout(f"nothing came for {timeout_s:.0f} s") from group
        finally:
            os.close(fd)
        return data.result()

    async def _call(
        self, method: str, arguments: list[Any], timeout_s: float
    ) -> tuple[Any, int | None, int]:
        async with self._lock:
            try:
                async with asyncio.timeout(timeout_s):
                    self._socket.send(json.dumps({"method": method, "args": arguments}).encode())
                    await _readable(self._socket.fileno())
                data, fds, _flags, _address = socket.recv_fds(self._socket, _REPLY_BYTES_MAX, 1)
            except TimeoutError as exc:
                self.kill()
                raise SkopeoTimeout(f"skopeo did not answer {method} in {timeout_s:.0f} s") from exc
            except OSError as exc:
                raise self._ended() from exc
            except asyncio.CancelledError:
                # Its answer would be taken for that to the next call.
                self.kill()
                raise
        if not data:
            raise self._ended()
        return _reply(data, fds[0] if fds else None)

    def _ended(self) -> SkopeoError:
        said = os.pread(self._complaints, _ERROR_CHARS_MAX, 0).decode(errors="replace").strip()
        return SkopeoError(f"skopeo ended: {said or 'without a word'}")

    def kill(self) -> None:
        """End it at once; every call and pipe fails."""
        with suppress(ProcessLookupError):
            self._process.kill()


@asynccontextmanager
async def proxy(
    arguments: tuple[str, ...], fds: tuple[int, ...], scratch: Path
) -> AsyncIterator[Proxy]:
    """Run a proxy for as long as the context lasts.

    Args:
        arguments: Options: credentials, TLS.
        fds: Descriptors that it inherits.
        scratch: A directory for its temporary files, which it leaves behind when it is killed.

    Raises:
        Internal: skopeo is not installed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    complaints = os.memfd_create("skopeo-stderr", os.MFD_CLOEXEC)
    process = None
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *tied([*_program(scratch), "experimental-image-proxy", "--sockfd",
                       str(theirs.fileno()), *arguments]),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=complaints, pass_fds=(theirs.fileno(), *fds),
                start_new_session=True,
            )  # fmt: skip
        finally:
            theirs.close()
        running = Proxy(process, ours, complaints)
        await running._call("Initialize", [], limits.MANIFEST_TIMEOUT_S)
        yield running
    finally:
        # It ends when its socket is closed, and is made to if it is stuck.
        ours.close()
        if process is not None:
            await _end(process, _END_WAIT_S)
        os.close(complaints)


def _program(scratch: Path) -> list[str]:
    """Whose signatures must be on images is for that file to say; without it skopeo stops."""
    policy = () if _POLICY.exists() else ("--insecure-policy",)
    return ["skopeo", *policy, "--tmpdir", str(scratch)]


async def run(arguments: list[str], fds: tuple[int, ...], scratch: Path, timeout_s: float) -> None:
    """Run skopeo to its end.

    Raises:
        Internal: it is not installed.
        SkopeoError, SkopeoTimeout
    """
    process = await asyncio.create_subprocess_exec(
        *tied([*_program(scratch), *arguments]), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, pass_fds=fds,
        start_new_session=True,
    )  # fmt: skip
    try:
        _out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError as exc:
        raise SkopeoTimeout(f"skopeo was not finished in {timeout_s:.0f} s") from exc
    finally:
        await _end(process, 0)
    if process.returncode != 0:
        raise SkopeoError(err.decode(errors="replace")[-_ERROR_CHARS_MAX:])


async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    try:
        if process.returncode is None and grace_s:
            await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _reply(data: bytes, fd: int | None) -> tuple[Any, int | None, int]:
    try:
        reply = json.loads(data)
        if not reply["success"]:
            raise SkopeoError(str(reply["error"])[-_ERROR_CHARS_MAX:])
        return reply.get("value"), fd, int(reply.get("pipeid", 0))
    except (ValueError, KeyError, TypeError) as exc:
        if fd is not None:
            os.close(fd)
        raise SkopeoError("skopeo gave an answer that cannot be read") from exc


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def _read_all(fd: int) -> bytes:
    found = bytearray()
    while True:
        await _readable(fd)
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return bytes(found)
        found += chunk
        if len(found) > limits.MANIFEST_BYTES_MAX:
            raise SkopeoError(f"invalid manifest: above {limits.MANIFEST_BYTES_MAX} bytes")

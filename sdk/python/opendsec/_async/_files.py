# SPDX-License-Identifier: Apache-2.0
"""Files of a sandbox."""

from __future__ import annotations

import builtins
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlencode

import httpx2

from opendsec import _network
from opendsec._errors import (
    AlreadyExists,
    FileNotFound,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    WaitTimeout,
)
from opendsec._models import FileInfo, WatchEvent
from opendsec._retry import Repeat
from opendsec._signing import Operation, file_signature
from opendsec._wire import EmptyReply, EntriesReply, EntryReply, WatchMessage, WireEntry

from . import _transfer
from ._concurrency import Content
from ._connect import AsyncMessageStream, AsyncSandboxWire, specific
from ._transport import decode


class AsyncFileStream:
    """A file's bytes as they arrive. Iterate over it; close it, or use it as a context manager."""

    def __init__(self, wire: AsyncSandboxWire, response: httpx2.Response) -> None:
        self._wire = wire
        self._response = response

    @property
    def size_bytes(self) -> int | None:
        """Length of the file, if the sandbox said so."""
        value = self._response.headers.get("content-length")
        return int(value) if value is not None and value.isdigit() else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Pieces of the file, in order.

        Raises:
            ConnectionFailed: the transfer broke off.
            SandboxNotFound: the sandbox ended.
        """
        try:
            async for chunk in self._response.aiter_bytes():
                yield chunk
        except httpx2.HTTPError as exc:
            cause = _network.connection_failed(exc, self._wire.base_url)
            raise await self._wire.explain_loss(cause) from exc
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Stop the transfer."""
        await self._response.aclose()


class AsyncWatch:
    """Changes below a directory, from the moment ``watch()`` returned.

    Iterate over it; close it, or use it as a context manager.
    """

    def __init__(self, stream: AsyncMessageStream[WatchMessage]) -> None:
        self._stream = stream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncIterator[WatchEvent]:
        """Changes as they happen; ends when ``timeout_s`` is over.

        Raises:
            SandboxNotFound: the sandbox ended.
            ConnectionFailed: the stream broke; changes may be missed, so look again.
        """
        while True:
            try:
                message = await self._stream.receive()
            except WaitTimeout:
                return
            if message is None:
                return
            if message.filesystem is not None:
                yield message.filesystem.public()

    async def aclose(self) -> None:
        """Stop watching."""
        await self._stream.aclose()


class AsyncFiles:
    """Files of one sandbox, at ``sandbox.files``.

    A relative path starts at the home of the user; ``~`` is expanded. ``user`` chooses the account
    (default: the template's, usually ``user``). Every method can raise:

    * ``FileNotFound``: no such path (unless said otherwise).
    * ``InvalidRequest``: the path is of the wrong kind, or may not be used by the user.
    * ``SandboxNotFound``, ``ConnectionFailed`` and other ``OpendsecError``.
    """

    def __init__(self, wire: AsyncSandboxWire) -> None:
        self._wire = wire

    async def read(self, path: str, *, user: str | None = None) -> bytes:
        """The whole file."""

        def make() -> httpx2.Request:
            return self._wire.file_request("GET", _query(path, user))

        try:
            response = await self._wire.exchange(make, repeat=Repeat.IDEMPOTENT)
        except NotFound as error:
            raise specific(error, FileNotFound) from error.__cause__
        return response.content

    async def read_text(
        self,
        path: str,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        user: str | None = None,
    ) -> str:
        """The whole file as text.

        Raises:
            UnicodeDecodeError: it is not in ``encoding``.
        """
        return (await self.read(path, user=user)).decode(encoding, errors)

    async def stream(
        self, path: str, *, offset_bytes: int = 0, user: str | None = None
    ) -> AsyncFileStream:
        """The file as it arrives, for files too large to hold. The caller closes the stream.

        Args:
            offset_bytes: Where to start.
        """
        headers = {"Range": f"bytes={offset_bytes}-"} if offset_bytes else {}

        def make() -> httpx2.Request:
            return self._wire.file_request("GET", _query(path, user), headers=headers)

        try:
            response = await self._wire.open(make, repeat=Repeat.IDEMPOTENT)
        except NotFound as error:
            raise specific(error, FileNotFound) from error.__cause__
        return AsyncFileStream(self._wire, response)

    async def write(self, path: str, data: Content, *, user: str | None = None) -> FileInfo:
        """Write a file, replacing what was there; parents are made.

        Args:
            data: Bytes, text (as UTF-8), an open binary file or an iterable of bytes; the last two
                are streamed.

        Raises:
            DiskFull: the sandbox's disk is full.
        """
        # What can be sent again is; a stream is used up by the first try.
        repeatable = isinstance(data, (bytes, bytearray, str))

        def make() -> httpx2.Request:
            return self._wire.file_request(
                "POST",
                _query(path, user),
                content=data,
                headers={"Content-Type": "application/octet-stream"},
            )

        response = await self._wire.exchange(
            make,
            repeat=Repeat.IDEMPOTENT if repeatable else Repeat.IF_UNSENT,
            retries=repeatable,
        )
        return decode(response, list[WireEntry])[0].public()

    async def write_many(
        self, files: Iterable[tuple[str, bytes | str]], *, user: str | None = None
    ) -> builtins.list[FileInfo]:
        """Write several files in one request, in order; parents are made.

        If it fails, the first of them may have been written.

        Raises:
            DiskFull: the sandbox's disk is full.
        """
        parts = [
            ("file", (path, data.encode() if isinstance(data, str) else data))
            for path, data in files
        ]
        if not parts:
            return []
        if any(_needs_own_request(path) for _, (path, _) in parts):
            return [await self.write(path, data, user=user) for _, (path, data) in parts]

        def make() -> httpx2.Request:
            query = {} if user is None else {"username": user}
            return self._wire.file_request("POST", query, files=parts)

        response = await self._wire.exchange(make, repeat=Repeat.IDEMPOTENT)
        return [entry.public() for entry in decode(response, list[WireEntry])]

    async def list(
        self, path: str = ".", *, depth: int = 1, user: str | None = None
    ) -> builtins.list[FileInfo]:
        """Entries of a directory in lexical order.

        Args:
            depth: 1: the directory itself; more: so many levels.
        """
        if depth < 1:
            raise InvalidRequest("depth must be at least 1.")
        reply = await self._wire.unary(
            "filesystem.Filesystem/ListDir",
            {"path": path, "depth": depth},
            EntriesReply,
            user=user,
            repeat=Repeat.IDEMPOTENT,
            not_found=FileNotFound,
        )
        return [entry.public() for entry in reply.entries]

    async def stat(self, path: str, *, user: str | None = None) -> FileInfo:
        """What the path is; links are followed."""
        reply = await self._wire.unary(
            "filesystem.Filesystem/Stat",
            {"path": path},
            EntryReply,
            user=user,
            repeat=Repeat.IDEMPOTENT,
            not_found=FileNotFound,
        )
        return reply.entry.public()

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is something at the path."""
        try:
            await self.stat(path, user=user)
        except FileNotFound:
            return False
        return True

    async def upload(self, local: str | Path, remote: str, *, user: str | None = None) -> None:
        """Copy a local file, or a directory with all below it, into the sandbox.

        As ``cp -r`` does: if ``remote`` is a directory, or ends in ``/``, the copy goes into it.
        Modes, times and symbolic links of directories are kept; owners are not.

        Raises:
            FileNotFoundError: there is no such local path.
            NotSupported: a directory, and the sandbox has no ``tar``.
            DiskFull: the sandbox's disk is full.
        """
        await _transfer.upload(self._wire, self, Path(local), remote, user)

    async def download(self, remote: str, local: str | Path, *, user: str | None = None) -> None:
        """Copy a file, or a directory with all below it, out of the sandbox.

        As ``cp -r`` does: if ``local`` is a directory, the copy goes into it. What comes from the
        sandbox is not trusted: nothing is written outside of ``local``, and devices are refused.

        Raises:
            NotSupported: a directory, and the sandbox has no ``tar``.
        """
        await _transfer.download(self._wire, self, remote, Path(local), user)

    async def make_dir(
        self, path: str, *, exist_ok: bool = False, user: str | None = None
    ) -> FileInfo:
        """Make a directory and its parents.

        Raises:
            AlreadyExists: it is there and not ``exist_ok``, or it is no directory.
        """
        try:
            reply = await self._wire.unary(
                "filesystem.Filesystem/MakeDir", {"path": path}, EntryReply, user=user
            )
        except AlreadyExists:
            if exist_ok and (found := await self.stat(path, user=user)).is_dir:
                return found
            raise
        return reply.entry.public()

    async def move(self, source: str, destination: str, *, user: str | None = None) -> FileInfo:
        """Rename or move."""
        reply = await self._wire.unary(
            "filesystem.Filesystem/Move",
            {"source": source, "destination": destination},
            EntryReply,
            user=user,
            not_found=FileNotFound,
        )
        return reply.entry.public()

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """Remove a file, or a directory with all below it. No error if it is not there."""
        await self._wire.unary(
            "filesystem.Filesystem/Remove",
            {"path": path},
            EmptyReply,
            user=user,
            repeat=Repeat.IDEMPOTENT,
        )

    async def watch(
        self,
        path: str,
        *,
        recursive: bool = False,
        include_entry: bool = False,
        timeout_s: float | None = None,
        user: str | None = None,
    ) -> AsyncWatch:
        """Watch a directory; changes after the return of this call are reported.

        Args:
            recursive: Also below its directories.
            include_entry: Give the ``FileInfo`` with each change.
            timeout_s: End the iteration after so long. None: when closed.
        """
        stream = await self._wire.stream(
            "filesystem.Filesystem/WatchDir",
            {"path": path, "recursive": recursive, "includeEntry": include_entry},
            WatchMessage,
            user=user,
            timeout_s=timeout_s,
            repeat=Repeat.IDEMPOTENT,
            not_found=FileNotFound,
        )
        try:
            await stream.receive()  # The start event: the watch is set.
        except BaseException:
            await stream.aclose()
            raise
        return AsyncWatch(stream)

    def download_url(
        self, path: str, *, user: str | None = None, expires_in_s: int | None = None
    ) -> str:
        """A URL that anyone who has it can read the file from, without a key.

        Args:
            expires_in_s: From now; None: as long as the sandbox lives.
        """
        return self._signed_url(path, "read", user, expires_in_s)

    def upload_url(
        self, path: str, *, user: str | None = None, expires_in_s: int | None = None
    ) -> str:
        """A URL that anyone who has it can write the file to (POST), without a key.

        Args:
            expires_in_s: From now; None: as long as the sandbox lives.
        """
        return self._signed_url(path, "write", user, expires_in_s)

    def _signed_url(
        self, path: str, operation: Operation, user: str | None, expires_in_s: int | None
    ) -> str:
        token = self._wire.token
        if token is None:
            raise Unauthenticated("The sandbox's access token is not known; connect to it first.")
        expires_at = None if expires_in_s is None else int(time.time()) + expires_in_s
        query = _query(path, user)
        query["signature"] = file_signature(path, operation, user, token, expires_at)
        if expires_at is not None:
            query["signature_expiration"] = str(expires_at)
        return f"{self._wire.base_url}/files?{urlencode(query)}"


def _query(path: str, user: str | None) -> dict[str, str]:
    query = {"path": path}
    if user is not None:
        query["username"] = user
    return query


def _needs_own_request(path: str) -> bool:
    """Whether clients and servers disagree about quoting the name in a multipart header."""
    return any(char in '"\\%' or ord(char) < 0x20 for char in path)

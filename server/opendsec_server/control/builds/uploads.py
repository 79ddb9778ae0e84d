# SPDX-License-Identifier: AGPL-3.0-only
"""Archives that callers send for ``COPY``: one file per project and hash, readable by root only.

The address to send one to is signed, since the clients send no key with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

import structlog

from opendsec_server.contract.errors import (
    InvalidRequest,
    NodeFull,
    PayloadTooLarge,
    QuotaExceeded,
)

from .plan import FILES_HASH_RE

log = structlog.get_logger(__name__)

URL_VALID_S = 3_600
KEPT_UNUSED_S = 7 * 24 * 3_600.0
_PART = ".part-"


class Uploads:
    """The archives that are here."""

    def __init__(self, directory: Path, bytes_max: int, project_bytes_max: int) -> None:
        self._directory = directory
        self.bytes_max = bytes_max
        self.project_bytes_max = project_bytes_max
        self._arriving: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of projects with archives that become whole: one after the other."""
        self._coming: Counter[str] = Counter()
        """Bytes of each project that are not whole archives yet."""

    def path(self, project_id: str, files_hash: str) -> Path:
        """Where an archive is, or will be.

        Raises:
            InvalidRequest: not a hash.
        """
        if FILES_HASH_RE.fullmatch(files_hash) is None:
            raise InvalidRequest("hash: 64 hexadecimal characters are needed")
        return self._directory / project_id / files_hash

    def present(self, project_id: str, files_hash: str) -> bool:
        """Whether an archive is here. Asking counts as use: it is not removed soon."""
        path = self.path(project_id, files_hash)
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    async def receive(
        self,
        project_id: str,
        files_hash: str,
        chunks: AsyncIterator[bytes],
        *,
        length_bytes: int | None,
    ) -> None:
        """Write an archive as it comes in. It is there when it is whole, or not at all.

        Args:
            project_id: Whose.
            files_hash: Its name.
            chunks: The body.
            length_bytes: As announced. None: not announced.

        Raises:
            PayloadTooLarge: longer than the server takes.
            InvalidRequest: shorter than announced.
            QuotaExceeded: with it the project would keep more than it may.
            NodeFull: no room for it.
        """
        if length_bytes is not None and length_bytes > self.bytes_max:
            raise self._too_large()
        path = self.path(project_id, files_hash)
        draft = path.with_name(f"{_PART}{secrets.token_hex(8)}")
        size_bytes = 0
        try:
            await asyncio.to_thread(_make_directory, path.parent)
            kept_bytes = await asyncio.to_thread(_kept_bytes, path)
            self._check_room(project_id, kept_bytes, length_bytes or 0)
            with private_file(draft) as out:
                async for chunk in chunks:
                    size_bytes += len(chunk)
                    self._coming[project_id] += len(chunk)
                    if size_bytes > self.bytes_max:
                        raise self._too_large()
                    self._check_room(project_id, kept_bytes, 0)
                    await asyncio.to_thread(out.write, chunk)
                if length_bytes is not None and size_bytes != length_bytes:
                    raise InvalidRequest(
                        f"{size_bytes} bytes came, and {length_bytes} were announced"
                    )
                await asyncio.to_thread(os.fsync, out.fileno())
            async with self._arriving.setdefault(project_id, asyncio.Lock()):
                # Others may have become whole since this one began.
                kept_bytes = await asyncio.to_thread(_kept_bytes, path)
                if kept_bytes + size_bytes > self.project_bytes_max:
                    raise self._no_room(project_id, kept_bytes)
                draft.replace(path)
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NodeFull("there is no room for the files of the build") from exc
            raise
        finally:
            self._coming[project_id] -= size_bytes
            draft.unlink(missing_ok=True)
        log.info("files of a build came in", project=project_id, size_bytes=size_bytes)

    def scratch(self, project_id: str) -> Path:
        """A name for an archive that is needed for a moment.

        Raises:
            OSError: its folder cannot be made.
        """
        directory = self._directory / project_id
        _make_directory(directory)
        return directory / f"{_PART}{secrets.token_hex(8)}"

    def sweep(self, *, drafts: bool = False) -> None:
        """Remove what was not used for long.

        Args:
            drafts: Also what a killed server left half-written. Only at its start.
        """
        oldest = time.time() - KEPT_UNUSED_S
        for path in self._directory.glob("*/*"):
            draft = path.name.startswith(_PART)
            if (draft and drafts) or (not draft and path.stat().st_mtime < oldest):
                path.unlink(missing_ok=True)

    def _check_room(self, project_id: str, kept_bytes: int, more_bytes: int) -> None:
        use = kept_bytes + self._coming[project_id] + more_bytes
        if use > self.project_bytes_max:
            raise self._no_room(project_id, kept_bytes)

    def _no_room(self, project_id: str, kept_bytes: int) -> QuotaExceeded:
        return QuotaExceeded(
            f"project {project_id} keeps {kept_bytes} bytes of files for builds, and may keep "
            f"{self.project_bytes_max}",
            remediation="What is not used for a week goes; or ask for a higher "
            "build_uploads_max_mb.",
            details={
                "dimension": "build_uploads",
                "limit": self.project_bytes_max,
                "use": kept_bytes,
                "project_id": project_id,
            },
        )

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the archive is larger than {self.bytes_max} bytes",
            remediation="Leave out what the build does not need (.dockerignore), or ask for a "
            "higher build_upload_max_mb.",
            details={"max_bytes": self.bytes_max},
        )


def _kept_bytes(path: Path) -> int:
    """Of the whole archives beside one that is about to come, or to come anew."""
    total = 0
    for other in path.parent.iterdir():
        if other.name != path.name and not other.name.startswith(_PART):
            with contextlib.suppress(FileNotFoundError):
                total += other.stat().st_size
    return total


def _make_directory(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def private_file(path: Path) -> IO[bytes]:
    """A new file that only its owner can read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")

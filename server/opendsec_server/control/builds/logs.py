# SPDX-License-Identifier: AGPL-3.0-only
"""Logs of builds: one file of JSON lines each, bounded, and kept in memory while it grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO, Literal

import msgspec

from opendsec_server.contract.limits import (
    BUILD_LOG_BYTES_MAX,
    BUILD_LOG_ENTRIES_MAX,
    BUILD_LOG_LINE_CHARS_MAX,
)

Level = Literal["debug", "info", "warn", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warn", "error")

ENDED_IN_MEMORY_MAX = 4
"""Logs of ended builds that are kept in memory too: clients ask for a build's end several times."""


class LogEntry(msgspec.Struct, kw_only=True, frozen=True):
    """One line of a build's log."""

    at: float
    level: Level
    message: str
    step: str | None = None
    """``base``, the number of the step, or ``finalize``."""


_decode = msgspec.json.Decoder(LogEntry).decode
_encode = msgspec.json.Encoder().encode


class BuildLog:
    """The log of a build that runs here."""

    def __init__(self, path: Path) -> None:
        self.entries: list[LogEntry] = []
        self._size_bytes = 0
        self._full = False
        self._grown = asyncio.Event()
        self._closed = False
        self._secrets: tuple[str, ...] = ()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "wb", buffering=0)

    def hide(self, secrets: Sequence[str]) -> None:
        """Replace these texts by stars wherever they would be written."""
        self._secrets = tuple(secret for secret in secrets if secret)

    def clean(self, text: str) -> str:
        """``text`` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def write(self, message: str, *, level: Level = "info", step: str | None = None) -> None:
        """Add an entry. After the log's limit nothing is kept but errors."""
        message = self.clean(message)
        if len(message) > BUILD_LOG_LINE_CHARS_MAX:
            message = message[:BUILD_LOG_LINE_CHARS_MAX] + " …"
        if self._full and level != "error":
            return
        self._add(LogEntry(at=time.time(), level=level, message=message, step=step))
        over = self._size_bytes > BUILD_LOG_BYTES_MAX or len(self.entries) > BUILD_LOG_ENTRIES_MAX
        if over and not self._full:
            self._full = True
            self._add(
                LogEntry(at=time.time(), level="warn", message="the log is full; more is not kept")
            )

    def close(self) -> None:
        """No more comes."""
        self._closed = True
        self._file.close()
        self._grown.set()

    async def follow(self, offset: int) -> AsyncIterator[LogEntry]:
        """Entries from ``offset`` on, also those that come; ends with the build."""
        while True:
            while offset < len(self.entries):
                yield self.entries[offset]
                offset += 1
            if self._closed:
                return
            self._grown.clear()
            await self._grown.wait()

    def _add(self, entry: LogEntry) -> None:
        line = _encode(entry) + b"\n"
        self.entries.append(entry)
        self._size_bytes += len(line)
        # A full disk must not end the build: its log is in memory as long as it runs.
        with contextlib.suppress(OSError):
            self._file.write(line)
        self._grown.set()


class BuildLogs:
    """The logs of all builds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._live: dict[str, BuildLog] = {}
        self._ended: OrderedDict[str, list[LogEntry]] = OrderedDict()

    def open(self, build_id: str) -> BuildLog:
        """Begin the log of a build.

        Raises:
            OSError: its file cannot be made.
        """
        self._ended.pop(build_id, None)
        log = self._live[build_id] = BuildLog(self._path(build_id))
        return log

    def close(self, build_id: str) -> None:
        """The build has ended; its log stays in its file."""
        log = self._live.pop(build_id, None)
        if log is not None:
            log.close()
            self._keep(build_id, log.entries)

    def live(self, build_id: str) -> BuildLog | None:
        """The log of a build that runs here."""
        return self._live.get(build_id)

    async def read(self, build_id: str) -> list[LogEntry]:
        """All entries so far, oldest first. Empty: there is no log."""
        live = self._live.get(build_id)
        if live is not None:
            return list(live.entries)
        if build_id in self._ended:
            self._ended.move_to_end(build_id)
            return list(self._ended[build_id])
        found = await asyncio.to_thread(_read, self._path(build_id))
        if found:
            self._keep(build_id, found)
        return list(found)

    def remove(self, build_id: str) -> None:
        """Remove the log of a build that is gone."""
        self._ended.pop(build_id, None)
        self._path(build_id).unlink(missing_ok=True)

    def _keep(self, build_id: str, entries: list[LogEntry]) -> None:
        self._ended[build_id] = entries
        self._ended.move_to_end(build_id)
        if len(self._ended) > ENDED_IN_MEMORY_MAX:
            self._ended.popitem(last=False)

    def _path(self, build_id: str) -> Path:
        return self._directory / f"{build_id}.log"


def _read(path: Path) -> list[LogEntry]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        # The last one is cut short if the server was killed while it wrote.
        with contextlib.suppress(msgspec.DecodeError):
            entries.append(_decode(line))
    return entries


def at_least(entries: Sequence[LogEntry], level: Level | None) -> list[LogEntry]:
    """Those of this level and above."""
    if level is None:
        return list(entries)
    lowest = LEVELS.index(level)
    return [entry for entry in entries if LEVELS.index(entry.level) >= lowest]

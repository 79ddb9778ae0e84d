# SPDX-License-Identifier: AGPL-3.0-only
"""The store in an SQLite file."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from .errors import StoreCorrupt, StoreLocked, StoreReadOnly, StoreStartError
from .migrate import migrate

T = TypeVar("T")

BUSY_TIMEOUT_MS = 5_000
START_BUSY_TIMEOUT_MS = 2_000
"""At start a held database is a mistake to report, not a moment to wait out."""
READERS = 4
CHECKED_WHOLE_BYTES_MAX = 256 * 1024 * 1024
"""Databases up to this size are read through at start to find damage."""
SQLITE_MAGIC = b"SQLite format 3\0"


def _prepare_file(path: Path) -> None:
    """Make the file with mode 0600, or check that what is there is a database."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise StoreReadOnly(
            f"cannot open the database {path} for writing: {exc.strerror}. "
            "Check the owner and that the file system is not mounted read-only."
        ) from exc
    try:
        head = os.read(descriptor, len(SQLITE_MAGIC))
        os.fchmod(descriptor, 0o600)
    except OSError as exc:
        raise StoreReadOnly(f"cannot use the database {path}: {exc.strerror}") from exc
    finally:
        os.close(descriptor)
    if head and head != SQLITE_MAGIC:
        raise StoreCorrupt(
            f"{path} is not an SQLite database. It was left as it is: move it away, or restore "
            "it from a backup, and start again."
        )


class Sqlite:
    """Work on threads: one that writes, a few that read."""

    def __init__(self, path: Path) -> None:
        self._reader = _sqlite_engine(path, connections=READERS)
        self._writer = _sqlite_engine(path, connections=1)
        sa.event.listen(self._writer, "begin", _begin_immediate)
        self._read_threads = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="store-write")

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        def on_thread() -> T:
            with self._reader.connect() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._read_threads, on_thread)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        def on_thread() -> T:
            with self._writer.begin() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._write_thread, on_thread)

    async def close(self) -> None:
        await asyncio.to_thread(self._read_threads.shutdown)
        self._reader.dispose()
        await asyncio.to_thread(self._write_thread.shutdown)
        self._writer.dispose()


def _sqlite_engine(path: Path, *, connections: int) -> sa.Engine:
    engine = sa.create_engine(
        f"sqlite:///{path}",
        connect_args={
            "timeout": START_BUSY_TIMEOUT_MS / 1_000,
            "cached_statements": 256,
            "check_same_thread": False,
        },
        poolclass=sa.QueuePool,
        pool_size=connections,
        max_overflow=0,
    )
    sa.event.listen(engine, "connect", _on_connect)
    return engine


def _on_connect(connection: Any, _record: Any) -> None:
    # Python's driver would open transactions by itself, late and in the wrong mode.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout = {START_BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "foreign_keys = ON",
        f"busy_timeout = {BUSY_TIMEOUT_MS}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


async def open_sqlite(path: Path) -> Sqlite:
    """Open or make the file, check it, and bring the schema up to date.

    Raises:
        StoreStartError: one of its kinds; nothing was overwritten.
    """
    await asyncio.to_thread(_prepare_file, path)
    backend = Sqlite(path)
    try:
        await backend.write(lambda connection: _check_sqlite(connection, path))
        await backend.write(migrate)
    except BaseException as exc:
        await backend.close()
        if isinstance(exc, sa.exc.DBAPIError | sqlite3.Error):
            raise _sqlite_start_error(path, exc) from exc
        raise
    return backend


def _check_sqlite(connection: sa.Connection, path: Path) -> None:
    """Read the file through if it is not huge. The caller holds the write lock."""
    if path.stat().st_size <= CHECKED_WHOLE_BYTES_MAX:
        found = connection.execute(sa.text("PRAGMA quick_check(1)")).scalar_one()
        if found != "ok":
            raise StoreCorrupt(
                f"the database {path} is damaged ({found}). It was left as it is: restore it from "
                "a backup, or move it away and start with an empty one."
            )
    # A read-only file lets the write lock be taken; only a write tells.
    savepoint = connection.begin_nested()
    connection.execute(sa.text("CREATE TABLE store_probe (x INTEGER)"))
    savepoint.rollback()


def _sqlite_start_error(path: Path, exc: BaseException) -> StoreStartError:
    cause = str(getattr(exc, "orig", None) or exc)
    if "locked" in cause or "busy" in cause:
        return StoreLocked(
            f"the database {path} is held by another process. Stop it (`fuser {path}` names it) "
            "and start again."
        )
    if "readonly" in cause or "unable to open" in cause:
        return StoreReadOnly(
            f"the database {path} cannot be written ({cause}). Check the owner, and that the file "
            "system is neither full nor mounted read-only."
        )
    if "malformed" in cause or "not a database" in cause:
        return StoreCorrupt(
            f"the database {path} is damaged ({cause}). It was left as it is: restore it from a "
            "backup, or move it away and start with an empty one."
        )
    return StoreStartError(f"the database {path} cannot be used: {cause}")

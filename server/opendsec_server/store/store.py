# SPDX-License-Identifier: AGPL-3.0-only
"""The connection to the database: SQLite in the state directory, or PostgreSQL by URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from opendsec_server.config import Config, ConfigError

from .errors import unavailable_when_broken
from .sqlite import Sqlite, open_sqlite

T = TypeVar("T")

Work = Callable[[sa.Connection], None]
"""A part of a transaction."""


class Backend(Protocol):
    """How work reaches one kind of database."""

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run queries outside of a transaction."""

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a transaction."""

    async def close(self) -> None:
        """Close every connection."""


class Store:
    """One database. ``read`` and ``write`` are the only ways in.

    Work is a plain function on a connection, done in one go: for SQLite on a thread of its own
    (one hop per transaction instead of several per statement), for PostgreSQL on the event loop.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def is_sqlite(self) -> bool:
        """Whether SQL must be SQLite's where the two databases differ."""
        return isinstance(self._backend, Sqlite)

    @classmethod
    async def open(cls, config: Config) -> Store:
        """Open, check, and bring the schema up to date.

        Raises:
            StoreStartError: one of its kinds; nothing was overwritten.
            ConfigError: ``database_url`` names no database that is supported.
        """
        url = config.database_url
        if url is None:
            return cls(await open_sqlite(config.state_path / "store.db"))
        try:
            parsed = make_url(url)
        except sa.exc.ArgumentError as exc:
            raise ConfigError("database_url is not a database URL") from exc
        kind = parsed.drivername.split("+")[0]
        if kind == "sqlite":
            if not parsed.database or parsed.database == ":memory:":
                raise ConfigError("database_url: SQLite needs a file, as in sqlite:////path/to.db")
            return cls(await open_sqlite(Path(parsed.database)))
        if kind in {"postgres", "postgresql"}:
            try:
                from .postgres import open_postgres
            except ImportError as exc:
                raise ConfigError(
                    "database_url names PostgreSQL, but its driver is not installed: "
                    "install `opendsec-server[postgres]`"
                ) from exc
            return cls(await open_postgres(parsed.set(drivername="postgresql+asyncpg")))
        raise ConfigError(f"database_url: {parsed.drivername} is not supported")

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run queries, each of which sees what is committed.

        Raises:
            StoreUnavailable: the database cannot be used now.
        """
        with unavailable_when_broken():
            return await self._backend.read(work)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a transaction: committed at the end of ``work``, rolled back on any exception.

        SQLite has one writer at a time: writes queue here, in order, instead of in SQLite's
        busy handler.

        Raises:
            StoreUnavailable: the database cannot be used now.
        """
        with unavailable_when_broken():
            return await self._backend.write(work)

    async def ping(self) -> None:
        """Show that the database answers.

        Raises:
            StoreUnavailable: it does not.
        """
        await self.read(lambda connection: connection.execute(sa.select(sa.literal(1))))

    async def close(self) -> None:
        """Close every connection. SQLite's write-ahead log is folded in by the last one."""
        await self._backend.close()

# SPDX-License-Identifier: AGPL-3.0-only
"""The store in a PostgreSQL database. Imported only when one is configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from opendsec_server.config import ConfigError

from .errors import StoreUnreachable
from .migrate import migrate

T = TypeVar("T")

POSTGRES_POOL = 16
POSTGRES_CONNECT_TIMEOUT_S = 5.0
POSTGRES_COMMAND_TIMEOUT_S = 10.0


class Postgres:
    """Work on the event loop, through asyncpg."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        async with self._reader.connect() as connection:
            return await connection.run_sync(work)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        async with self._engine.begin() as connection:
            return await connection.run_sync(work)

    async def close(self) -> None:
        await self._engine.dispose()


async def open_postgres(url: sa.URL) -> Postgres:
    """Connect, and bring the schema up to date.

    Raises:
        ConfigError: the driver is not installed.
        StoreStartError: the server cannot be reached, or has a newer schema.
    """
    try:
        engine = create_async_engine(
            url,
            pool_size=POSTGRES_POOL,
            max_overflow=0,
            pool_pre_ping=True,
            pool_timeout=POSTGRES_COMMAND_TIMEOUT_S,
            connect_args={
                "timeout": POSTGRES_CONNECT_TIMEOUT_S,
                "command_timeout": POSTGRES_COMMAND_TIMEOUT_S,
            },
        )
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "database_url names PostgreSQL, but its driver is not installed: "
            "install `opendsec-server[postgres]`"
        ) from exc
    try:
        async with engine.begin() as connection:
            await connection.run_sync(migrate)
    except (sa.exc.DBAPIError, OSError, TimeoutError) as exc:
        await engine.dispose()
        cause = getattr(exc, "orig", None) or exc
        raise StoreUnreachable(
            f"the database server at {url.host or 'the local socket'} cannot be used: {cause}"
        ) from exc
    except BaseException:
        await engine.dispose()
        raise
    return Postgres(engine)

# SPDX-License-Identifier: AGPL-3.0-only
"""Why the store could not be opened at start, and how run-time failures reach callers."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import sqlalchemy.exc

from opendsec_server.config import ConfigError
from opendsec_server.contract.errors import StoreUnavailable


class StoreStartError(ConfigError):
    """The database cannot be used as it is. Nothing in it was changed."""


class StoreLocked(StoreStartError):
    """Another process holds the database."""


class StoreReadOnly(StoreStartError):
    """The database or its folder cannot be written."""


class StoreCorrupt(StoreStartError):
    """The file is damaged, or is not a database."""


class StoreSchemaNewer(StoreStartError):
    """A newer release of the server has migrated this database."""


class StoreUnreachable(StoreStartError):
    """The database server does not answer, or refuses the log-in."""


@contextlib.contextmanager
def unavailable_when_broken() -> Iterator[None]:
    """Turn every failure of the database into the retryable ``StoreUnavailable``.

    Violated constraints pass through: they are answers, and the query functions expect them.

    Raises:
        StoreUnavailable: locked, read-only, full, damaged, or not reachable.
    """
    try:
        yield
    except sqlalchemy.exc.IntegrityError:
        raise
    except (
        sqlalchemy.exc.DBAPIError,
        sqlalchemy.exc.TimeoutError,
        sqlite3.Error,
        OSError,
    ) as exc:
        cause = getattr(exc, "orig", None) or exc
        raise StoreUnavailable(
            f"the control plane's database cannot be used: {type(cause).__name__}: {cause}"
        ) from exc

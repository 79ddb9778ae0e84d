# SPDX-License-Identifier: AGPL-3.0-only
"""A database that stops answering. Tests only."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any

from opendsec_server.control.services import Services


@contextlib.contextmanager
def broken_store(services: Services) -> Iterator[None]:
    """Every query fails, as with a full or vanished disk, until the block is left."""
    backend: Any = services.store._backend

    async def fail(work: object) -> object:
        raise sqlite3.OperationalError("disk I/O error")

    healthy = backend.read, backend.write
    backend.read = backend.write = fail
    try:
        yield
    finally:
        backend.read, backend.write = healthy

# SPDX-License-Identifier: AGPL-3.0-only
"""Sockets of the daemon, and the ASGI server on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

STOP_GRACE_S = 10
LISTEN_BACKLOG = 2_048


def bind_unix(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(previous)
    listener.listen(LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


def bind_tcp(host: str, port: int) -> socket.socket:
    """A TCP socket that listens.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


class Tls(NamedTuple):
    """Certificate and key, PEM files."""

    cert: str
    key: str


@contextlib.asynccontextmanager
async def listening(
    app: Any, listener: socket.socket, tls: Tls | None = None
) -> AsyncIterator[None]:
    """Serve an ASGI app on a socket; close it afterwards."""
    name = listener.getsockname()
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            loop="none",
            http="httptools",
            ws="none",
            timeout_graceful_shutdown=STOP_GRACE_S,
            timeout_keep_alive=75,
            backlog=LISTEN_BACKLOG,
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
        )
    )
    # Signals are ours: uvicorn must not replace the handlers.
    task = asyncio.create_task(server._serve(sockets=[listener]), name=f"uvicorn-{name}")
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn offers no event
            await asyncio.sleep(0.01)
        if task.done():
            await task
        yield
    finally:
        server.should_exit = True
        await task
        listener.close()
        if isinstance(name, str):
            await asyncio.to_thread(Path(name).unlink, missing_ok=True)

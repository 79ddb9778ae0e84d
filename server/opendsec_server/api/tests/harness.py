# SPDX-License-Identifier: AGPL-3.0-only
"""A control plane over a fake node, with its APIs on real sockets. Tests only."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn

from opendsec_server.api.app import build_api_app
from opendsec_server.config import Config
from opendsec_server.control.services import Services
from opendsec_server.control.tests.fake_node import FakeNode


class Plane:
    """One running control plane and its first key."""

    def __init__(self, services: Services, node: FakeNode, url: str, key: str) -> None:
        self.services = services
        self.node = node
        self.url = url
        self.key = key

    @property
    def headers(self) -> dict[str, str]:
        return {"X-API-Key": self.key}


@contextlib.asynccontextmanager
async def serving(app: object) -> AsyncIterator[str]:
    """Serve an application on a loopback port; gives its URL."""
    # With the protocol named, asyncio switches Nagle's algorithm off for accepted connections.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="httptools",
            ws="none",
            timeout_graceful_shutdown=2,
        )
    )
    task = asyncio.create_task(server._serve(sockets=[listener]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        host, port = listener.getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task
        listener.close()


@contextlib.asynccontextmanager
async def running_plane(state_dir: Path, node: FakeNode | None = None) -> AsyncIterator[Plane]:
    """A control plane over ``state_dir``; start it again there to restart it."""
    config = Config(
        state_dir=str(state_dir), run_dir=str(state_dir / "run"), domain="localhost:7300"
    )
    node = node or FakeNode()
    services = await Services.start(config, node)
    try:
        async with serving(build_api_app(services)) as url:
            key = (await asyncio.to_thread(config.api_key_file.read_text)).strip()
            yield Plane(services, node, url, key)
    finally:
        await services.stop()

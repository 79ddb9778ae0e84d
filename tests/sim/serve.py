# SPDX-License-Identifier: AGPL-3.0-only
"""Serves simulated nodes, each on a Unix socket, by the node's own application.

As a program: ``python -m tests.sim.serve --nodes 160 --directory DIR``; ready when ``DIR/ready`` is
there. What is wrong with a node is told to it by ``POST /sim`` (see ``tell``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from opendsec_server.node.serving import NodeApp

from .simulated import NONE, Faults, Latencies, SimNode

SECRET = b"the secret of simulated nodes, which is none"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def node_id(number: int) -> str:
    """The id of the nth node: ``s`` and three letters."""
    return "s" + "".join(ALPHABET[number // 26**place % 26] for place in (2, 1, 0))


class SimApp:
    """The node's application, behind its faults."""

    def __init__(self, node: SimNode, scratch: Path) -> None:
        self.node = node
        self.faults: Faults = getattr(node, "faults", None) or Faults()
        self.app = NodeApp(node, node.node_id, SECRET, scratch)  # type: ignore[arg-type]
        self._never = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/sim":
            await self._told(receive, send)
            return
        faults = self.faults
        if faults.dead:
            await self._never.wait()
        if faults.slow > 1:
            await asyncio.sleep(0.005 * faults.slow)
        if faults.drop_answers and not scope["path"].endswith(("/info", "/events")):

            async def swallow(message: Any) -> None:
                return None

            await self.app(scope, receive, swallow)
            scope["transport"].close()
            return
        await self.app(scope, receive, send)

    async def _told(self, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = msgspec.json.decode(body)
        node = self.node
        for name, value in asked.get("faults", {}).items():
            setattr(node.faults, name, value)
        if "preload" in asked:
            node.preload(
                asked["preload"], asked["project_id"], asked["template_id"], asked.get("end_at")
            )
        told = {"made": node.made, "refused": node.refused, "live": node.live}
        if asked.get("names"):
            told["names"] = [n for n, kept in node.kept.items() if kept.reason is None]  # type: ignore[assignment]
        data = msgspec.json.encode(told)
        headers = [(b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})


class _Protocol(HttpToolsProtocol):
    """Hands the connection on, for the fault that breaks it."""

    def on_headers_complete(self) -> None:
        self.scope["transport"] = self.transport
        super().on_headers_complete()


@contextlib.asynccontextmanager
async def serving(nodes: Sequence[SimNode], directory: Path) -> AsyncIterator[list[str]]:
    """Serve the nodes; their addresses."""
    servers, urls = [], []
    loop = asyncio.get_running_loop()
    state = ServerState()
    for node in nodes:
        config = uvicorn.Config(
            SimApp(node, directory),
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            timeout_keep_alive=75,
        )
        config.load()
        path = directory / f"{node.node_id}.sock"
        path.unlink(missing_ok=True)
        server = await loop.create_unix_server(
            lambda config=config: _Protocol(config=config, server_state=state, app_state={}),
            path=str(path),
            backlog=512,
        )
        servers.append(server)
        urls.append(f"unix:{path}")
    try:
        yield urls
    finally:
        for server in servers:
            server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


async def tell(url: str, **asked: object) -> dict[str, Any]:
    """Tell a simulated node its faults, or ask what it has."""
    reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix:"))
    body = msgspec.json.encode(asked)
    writer.write(b"POST /sim HTTP/1.1\r\nhost: sim\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    found: dict[str, Any] = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])
    return found


async def _main(options: argparse.Namespace) -> None:
    latencies = Latencies() if options.measured else NONE
    nodes = [
        SimNode(node_id(n), sandboxes_max=options.sandboxes_max, latencies=latencies)
        for n in range(options.first, options.first + options.nodes)
    ]
    async with serving(nodes, options.directory):
        (options.directory / f"ready-{options.first}").touch()
        await asyncio.Event().wait()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--sandboxes-max", type=int, default=4_096)
    parser.add_argument("--measured", action="store_true", help="take as long as real nodes")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()

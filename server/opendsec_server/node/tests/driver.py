# SPDX-License-Identifier: AGPL-3.0-only
"""A process that runs one node and does what its standard input says: what a daemon is to the
node, without API and edge, so that tests can kill it at any point."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog
import uvloop

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import OpendsecError
from opendsec_server.contract.images import PackOptions
from opendsec_server.contract.node import NetworkPolicy, SandboxSpec
from opendsec_server.contract.states import EndReason
from opendsec_server.node import limits
from opendsec_server.node.mountns import enter_private_mount_namespace
from opendsec_server.node.node import Node


class Driver:
    """Answers JSON lines; several calls may be under way."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._seen: list[dict[str, Any]] = []
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "create": lambda spec: node.create(msgspec.convert(spec, SandboxSpec)),
            "get": node.get,
            "list": node.list,
            "kill": lambda i, reason="killed": node.kill(i, EndReason(reason)),
            "pause": node.pause,
            "resume": node.resume,
            "snapshot": node.snapshot,
            "snapshots": node.snapshots,
            "delete_snapshot": node.delete_snapshot,
            "set_end_at": node.set_end_at,
            "set_network": lambda i, p: node.set_network(i, msgspec.convert(p, NetworkPolicy)),
            "route": node.route,
            "route_by_signature": node.route_by_signature,
            "metrics": node.metrics,
            "usage": node.usage,
            "transitions": node.transitions,
            "info": node.info,
            "exec": self._exec,
            "unpack": node.unpack,
            "pack": lambda i, o: node.pack(i, msgspec.convert(o, PackOptions)),
            "image": node.images.get,
            "pull": node.images.pull,
            "compose": node.images.compose,
            "remove_image": node.images.remove,
            "events": self._events,
            "stop": node.stop,
            "purge": node.purge,
        }

    async def _exec(self, sandbox_id: str, argv: list[str], **options: Any) -> list[Any]:
        events = self._node.exec(sandbox_id, tuple(argv), **options)
        return [msgspec.to_builtins(event) async for event in events]

    async def _events(self) -> list[dict[str, Any]]:
        return self._seen

    async def collect(self) -> None:
        """Remember every event."""
        async for event in self._node.events():
            self._seen.append(msgspec.to_builtins(event))

    async def answer(self, request: dict[str, Any]) -> None:
        """Do one call and print its result."""
        try:
            result = await self._calls[request["call"]](
                *request.get("args", []), **request.get("kwargs", {})
            )
            reply = {"id": request["id"], "ok": msgspec.to_builtins(result)}
        except OpendsecError as exc:
            reply = {"id": request["id"], "error": exc.to_dict()}
        except Exception as exc:
            reply = {"id": request["id"], "error": {"code": "bug", "message": repr(exc)}}
        print(json.dumps(reply), flush=True)


async def main() -> None:
    """Start a node from the configuration in the first argument; serve standard input."""
    factor = float(os.environ.get("OPENDSEC_TEST_TIME_FACTOR", "1"))
    if factor > 1:  # an emulated host, where making a template takes minutes
        limits.START_BUDGET_EMULATED_S *= factor
    try:
        node = await Node.start(msgspec.json.decode(sys.argv[1].encode(), type=Config))
    except ConfigError as exc:
        print(json.dumps({"config_error": str(exc)}), flush=True)
        return
    driver = Driver(node)
    collector = asyncio.create_task(driver.collect())
    print(json.dumps({"ready": True}), flush=True)
    reader = asyncio.StreamReader(limit=1 << 22)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    tasks: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        request = json.loads(line)
        task = asyncio.create_task(driver.answer(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if request["call"] in ("stop", "purge"):
            await task
            break
    collector.cancel()


if __name__ == "__main__":
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    enter_private_mount_namespace()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())

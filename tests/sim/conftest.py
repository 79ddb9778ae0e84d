# SPDX-License-Identifier: AGPL-3.0-only
"""A control plane over simulated nodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from opendsec_server.config import Config
from opendsec_server.contract import node_wire
from opendsec_server.control.iam import Caller
from opendsec_server.control.nodes import Fleet, NodeSource, connection, member
from opendsec_server.control.nodes.http_client import HttpNode
from opendsec_server.control.services import Services
from opendsec_server.control.tests.seed import seeded

from .serve import SECRET, node_id, serving
from .simulated import Latencies, Latency, SimNode

QUICK = Latencies(*(Latency(0.005, 0.02) for _ in range(4)))
POLL_S = 0.2


class Cluster:
    """Ten nodes and a gateway."""

    def __init__(self, nodes: list[SimNode], urls: list[str], services: Services) -> None:
        self.nodes = nodes
        self.urls = urls
        self.services = services

    async def caller(self) -> Caller:
        """The caller of the first key."""
        key = self.services.config.api_key_file.read_text().strip()
        return await self.services.iam.authenticate(key)

    def on_nodes(self) -> dict[str, str]:
        """Every live sandbox, and its node."""
        return {
            name: node.node_id
            for node in self.nodes
            for name, kept in node.kept.items()
            if kept.reason is None
        }


def fleet_of(urls: list[str], seed: int = 0) -> Fleet:
    """A fleet over served nodes."""
    sources = [NodeSource(name=url, client=HttpNode(url, SECRET)) for url in urls]
    return Fleet(sources, interval_s=POLL_S, rng=random.Random(seed))


async def until(holds: Callable[[], Awaitable[bool] | bool], within_s: float = 20.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(within_s):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that are silent are given up in seconds, not in a quarter of a minute."""
    monkeypatch.setattr(node_wire, "ALIVE_EVERY_S", 0.3)
    monkeypatch.setattr(node_wire, "SILENCE_S_MAX", 5.0)
    monkeypatch.setattr(connection, "WATCH_INTERVAL_S", 0.1)
    monkeypatch.setattr(member, "POLL_TIMEOUT_S", 2.0)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(seeded(tmp_path)), node_lost_after_s=3_600.0)


@asynccontextmanager
async def cluster_of(
    config: Config, directory: Path, count: int = 10, sandboxes_max: int = 4_096
) -> AsyncIterator[Cluster]:
    """Serve nodes, and start a control plane over them."""
    nodes = [
        SimNode(node_id(n), sandboxes_max=sandboxes_max, latencies=QUICK) for n in range(count)
    ]
    async with serving(nodes, directory) as urls:
        cluster = Cluster(nodes, urls, await Services.start(config, fleet_of(urls)))
        try:
            yield cluster
        finally:
            # A test may have put another in the first one's place.
            await cluster.services.stop()

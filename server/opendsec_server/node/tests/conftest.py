# SPDX-License-Identifier: AGPL-3.0-only
"""Real nodes for tests: own state, names and addresses; checked for leaks afterwards."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opendsec_server.binaries import find_agent
from opendsec_server.config import Config, ConfigError
from opendsec_server.images.base import ensure_base
from opendsec_server.node.tests.machine import NodeProcess
from tests.leaks import Snapshot
from tests.shares import draw, instance_name

IMAGE_CACHE = os.environ.get("OPENDSEC_IMAGE_CACHE", "/var/tmp/opendsec-test-images")
FIRST_BUILD_TIMEOUT_S = 900
RELEASED_WITHIN_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test with a node may have to make the template."""
    for item in items:
        if item.get_closest_marker("node") is not None:
            item.add_marker(pytest.mark.timeout(FIRST_BUILD_TIMEOUT_S))


def _agent() -> str:
    try:
        return str(find_agent(Config()))
    except ConfigError as exc:
        pytest.skip(str(exc))


MakeNode = Callable[..., NodeProcess]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that sandboxes' users can walk through (pytest's own is closed to others)."""
    path = Path(tempfile.mkdtemp(prefix="opendsec-node-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def make_node(scratch: Path) -> AsyncIterator[MakeNode]:
    """Makes a node that is not started yet; purges it afterwards and compares the machine."""
    if os.geteuid() != 0:
        pytest.skip("a real node needs root")
    instance, block = instance_name(), draw(30 * 16)
    state, run = scratch / "state", scratch / "run"
    config = Config(
        state_dir=str(state),
        run_dir=str(run),
        instance=instance,
        network_cidr=f"10.{160 + block // 16}.{block % 16 * 16}.0/20",
        slots_ready=2,
        agent_path=_agent(),
        disk_pool_mb=8_192,
    )
    state.mkdir(mode=0o700)
    os.environ["OPENDSEC_IMAGE_CACHE"] = IMAGE_CACHE
    ensure_base(config, print)
    before = Snapshot.take(instance, (run,))
    nodes: list[NodeProcess] = []

    def make(**changes: Any) -> NodeProcess:
        node = NodeProcess(msgspec.structs.replace(config, **changes))
        nodes.append(node)
        return node

    yield make
    cleaner = NodeProcess(config)
    for node in nodes:
        if node.running:
            await node.kill9()
    await cleaner.start()
    assert cleaner.config_error is None
    await cleaner.finish("purge")
    before.assert_nothing_new()
    # On a busy disk the kernel needs its time to write a file system out before it lets go.
    deadline = time.monotonic() + RELEASED_WITHIN_S
    while left := [
        what
        for what in Snapshot.take(instance, (scratch,)).seen
        if what.startswith(("mount", "loop"))
    ]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.2)


@pytest.fixture
async def node(make_node: MakeNode) -> NodeProcess:
    """A running node."""
    made = make_node()
    await made.start()
    assert made.config_error is None
    return made

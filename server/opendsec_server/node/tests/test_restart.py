# SPDX-License-Identifier: AGPL-3.0-only
"""The daemon goes, gracefully or by kill -9, at any point: sandboxes are adopted or gone."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from opendsec_server.node.tests.conftest import MakeNode
from opendsec_server.node.tests.machine import NodeProcess, first_process, small_spec
from tests.leaks import Snapshot

pytestmark = pytest.mark.node

HOOKS = ["admit", "disk", "layers", "network", "bundle", "rootfs", "runtime", "agent", "names"]
BOUNDARIES = [f"{hook}:{side}" for hook in HOOKS for side in ("before", "after")]


async def again(node: NodeProcess, **environment: str) -> None:
    """Start the node's next process."""
    await node.start(**environment)
    assert node.config_error is None


@pytest.mark.parametrize("how", ["stop", "kill9"])
async def test_running_sandboxes_go_on(node: NodeProcess, how: str) -> None:
    spec = await node.create()
    pid = first_process(node.config, spec.sandbox_id)
    _code, job = await node.exec(spec, "nohup sleep 1000 >/dev/null 2>&1 & echo $!")
    await (node.kill9() if how == "kill9" else node.finish("stop"))
    await again(node)
    assert first_process(node.config, spec.sandbox_id) == pid
    assert await node.state(spec.sandbox_id) == "running"
    assert (await node.exec(spec, f"kill -0 {job.strip()} && echo lives"))[1] == "lives\n"
    other = await node.create()
    routes = [await node.call("route", s.sandbox_id) for s in (spec, other)]
    assert routes[0]["address"] != routes[1]["address"]
    await node.call("set_network", spec.sandbox_id, {"internet": False})
    assert (await node.call("kill", spec.sandbox_id))["reason"] == "killed"


async def test_deadline_while_down(node: NodeProcess) -> None:
    spec = await node.create(end_at=time.time() + 1)
    await node.kill9()
    await asyncio.sleep(1.2)
    await again(node)
    assert (await node.wait_state(spec.sandbox_id, "ended"))["reason"] == "timeout"


async def test_ended_while_down(node: NodeProcess) -> None:
    spec = await node.create()
    await node.kill9()
    os.kill(first_process(node.config, spec.sandbox_id), signal.SIGKILL)
    await again(node)
    status = await node.wait_state(spec.sandbox_id, "ended")
    assert status["reason"] == "lost"


async def test_second_daemon_is_refused(node: NodeProcess, make_node: MakeNode) -> None:
    spec = await node.create()
    second = make_node()
    await second.start()
    assert second.config_error is not None
    assert "another opendsecd" in second.config_error
    assert (await node.exec(spec, "echo fine"))[1] == "fine\n"


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_killed_while_setting_up(make_node: MakeNode, boundary: str) -> None:
    node = make_node()
    await node.start(OPENDSEC_CRASH_AT=boundary)
    spec = small_spec()
    with pytest.raises(ConnectionError):
        await node.call("create", spec)
    await node.wait()
    await again(node)
    status = await node.call("get", spec.sandbox_id)
    assert (status["state"], status["reason"]) == ("failed", "start_failed")
    _nothing_of(node, spec.sandbox_id)
    fresh = await node.create()
    assert (await node.exec(fresh, "echo fine"))[1] == "fine\n"


@pytest.mark.parametrize("boundary", [f"teardown.{b}" for b in BOUNDARIES])
async def test_killed_while_tearing_down(make_node: MakeNode, boundary: str) -> None:
    node = make_node()
    await node.start(OPENDSEC_CRASH_AT=boundary)
    spec = await node.create()
    with pytest.raises(ConnectionError):
        await node.call("kill", spec.sandbox_id)
    await node.wait()
    await again(node)
    status = await node.wait_state(spec.sandbox_id, "ended")
    assert status["reason"] == "killed"
    _nothing_of(node, spec.sandbox_id)


def _nothing_of(node: NodeProcess, sandbox_id: str) -> None:
    config = node.config
    roots = (config.run_path, config.state_path / "pool")
    left = [s for s in Snapshot.take(config.instance, roots).seen if sandbox_id in s]
    assert not left

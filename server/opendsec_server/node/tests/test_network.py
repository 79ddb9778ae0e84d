# SPDX-License-Identifier: AGPL-3.0-only
"""What a sandbox can and cannot reach, with a network namespace standing for the internet."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from opendsec_server.contract.node import NetworkPolicy, SandboxSpec
from opendsec_server.node.tests.conftest import MakeNode
from opendsec_server.node.tests.machine import NodeProcess
from opendsec_server.node.tests.world import (
    ANSWER,
    HOST_END,
    METADATA,
    NAME,
    PORT,
    PRIVATE,
    PUBLIC,
    World,
    ip,
    make_world,
)

pytestmark = pytest.mark.node

world = pytest.fixture(make_world)


@pytest.fixture
async def online(make_node: MakeNode, world: World) -> AsyncIterator[NodeProcess]:
    """A node whose resolver is the world's, on a private address."""
    node = make_node(dns_servers=(PRIVATE,))
    await node.start()
    assert node.config_error is None
    yield node


CONNECT = """
import socket, sys
s = socket.socket(); s.settimeout(4)
try: s.connect((sys.argv[1], int(sys.argv[2]))); print("open")
except OSError: print("closed")
"""


async def reach(node: NodeProcess, spec: SandboxSpec, address: str, port: int = PORT) -> str:
    """``open`` or ``closed``, tried from inside, as root."""
    _code, output = await node.exec(spec, f"python3 -c '{CONNECT}' {address} {port}", user="root")
    return output.strip()


async def resolves(node: NodeProcess, spec: SandboxSpec) -> bool:
    """Whether a name is resolved inside."""
    code, output = await node.exec(spec, f"timeout 8 getent ahostsv4 {NAME}")
    return code == 0 and ANSWER in output


async def test_default_policy(online: NodeProcess) -> None:
    spec = await online.create()
    assert await reach(online, spec, PUBLIC) == "open"
    assert await reach(online, spec, PRIVATE) == "closed"
    assert await reach(online, spec, METADATA) == "closed"
    assert await resolves(online, spec), "the resolver is private and must work all the same"
    assert await reach(online, spec, PRIVATE, 53) == "closed"


async def test_allow_and_deny(online: NodeProcess) -> None:
    allowed = await online.create(network=NetworkPolicy(allow=("192.168.77.0/24",)))
    assert await reach(online, allowed, PRIVATE) == "open"
    denied = await online.create(network=NetworkPolicy(deny=("203.0.114.0/24",)))
    assert await reach(online, denied, PUBLIC) == "closed"
    both = await online.create(
        network=NetworkPolicy(deny=("203.0.114.0/24",), allow=(PUBLIC, METADATA))
    )
    assert await reach(online, both, PUBLIC) == "open"
    assert await reach(online, both, METADATA) == "closed", "not even when allowed"


async def test_no_internet(online: NodeProcess, world: World) -> None:
    spec = await online.create(network=NetworkPolicy(internet=False))
    assert await reach(online, spec, PUBLIC) == "closed"
    assert not await resolves(online, spec)
    assert world.questions == []
    some = await online.create(network=NetworkPolicy(internet=False, allow=(PUBLIC,)))
    assert await reach(online, some, PUBLIC) == "open"
    assert await reach(online, some, ANSWER) == "closed"
    assert await resolves(online, some)


async def test_sandboxes_and_host_are_closed(online: NodeProcess) -> None:
    everything = NetworkPolicy(allow=("0.0.0.0/0",))
    one, two = await online.create(network=everything), await online.create(network=everything)
    route = await online.call("route", two.sandbox_id)
    assert await reach(online, one, route["address"], 49_983) == "closed"
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        for address in ("169.254.0.1", HOST_END, "10.255.255.254"):
            assert await reach(online, one, address, port) == "closed", address
    code, _ = await online.exec(one, "python3 -c '" + CONNECT + "' ::1 1; ip -6 route | grep .")
    assert code != 0, "no IPv6 leaves the sandbox"


async def test_only_the_host_reaches_a_sandbox(online: NodeProcess, world: World) -> None:
    """Not even a router that knows the way gets in."""
    spec = await online.create()
    address = (await online.call("route", spec.sandbox_id))["address"]
    ip("-n", world.namespace, "route", "add", f"{address}/32", "via", HOST_END)
    tried = subprocess.run(
        ["ip", "netns", "exec", world.namespace, sys.executable, "-c", CONNECT, address, "49983"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert tried.stdout.strip() == "closed"
    with pytest.raises(OSError):
        socket.create_connection((address, 22), timeout=2)


async def test_replaced_while_running(online: NodeProcess) -> None:
    """At once, and without cutting off the agent's streams."""
    spec = await online.create()
    stream = asyncio.create_task(online.exec(spec, "for i in 1 2 3 4 5; do echo $i; sleep 1; done"))
    await online.call("set_network", spec.sandbox_id, {"internet": False})
    assert await reach(online, spec, PUBLIC) == "closed"
    assert not await resolves(online, spec)
    await online.call("set_network", spec.sandbox_id, {"internet": True, "deny": [ANSWER]})
    assert await reach(online, spec, PUBLIC) == "open"
    assert await reach(online, spec, ANSWER) == "closed"
    assert await resolves(online, spec)
    assert (await stream)[1].split() == ["1", "2", "3", "4", "5"]


async def test_address_used_again(make_node: MakeNode, world: World) -> None:
    """A later sandbox of the same address knows nothing of the earlier one's connections."""
    node = make_node(dns_servers=(PRIVATE,), sandboxes_max=1, slots_ready=1)
    await node.start()
    for _ in range(4):
        spec = await node.create()
        assert await reach(node, spec, PUBLIC) == "open"
        assert await resolves(node, spec)
        await node.call("kill", spec.sandbox_id)

# SPDX-License-Identifier: AGPL-3.0-only
"""Groups on a real node: who reaches whom, by which names, and what a hostile member cannot do."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from opendsec_server.config import ConfigError
from opendsec_server.contract.ids import new_group_id, random_chars
from opendsec_server.contract.images import ReadyCheck, StartCommand
from opendsec_server.contract.node import GroupMembership, NetworkPolicy, SandboxSpec
from opendsec_server.node.network.policy import NAMES_ADDRESS, NAMES_PORT
from opendsec_server.node.tests.conftest import MakeNode
from opendsec_server.node.tests.layered import busybox, make_image, store_of
from opendsec_server.node.tests.machine import (
    WAIT_S,
    CallError,
    NodeProcess,
    agent_exec,
    first_process,
)
from opendsec_server.node.tests.test_images import sh
from opendsec_server.node.tests.test_network import CONNECT, reach
from opendsec_server.node.tests.test_restart import again
from opendsec_server.node.tests.world import (
    ANSWER,
    METADATA,
    NAME,
    PRIVATE,
    PUBLIC,
    World,
    make_world,
)
from opendsec_server.node.vmm.qemu.program import find_qemu

pytestmark = pytest.mark.node

world = pytest.fixture(make_world)

SERVE = StartCommand(
    argv=(
        "python3",
        "-c",
        """
import socket, sys, threading
name = sys.argv[1].encode()
def datagrams():
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.bind(("0.0.0.0", 7000))
    while True:
        _data, peer = end.recvfrom(64)
        end.sendto(b"udp of " + name, peer)
threading.Thread(target=datagrams).start()
local = socket.create_server(("127.0.0.1", 7001))
listener = socket.create_server(("0.0.0.0", 7000), backlog=64)
while True:
    connection, peer = listener.accept()
    connection.sendall(b"tcp of " + name + b" for " + peer[0].encode())
    connection.close()
""",
        "NAME",
    ),
    ready=ReadyCheck(port=7000, timeout_s=20),
)
"""Tells who it is, over TCP and UDP on port 7000; on 7001 for itself only."""

ASK = """
import socket, sys
kind = socket.SOCK_STREAM if sys.argv[1] == "tcp" else socket.SOCK_DGRAM
end = socket.socket(socket.AF_INET, kind)
end.settimeout(4)
try:
    end.connect((sys.argv[2], 7000))
    if kind == socket.SOCK_DGRAM: end.send(b"?")
    print(end.recv(64).decode())
except socket.gaierror: print("unknown")
except OSError as exc: print("closed", exc)
"""

LOOK_UP = """
import socket, struct, sys
labels = b"".join(bytes([len(x)]) + x.encode() for x in sys.argv[1].split("."))
question = struct.pack(">6H", 77, 0x100, 1, 0, 0, 0) + labels
question += struct.pack(">BHH", 0, int(sys.argv[2]), 1)
if sys.argv[3] == "tcp":
    end = socket.create_connection((sys.argv[4], 53), 4)
    end.sendall(struct.pack(">H", len(question)) + question)
    end.recv(2)
else:
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.settimeout(4)
    end.sendto(question, (sys.argv[4], 53))
answer = end.recv(512)
records = answer[len(question):]
found = [socket.inet_ntoa(records[at + 12:at + 16]) for at in range(0, len(records), 16)]
print(answer[3] & 15, *found)
"""


PING = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
end.settimeout(4)
end.connect((sys.argv[1], 0))
end.send(bytes([8, 0, 0, 0, 0, 0, 0, 1]))
print("alive" if end.recv(64)[0] == 0 else "refused")
"""

BIND = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind((sys.argv[1], int(sys.argv[2])))
"""

FLOOD = """
import os, socket
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(20000):
    try: end.sendto(os.urandom(n % 300), ("169.254.0.1", 53))
    except OSError: pass
held = []
for n in range(64):
    try: held.append(socket.create_connection(("169.254.0.1", 53), 0.2))
    except OSError: pass
"""

HEAR = """
import socket
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind(("0.0.0.0", 7002))
print("listening", flush=True)
while True: print(end.recv(64), flush=True)
"""

SEND = """
import socket, sys
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
end.bind((sys.argv[1], 0))
end.sendto(sys.argv[3].encode(), (sys.argv[2], 7002))
"""

KEEP_ASKING = """
import socket, sys, time
address = socket.gethostbyname(sys.argv[1])
while True:
    try:
        with socket.create_connection((address, 7000), 4) as end:
            print("heard", end.recv(64), flush=True)
    except OSError as exc: print("lost", exc, flush=True)
    time.sleep(0.02)
"""


def member(group_id: str, name: str, *aliases: str) -> GroupMembership:
    return GroupMembership(group_id=group_id, name=name, aliases=aliases)


def serving(name: str) -> StartCommand:
    return StartCommand(argv=(*SERVE.argv[:-1], name), ready=SERVE.ready)


async def serve(
    node: NodeProcess, group_id: str | None, name: str, *aliases: str, **options: Any
) -> SandboxSpec:
    """A member (or, without a group, none) that serves as its name."""
    group = None if group_id is None else member(group_id, name, *aliases)
    return await node.create(group=group, start=serving(name), **options)


async def ask(node: NodeProcess, spec: SandboxSpec, whom: str, kind: str = "tcp") -> str:
    """What somebody says, or ``unknown``, or ``closed``; asked as the sandbox's root."""
    _code, said = await node.exec(spec, f"python3 -c '{ASK}' {kind} {whom}", user="root")
    return said.strip()


async def look_up(
    node: NodeProcess,
    spec: SandboxSpec,
    name: str,
    *,
    kind: int = 1,
    how: str = "udp",
    at: str = "169.254.0.1",
) -> str:
    """The answer's code and addresses, asked by hand."""
    _code, said = await node.exec(spec, f"python3 -c '{LOOK_UP}' {name} {kind} {how} {at}")
    return said.strip()


async def address_of(node: NodeProcess, spec: SandboxSpec) -> str:
    route = await node.call("route", spec.sandbox_id)
    return str(route["address"])


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not await true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.fixture
async def online(make_node: MakeNode, world: World) -> AsyncIterator[NodeProcess]:
    node = make_node(dns_servers=(PRIVATE,))
    await node.start()
    assert node.config_error is None
    yield node


async def test_members_reach_each_other(node: NodeProcess) -> None:
    """By name, alias and address, over TCP, UDP and ICMP; whoever comes later is found too."""
    group = new_group_id()
    web = await serve(node, group, "web", "www", "www.example.test")
    db = await serve(node, group, "Db")
    late = await serve(node, group, "late")
    web_address = await address_of(node, web)
    for spec in (db, late):
        own = await address_of(node, spec)
        for name in ("web", "www", "WWW", "www.example.test", web_address):
            assert await ask(node, spec, name) == f"tcp of web for {own}", name
            assert await ask(node, spec, name, "udp") == "udp of web", name
    assert (await ask(node, web, "late")).startswith("tcp of late for")
    assert (await ask(node, web, "db")).startswith("tcp of Db for")
    assert (await ask(node, web, "web")).startswith("tcp of web for"), "itself too"
    assert web_address in (await node.exec(db, "getent ahostsv4 web"))[1]
    assert (await node.exec(db, f"python3 -c '{PING}' web"))[1] == "alive\n"
    local = await node.exec(db, f"python3 -c '{CONNECT}' web 7001")
    assert local[1].strip() == "closed", "what listens on the loopback is its own"
    agent = await node.exec(db, f"python3 -c '{CONNECT}' web 49983", user="root")
    assert agent[1].strip() == "closed", "the agent's port is no service of the member's"


async def test_nobody_else_reaches_a_member(node: NodeProcess) -> None:
    """Not another group with the same names, nor one of the same id in another project."""
    group, other_group = new_group_id(), new_group_id()
    everything = NetworkPolicy(allow=("0.0.0.0/0",))
    web = await serve(node, group, "web", network=everything)
    db = await serve(node, group, "db", network=everything)
    strangers = {
        "other group": await serve(node, other_group, "web", network=everything),
        "other project": await serve(node, group, "web", project_id="q", network=everything),
        "no group": await serve(node, None, "web", network=everything),
    }
    inside = [await address_of(node, spec) for spec in (web, db)]
    for who, stranger in strangers.items():
        outside = await address_of(node, stranger)
        for address in inside:
            for kind in ("tcp", "udp"):
                assert (await ask(node, stranger, address, kind)).startswith("closed"), who
                assert (await ask(node, db, outside, kind)).startswith("closed"), who
        assert await ask(node, stranger, "db") == "unknown", who
    other = await address_of(node, strangers["other group"])
    assert await ask(node, strangers["other group"], "web") == f"tcp of web for {other}"
    assert await look_up(node, db, "web") == f"0 {inside[0]}", "and only that one"


async def test_policy_and_names_of_the_internet(online: NodeProcess, world: World) -> None:
    """The group's network is open whatever the policy, and opens nothing else."""
    node, group = online, new_group_id()
    shut = NetworkPolicy(internet=False)
    closed = await serve(node, group, "closed", network=shut)
    open_ = await serve(node, group, "open")
    for spec, other in ((closed, "open"), (open_, "closed")):
        assert (await ask(node, spec, other)).startswith(f"tcp of {other} for")
        assert await reach(node, spec, METADATA) == "closed"
        assert await reach(node, spec, PRIVATE) == "closed"
    assert await reach(node, closed, PUBLIC) == "closed"
    assert await reach(node, open_, PUBLIC) == "open"
    assert (await node.exec(closed, f"getent ahostsv4 {NAME}"))[0] == 2
    assert world.questions == [], "who may not ask does not ask"
    for how in ("udp", "tcp"):
        assert await look_up(node, closed, NAME, how=how) == "5", "refused"
    code, said = await node.exec(open_, f"getent ahostsv4 {NAME}")
    assert code == 0
    assert ANSWER in said
    assert await reach(node, open_, PRIVATE, 53) == "closed", "only the node asks there"
    await node.call("set_network", open_.sandbox_id, {"internet": False})
    assert await reach(node, open_, PUBLIC) == "closed"
    assert await look_up(node, open_, NAME) == "5"
    assert (await ask(node, open_, "closed")).startswith("tcp of closed for")
    await node.call("set_network", closed.sandbox_id, {"internet": True})
    assert await look_up(node, closed, NAME) == f"0 {ANSWER}"
    assert (await ask(node, closed, "open")).startswith("tcp of open for")
    await look_up(node, closed, "nobody")
    asked = [question for question in world.questions if b"service" not in question]
    assert not asked, "names of the group, and those without a dot, stay here"


async def test_answers(node: NodeProcess) -> None:
    group = new_group_id()
    web = await serve(node, group, "web", "all")
    db = await serve(node, group, "db", "all")
    addresses = [await address_of(node, spec) for spec in (web, db)]
    for how in ("udp", "tcp"):
        for at in ("169.254.0.1", "169.254.0.2", "169.254.0.3"):
            assert await look_up(node, db, "web", how=how, at=at) == f"0 {addresses[0]}"
    code, *both = (await look_up(node, db, "all")).split()
    assert (code, sorted(both)) == ("0", sorted(addresses))
    assert await look_up(node, db, "web", kind=28) == "0", "no address of that kind, but there"
    assert await look_up(node, db, "nobody") == "3"


async def test_static_programs_and_images_without_etc(node: NodeProcess) -> None:
    image = await make_image(store_of(node.config), busybox())
    group = new_group_id()
    web = await serve(node, group, "web")
    bare = await node.create(image=image.digest, default_user="root", group=member(group, "bare"))
    own = await address_of(node, bare)
    said = await sh(node, bare, "rm /etc/hosts; busybox nc web 7000 </dev/null")
    assert said == f"tcp of web for {own}"
    assert await address_of(node, web) in await sh(node, bare, "busybox nslookup web")


async def test_members_come_and_go(node: NodeProcess) -> None:
    """A member that has ended is not found; who has its address next is not reached by it."""
    group = new_group_id()
    web = await serve(node, group, "web")
    db = await serve(node, group, "db")
    old = await address_of(node, db)
    assert (await ask(node, web, "db")).startswith("tcp of db for")
    await node.call("kill", db.sandbox_id)
    assert await ask(node, web, "db") == "unknown"
    assert (await ask(node, web, old)).startswith("closed")
    stranger = await serve(node, None, "stranger")
    for _ in range(node.config.sandboxes_max):
        if await address_of(node, stranger) == old:
            break
        await node.call("kill", stranger.sandbox_id)
        stranger = await serve(node, None, "stranger")
        if time.time() > stranger.created_at + 60:
            break
    assert (await ask(node, web, await address_of(node, stranger))).startswith("closed")
    db = await serve(node, group, "db")
    assert (await ask(node, web, "db")).startswith("tcp of db for")


async def test_pause_and_resume(node: NodeProcess) -> None:
    group = new_group_id()
    web = await serve(node, group, "web")
    db = await serve(node, group, "db")
    for mode in ("full", "filesystem"):
        await node.call("pause", db.sandbox_id, mode=mode)
        assert await ask(node, web, "db") == "unknown", mode
        await node.call("resume", db.sandbox_id, end_at=time.time() + 600)
        assert (await ask(node, web, "db")).startswith("tcp of db for"), mode
        assert (await ask(node, db, "web")).startswith("tcp of web for"), mode


async def test_forks_are_in_no_group(node: NodeProcess) -> None:
    group = new_group_id()
    web = await serve(node, group, "web")
    db = await serve(node, group, "db")
    await node.call("snapshot", db.sandbox_id, saved := random_chars(20), mode="filesystem")
    fork = await node.create(snapshot_id=saved)
    assert await ask(node, fork, "web") == "unknown"
    assert (await ask(node, fork, await address_of(node, web))).startswith("closed")
    assert await look_up(node, web, "db") == f"0 {await address_of(node, db)}"


@pytest.mark.parametrize("how", ["stop", "kill9"])
async def test_node_restart(node: NodeProcess, how: str) -> None:
    """Connections stand, the network is there while the node is away, names are after it."""
    group = new_group_id()
    web = await serve(node, group, "web")
    db = await serve(node, group, "db")
    gone = await serve(node, group, "gone")
    frozen = await serve(node, group, "frozen")
    stranger = await serve(node, None, "stranger")
    addresses = {s.sandbox_id: await address_of(node, s) for s in (web, db, gone, frozen, stranger)}
    await node.call("pause", frozen.sandbox_id)
    await node.exec(db, f"nohup python3 -c '{KEEP_ASKING}' web >~/said 2>&1 & exit 0")
    await until(lambda: _said(node, db, "heard"))
    await (node.kill9() if how == "kill9" else node.finish("stop"))
    # A question that is asked meanwhile is answered when there is somebody again.
    pending = asyncio.create_task(
        asyncio.to_thread(
            agent_exec, addresses[db.sandbox_id], db.access_token, "getent ahostsv4 web", "user"
        )
    )
    await again(node)
    assert (await node.exec(db, "grep -c lost ~/said"))[1] == "0\n"
    code, said = await pending
    assert (code, said.split()[0]) == (0, addresses[web.sandbox_id])
    for one, name in ((web, "db"), (db, "web"), (web, "gone")):
        assert (await ask(node, one, name)).startswith(f"tcp of {name} for")
    assert await ask(node, web, "frozen") == "unknown"
    await node.call("resume", frozen.sandbox_id, end_at=time.time() + 600)
    assert (await ask(node, web, "frozen")).startswith("tcp of frozen for")
    assert (await ask(node, stranger, addresses[web.sandbox_id])).startswith("closed")
    await node.call("kill", gone.sandbox_id)
    assert await ask(node, web, "gone") == "unknown"
    late = await serve(node, group, "late")
    assert (await ask(node, late, "web")).startswith("tcp of web for")
    assert (await ask(node, web, "late")).startswith("tcp of late for")


async def _said(node: NodeProcess, spec: SandboxSpec, word: str, file: str = "said") -> bool:
    return word in (await node.exec(spec, f"cat ~/{file}"))[1]


async def test_killed_while_joining(make_node: MakeNode) -> None:
    """A member that was half connected when the node died leaves nothing open."""
    node = make_node()
    await node.start()
    group = new_group_id()
    web = await serve(node, group, "web")
    await node.finish("stop")
    await again(node, OPENDSEC_CRASH_AT="network:after")
    with pytest.raises(ConnectionError):
        await serve(node, group, "db")
    await node.wait()
    await again(node)
    assert await ask(node, web, "db") == "unknown"
    answer = await node.exec(web, "getent hosts web")
    assert answer[0] == 0
    db = await serve(node, group, "db")
    assert (await ask(node, db, "web")).startswith("tcp of web for")


async def test_a_hostile_member(node: NodeProcess) -> None:
    """Root in a member can neither pass for another, nor answer for the node, nor tire it out."""
    group = new_group_id()
    web = await serve(node, group, "web")
    evil = await serve(node, group, "evil")
    stranger = await serve(node, None, "stranger")
    addresses = [await address_of(node, spec) for spec in (web, evil, stranger)]
    for source in (addresses[2], "169.254.0.1", "198.51.100.7"):
        code, _ = await node.exec(evil, f"python3 -c '{BIND}' {source} 5", user="root")
        assert code != 0, "no foreign source"
    for forged in (
        "ip addr add 10.9.9.9/32 dev eth0",
        "nft flush ruleset",
        f"iptables -t nat -A OUTPUT -d {NAMES_ADDRESS} -j DROP",
        "python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'",
        "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
        f"python3 -c '{BIND}' {NAMES_ADDRESS} {NAMES_PORT}",
    ):
        assert (await node.exec(evil, forged, user="root"))[0] != 0, forged
    code, _ = await node.exec(evil, f"python3 -c '{FLOOD}'", user="root")
    assert code == 0
    assert await look_up(node, web, "evil") == f"0 {addresses[1]}", "others are served as before"
    assert await look_up(node, web, "web") == f"0 {addresses[0]}"

    async def served_again() -> bool:
        return await look_up(node, evil, "web") == f"0 {addresses[0]}"

    await until(served_again)


async def test_another_link_is_not_believed(node: NodeProcess) -> None:
    """Not even a stranger without rules of its own, on a link without reverse path filter, passes
    for a member: the host goes by link and address."""
    group = new_group_id()
    web = await serve(node, group, "web")
    db = await serve(node, group, "db")
    stranger = await serve(node, None, "stranger")
    source, target, own = [await address_of(node, spec) for spec in (web, db, stranger)]
    await node.exec(db, f"nohup python3 -c '{HEAR}' >~/heard 2>&1 & exit 0")
    await until(lambda: _said(node, db, "listening", "heard"))
    network = ipaddress.IPv4Network(node.config.network_cidr)
    number = int(ipaddress.IPv4Address(own)) - int(network.network_address)
    link = f"{node.config.instance}-{number}"
    Path(f"/proc/sys/net/ipv4/conf/{link}/rp_filter").write_text("0")
    pid = first_process(node.config, stranger.sandbox_id)
    forge = f"nft flush ruleset; ip addr add {source}/32 dev lo; python3 -c '{SEND}' {source} "
    for _ in range(3):
        subprocess.run(
            ["nsenter", "-t", str(pid), "-n", "sh", "-c", f"{forge} {target} forged"], check=True
        )
    await node.exec(web, f"python3 -c '{SEND}' {source} {target} honest")
    await until(lambda: _said(node, db, "honest", "heard"))
    assert not await _said(node, db, "forged", "heard")


async def test_refused_memberships(node: NodeProcess) -> None:
    for bad in (
        member("g1", "web"),
        member(new_group_id(), ""),
        member(new_group_id(), "a b"),
        member(new_group_id(), "-"),
        member(new_group_id(), "x" * 64),
        member(new_group_id(), "web", "bad..name"),
        member(new_group_id(), "web", *(f"a{n}" for n in range(20))),
    ):
        with pytest.raises(CallError) as refused:
            await node.create(group=bad)
        assert refused.value.code == "invalid_request"


async def test_the_host_knows_no_names(node: NodeProcess) -> None:
    """A member's answerer is in its own namespace: nobody else can ask it."""
    await serve(node, new_group_id(), "web")
    with pytest.raises(OSError):
        socket.create_connection((NAMES_ADDRESS, NAMES_PORT), timeout=1)


@pytest.fixture
def _qemu() -> None:
    try:
        find_qemu(None)
    except ConfigError as exc:
        pytest.skip(f"no microVMs: {exc}")


@pytest.mark.usefixtures("_qemu")
async def test_machines(online: NodeProcess) -> None:
    """A microVM and a container in one group; another machine outside; saved and restored."""
    node, group = online, new_group_id()
    web = await serve(node, group, "web")
    machine = await serve(node, group, "machine", backend="microvm", disk_mb=512)
    stranger = await serve(node, None, "stranger")
    web_address = await address_of(node, web)

    async def check() -> None:
        address = await address_of(node, machine)
        assert await ask(node, machine, "web") == f"tcp of web for {address}"
        assert await ask(node, machine, "web", "udp") == "udp of web"
        assert (await ask(node, machine, "machine")).startswith("tcp of machine for")
        assert await ask(node, web, "machine") == f"tcp of machine for {web_address}"
        assert await ask(node, web, "machine", "udp") == "udp of machine"
        assert (await node.exec(web, f"python3 -c '{PING}' machine"))[1] == "alive\n"
        agent = await node.exec(web, f"python3 -c '{CONNECT}' machine 49983", user="root")
        assert agent[1].strip() == "closed"
        assert (await ask(node, stranger, address)).startswith("closed")
        outside = await address_of(node, stranger)
        assert (await ask(node, machine, outside)).startswith("closed")
        assert await reach(node, machine, METADATA) == "closed"
        assert ANSWER in await look_up(node, machine, NAME)

    await check()
    await node.call("pause", machine.sandbox_id)
    assert await ask(node, web, "machine") == "unknown"
    await node.kill9()
    await again(node)
    await node.call("resume", machine.sandbox_id, end_at=time.time() + 600)
    await check()

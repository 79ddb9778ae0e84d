# SPDX-License-Identifier: AGPL-3.0-only
"""Slots of virtual machines, with a namespace standing for the guest.

The guest is a namespace with a tap of its own; a thread carries frames between that tap and the
slot's, as a machine monitor would. Everything from the slot's link to the guest's card is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from opendsec_server.contract.node import NetworkPolicy
from opendsec_server.node import syscalls
from opendsec_server.node.network import hosttable, netlink, tap
from opendsec_server.node.network.policy import AGENT_PORT, GATEWAY
from opendsec_server.node.network.slots import Slot, SlotPool
from opendsec_server.node.tests.world import (
    ANSWER,
    HOST_END,
    METADATA,
    NAME,
    PORT,
    PRIVATE,
    PUBLIC,
    World,
    make_world,
)
from tests.leaks import Snapshot
from tests.shares import draw, instance_name

T = TypeVar("T")
OWNER = 61_234
WAIT_S = 5.0
ECHO_PORT = 9_090
EVERYTHING = NetworkPolicy(allow=("0.0.0.0/0",))

world = pytest.fixture(make_world)


def inside(netns: int, function: Callable[[], T]) -> T:
    """Call in another network namespace. Sockets made there stay there."""
    done: Future[T] = Future()

    def body() -> None:
        try:
            syscalls.setns(netns, syscalls.CLONE_NEWNET)
            done.set_result(function())
        except BaseException as exc:
            done.set_exception(exc)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return done.result()


def open_tap(name: str) -> int:
    """Attach to a tap of the thread's namespace, made if there is none."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, 0x400454CA, struct.pack("=16sH22x", name.encode(), 0x1002))
    except OSError:
        os.close(fd)
        raise
    return fd


class Guest:
    """A namespace with the guest's addresses; its frames go to the slot that it is put in."""

    def __init__(self) -> None:
        self.netns = inside(os.open("/proc/self/ns/net", os.O_RDONLY), self._own_namespace)
        self._card = inside(self.netns, self._make_card)
        self._slot_tap = -1
        self._lock = threading.Lock()
        self._stop_read, self._stop_write = os.pipe()
        self._pump_thread = threading.Thread(target=self._pump)
        self._pump_thread.start()

    @staticmethod
    def _own_namespace() -> int:
        syscalls.unshare(syscalls.CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    @staticmethod
    def _make_card() -> int:
        fd = open_tap("eth0")
        index = socket.if_nametoindex("eth0")
        with netlink.Netlink() as link:
            link.send(
                netlink.link_up(netlink.LOOPBACK_INDEX),
                netlink.link_address(index, tap.GUEST_MAC),
                netlink.link_up(index),
                netlink.address(index, tap.GUEST_ADDRESS, tap.PREFIX_LENGTH),
                netlink.default_route_onlink(index, tap.TAP_ADDRESS),
            )
        return fd

    def put_into(self, slot: Slot) -> None:
        """As booted there, or restored there: the guest notices nothing."""
        fresh = inside(slot.netns_fd, lambda: open_tap(tap.TAP))
        with self._lock:
            old, self._slot_tap = self._slot_tap, fresh
            os.write(self._stop_write, b"n")
        if old >= 0:
            os.close(old)

    def _pump(self) -> None:
        while True:
            with self._lock:
                ends = [self._stop_read, self._card, *([self._slot_tap] * (self._slot_tap >= 0))]
            ready = select.select(ends, [], [])[0]
            if self._stop_read in ready and os.read(self._stop_read, 1) == b"x":
                return
            with self._lock:
                for fd, other in ((self._card, self._slot_tap), (self._slot_tap, self._card)):
                    if fd in ready and other >= 0:
                        with contextlib.suppress(OSError):
                            os.write(other, os.read(fd, 65_536))

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._pump_thread.join()
        for fd in (self._card, self._slot_tap, self._stop_read, self._stop_write, self.netns):
            if fd >= 0:
                os.close(fd)

    # --- what runs in it ----------------------------------------------------

    def listen(self, port: int) -> socket.socket:
        return inside(self.netns, lambda: socket.create_server(("0.0.0.0", port)))

    def connect(self, address: str, port: int) -> socket.socket:
        return inside(self.netns, lambda: socket.create_connection((address, port), WAIT_S))

    def reach(self, address: str, port: int = PORT) -> str:
        """``open``, or why not."""
        try:
            self.connect(address, port).close()
        except TimeoutError:
            return "no answer"
        except OSError as exc:
            return errno.errorcode.get(exc.errno or 0, str(exc))
        return "open"

    def datagram(self) -> socket.socket:
        found = inside(self.netns, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        found.settimeout(WAIT_S)
        return found

    def pings(self, address: str) -> bool:
        """Whether an echo request is answered."""

        def make() -> socket.socket:
            return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)

        with inside(self.netns, make) as raw:
            raw.settimeout(1)
            request = struct.pack(">BBHHH", 8, 0, 0, 7, 1)
            checksum = ~sum(struct.unpack(">4H", request)) & 0xFFFF
            raw.connect((address, 0))
            try:
                raw.send(request[:2] + struct.pack(">H", checksum) + request[4:])
                return raw.recv(256)[20] == 0
            except OSError:
                return False

    def resolves(self, name: str = NAME) -> bool:
        """Ask the slot's resolver, by datagram."""
        labels = b"".join(bytes([len(x)]) + x.encode() for x in name.split("."))
        question = b"\x12\x34\x01\0\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1"
        with self.datagram() as ask:
            ask.connect((GATEWAY, 53))
            try:
                ask.send(question)
                return socket.inet_aton(ANSWER) in ask.recv(512)
            except OSError:
                return False


@dataclass
class Machines:
    """A pool of slots, the host's table, and guests."""

    pool: SlotPool
    guests: list[Guest] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)

    async def slot(self, policy: NetworkPolicy | None = None) -> Slot:
        slot = await self.pool.take(policy or NetworkPolicy(), tap_owner=OWNER)
        self.slots.append(slot)
        return slot

    async def boot(self, policy: NetworkPolicy | None = None) -> tuple[Guest, Slot]:
        slot = await self.slot(policy)
        guest = Guest()
        self.guests.append(guest)
        guest.put_into(slot)
        return guest, slot


@pytest.fixture
async def machines(world: World) -> AsyncIterator[Machines]:
    """Checks that nothing is left, on the host's side too."""
    if not Path("/dev/net/tun").exists():
        pytest.skip("no tun driver")
    instance, block = instance_name(), draw(10 * 16)
    network = f"10.{190 + block // 16}.{block % 16 * 16}.0/20"
    before = Snapshot.take(instance)
    links_before = set(os.listdir("/sys/class/net"))
    was_forwarding = hosttable.forwarding_enabled()
    hosttable.set_forwarding(True)
    pool = SlotPool(instance, network, ready_wanted=2, capacity=64, user_namespaces=False)
    pool.maker.start()
    rules = hosttable.ruleset(instance, network, (PRIVATE,))
    await pool.maker.ask("host", commands=rules)
    await pool.start(set())
    made = Machines(pool)
    try:
        yield made
    finally:
        for guest in made.guests:
            guest.close()
        for slot in made.slots:
            pool.release(slot)
        await pool.stop()
        left = await pool.wait_links_gone(20)
        await pool.maker.ask("host", commands=hosttable.removal(instance))
        tables, _ = await pool.maker.ask("host", commands="list tables\n")
        if not was_forwarding and "opendsec_" not in tables["output"]:
            hosttable.set_forwarding(False)
        await pool.maker.stop()
    assert not left
    before.assert_nothing_new()
    taps = {n for n in set(os.listdir("/sys/class/net")) - links_before if n.startswith("tap")}
    assert not taps, "a tap came out of its namespace"


@pytest.fixture
def echo(world: World) -> Iterator[Callable[[], socket.socket]]:
    """Accepts connections to the world's echo port; what is accepted is the test's."""
    fd = os.open(f"/run/netns/{world.namespace}", os.O_RDONLY)
    listener = inside(fd, lambda: socket.create_server(("0.0.0.0", ECHO_PORT)))
    os.close(fd)
    listener.settimeout(WAIT_S)
    accepted = []

    def accept() -> socket.socket:
        connection, _peer = listener.accept()
        connection.settimeout(WAIT_S)
        accepted.append(connection)
        return connection

    yield accept
    for connection in (*accepted, listener):
        connection.close()


def talks(one: socket.socket, other: socket.socket) -> bool:
    """Whether bytes arrive."""
    word = secrets.token_bytes(4)
    one.sendall(word)
    return other.recv(16) == word


def was_reset(end: socket.socket) -> bool:
    """Whether sending something, and waiting for the answer, ends in a reset."""
    try:
        end.sendall(b"?")
        end.recv(1)
    except (ConnectionResetError, BrokenPipeError):
        return True
    except TimeoutError:
        return False
    return False


async def host_to_guest(guest: Guest, slot: Slot) -> tuple[socket.socket, socket.socket]:
    """A connection of the host to the guest's agent port: both ends."""
    with guest.listen(AGENT_PORT) as listener:
        ours = socket.create_connection((slot.address, AGENT_PORT), WAIT_S)
        listener.settimeout(WAIT_S)
        theirs, peer = listener.accept()
    theirs.settimeout(WAIT_S)
    assert peer[0] == GATEWAY
    return ours, theirs


async def test_host_reaches_the_agent_only(machines: Machines) -> None:
    guest, slot = await machines.boot()
    ours, theirs = await host_to_guest(guest, slot)
    with ours, theirs:
        assert talks(ours, theirs)
        assert talks(theirs, ours)
    with guest.listen(22), pytest.raises(OSError):
        socket.create_connection((slot.address, 22), timeout=1)


async def test_default_policy(machines: Machines, world: World) -> None:
    guest, _slot = await machines.boot()
    assert guest.reach(PUBLIC) == "open"
    assert guest.reach(PRIVATE) == "EHOSTUNREACH", "refused at once"
    assert guest.reach(METADATA) == "EHOSTUNREACH"
    assert guest.reach(PRIVATE, 53) == "EHOSTUNREACH"
    assert guest.resolves()
    assert guest.pings(PUBLIC)
    assert not guest.pings(PRIVATE)


async def test_allow_and_deny(machines: Machines) -> None:
    guest, slot = await machines.boot(NetworkPolicy(allow=("192.168.77.0/24",)))
    assert guest.reach(PRIVATE) == "open"
    await machines.pool.set_policy(slot, NetworkPolicy(deny=("203.0.114.0/24",)))
    assert guest.reach(PUBLIC) == "EHOSTUNREACH"
    await machines.pool.set_policy(
        slot, NetworkPolicy(deny=("203.0.114.0/24",), allow=(PUBLIC, METADATA))
    )
    assert guest.reach(PUBLIC) == "open"
    assert guest.reach(METADATA) == "EHOSTUNREACH", "not even when allowed"


async def test_no_internet(machines: Machines, world: World) -> None:
    guest, slot = await machines.boot(NetworkPolicy(internet=False))
    assert guest.reach(PUBLIC) == "EHOSTUNREACH"
    assert not guest.resolves()
    assert world.questions == []
    await machines.pool.set_policy(slot, NetworkPolicy(internet=False, allow=(PUBLIC,)))
    assert guest.reach(PUBLIC) == "open"
    assert guest.reach(ANSWER) == "EHOSTUNREACH"
    assert guest.resolves()


async def test_sandboxes_and_host_are_closed(machines: Machines) -> None:
    guest, own = await machines.boot(EVERYTHING)
    other, other_slot = await machines.boot(EVERYTHING)
    with (
        other.listen(AGENT_PORT),
        socket.create_server(("0.0.0.0", AGENT_PORT)),
        inside(own.netns_fd, lambda: socket.create_server(("0.0.0.0", AGENT_PORT))),
    ):
        gateway_of_network = machines.pool.address_of(0)
        for address in (
            other_slot.address,
            own.address,
            GATEWAY,
            HOST_END,
            gateway_of_network,
            tap.TAP_ADDRESS,
            "169.254.0.2",
        ):
            # The host's own addresses are closed by the host, which drops; the rest is refused.
            wanted = "no answer" if address == HOST_END else "EHOSTUNREACH"
            assert guest.reach(address, AGENT_PORT) == wanted, address
        assert not guest.pings(GATEWAY)
        # The same doors stand open to those who may come in.
        socket.create_connection((other_slot.address, AGENT_PORT), WAIT_S).close()


async def test_only_the_host_reaches_a_guest(machines: Machines, world: World) -> None:
    guest, slot = await machines.boot()
    fd = os.open(f"/run/netns/{world.namespace}", os.O_RDONLY)
    subprocess.run(
        ["ip", "-n", world.namespace, "route", "add", f"{slot.address}/32", "via", HOST_END],
        check=True,
    )
    with guest.listen(AGENT_PORT), pytest.raises(OSError):
        inside(fd, lambda: socket.create_connection((slot.address, AGENT_PORT), timeout=1))
    os.close(fd)


def _add_address(index: int, address: str) -> None:
    with netlink.Netlink() as link:
        link.send(netlink.address(index, address))


async def test_forged_sources(machines: Machines, world: World) -> None:
    guest, slot = await machines.boot(EVERYTHING)
    fd = os.open(f"/run/netns/{world.namespace}", os.O_RDONLY)
    ear = inside(fd, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    os.close(fd)
    ear.settimeout(1)
    ear.bind((PUBLIC, 7_777))
    with ear:
        index = inside(guest.netns, lambda: socket.if_nametoindex("eth0"))
        for source in (slot.address, "198.51.100.9", GATEWAY, tap.TAP_ADDRESS, "169.254.0.20"):
            inside(guest.netns, partial(_add_address, index, source))
            with guest.datagram() as forged:
                forged.bind((source, 0))
                forged.sendto(source.encode(), (PUBLIC, 7_777))
            with pytest.raises(TimeoutError):
                ear.recv(64)
        with guest.datagram() as honest:
            honest.bind((tap.GUEST_ADDRESS, 0))
            honest.sendto(b"honest", (PUBLIC, 7_777))
        assert ear.recv(64) == b"honest"

    def addresses_of_tap() -> str:
        return subprocess.run(
            ["ip", "-6", "addr", "show"], capture_output=True, text=True, check=True
        ).stdout

    assert tap.TAP not in inside(slot.netns_fd, addresses_of_tap), "no IPv6"


async def test_replaced_while_running(
    machines: Machines, echo: Callable[[], socket.socket]
) -> None:
    """What is no longer allowed ends at both ends; the rest goes on, whoever speaks first."""
    guest, slot = await machines.boot(EVERYTHING)
    agent, agent_end = await host_to_guest(guest, slot)
    pairs = []
    for address in (PUBLIC, PRIVATE, PUBLIC):
        near = guest.connect(address, ECHO_PORT)
        pairs.append((near, echo()))
        assert talks(*pairs[-1])
    (public, public_far), (private, private_far), (other, other_far) = pairs
    await machines.pool.set_policy(slot, NetworkPolicy())
    assert talks(public_far, public), "allowed before and after, and the far end speaks first"
    assert talks(public, public_far)
    assert was_reset(private)
    assert was_reset(private_far)
    await machines.pool.set_policy(slot, NetworkPolicy(internet=False))
    assert was_reset(other_far), "the far end learns it without a word of the guest"
    assert was_reset(public)
    assert talks(agent, agent_end)
    assert talks(agent_end, agent)
    for end in (agent, agent_end, public, private, other):
        end.close()


async def test_connections_of_another_life(
    machines: Machines, echo: Callable[[], socket.socket]
) -> None:
    """A restored guest still believes in its connections; they end at the first word."""
    guest, first = await machines.boot()
    outward, outward_far = guest.connect(PUBLIC, ECHO_PORT), echo()
    agent, agent_end = await host_to_guest(guest, first)
    assert talks(outward, outward_far)
    second = await machines.slot()
    guest.put_into(second)
    assert was_reset(outward)
    assert was_reset(agent_end)
    assert guest.reach(PUBLIC) == "open"
    fresh, fresh_end = await host_to_guest(guest, second)
    assert talks(fresh, fresh_end)

    def forget() -> None:
        with netlink.Netlink(netfilter=True) as conntrack:
            conntrack.send(netlink.conntrack_flush())

    inside(second.netns_fd, forget)
    assert was_reset(fresh), "the same towards the host"
    for end in (outward, agent, agent_end, fresh, fresh_end):
        end.close()


async def test_who_may_open_the_tap(machines: Machines) -> None:
    """The owner without capabilities, nobody else; with the flags of both monitors."""
    slot = await machines.slot()
    for flags in (0x1002, 0x5002):  # IFF_TAP | IFF_NO_PI, and | IFF_VNET_HDR
        assert inside(slot.netns_fd, partial(_try_open, OWNER, flags)) == 0
    assert inside(slot.netns_fd, partial(_try_open, OWNER + 1, 0x5002)) == errno.EPERM


ATTACH = """
import fcntl, struct, sys
try: fcntl.ioctl(int(sys.argv[1]), 0x400454CA, struct.pack("=16sH22x", b"tap0", int(sys.argv[2])))
except OSError as exc: sys.exit(exc.errno)
"""


def _try_open(uid: int, flags: int) -> int:
    """The error number of attaching as another user."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    try:
        return subprocess.run(
            [os.path.realpath(sys.executable), "-I", "-c", ATTACH, str(fd), str(flags)],
            user=uid,
            group=uid,
            extra_groups=[],
            pass_fds=[fd],
            check=False,
        ).returncode
    finally:
        os.close(fd)


async def test_ready_slots_serve_both(machines: Machines) -> None:
    """Machines and containers share the pool of ready slots; a container's slot has no tap."""
    pool = machines.pool
    async with asyncio.timeout(WAIT_S):
        while pool.ready < pool.ready_wanted:
            await asyncio.sleep(0.02)
    numbers = pool.ready
    await machines.slot(NetworkPolicy(internet=False))
    assert pool.ready == numbers - 1
    container = await pool.take(NetworkPolicy())
    machines.slots.append(container)
    assert not inside(container.netns_fd, lambda: netlink.link_there(tap.TAP))
    await pool.set_policy(container, NetworkPolicy(internet=False))


async def test_refusals_leave_nothing(machines: Machines) -> None:
    """A tap that cannot be made gives the slot back."""
    slot = await machines.slot()
    with pytest.raises(Exception, match="cannot make a tap"):
        await machines.pool.add_tap(slot, OWNER, NetworkPolicy())
    assert machines.pool.in_use == 1

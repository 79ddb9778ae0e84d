# SPDX-License-Identifier: AGPL-3.0-only
"""The pool of ready slots and the daemon's side of the slot maker.

A slot is used once. A fresh namespace costs 2.5 ms, spent in the slot maker ahead of the create;
cleaning a used one (sockets in FIN_WAIT, connection tracking, routes, policy) costs more and can
only be hoped to be complete. Only the number of a slot is used again, oldest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from opendsec_server.contract.errors import NodeFull, SandboxStartFailed
from opendsec_server.contract.node import NetworkPolicy

from .policy import base_ruleset, policy_commands
from .slotmaker import IDS_PER_SANDBOX, MESSAGE_BYTES_MAX
from .tap import TapInfo, tap_ruleset

ID_BASE = 0x7000_0000
"""First host user id given to a sandbox; slot n owns ``ID_BASE + n * 65536`` and up."""

NUMBER_REST_S = 2.0
"""How long a number rests before it is used again: its old link must be gone by then."""

_DESCRIPTORS_PER_ANSWER = 2
_MAKERS_AT_ONCE = 4

_LULL_S = 0.25
"""How long no slot must have been taken before the pool is filled again."""

_LOW_WATER = 4
"""Below this part of the pool it is filled at once."""


def _egress(policy: NetworkPolicy) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    return policy.internet, policy.allow, policy.deny


_DEFAULT_EGRESS = _egress(NetworkPolicy())


class SlotMakerError(Exception):
    """The slot maker refused a request; the message is the kernel's or nft's."""


@dataclass(slots=True)
class Slot:
    """One network namespace with its addresses, and the id range of its sandbox.

    Attributes:
        number: 1 and up; names and addresses follow from it.
        address: The sandbox's address.
        netns_fd: Keeps the namespace while nobody lives in it.
        userns_fd: The id map for mounts; None without user namespaces. Owned by the pool.
    """

    number: int
    address: str
    netns_fd: int
    userns_fd: int | None

    @property
    def id_base(self) -> int:
        """First host id of the sandbox's range."""
        return ID_BASE + self.number * IDS_PER_SANDBOX


class SlotMakerClient:
    """Asks the helper process; requests are answered in order."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._process_pid: int | None = None
        self._waiting: deque[asyncio.Future[tuple[dict[str, Any], list[int]]]] = deque()
        self._room = asyncio.Semaphore(_MAKERS_AT_ONCE)

    def start(self) -> None:
        """Start the helper."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES_MAX)
        with theirs:
            self._process_pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "opendsec_server.node.network.slotmaker"],
                _python_environment(),
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
                setsid=True,
            )
        ours.setblocking(False)
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._readable)

    async def stop(self) -> None:
        """End the helper and wait for it."""
        if self._channel is None:
            return
        self._disconnect()
        pid, self._process_pid = self._process_pid, None
        if pid is not None:
            await asyncio.to_thread(os.waitpid, pid, 0)

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            channel.close()
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(SlotMakerError("the slot maker ended"))

    def _readable(self) -> None:
        assert self._channel is not None
        try:
            data, fds, _flags, _address = socket.recv_fds(
                self._channel, MESSAGE_BYTES_MAX, _DESCRIPTORS_PER_ANSWER
            )
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._restart()
            return
        for fd in fds:
            os.set_inheritable(fd, False)
        waiting = self._waiting.popleft()
        if waiting.cancelled():
            for fd in fds:
                os.close(fd)
        else:
            waiting.set_result((json.loads(data), fds))

    def _restart(self) -> None:
        """The helper died: fail what waits, and start another."""
        self._disconnect()
        if self._process_pid is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._process_pid, 0)
        self.start()

    async def ask(
        self, operation: str, *, fds: tuple[int, ...] = (), **arguments: object
    ) -> tuple[dict[str, Any], list[int]]:
        """One request.

        Raises:
            SlotMakerError: refused, or the helper ended.
        """
        request = json.dumps({"op": operation, **arguments}).encode()
        async with self._room:
            if self._channel is None:
                raise SlotMakerError("the slot maker is not running")
            waiting: asyncio.Future[tuple[dict[str, Any], list[int]]] = (
                asyncio.get_running_loop().create_future()
            )
            try:
                socket.send_fds(self._channel, [request], fds)
            except OSError as exc:
                raise SlotMakerError(f"the slot maker cannot be reached: {exc}") from exc
            self._waiting.append(waiting)
            answer, got = await waiting
        if not answer["ok"]:
            raise SlotMakerError(answer["error"])
        return answer, got


def _python_environment() -> dict[str, str]:
    """Ours, plus where this package was imported from (a checkout need not be installed)."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@dataclass
class SlotPool:
    """Numbers, ready slots and their refill.

    Args:
        instance: Prefix of link names.
        network_cidr: Where addresses come from.
        ready_wanted: How many slots are kept ready.
        capacity: The most slots at one time; also bounded by the network.
        user_namespaces: Whether slots have an id map.
        route_localnet: Whether the host's resolver is on its loopback.
    """

    instance: str
    network_cidr: str
    ready_wanted: int
    capacity: int
    user_namespaces: bool
    route_localnet: bool = False
    maker: SlotMakerClient = field(default_factory=SlotMakerClient)
    _ready: deque[Slot] = field(default_factory=deque)
    _freed: deque[tuple[float, int]] = field(default_factory=deque)
    _reserved: set[int] = field(default_factory=set)
    _highest: int = 0
    _maps: dict[int, int] = field(default_factory=dict)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _filler: asyncio.Task[None] | None = None
    _taken_at: float = 0.0

    def __post_init__(self) -> None:
        self._network = ipaddress.IPv4Network(self.network_cidr)
        self.capacity = min(self.capacity, self._network.num_addresses - 2)
        self._fresh_ruleset = base_ruleset(self.network_cidr)

    # --- names --------------------------------------------------------------

    @property
    def link_prefix(self) -> str:
        """Of every host link of this instance. The dash keeps instances od and od1 apart."""
        return f"{self.instance}-"

    def link_of(self, number: int) -> str:
        """Host link of a slot."""
        return f"{self.link_prefix}{number}"

    def address_of(self, number: int) -> str:
        """Sandbox address of a slot."""
        return str(self._network[number])

    # --- life ---------------------------------------------------------------

    async def start(self, in_use: set[int]) -> None:
        """Start refilling. ``in_use``: numbers of adopted sandboxes."""
        self._reserved |= in_use
        await self._remove_strange_links(in_use)
        self._wanted.set()
        self._filler = asyncio.create_task(self._fill(), name="slot-filler")

    async def _remove_strange_links(self, in_use: set[int]) -> None:
        """Links whose sandbox is gone: usually the kernel is about to remove them itself."""
        known = {self.link_of(number) for number in in_use}
        answer, _ = await self.maker.ask("links", prefix=self.link_prefix)
        strange = [name for name in answer["names"] if name not in known]
        if strange:
            await self.maker.ask("unlink", links=strange)

    async def stop(self) -> None:
        """Let go of the ready slots; they vanish. Those in use stay."""
        if self._filler is not None:
            self._filler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filler
            self._filler = None
        while self._ready:
            self._close(self._ready.popleft())
        for fd in self._maps.values():
            os.close(fd)
        self._maps.clear()

    async def _fill(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self._lull()
            while len(self._ready) < self.ready_wanted:
                try:
                    self._ready.append(await self._make(_DEFAULT_EGRESS_POLICY))
                except NodeFull:
                    break
                except SandboxStartFailed:
                    await asyncio.sleep(1.0)

    async def _lull(self) -> None:
        """Wait until no slot was taken for a moment, or few are left.

        Making a slot costs about as much as starting a sandbox; in the middle of a burst it would
        slow down exactly those creates that the ready slots are for.
        """
        while len(self._ready) > self.ready_wanted // _LOW_WATER:
            quiet_s = time.monotonic() - self._taken_at
            if quiet_s >= _LULL_S:
                return
            await asyncio.sleep(_LULL_S - quiet_s)

    # --- use ----------------------------------------------------------------

    @property
    def in_use(self) -> int:
        """Slots given out or adopted (ready ones not counted)."""
        return len(self._reserved) - len(self._ready)

    @property
    def ready(self) -> int:
        """Slots ready to be taken."""
        return len(self._ready)

    async def take(self, policy: NetworkPolicy, *, tap_owner: int | None = None) -> Slot:
        """A slot with this egress policy: a ready one, or one made now.

        Args:
            policy: What the sandbox may reach.
            tap_owner: For a virtual machine: the user id that may open the slot's tap. None: for
                a container.

        Raises:
            NodeFull: no number is left.
            SandboxStartFailed: the kernel or nft refused.
        """
        self._taken_at = time.monotonic()
        self._wanted.set()
        if self._ready and (tap_owner is not None or _egress(policy) == _DEFAULT_EGRESS):
            slot = self._ready.popleft()
        else:
            slot = await self._make(policy)
        if tap_owner is not None:
            try:
                await self.add_tap(slot, tap_owner, policy)
            except BaseException:
                self.release(slot)
                raise
        return slot

    async def add_tap(self, slot: Slot, owner_uid: int, policy: NetworkPolicy) -> TapInfo:
        """Turn a slot into one for a virtual machine. Once; there is no way back.

        Args:
            slot: Taken, and nobody lives in it yet.
            owner_uid: The user id that may open the tap without capabilities.
            policy: What the guest may reach. Replaces the slot's.

        Raises:
            SandboxStartFailed: the kernel or nft refused; the slot must be released.
        """
        rules = tap_ruleset(self.network_cidr, slot.address)
        try:
            await self.maker.ask(
                "tap",
                fds=(slot.netns_fd,),
                owner_uid=owner_uid,
                ruleset=rules + policy_commands(policy, forwarded=True),
            )
        except SlotMakerError as exc:
            raise SandboxStartFailed(f"cannot make a tap: {exc}") from exc
        return TapInfo(owner_uid)

    def _take_number(self) -> int:
        rested = self._freed and time.monotonic() - self._freed[0][0] >= NUMBER_REST_S
        if rested or (self._highest >= self.capacity and self._freed):
            number = self._freed.popleft()[1]
        elif self._highest < self.capacity:
            self._highest += 1
            while self._highest in self._reserved:
                self._highest += 1
            number = self._highest
        else:
            raise NodeFull("the node has no free network slot", retry_after_s=5)
        self._reserved.add(number)
        return number

    async def _make(self, policy: NetworkPolicy) -> Slot:
        number = self._take_number()
        address = self.address_of(number)
        need_map = self.user_namespaces and number not in self._maps
        try:
            _answer, fds = await self.maker.ask(
                "make",
                link=self.link_of(number),
                address=address,
                ruleset=self._fresh_ruleset + policy_commands(policy),
                id_base=ID_BASE + number * IDS_PER_SANDBOX if need_map else None,
                route_localnet=self.route_localnet,
            )
        except SlotMakerError as exc:
            self.free_number(number)
            raise SandboxStartFailed(f"cannot make a network slot: {exc}") from exc
        except BaseException:
            self.free_number(number)
            raise
        if need_map:
            self._maps[number] = fds[1]
        return Slot(number, address, fds[0], self._maps.get(number))

    async def set_policy(self, slot: Slot, policy: NetworkPolicy) -> None:
        """Replace the egress policy of a slot in use, atomically. Of a container or of a machine.

        Raises:
            SlotMakerError: the kernel or nft refused; the old policy stands.
        """
        await self.maker.ask(
            "policy",
            fds=(slot.netns_fd,),
            ruleset=policy_commands(policy),
            forwarded_ruleset=policy_commands(policy, forwarded=True),
        )

    def release(self, slot: Slot) -> None:
        """Give a slot back after its sandbox's last process is gone."""
        self._close(slot)
        self.free_number(slot.number)

    def free_number(self, number: int) -> None:
        """Let a number be used again, after a rest."""
        self._reserved.discard(number)
        self._freed.append((time.monotonic(), number))
        self._wanted.set()

    @staticmethod
    def _close(slot: Slot) -> None:
        if slot.netns_fd >= 0:
            os.close(slot.netns_fd)
            slot.netns_fd = -1

    async def wait_links_gone(self, timeout_s: float) -> list[str]:
        """Wait until no link of this instance is left; return those that are."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer, _ = await self.maker.ask("links", prefix=self.link_prefix)
            names: list[str] = answer["names"]
            if not names or time.monotonic() > deadline:
                return names
            await asyncio.sleep(0.02)


_DEFAULT_EGRESS_POLICY = NetworkPolicy()

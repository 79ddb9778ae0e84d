# SPDX-License-Identifier: AGPL-3.0-only
"""Who is in which group on this node, and what follows from it.

Nothing is kept on disk: a group is what the specifications of its running members say. What the
kernel holds for it is written anew when a daemon starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import structlog

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest, SandboxStartFailed
from opendsec_server.contract.ids import GROUP_ID_RE
from opendsec_server.contract.node import GroupMembership
from opendsec_server.contract.states import State
from opendsec_server.node.network.slots import Slot, SlotMakerError, SlotPool
from opendsec_server.node.network.tap import GUEST_ADDRESS
from opendsec_server.node.sandbox import Sandbox

from . import rules
from .answerer import Answerer
from .upstream import Upstream

log = structlog.get_logger("opendsec.node")

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME_RE = re.compile(rf"(?:{_LABEL})(?:\.{_LABEL})*", re.IGNORECASE)
_NAME_CHARS_MAX = 253
_TIDY_AFTER_S = 0.2
"""How long after a member has gone the others forget its address: groups often end as one."""


def check(group: GroupMembership) -> None:
    """Refuse what is no membership.

    Raises:
        InvalidRequest: names the entry.
    """
    if GROUP_ID_RE.fullmatch(group.group_id) is None:
        raise InvalidRequest(f"{group.group_id!r} is no id of a group")
    names = (group.name, *group.aliases)
    if len(names) > limits.GROUP_NAMES_MAX:
        raise InvalidRequest(
            f"member {group.name!r} has {len(names)} names; {limits.GROUP_NAMES_MAX} is the most"
        )
    for name in names:
        if len(name) > _NAME_CHARS_MAX or _NAME_RE.fullmatch(name) is None:
            raise InvalidRequest(
                f"{name!r} is no host name",
                remediation="Use letters, digits and dashes, and dots between labels.",
            )


@dataclass(slots=True, eq=False)
class _Member:
    """A sandbox whose address is its group's.

    Attributes:
        box: The sandbox.
        slot: Its network.
        shown: Its agent has come up: others may find it.
        answerer: Answers its questions; None: it cannot be reached for them.
    """

    box: Sandbox
    slot: Slot
    shown: bool = False
    answerer: Answerer | None = None

    @property
    def own_address(self) -> str:
        """What its name means to itself."""
        return self.slot.address if self.box.spec.backend == "container" else GUEST_ADDRESS

    @property
    def found(self) -> bool:
        """Whether its names resolve. A frozen one would take connections and not serve them."""
        return self.shown and self.box.state is not State.PAUSED

    def has(self, name: str) -> bool:
        """Whether it goes by this name."""
        group = self.box.spec.group
        assert group is not None
        return any(name == own.lower() for own in (group.name, *group.aliases))


@dataclass(slots=True, eq=False)
class _Group:
    """Members by id; those who wait for the lock keep it in being."""

    members: dict[str, _Member] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


_Key = tuple[str, str]
"""Project and group: an id that another project made up is another group."""


def _key_of(box: Sandbox) -> _Key | None:
    group = box.spec.group
    return None if group is None else (box.spec.project_id, group.group_id)


class Groups:
    """All groups of a node.

    Args:
        slots: The members' networks.

    Attributes:
        resolvers: The host's resolvers, now.
    """

    resolvers: Callable[[], tuple[str, ...]]

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._groups: dict[_Key, _Group] = {}
        self._upstream = Upstream(lambda: self.resolvers())
        self._closing: dict[str, set[rules.Way]] = {}
        self._closed_next: set[rules.Way] = set()
        self._closing_ways = asyncio.Lock()
        self._untidy: set[_Key] = set()
        self._tidier: asyncio.Task[None] | None = None

    # --- coming and going ---------------------------------------------------

    async def join(self, box: Sandbox) -> None:
        """Connect a sandbox, whose slot is made, with the other members of its group. Nothing for
        one in no group. Undone by ``leave``, also when it failed half-way.

        Raises:
            InvalidRequest: the group is full.
            SandboxStartFailed: the kernel or nft refused.
        """
        key = _key_of(box)
        if key is None:
            return
        assert box.slot is not None
        async with self._locked(key) as group:
            if len(group.members) >= limits.GROUP_MEMBERS_MAX:
                raise InvalidRequest(
                    f"a group has at most {limits.GROUP_MEMBERS_MAX} members at one time"
                )
            others = list(group.members.values())
            member = group.members[box.sandbox_id] = _Member(box, box.slot)
            try:
                await self._on_host(rules.connect(self._instance, self._ways(member, others)))
                await self._open_inside(group, member, fresh=True)
                told = rules.add_peers([member.slot.address])
                await asyncio.gather(*(self._tell(other, told) for other in others))
            except SlotMakerError as exc:
                raise SandboxStartFailed(f"cannot connect it with its group: {exc}") from exc

    async def leave(self, box: Sandbox) -> None:
        """Disconnect a sandbox whose processes are gone. Idempotent.

        Raises:
            SlotMakerError: the host still lets its address through: it must not be used again.
        """
        key = _key_of(box)
        if key is None:
            return
        async with self._locked(key) as group:
            member = group.members.pop(box.sandbox_id, None)
            if member is not None:
                _close(member)
                ways = self._ways(member, group.members.values())
                self._closing[box.sandbox_id] = set(ways)
                if group.members:
                    self._tidy_soon(key)
        # Without the lock: those who go together go in one transaction.
        closing = self._closing.get(box.sandbox_id)
        if closing is not None:
            await self._close_ways(closing)
            self._closing.pop(box.sandbox_id, None)

    async def _close_ways(self, ways: set[rules.Way]) -> None:
        self._closed_next |= ways
        async with self._closing_ways:
            while self._closed_next:
                some = set(itertools.islice(self._closed_next, rules.WAYS_AT_ONCE_MAX))
                await self._on_host(rules.disconnect(self._instance, some))
                self._closed_next -= some

    def show(self, box: Sandbox) -> None:
        """Let the others find it by its names."""
        member = self._member(box)
        if member is not None:
            member.shown = True

    def hide(self, box: Sandbox) -> None:
        """Let nobody find it any more. Idempotent."""
        member = self._member(box)
        if member is not None:
            member.shown = False

    async def adopt(self, boxes: Iterable[Sandbox]) -> None:
        """After a start: the groups are those of these running sandboxes, and nobody else's.

        Raises:
            SlotMakerError: the host's table cannot be written.
        """
        for box in boxes:
            key = _key_of(box)
            if key is not None and box.slot is not None:
                group = self._groups.setdefault(key, _Group())
                group.members[box.sandbox_id] = _Member(box, box.slot, shown=True)
        ways = [
            way
            for group in self._groups.values()
            for count, member in enumerate(group.members.values())
            for way in self._ways(member, list(group.members.values())[:count])
        ]
        commands = rules.disconnect_all(self._instance)
        for start in range(0, max(1, len(ways)), rules.WAYS_AT_ONCE_MAX):
            some = ways[start : start + rules.WAYS_AT_ONCE_MAX]
            await self._on_host(commands + rules.connect(self._instance, some))
            commands = ""
        await asyncio.gather(
            *(
                self._reopen(group, member)
                for group in self._groups.values()
                for member in group.members.values()
            )
        )

    def stop(self) -> None:
        """Answer no more questions. What is connected stays so."""
        if self._tidier is not None:
            self._tidier.cancel()
        for group in self._groups.values():
            for member in group.members.values():
                _close(member)
        self._groups.clear()

    # --- helpers ------------------------------------------------------------

    @property
    def _instance(self) -> str:
        return self._slots.instance

    @contextlib.asynccontextmanager
    async def _locked(self, key: _Key) -> AsyncIterator[_Group]:
        group = self._groups.setdefault(key, _Group())
        group.users += 1
        try:
            async with group.lock:
                yield group
        finally:
            group.users -= 1
            if not group.users and not group.members and self._groups.get(key) is group:
                del self._groups[key]

    def _member(self, box: Sandbox) -> _Member | None:
        key = _key_of(box)
        group = None if key is None else self._groups.get(key)
        return None if group is None else group.members.get(box.sandbox_id)

    def _end_of(self, member: _Member) -> rules.End:
        return self._slots.link_of(member.slot.number), member.slot.address

    def _ways(self, member: _Member, others: Iterable[_Member]) -> list[rules.Way]:
        end = self._end_of(member)
        return [rules.way(end, self._end_of(other)) for other in others]

    async def _on_host(self, commands: str) -> None:
        if commands:
            await self._slots.maker.ask("host", commands=commands)

    async def _inside(self, member: _Member, ruleset: str, forwarded_ruleset: str) -> None:
        await self._slots.maker.ask(
            "inside",
            fds=(member.slot.netns_fd,),
            ruleset=ruleset,
            forwarded_ruleset=forwarded_ruleset,
        )

    async def _open_inside(self, group: _Group, member: _Member, *, fresh: bool) -> None:
        """Its own namespace: who its peers are, and an answerer for its questions."""
        _answer, fds = await self._slots.maker.ask("listen", fds=(member.slot.netns_fd,))
        datagrams, listener = (socket.socket(fileno=fd) for fd in fds)
        member.answerer = Answerer(
            (datagrams, listener),
            lambda name: _addresses(group, member, name),
            lambda: _may_ask_host(member.box),
            self._upstream,
        )
        write = rules.add_peers if fresh else rules.replace_peers
        peers = write(_peers(group, member))
        await self._inside(
            member,
            peers + rules.names_inside(forwarded=False, fresh=fresh),
            peers + rules.names_inside(forwarded=True, fresh=fresh),
        )

    async def _reopen(self, group: _Group, member: _Member) -> None:
        """Of an adopted member: what fails is its own, and keeps no other from being served."""
        try:
            await self._open_inside(group, member, fresh=False)
        except SlotMakerError as exc:
            log.error("group member", sandbox_id=member.box.sandbox_id, error=str(exc))
            await self._tell(member, rules.replace_peers(_peers(group, member)))

    async def _tell(self, member: _Member, commands: str) -> None:
        """The host has decided already; a member that is just ending needs to know nothing."""
        try:
            await self._inside(member, commands, commands)
        except SlotMakerError as exc:
            log.warning("group member", sandbox_id=member.box.sandbox_id, error=str(exc))

    def _tidy_soon(self, key: _Key) -> None:
        self._untidy.add(key)
        if self._tidier is None or self._tidier.done():
            self._tidier = asyncio.create_task(self._tidy(), name="groups-tidy")

    async def _tidy(self) -> None:
        """Let members forget those who have gone: the host drops what the others would refuse."""
        while self._untidy:
            await asyncio.sleep(_TIDY_AFTER_S)
            key = self._untidy.pop()
            async with self._locked(key) as group:
                for member in group.members.values():
                    await self._tell(member, rules.replace_peers(_peers(group, member)))


def _close(member: _Member) -> None:
    answerer, member.answerer = member.answerer, None
    if answerer is not None:
        answerer.close()


def _peers(group: _Group, member: _Member) -> list[str]:
    return [other.slot.address for other in group.members.values() if other is not member]


def _addresses(group: _Group, asker: _Member, name: str) -> tuple[str, ...] | None:
    named = [member for member in group.members.values() if member.has(name)]
    if not named:
        return None
    return tuple(
        member.own_address if member is asker else member.slot.address
        for member in named
        if member.found
    )


def _may_ask_host(box: Sandbox) -> bool:
    """As in ``network.policy``: with no way out, nothing is asked either."""
    network = box.spec.network
    return network.internet or bool(network.allow)

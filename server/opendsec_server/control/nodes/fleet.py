# SPDX-License-Identifier: AGPL-3.0-only
"""All nodes as one ``NodeClient``: a call goes to the node that a sandbox's id names."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec
import structlog

from opendsec_server.contract.actions import KeptProgram, ProgramOrder
from opendsec_server.contract.errors import (
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    NotFound,
    OpendsecError,
    SandboxNotFound,
)
from opendsec_server.contract.ids import node_id_of
from opendsec_server.contract.images import ExecEvent, ImageInfo, PackOptions
from opendsec_server.contract.node import (
    BackendInfo,
    ConsoleKind,
    MetricSamples,
    NetworkPolicy,
    NodeClient,
    NodeEvent,
    NodeInfo,
    NodeLoad,
    PauseReport,
    Route,
    SandboxSpec,
    SandboxStatus,
    SandboxUsage,
    Snapshot,
    StateMode,
)
from opendsec_server.contract.node import Snapshots as SnapshotList
from opendsec_server.contract.states import EndReason
from opendsec_server.control.placement import Need, Placement

from .images import FleetImages, ImageMissing
from .member import Member, NodeNotReached, NodeSource
from .watch import POLL_ALONE_S, POLL_INTERVAL_S, HealthWatch

log = structlog.get_logger(__name__)

T = TypeVar("T")

BACKENDS_KEPT_S = 1.0
"""Every create asks what is offered; nodes seldom change."""
SNAPSHOT_PLACES_MAX = 65_536
"""Snapshots whose node is remembered; others are looked for on every node."""


class NodeRef(msgspec.Struct, kw_only=True, frozen=True):
    """The node that placement has chosen."""

    node_id: str


class Fleet:
    """Implements ``NodeClient`` over all nodes.

    With one node it hands every call on. With several, calls about a sandbox go to its node, and
    those about everything to all that can be reached.

    Args:
        sources: The nodes.
        interval_s: Between two polls of a node. None: as seldom as their number allows.
        rng: Draws of placement; for tests.
    """

    def __init__(
        self,
        sources: Sequence[NodeSource],
        *,
        interval_s: float | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.members = [Member(source) for source in sources]
        self._by_id: dict[str, Member] = {}
        self.placement = Placement(rng or random.Random())  # noqa: S311 - no secret
        self.images = FleetImages(self)
        self._watch = HealthWatch(
            self.members,
            self._health_changed,
            look_at_images=len(self.members) > 1,
            interval_s=interval_s or (POLL_INTERVAL_S if len(sources) > 1 else POLL_ALONE_S),
        )
        self._snapshot_places: dict[str, str] = {}
        self._backends: dict[str, BackendInfo] | None = None
        self._backends_until = 0.0

    @classmethod
    def of_one(cls, node: NodeClient) -> Fleet:
        """A fleet of one node in this process."""
        return cls([NodeSource(name="local", client=node)])

    async def start(self) -> None:
        """Poll every node once, then go on doing so. Nodes that do not answer are no failure."""
        await self._watch.start()

    async def stop(self) -> None:
        """Poll no more, and close connections."""
        await self._watch.stop()
        for member in self.members:
            close: Callable[[], Awaitable[None]] | None = getattr(member.client, "close", None)
            if close is not None:
                await close()

    def _health_changed(self, member: Member) -> None:
        node_id = member.node_id
        self._backends = None
        if member.up and node_id is not None and self._by_id.get(node_id) is not member:
            if node_id in self._by_id:
                log.error(
                    "two nodes have the same id: the second is not used",
                    node_id=node_id,
                    first=self._by_id[node_id].name,
                    second=member.name,
                )
                member.standing.health = "down"
                return
            self._by_id[node_id] = member
            self.placement.add(member.standing)

    # --- which node ---------------------------------------------------------

    def choose(self, need: Need, *, avoid: Collection[str] = ()) -> NodeRef:
        """The node for a new sandbox.

        Args:
            need: What it needs.
            avoid: Ids of nodes that have refused it.

        Raises:
            NodeFull: no node offers what it needs, or all of those have refused it.
            NodeNotReached: those that do cannot be reached.
        """
        chosen = self.placement.choose(need, now=time.monotonic(), avoid=avoid)
        if chosen is None:
            raise self._why_not(need, avoid)
        return NodeRef(node_id=chosen.node_id)

    def _why_not(self, need: Need, avoid: Collection[str]) -> OpendsecError:
        left = [m for m in self.members if m.node_id not in avoid or m.node_id is None]
        unreached = [
            member
            for member in left
            if member.down
            and (need.only is None or member.node_id in need.only or member.node_id is None)
        ]
        if unreached:
            return NodeNotReached(
                "no node that could take this sandbox can be reached now",
                details={"unreached": [member.node_id or member.name for member in unreached]},
                retry_after_s=2,
            )
        if avoid:
            return NodeFull("every node that could take this sandbox has refused it")
        if need.labels:
            return NodeFull(
                "no node that takes new sandboxes has all the labels that were asked for",
                remediation="Ask for other labels, or add a node that has them.",
                details={"labels": need.labels},
            )
        return NodeFull(
            f"no node takes new sandboxes of the backend `{need.backend}` now",
            remediation="End the drain of a node, or add one.",
        )

    def member(self, node_id: str) -> Member:
        """The node of an id.

        Raises:
            NotFound: none of the installation's nodes has it.
            NodeNotReached: some were not reached yet, so that one of them may be it.
        """
        found = self._by_id.get(node_id)
        if found is not None:
            return found
        unknown = [member for member in self.members if member.node_id is None]
        if unknown:
            unknown[0].check()
        raise NotFound(
            f"there is no node `{node_id[:16]}`", remediation="List nodes (`opendsec node ls`)."
        )

    def _of(self, sandbox_id: str) -> NodeClient:
        """The client of a sandbox's node.

        Raises:
            SandboxNotFound: its id names no node of this installation.
            NodeNotReached: the node is down.
        """
        if len(self.members) == 1:
            member = self.members[0]
        else:
            try:
                member = self.member(node_id_of(sandbox_id))
            except NotFound as exc:
                raise SandboxNotFound("there is no such sandbox") from exc
        member.check()
        return member.client

    def reachable(self) -> Sequence[Member]:
        """Nodes that calls about everything go to.

        Raises:
            NodeNotReached: there is none.
        """
        found = [member for member in self.members if not member.down]
        if not found:
            for member in self.members:
                member.check()
            raise NodeNotReached("this installation has no nodes")
        return found

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the nodes that were reached once."""
        return list(self._by_id)

    def find(self, node_id: str) -> Member | None:
        """The node of an id, if it was reached once."""
        return self._by_id.get(node_id)

    @property
    def backends(self) -> Mapping[str, BackendInfo]:
        """What any node offers, by name. Of several that offer one, a fast one speaks for all."""
        if self._backends is None or time.monotonic() >= self._backends_until:
            self._backends = self._offered()
            self._backends_until = time.monotonic() + BACKENDS_KEPT_S
        return self._backends

    def _offered(self) -> dict[str, BackendInfo]:
        found: dict[str, BackendInfo] = {}
        for member in self.members:
            for backend in () if member.info is None else member.info.backends:
                if backend.name not in found or backend.accelerator == "kvm":
                    found[backend.name] = backend
        return found

    # --- NodeClient: about one sandbox --------------------------------------

    async def create(self, spec: SandboxSpec) -> SandboxStatus:
        """See ``NodeClient.create``."""
        client = self._of(spec.sandbox_id)
        if len(self.members) == 1:
            standing = self.members[0].standing
        else:
            standing = self.member(node_id_of(spec.sandbox_id)).standing
        standing.starting += 1
        try:
            status = await self.images.with_image(client, spec)
        except NodeFull as exc:
            if not isinstance(exc, ImageMissing):
                standing.refused(time.monotonic())
            raise
        except NodeUnavailable:
            self._by_id[standing.node_id].wake.set()
            raise
        else:
            standing.accepted()
            return status
        finally:
            standing.starting -= 1

    async def get(self, sandbox_id: str) -> SandboxStatus:
        """See ``NodeClient.get``."""
        return await self._of(sandbox_id).get(sandbox_id)

    async def kill(self, sandbox_id: str, reason: EndReason = EndReason.KILLED) -> SandboxStatus:
        """See ``NodeClient.kill``."""
        return await self._of(sandbox_id).kill(sandbox_id, reason)

    async def pause(self, sandbox_id: str, mode: StateMode = "full") -> PauseReport:
        """See ``NodeClient.pause``."""
        return await self._of(sandbox_id).pause(sandbox_id, mode)

    async def resume(
        self, sandbox_id: str, *, end_at: float, reboot: bool = False
    ) -> SandboxStatus:
        """See ``NodeClient.resume``."""
        return await self._of(sandbox_id).resume(sandbox_id, end_at=end_at, reboot=reboot)

    async def snapshot(
        self,
        sandbox_id: str,
        snapshot_id: str,
        *,
        mode: StateMode = "full",
        ephemeral: bool = False,
    ) -> Snapshot:
        """See ``NodeClient.snapshot``."""
        taken = await self._of(sandbox_id).snapshot(
            sandbox_id, snapshot_id, mode=mode, ephemeral=ephemeral
        )
        self._snapshot_places[snapshot_id] = node_id_of(sandbox_id)
        if len(self._snapshot_places) > SNAPSHOT_PLACES_MAX:
            del self._snapshot_places[next(iter(self._snapshot_places))]
        return taken

    def exec(
        self,
        sandbox_id: str,
        argv: tuple[str, ...],
        *,
        user: str | None = None,
        workdir: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float,
    ) -> AsyncIterator[ExecEvent]:
        """See ``NodeClient.exec``."""
        return self._of(sandbox_id).exec(
            sandbox_id, argv, user=user, workdir=workdir, env=env, timeout_s=timeout_s
        )

    async def start_kept(self, sandbox_id: str, tag: str, order: ProgramOrder) -> None:
        """See ``NodeClient.start_kept``."""
        await self._of(sandbox_id).start_kept(sandbox_id, tag, order)

    async def kept(
        self, sandbox_id: str, tag: str, *, wait_s: float = 0.0, void: bool = False
    ) -> KeptProgram:
        """See ``NodeClient.kept``."""
        return await self._of(sandbox_id).kept(sandbox_id, tag, wait_s=wait_s, void=void)

    async def forget_kept(self, sandbox_id: str, tag: str) -> None:
        """See ``NodeClient.forget_kept``."""
        await self._of(sandbox_id).forget_kept(sandbox_id, tag)

    async def write_file(
        self, sandbox_id: str, path: str, data: bytes, *, user: str | None = None
    ) -> None:
        """See ``NodeClient.write_file``."""
        await self._of(sandbox_id).write_file(sandbox_id, path, data, user=user)

    async def read_file(
        self, sandbox_id: str, path: str, *, user: str | None = None, bytes_max: int
    ) -> bytes:
        """See ``NodeClient.read_file``."""
        return await self._of(sandbox_id).read_file(
            sandbox_id, path, user=user, bytes_max=bytes_max
        )

    async def unpack(
        self,
        sandbox_id: str,
        archive: str,
        *,
        sources: Sequence[str],
        target: str,
        user: str,
        mode: int | None,
    ) -> None:
        """See ``NodeClient.unpack``."""
        await self._of(sandbox_id).unpack(
            sandbox_id, archive, sources=sources, target=target, user=user, mode=mode
        )

    async def pack(self, sandbox_id: str, options: PackOptions) -> ImageInfo:
        """See ``NodeClient.pack``."""
        image = await self._of(sandbox_id).pack(sandbox_id, options)
        self.images.note(node_id_of(sandbox_id), image)
        return image

    async def set_end_at(
        self, sandbox_id: str, end_at: float, *, only_extend: bool = False
    ) -> SandboxStatus:
        """See ``NodeClient.set_end_at``."""
        return await self._of(sandbox_id).set_end_at(sandbox_id, end_at, only_extend=only_extend)

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        """See ``NodeClient.set_network``."""
        await self._of(sandbox_id).set_network(sandbox_id, policy)

    async def route(self, sandbox_id: str) -> Route:
        """See ``NodeClient.route``."""
        return await self._of(sandbox_id).route(sandbox_id)

    async def console(self, sandbox_id: str, kind: ConsoleKind) -> str:
        """See ``NodeClient.console``."""
        return await self._of(sandbox_id).console(sandbox_id, kind)

    async def console_tail(self, sandbox_id: str) -> str:
        """See ``NodeClient.console_tail``."""
        return await self._of(sandbox_id).console_tail(sandbox_id)

    async def metrics(self, sandbox_id: str, start: float, end: float) -> MetricSamples:
        """See ``NodeClient.metrics``."""
        return await self._of(sandbox_id).metrics(sandbox_id, start, end)

    # --- NodeClient: about many ---------------------------------------------

    async def info(self) -> NodeInfo:
        """Of a single node its own report, asked for now; of several their sum.

        Raises:
            NodeUnavailable: none can be reached.
        """
        if len(self.members) == 1:
            return await self.members[0].client.info()
        infos = [m.info for m in self.reachable() if m.info is not None]
        return NodeInfo(
            node_id="",
            hostname=f"{len(infos)} nodes",
            version=min(info.version for info in infos),
            backends=tuple(self.backends.values()),
            cpu_count=sum(info.cpu_count for info in infos),
            memory_total_bytes=sum(info.memory_total_bytes for info in infos),
            disk_total_bytes=sum(info.disk_total_bytes for info in infos),
            disk_free_bytes=sum(info.disk_free_bytes for info in infos),
            sandboxes=sum(info.sandboxes for info in infos),
            sandboxes_max=sum(info.sandboxes_max for info in infos),
            features={"nodes": len(self.members), "nodes_up": sum(m.up for m in self.members)},
            load=NodeLoad(cpu_used=sum(i.load.cpu_used for i in infos) / len(infos)),
        )

    async def set_marks(
        self, *, labels: dict[str, str] | None = None, draining: bool | None = None
    ) -> NodeInfo:
        """See ``NodeClient.set_marks``. Only a single node can be meant."""
        if len(self.members) > 1:
            raise InvalidRequest("which node is meant?")
        return await self.mark(self.members[0], labels=labels, draining=draining)

    async def mark(
        self,
        member: Member,
        *,
        labels: dict[str, str] | None = None,
        draining: bool | None = None,
    ) -> NodeInfo:
        """Replace what operators say of a node; placement knows it at once.

        Raises:
            NodeUnavailable: it was not told.
        """
        member.check()
        info = await member.client.set_marks(labels=labels, draining=draining)
        member.marked(info)
        return info

    async def _each(
        self, work: Callable[[NodeClient], Awaitable[T]]
    ) -> Sequence[tuple[Member, T | OpendsecError]]:
        """Do it on every node that can be reached, at the same time."""

        async def one(member: Member) -> tuple[Member, T | OpendsecError]:
            try:
                return member, await work(member.client)
            except OpendsecError as exc:
                return member, exc

        return await asyncio.gather(*(one(member) for member in self.reachable()))

    async def every(self, work: Callable[[NodeClient], Awaitable[T]]) -> Sequence[tuple[Member, T]]:
        """The answers of all nodes that can be reached.

        Raises:
            OpendsecError: a node's own, when it is the only one, or all fail.
        """
        answers = await self._each(work)
        good = [(member, got) for member, got in answers if not isinstance(got, OpendsecError)]
        if not good:
            for _, got in answers:
                if isinstance(got, OpendsecError):
                    raise got
        return good

    async def list(self) -> list[SandboxStatus]:
        """See ``NodeClient.list``. Of several nodes: of those that can be reached."""
        answers = await self.every(lambda client: client.list())
        return [status for _, statuses in answers for status in statuses]

    async def snapshots(self) -> SnapshotList:
        """See ``NodeClient.snapshots``. Of several nodes: of those that can be reached."""
        answers = await self.every(lambda client: client.snapshots())
        return [snapshot for _, snapshots in answers for snapshot in snapshots]

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        """See ``NodeClient.delete_snapshot``.

        Raises:
            NodeUnavailable: the node that may hold it cannot be reached.
        """
        place = self._by_id.get(self._snapshot_places.get(snapshot_id, ""))
        if place is not None:
            place.check()
            return await place.client.delete_snapshot(snapshot_id)
        answers = await self._each(lambda client: client.delete_snapshot(snapshot_id))
        if any(got is True for _, got in answers):
            return True
        for _, got in answers:
            if isinstance(got, OpendsecError):
                raise got
        for member in self.members:
            member.check()
        return False

    async def route_by_signature(
        self, *, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route:
        """See ``NodeClient.route_by_signature``."""
        answers = await self._each(
            lambda client: client.route_by_signature(
                path=path,
                operation=operation,
                username=username,
                signature=signature,
                expiration=expiration,
            )
        )
        for member, got in answers:
            if isinstance(got, Route) and member.speaks_of(got.sandbox_id):
                return got
        for _, got in answers:
            if isinstance(got, OpendsecError) and not isinstance(got, SandboxNotFound):
                raise got
        raise SandboxNotFound("no running sandbox made this signature")

    async def usage(self, sandbox_ids: Sequence[str]) -> dict[str, SandboxUsage]:
        """See ``NodeClient.usage``. Sandboxes of nodes that cannot be reached are left out."""
        if len(self.members) == 1:
            return await self.members[0].client.usage(sandbox_ids)
        by_node: dict[str, list[str]] = {}
        for sandbox_id in sandbox_ids:
            by_node.setdefault(node_id_of(sandbox_id), []).append(sandbox_id)

        async def of_node(node_id: str, names: list[str]) -> dict[str, SandboxUsage]:
            member = self._by_id.get(node_id)
            if member is None or member.down:
                return {}
            try:
                return await member.client.usage(names)
            except NodeUnavailable:
                return {}

        parts = await asyncio.gather(*(of_node(*item) for item in by_node.items()))
        return {name: usage for part in parts for name, usage in part.items()}

    async def events(self) -> AsyncIterator[NodeEvent]:
        """Changes of all nodes. Ends when the stream of one does: something may have been missed.

        Who must know which node listens to ``members`` one by one.
        """
        queue: asyncio.Queue[NodeEvent | None] = asyncio.Queue()

        async def pump(member: Member) -> None:
            try:
                async for event in member.client.events():
                    queue.put_nowait(event)
            finally:
                queue.put_nowait(None)

        pumps = [asyncio.create_task(pump(member)) for member in self.members]
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

# SPDX-License-Identifier: AGPL-3.0-only
"""A node that makes nothing: it keeps a few words for each sandbox, takes as long as a real one
was measured to take, and has the faults that it is told to have."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from opendsec_server.contract.errors import (
    ImageNotFound,
    NodeFull,
    NotSupported,
    SandboxNotFound,
    StateConflict,
)
from opendsec_server.contract.images import ExecEvent, ImageInfo
from opendsec_server.contract.node import (
    BackendInfo,
    Capabilities,
    NodeEvent,
    NodeInfo,
    NodeLoad,
    PauseReport,
    Route,
    SandboxSpec,
    SandboxStatus,
    SandboxUsage,
    StateMode,
)
from opendsec_server.contract.states import EndReason, State

CONTAINER = BackendInfo(
    name="container",
    capabilities=Capabilities(
        own_kernel=False,
        memory_snapshot=False,
        pause_survives_reboot=False,
        fork=True,
        disk_images=False,
        console=False,
        passthrough=False,
    ),
)
GIB = 1 << 30


class Latency(NamedTuple):
    """Seconds of one operation: a lognormal distribution by its median and 99th percentile."""

    p50: float
    p99: float

    def draw(self, rng: random.Random) -> float:
        """One of them."""
        if self.p50 <= 0:
            return 0.0
        return self.p50 * (self.p99 / self.p50) ** (rng.gauss(0, 1) / 2.326)


class Latencies(NamedTuple):
    """What a container node was measured to take (SPECIFICATION.md, speed), in seconds."""

    create: Latency = Latency(0.040, 0.120)
    kill: Latency = Latency(0.030, 0.090)
    pause: Latency = Latency(0.050, 0.200)
    resume: Latency = Latency(0.020, 0.080)


NONE = Latencies(*(Latency(0, 0) for _ in range(4)))


class Faults:
    """What is wrong with a node now."""

    def __init__(self) -> None:
        self.dead = False
        """Takes connections, and never answers: a machine that hangs."""
        self.slow = 1.0
        """So many times as long for everything."""
        self.full = False
        """Refuses every create."""
        self.lying = False
        """Reports that it is empty, whatever it has."""
        self.drop_answers = False
        """Does what it is asked, and breaks the connection instead of answering."""


class Kept(NamedTuple):
    """What is kept of a sandbox."""

    project_id: str
    template_id: str
    state: State
    created_at: float
    started_at: float
    end_at: float
    seq: int
    reason: EndReason | None = None


class SimNode:
    """Implements as much of ``NodeClient`` as gateways use of a node of containers."""

    def __init__(
        self,
        node_id: str,
        *,
        sandboxes_max: int = 4_096,
        latencies: Latencies = NONE,
        seed: int = 0,
    ) -> None:
        self.node_id = node_id
        self.sandboxes_max = sandboxes_max
        self.latencies = latencies
        self.faults = Faults()
        self.labels: dict[str, str] = {}
        self.draining = False
        self.kept: dict[str, Kept] = {}
        self.live = 0
        self.made = 0
        """Sandboxes that were really made."""
        self.refused = 0
        self.images = SimImages()
        self._rng = random.Random(f"{node_id}{seed}")
        self._starting: dict[str, asyncio.Task[SandboxStatus]] = {}
        self._listeners: set[asyncio.Queue[NodeEvent]] = set()

    async def _take(self, latency: Latency) -> None:
        seconds = latency.draw(self._rng) * self.faults.slow
        if seconds > 0:
            await asyncio.sleep(seconds)

    # --- NodeClient ---------------------------------------------------------

    async def info(self) -> NodeInfo:
        live = 0 if self.faults.lying else self.live
        return NodeInfo(
            node_id=self.node_id,
            hostname=f"sim-{self.node_id}",
            version="0",
            backends=(CONTAINER,),
            cpu_count=192,
            memory_total_bytes=1_536 * GIB,
            disk_total_bytes=8_192 * GIB,
            disk_free_bytes=(8_192 - live // 4) * GIB,
            sandboxes=live,
            sandboxes_max=self.sandboxes_max,
            load=NodeLoad(
                cpu_used=min(live / self.sandboxes_max, 1.0),
                memory_available_bytes=1_536 * GIB - live * (GIB // 4),
            ),
            labels=self.labels,
            draining=self.draining,
        )

    async def set_marks(
        self, *, labels: dict[str, str] | None = None, draining: bool | None = None
    ) -> NodeInfo:
        self.labels = self.labels if labels is None else dict(labels)
        self.draining = self.draining if draining is None else draining
        return await self.info()

    async def create(self, spec: SandboxSpec) -> SandboxStatus:
        name = spec.sandbox_id
        known = self.kept.get(name)
        if known is not None and known.state is State.RUNNING:
            return self._status(name)
        task = self._starting.get(name)
        if task is None:
            if known is not None:
                raise StateConflict("killed while starting")
            if self.faults.full or self.draining or self.live >= self.sandboxes_max:
                self.refused += 1
                raise NodeFull(f"node {self.node_id} takes no more sandboxes")
            self.live += 1
            self.kept[name] = Kept(
                spec.project_id,
                spec.template_id,
                State.STARTING,
                spec.created_at,
                time.time(),
                spec.end_at,
                1,
            )
            task = self._starting[name] = asyncio.create_task(self._start(name))
            task.add_done_callback(lambda _: self._starting.pop(name, None))
        return await asyncio.shield(task)

    async def _start(self, name: str) -> SandboxStatus:
        await self._take(self.latencies.create)
        if self.kept[name].state is not State.STARTING:
            raise StateConflict("killed while starting")
        self.made += 1
        return self._move(name, State.RUNNING, started_at=time.time())

    async def get(self, sandbox_id: str) -> SandboxStatus:
        return self._status(sandbox_id)

    async def list(self) -> list[SandboxStatus]:
        return [
            self._status(name) for name, kept in self.kept.items() if kept.state is not State.ENDED
        ]

    async def kill(self, sandbox_id: str, reason: EndReason = EndReason.KILLED) -> SandboxStatus:
        if self._live(sandbox_id, ended_too=True).state is State.ENDED:
            return self._status(sandbox_id)
        await self._take(self.latencies.kill)
        if self.kept[sandbox_id].state is not State.ENDED:
            self.live -= 1
            self._move(sandbox_id, State.ENDED, reason=reason)
        return self._status(sandbox_id)

    async def pause(self, sandbox_id: str, mode: StateMode = "full") -> PauseReport:
        self._must_be(sandbox_id, State.RUNNING)
        await self._take(self.latencies.pause)
        self._must_be(sandbox_id, State.RUNNING)
        self._move(sandbox_id, State.PAUSING)
        status = self._move(sandbox_id, State.PAUSED)
        return PauseReport(
            status=status,
            took_s=0.1,
            memory_before_bytes=GIB // 4,
            memory_freed_bytes=GIB // 5,
            stored_bytes=0,
        )

    async def resume(
        self, sandbox_id: str, *, end_at: float, reboot: bool = False
    ) -> SandboxStatus:
        self._must_be(sandbox_id, State.PAUSED)
        await self._take(self.latencies.resume)
        self._must_be(sandbox_id, State.PAUSED)
        self._move(sandbox_id, State.RESUMING)
        return self._move(sandbox_id, State.RUNNING, end_at=end_at)

    async def exec(
        self, sandbox_id: str, argv: tuple[str, ...], **options: Any
    ) -> AsyncIterator[ExecEvent]:
        self._must_be(sandbox_id, State.RUNNING)
        yield ExecEvent(kind="stdout", data=" ".join(argv).encode())
        if argv[0] == "sleep":
            await asyncio.sleep(float(argv[1]))
        yield ExecEvent(kind="end", exit_code=0)

    async def set_end_at(
        self, sandbox_id: str, end_at: float, *, only_extend: bool = False
    ) -> SandboxStatus:
        kept = self._live(sandbox_id)
        if not only_extend or end_at > kept.end_at:
            self.kept[sandbox_id] = kept._replace(end_at=end_at)
        return self._status(sandbox_id)

    async def route(self, sandbox_id: str) -> Route:
        self._must_be(sandbox_id, State.RUNNING)
        return Route(
            sandbox_id=sandbox_id,
            state=State.RUNNING,
            address="127.0.0.1",
            agent_port=1,
            control_token="c",
            traffic_token="t",
        )

    async def route_by_signature(self, **_: object) -> Route:
        raise SandboxNotFound("no running sandbox made this signature")

    async def metrics(self, sandbox_id: str, start: float, end: float) -> list[Any]:  # type: ignore[valid-type]
        self._live(sandbox_id, ended_too=True)
        return []

    async def usage(self, sandbox_ids: Sequence[str]) -> dict[str, SandboxUsage]:
        return {name: SandboxUsage(at=time.time()) for name in sandbox_ids if name in self.kept}

    async def snapshots(self) -> list[Any]:  # type: ignore[valid-type]
        return []

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        return False

    async def unpack(self, sandbox_id: str, archive: str, **_: object) -> None:
        raise NotSupported("simulated nodes have no files")

    async def events(self) -> AsyncIterator[NodeEvent]:
        queue: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)

    # --- for tests ----------------------------------------------------------

    def preload(
        self,
        names: Sequence[str],
        project_id: str,
        template_id: str,
        end_at: float | None = None,
    ) -> None:
        """Sandboxes that run already."""
        now = time.time()
        until = now + 86_400 if end_at is None else end_at
        for name in names:
            self.kept[name] = Kept(project_id, template_id, State.RUNNING, now, now, until, 2)
        self.live += len(names)

    # --- inside -------------------------------------------------------------

    def _move(self, name: str, state: State, **changes: Any) -> SandboxStatus:
        kept = self.kept[name]
        self.kept[name] = kept = kept._replace(state=state, seq=kept.seq + 1, **changes)
        event = NodeEvent(
            sandbox_id=name, state=state, at=time.time(), reason=kept.reason, seq=kept.seq
        )
        for queue in self._listeners:
            queue.put_nowait(event)
        return self._status(name)

    def _live(self, name: str, *, ended_too: bool = False) -> Kept:
        kept = self.kept.get(name)
        if kept is None or (kept.state is State.ENDED and not ended_too):
            raise SandboxNotFound(f"node {self.node_id} does not know {name}")
        return kept

    def _must_be(self, name: str, state: State) -> None:
        found = self._live(name).state
        if found is not state:
            raise StateConflict(f"{name} is {found}", details={"state": found})

    def _status(self, name: str) -> SandboxStatus:
        kept = self._live(name, ended_too=True)
        ended = kept.state is State.ENDED
        return SandboxStatus(
            sandbox_id=name,
            project_id=kept.project_id,
            template_id=kept.template_id,
            backend="container",
            state=kept.state,
            created_at=kept.created_at,
            started_at=kept.started_at,
            end_at=kept.end_at,
            ended_at=time.time() if ended else None,
            reason=kept.reason,
            pause_mode="full" if kept.state is State.PAUSED else None,
            seq=kept.seq,
        )


class SimImages:
    """A store that has nothing but names."""

    async def all(self) -> list[ImageInfo]:
        return []

    async def get(self, name: str) -> ImageInfo:
        raise ImageNotFound(f"no image {name} here")

    async def keep(self, digests: Sequence[str]) -> None:
        return None

    async def progress(self) -> list[Any]:
        return []

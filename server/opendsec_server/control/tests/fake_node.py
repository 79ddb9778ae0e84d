# SPDX-License-Identifier: AGPL-3.0-only
"""A node without a machine: the contract's behaviour, with faults on demand. Tests only."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fnmatch
import posixpath
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from opendsec_server.contract.actions import (
    KeptOutput,
    KeptProgram,
    KeptState,
    ProgramOrder,
)
from opendsec_server.contract.errors import (
    AgentUnresponsive,
    AlreadyPaused,
    Conflict,
    FileNotFound,
    InvalidRequest,
    NotSupported,
    OpendsecError,
    PayloadTooLarge,
    SandboxNotFound,
    SnapshotNotFound,
    StateConflict,
)
from opendsec_server.contract.images import ExecEvent, ImageInfo, PackOptions
from opendsec_server.contract.node import (
    Accelerator,
    BackendInfo,
    Capabilities,
    MetricSample,
    NetworkPolicy,
    NodeEvent,
    NodeInfo,
    PauseReport,
    Route,
    SandboxSpec,
    SandboxStatus,
    SandboxUsage,
    Snapshot,
    StateMode,
)
from opendsec_server.contract.signatures import file_signature
from opendsec_server.contract.states import TERMINAL, EndReason, State, can_move

from . import fake_programs
from .fake_images import FakeImages

NODE_ID = "n0de"
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
MICROVM = Capabilities(
    own_kernel=True,
    memory_snapshot=True,
    pause_survives_reboot=True,
    fork=True,
    disk_images=False,
    console=False,
    passthrough=False,
)


class Content(msgspec.Struct):
    """What a sandbox holds."""

    disk: dict[str, str] = {}
    memory: dict[str, str] = {}


class FakeNode:
    """Keeps sandboxes in memory. Survives a restart of the control plane, like a real node."""

    def __init__(self, *, microvm: Accelerator | None = None, node_id: str = NODE_ID) -> None:
        self.node_id = node_id
        self.sandboxes_max = 4096
        self.labels: dict[str, str] = {}
        self.draining = False
        self.backends = {CONTAINER.name: CONTAINER}
        if microvm is not None:
            self.backends["microvm"] = BackendInfo(
                name="microvm", capabilities=MICROVM, accelerator=microvm, vmm="qemu 7.2"
            )
        self.specs: dict[str, SandboxSpec] = {}
        self.statuses: dict[str, SandboxStatus] = {}
        self.networks: dict[str, NetworkPolicy] = {}
        self.contents: dict[str, Content] = {}
        self.samples: dict[str, list[MetricSample]] = {}
        self.used: dict[str, SandboxUsage] = {}
        self.saved: dict[str, Snapshot] = {}
        """Complete snapshots, ephemeral ones too."""
        self.ephemeral: set[str] = set()
        self.saved_contents: dict[str, Content] = {}
        self.images = FakeImages()
        self.commands: list[str] = []
        """What was run in sandboxes, in order."""
        self.fail_start: OpendsecError | None = None
        """Raised by creates with a start command: it does not come up."""
        self.ended: dict[str, asyncio.Event] = {}
        """Of sandboxes that ran something."""
        self.created = 0
        """How many sandboxes were really made."""
        self.calls: list[str] = []
        """Names of the calls that change states, in order."""
        self.fail_with: Exception | None = None
        """Raised by every create, before anything is made."""
        self.fail_after: Exception | None = None
        """Raised by every create, after the sandbox was made."""
        self.fail_children: dict[int, Exception] = {}
        """Raised by the nth create from a snapshot, from 0 on."""
        self.fail: dict[str, Exception] = {}
        """Raised by ``pause``, ``resume``, ``snapshot`` or ``delete_snapshot`` half-way: what
        the contract says of a failure holds afterwards."""
        self.lose_answer: dict[str, Exception] = {}
        """Raised by these calls after they have done their work."""
        self.unreachable: OpendsecError | None = None
        """Raised by every call but events."""
        self.gate: asyncio.Event | None = None
        """Creates wait here after admission."""
        self.admitted = asyncio.Event()
        self.begun: list[str] = []
        """Tags of programs that really began."""
        self.kept_programs: dict[tuple[str, str], tuple[KeptProgram, asyncio.Event]] = {}
        self.void_tags: set[tuple[str, str]] = set()
        self.instances: dict[str, str] = {}
        self.oom_kills: dict[str, int] = {}
        self.kept_gate: asyncio.Event | None = None
        """Kept programs wait here before their end."""
        self.delay_starts = False
        """Starts of kept programs arrive when ``deliver`` is called, and their answer is lost."""
        self.delayed: list[tuple[str, str, ProgramOrder]] = []
        self._kept_work: set[asyncio.Task[None]] = set()
        self.between: Callable[[str], Awaitable[None]] | None = None
        """Awaited half-way through every pause, resume and snapshot."""
        self._children = 0
        self._moving: dict[str, asyncio.Task[Any]] = {}
        """Pauses, resumes and snapshots under way, by sandbox."""
        self._listeners: set[asyncio.Queue[NodeEvent]] = set()

    # --- NodeClient ---------------------------------------------------------

    async def info(self) -> NodeInfo:
        self._reach()
        return NodeInfo(
            node_id=self.node_id,
            hostname="test",
            version="0",
            backends=tuple(self.backends.values()),
            cpu_count=2,
            memory_total_bytes=1 << 34,
            disk_total_bytes=1 << 36,
            disk_free_bytes=1 << 35,
            sandboxes=len(self.statuses),
            sandboxes_max=self.sandboxes_max,
            labels=self.labels,
            draining=self.draining,
        )

    async def set_marks(
        self, *, labels: dict[str, str] | None = None, draining: bool | None = None
    ) -> NodeInfo:
        self._reach()
        self.labels = self.labels if labels is None else dict(labels)
        self.draining = self.draining if draining is None else draining
        return await self.info()

    async def create(self, spec: SandboxSpec) -> SandboxStatus:
        self._reach()
        if self.fail_with is not None:
            raise self.fail_with
        known = self.statuses.get(spec.sandbox_id)
        if known is None:
            self._admit(spec)
        self.admitted.set()
        if self.gate is not None:
            await self.gate.wait()
        known = self.statuses[spec.sandbox_id]
        if known.state in TERMINAL:
            raise StateConflict("killed while starting", details={"state": known.state})
        if known.state is State.STARTING:
            self.created += 1
            known = self._move(spec.sandbox_id, State.RUNNING, started_at=time.time())
        if self.fail_after is not None:
            raise self.fail_after
        return known

    def _admit(self, spec: SandboxSpec) -> None:
        content = Content(disk=dict(self.images.disks.get(spec.image, {})))
        if spec.start is not None:
            if self.fail_start is not None:
                raise self.fail_start
            content.memory["start"] = spec.start.argv[-1]
        backend = self.backends[spec.backend]
        if spec.snapshot_id is not None:
            number, self._children = self._children, self._children + 1
            if number in self.fail_children:
                raise self.fail_children[number]
            snapshot = self.saved.get(spec.snapshot_id)
            if snapshot is None:
                raise SnapshotNotFound(f"no snapshot {spec.snapshot_id} here")
            assert snapshot.backend == spec.backend, "control must not mix backends"
            content = copy.deepcopy(self.saved_contents[spec.snapshot_id])
        self.specs[spec.sandbox_id] = spec
        self.networks[spec.sandbox_id] = spec.network
        self.contents[spec.sandbox_id] = content
        self.statuses[spec.sandbox_id] = SandboxStatus(
            sandbox_id=spec.sandbox_id,
            project_id=spec.project_id,
            template_id=spec.template_id,
            backend=spec.backend,
            state=State.PENDING,
            created_at=spec.created_at,
            end_at=spec.end_at,
            accelerator=backend.accelerator,
            vmm=backend.vmm,
        )
        self._move(spec.sandbox_id, State.STARTING)

    async def get(self, sandbox_id: str) -> SandboxStatus:
        self._reach()
        return self._known(sandbox_id)

    async def list(self) -> list[SandboxStatus]:
        self._reach()
        return [status for status in self.statuses.values() if status.state not in TERMINAL]

    async def kill(self, sandbox_id: str, reason: EndReason = EndReason.KILLED) -> SandboxStatus:
        self._reach()
        status = self._known(sandbox_id)
        if status.state in TERMINAL:
            return status
        return self.end(sandbox_id, reason)

    async def pause(self, sandbox_id: str, mode: StateMode = "full") -> PauseReport:
        self._reach()
        self.calls.append("pause")
        status = self._live(sandbox_id)
        moving = self._moving.get(sandbox_id)
        if moving is not None and moving.get_name() == "pause":
            shared: PauseReport = await self._shared(moving)
            return shared
        while moving is not None and moving.get_name() == "snapshot":
            await asyncio.wait({moving})
            status = self._live(sandbox_id)
            moving = self._moving.get(sandbox_id)
        if status.state is State.PAUSED:
            raise AlreadyPaused(f"sandbox {sandbox_id} is paused")
        self._must_be(sandbox_id, State.RUNNING)
        report: PauseReport = await self._shared(self._begin_pause(sandbox_id, mode))
        self._answer("pause")
        return report

    def _begin_pause(self, sandbox_id: str, mode: StateMode) -> asyncio.Task[PauseReport]:
        self._move(sandbox_id, State.PAUSING)
        return self._start("pause", sandbox_id, self._pause(sandbox_id, mode))

    async def _pause(self, sandbox_id: str, mode: StateMode) -> PauseReport:
        await self._half_way("pause", sandbox_id)
        if "pause" in self.fail:
            self._move(sandbox_id, State.RUNNING)
            raise self.fail["pause"]
        if mode == "filesystem":
            self.contents[sandbox_id].memory.clear()
        status = self._move(sandbox_id, State.PAUSED, pause_mode=mode)
        return PauseReport(
            status=status,
            took_s=0.1,
            memory_before_bytes=1 << 28,
            memory_freed_bytes=1 << 27,
            stored_bytes=1 << 20 if mode == "full" else 0,
        )

    async def resume(
        self, sandbox_id: str, *, end_at: float, reboot: bool = False
    ) -> SandboxStatus:
        self._reach()
        self.calls.append("resume")
        for _ in range(10):
            status = self._live(sandbox_id)
            moving = self._moving.get(sandbox_id)
            if status.state is State.PAUSED:
                self._move(sandbox_id, State.RESUMING)
                moving = self._start("resume", sandbox_id, self._resume(sandbox_id, end_at, reboot))
                await self._shared(moving)
                continue
            if moving is not None:
                # One that fails tells those who share it.
                waits = moving.get_name() != "resume"
                await (asyncio.wait({moving}) if waits else self._shared(moving))
                continue
            self._must_be(sandbox_id, State.RUNNING)
            if end_at > status.end_at:
                status = self.statuses[sandbox_id] = msgspec.structs.replace(status, end_at=end_at)
            self._answer("resume")
            return status
        raise AssertionError("never came to rest")

    async def _resume(self, sandbox_id: str, end_at: float, reboot: bool) -> None:
        await self._half_way("resume", sandbox_id)
        if "resume" in self.fail:
            self._move(sandbox_id, State.PAUSED)
            raise self.fail["resume"]
        if reboot:
            self.contents[sandbox_id].memory.clear()
        # Its old end time was forgotten when it paused.
        self._move(sandbox_id, State.RUNNING, pause_mode=None, end_at=end_at)

    async def snapshot(
        self,
        sandbox_id: str,
        snapshot_id: str,
        *,
        mode: StateMode = "full",
        ephemeral: bool = False,
    ) -> Snapshot:
        self._reach()
        self.calls.append("snapshot")
        status = self._live(sandbox_id)
        if snapshot_id in self.saved:
            return self.saved[snapshot_id]
        spec = self.specs[sandbox_id]
        if mode == "full" and not self.backends[spec.backend].capabilities.memory_snapshot:
            raise NotSupported(f"{spec.backend} cannot keep memory")
        moving = self._moving.get(sandbox_id)
        while moving is not None and moving.get_name() == "snapshot":
            await asyncio.wait({moving})
            status = self._live(sandbox_id)
            moving = self._moving.get(sandbox_id)
        if status.state is State.PAUSED:
            if mode == "full" and status.pause_mode == "filesystem":
                raise NotSupported("it was paused without memory; ask for filesystem")
            return self._save(sandbox_id, snapshot_id, mode, ephemeral)
        self._must_be(sandbox_id, State.RUNNING)
        self._move(sandbox_id, State.PAUSING)
        work = self._snapshot(sandbox_id, snapshot_id, mode, ephemeral)
        taken: Snapshot = await self._shared(self._start("snapshot", sandbox_id, work))
        self._answer("snapshot")
        return taken

    async def _snapshot(
        self, sandbox_id: str, snapshot_id: str, mode: StateMode, ephemeral: bool
    ) -> Snapshot:
        await self._half_way("snapshot", sandbox_id)
        if "snapshot" in self.fail:
            self._move(sandbox_id, State.RUNNING)
            raise self.fail["snapshot"]
        taken = self._save(sandbox_id, snapshot_id, mode, ephemeral)
        self._move(sandbox_id, State.RUNNING)
        return taken

    def _save(
        self, sandbox_id: str, snapshot_id: str, mode: StateMode, ephemeral: bool
    ) -> Snapshot:
        spec = self.specs[sandbox_id]
        content = copy.deepcopy(self.contents[sandbox_id])
        if mode == "filesystem":
            content.memory.clear()
        taken = Snapshot(
            snapshot_id=snapshot_id,
            source_id=sandbox_id,
            backend=spec.backend,
            mode=mode,
            image=spec.image,
            cpu=spec.cpu,
            memory_mb=spec.memory_mb,
            disk_mb=spec.disk_mb,
            created_at=time.time(),
            disk_bytes=4_096,
            memory_bytes=1 << 20 if mode == "full" else 0,
            versions={"vmm": "qemu 7.2"} if mode == "full" else {},
        )
        self.saved[snapshot_id] = taken
        self.saved_contents[snapshot_id] = content
        if ephemeral:
            self.ephemeral.add(snapshot_id)
        return taken

    async def exec(
        self,
        sandbox_id: str,
        argv: tuple[str, ...],
        *,
        user: str | None = None,
        workdir: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float,
    ) -> AsyncIterator[ExecEvent]:
        self._reach()
        self._must_be(sandbox_id, State.RUNNING)
        spec, ended = self.specs[sandbox_id], self.ended.setdefault(sandbox_id, asyncio.Event())
        self.commands.append(argv[-1])
        async for event in fake_programs.run(
            argv[-1],
            self.contents[sandbox_id].disk,
            user=user or spec.default_user,
            workdir=workdir,
            env={**spec.env, **(env or {})},
            ended=ended,
        ):
            yield event
        if ended.is_set():
            raise SandboxNotFound(f"{sandbox_id} has ended")

    async def start_kept(self, sandbox_id: str, tag: str, order: ProgramOrder) -> None:
        self._reach()
        self._must_be(sandbox_id, State.RUNNING)
        if "start_kept" in self.fail:
            raise self.fail["start_kept"]
        if self.delay_starts:
            # The request is on its way, and its sender has lost sight of it.
            self.delayed.append((sandbox_id, tag, order))
            raise AgentUnresponsive("no answer in time")
        self._begin_kept(sandbox_id, tag, order)
        self._answer("start_kept")

    def deliver(self) -> None:
        """What was on its way to guest agents arrives."""
        for sandbox_id, tag, order in self.delayed:
            with contextlib.suppress(OpendsecError):
                self._must_be(sandbox_id, State.RUNNING)
                self._begin_kept(sandbox_id, tag, order)
        self.delayed.clear()

    def _begin_kept(self, sandbox_id: str, tag: str, order: ProgramOrder) -> None:
        place = (sandbox_id, tag)
        if order.instance not in (None, self.instances.get(sandbox_id, "first")):
            raise StateConflict("the agent was started anew since")
        if order.argv[0] == "/missing":
            raise InvalidRequest("no such program")
        if place in self.kept_programs or place in self.void_tags:
            raise Conflict("the tag was used before")
        self.begun.append(tag)
        over = asyncio.Event()
        self.kept_programs[place] = (self._kept(sandbox_id, "running"), over)
        work = asyncio.create_task(self._run_kept(place, order, over))
        self._kept_work.add(work)
        work.add_done_callback(self._kept_work.discard)

    async def _run_kept(
        self, place: tuple[str, str], order: ProgramOrder, over: asyncio.Event
    ) -> None:
        sandbox_id, _ = place
        spec, ended = self.specs[sandbox_id], self.ended.setdefault(sandbox_id, asyncio.Event())
        output: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        end = ExecEvent(kind="end", exit_code=0)
        async for event in fake_programs.run(
            order.argv[-1],
            self.contents[sandbox_id].disk,
            user=order.user or spec.default_user,
            workdir=order.workdir,
            env={**spec.env, **order.env},
            ended=ended,
        ):
            if event.kind == "end":
                end = event
            else:
                output[event.kind] += event.data
        if self.kept_gate is not None:
            await self.kept_gate.wait()
        kept = {
            name: KeptOutput(head=text[: order.output_bytes], bytes_total=len(text))
            for name, text in output.items()
        }
        program = self._kept(
            sandbox_id,
            "ended",
            exit_code=end.exit_code,
            signal=end.signal,
            stdout=kept["stdout"],
            stderr=kept["stderr"],
        )
        if place in self.kept_programs:
            self.kept_programs[place] = (program, over)
        over.set()

    def _kept(self, sandbox_id: str, state: KeptState, **told: Any) -> KeptProgram:
        instance = self.instances.get(sandbox_id, "first")
        return KeptProgram(
            state=state, instance=instance, oom_total=self.oom_kills.get(sandbox_id, 0), **told
        )

    async def kept(
        self, sandbox_id: str, tag: str, *, wait_s: float = 0.0, void: bool = False
    ) -> KeptProgram:
        self._reach()
        self._must_be(sandbox_id, State.RUNNING)
        if "kept" in self.fail:
            raise self.fail["kept"]
        place = (sandbox_id, tag)
        if place in self.kept_programs:
            program, over = self.kept_programs[place]
            ended = self.ended.setdefault(sandbox_id, asyncio.Event())
            waits = [asyncio.create_task(event.wait()) for event in (over, ended)]
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            self._must_be(sandbox_id, State.RUNNING)
            if "kept" in self.fail:
                raise self.fail["kept"]
            if place in self.kept_programs:
                program, _ = self.kept_programs[place]
                # As it is now: kills are counted to this moment.
                return msgspec.structs.replace(program, oom_total=self.oom_kills.get(sandbox_id, 0))
        if place in self.void_tags:
            return self._kept(sandbox_id, "void")
        if void:
            self.void_tags.add(place)
        return self._kept(sandbox_id, "missing")

    async def forget_kept(self, sandbox_id: str, tag: str) -> None:
        self._reach()
        self._must_be(sandbox_id, State.RUNNING)
        if self.kept_programs.pop((sandbox_id, tag), None) is not None:
            self.void_tags.add((sandbox_id, tag))

    def new_agent(self, sandbox_id: str) -> None:
        """Its guest agent is another one, which knows nothing of what the first was told."""
        self.instances[sandbox_id] = f"{self.instances.get(sandbox_id, 'first')}+"
        for place in [place for place in self.kept_programs if place[0] == sandbox_id]:
            del self.kept_programs[place]
        self.void_tags = {place for place in self.void_tags if place[0] != sandbox_id}

    async def write_file(
        self, sandbox_id: str, path: str, data: bytes, *, user: str | None = None
    ) -> None:
        self._reach()
        self._must_be(sandbox_id, State.RUNNING)
        if "write_file" in self.fail:
            raise self.fail["write_file"]
        self.contents[sandbox_id].disk[path] = data.decode(errors="surrogateescape")
        self._answer("write_file")

    async def read_file(
        self, sandbox_id: str, path: str, *, user: str | None = None, bytes_max: int
    ) -> bytes:
        self._reach()
        self._must_be(sandbox_id, State.RUNNING)
        if "read_file" in self.fail:
            raise self.fail["read_file"]
        text = self.contents[sandbox_id].disk.get(path)
        if text is None:
            raise FileNotFound(f"no file {path}")
        data = text.encode(errors="surrogateescape")
        if len(data) > bytes_max:
            raise PayloadTooLarge(f"more than {bytes_max} bytes")
        return data

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
        self._reach()
        self._must_be(sandbox_id, State.RUNNING)
        self.calls.append("unpack")
        disk = self.contents[sandbox_id].disk
        texts: dict[str, str] = {}
        try:
            with tarfile.open(archive) as tar:
                for member in tar.getmembers():
                    content = tar.extractfile(member) if member.isfile() else None
                    if content is not None:
                        name = posixpath.normpath(member.name)
                        texts[name] = content.read().decode(errors="replace")
        except (tarfile.TarError, EOFError) as exc:
            raise InvalidRequest(f"the archive is damaged: {exc}") from exc
        found = [(source, part) for source in sources for part in _parts(texts, source)]
        for source in sources:
            if source not in dict(found):
                raise InvalidRequest(f"the archive has no `{source}`")
        if len(found) > 1:
            target = target.rstrip("/") + "/"
        for _, part in found:
            if part in texts:
                into = posixpath.basename(part) if target.endswith("/") else ""
                disk[posixpath.join(target, into).rstrip("/")] = texts[part]
            for name, text in texts.items():
                if part == "." or name.startswith(f"{part}/"):
                    rest = name if part == "." else name.removeprefix(f"{part}/")
                    disk[posixpath.join(target, rest)] = text

    async def pack(self, sandbox_id: str, options: PackOptions) -> ImageInfo:
        self._reach()
        self.calls.append("pack")
        self._must_be(sandbox_id, State.RUNNING)
        if "pack" in self.fail:
            raise self.fail["pack"]
        names = () if options.name is None else (options.name,)
        return self.images.add(self.contents[sandbox_id].disk, options.config, names=names)

    async def snapshots(self) -> list[Snapshot]:  # type: ignore[valid-type]
        self._reach()
        return [s for name, s in self.saved.items() if name not in self.ephemeral]

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        self._reach()
        if "delete_snapshot" in self.fail:
            raise self.fail["delete_snapshot"]
        self.ephemeral.discard(snapshot_id)
        self.saved_contents.pop(snapshot_id, None)
        return self.saved.pop(snapshot_id, None) is not None

    async def set_end_at(
        self, sandbox_id: str, end_at: float, *, only_extend: bool = False
    ) -> SandboxStatus:
        self._reach()
        status = self._live(sandbox_id)
        if not only_extend or end_at > status.end_at:
            status = msgspec.structs.replace(status, end_at=end_at)
            self.statuses[sandbox_id] = status
        if status.end_at <= time.time():
            return self.expire(sandbox_id)
        return status

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        self._reach()
        self._must_be(sandbox_id, State.RUNNING)
        self.networks[sandbox_id] = policy

    async def route(self, sandbox_id: str) -> Route:
        self._reach()
        self._live(sandbox_id)
        for _ in range(10):
            moving = self._moving.get(sandbox_id)
            if moving is None:
                break
            await asyncio.wait({moving})
        self._live(sandbox_id)
        self._must_be(sandbox_id, State.RUNNING)
        spec = self.specs[sandbox_id]
        return Route(
            sandbox_id=sandbox_id,
            state=State.RUNNING,
            address="10.201.0.5",
            agent_port=49983,
            control_token=spec.control_token,
            traffic_token=spec.traffic_token,
        )

    async def console(self, sandbox_id: str, kind: str) -> str:
        raise NotSupported("no backend here has one")

    async def console_tail(self, sandbox_id: str) -> str:
        raise NotSupported("no backend here has one")

    async def route_by_signature(
        self, *, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route:
        self._reach()
        for sandbox_id, spec in self.specs.items():
            if self.statuses[sandbox_id].state is not State.RUNNING:
                continue
            token = spec.access_token
            if signature == file_signature(path, operation, username, token, expiration):
                return await self.route(sandbox_id)
        raise SandboxNotFound("no running sandbox's token fits")

    async def metrics(self, sandbox_id: str, start: float, end: float) -> list[MetricSample]:  # type: ignore[valid-type]
        self._reach()
        self._known(sandbox_id)
        return [s for s in self.samples.get(sandbox_id, []) if start <= s.at <= end]

    async def usage(self, sandbox_ids: Sequence[str]) -> dict[str, SandboxUsage]:
        self._reach()
        return {name: self.used[name] for name in sandbox_ids if name in self.used}

    async def events(self) -> AsyncIterator[NodeEvent]:
        queue: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)

    # --- for tests ----------------------------------------------------------

    def end(self, sandbox_id: str, reason: EndReason, message: str | None = None) -> SandboxStatus:
        """The sandbox ends by itself."""
        moving = self._moving.pop(sandbox_id, None)
        if sandbox_id in self.ended:
            self.ended[sandbox_id].set()
        ended = self._move(
            sandbox_id,
            State.ENDED,
            ended_at=time.time(),
            reason=reason,
            message=message,
            usage=self.used.get(sandbox_id),
        )
        if moving is not None:
            moving.cancel()
        return ended

    def expire(self, sandbox_id: str) -> SandboxStatus:
        """Its time is up."""
        spec, status = self.specs[sandbox_id], self.statuses[sandbox_id]
        if spec.on_timeout == "kill":
            return self.end(sandbox_id, EndReason.TIMEOUT)
        if status.state is State.RUNNING:
            self._begin_pause(sandbox_id, spec.pause_mode)
        return self.statuses[sandbox_id]

    def forget(self, sandbox_id: str) -> None:
        """The node loses the sandbox without a word."""
        del self.statuses[sandbox_id]

    def restart(self) -> None:
        """The node starts anew: what forks had saved is gone."""
        for snapshot_id in self.ephemeral:
            del self.saved[snapshot_id], self.saved_contents[snapshot_id]
        self.ephemeral.clear()

    def sample(self, sandbox_id: str, at: float) -> None:
        """The node measures once."""
        self.samples.setdefault(sandbox_id, []).append(
            MetricSample(
                at=at,
                cpu_count=2.0,
                cpu_used_pct=12.5,
                memory_used_bytes=10,
                memory_total_bytes=100,
                memory_cache_bytes=5,
                disk_used_bytes=7,
                disk_total_bytes=70,
            )
        )

    async def settled(self) -> None:
        """Wait until no pause, resume or snapshot is under way."""
        while self._moving:
            await asyncio.wait(set(self._moving.values()))
            await asyncio.sleep(0)

    # --- inside -------------------------------------------------------------

    def _start(
        self, name: str, sandbox_id: str, work: Coroutine[Any, Any, Any]
    ) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._moving[sandbox_id] = task

        def done(_: asyncio.Task[Any]) -> None:
            if self._moving.get(sandbox_id) is task:
                del self._moving[sandbox_id]
            if not task.cancelled():
                task.exception()

        task.add_done_callback(done)
        return task

    async def _shared(self, task: asyncio.Task[Any]) -> Any:
        """The task's result. One that was cut off by a kill tells of the end."""
        await asyncio.wait({task})
        # Its done callback may come after us.
        await asyncio.sleep(0)
        if task.cancelled():
            raise SandboxNotFound("it was killed meanwhile")
        return task.result()

    async def _half_way(self, name: str, sandbox_id: str) -> None:
        if self.between is not None:
            await self.between(name)
        else:
            await asyncio.sleep(0)
        assert self.statuses[sandbox_id].state not in TERMINAL

    def _answer(self, name: str) -> None:
        if name in self.lose_answer:
            raise self.lose_answer[name]

    def _move(self, sandbox_id: str, state: State, **told: object) -> SandboxStatus:
        before = self.statuses[sandbox_id]
        assert can_move(before.state, state), (before.state, state)
        status = msgspec.structs.replace(before, state=state, seq=before.seq + 1, **told)
        self.statuses[sandbox_id] = status
        for queue in self._listeners:
            queue.put_nowait(
                NodeEvent(
                    sandbox_id=status.sandbox_id,
                    state=status.state,
                    at=time.time(),
                    reason=status.reason,
                    message=status.message,
                    seq=status.seq,
                    usage=status.usage,
                )
            )
        return status

    def _reach(self) -> None:
        if self.unreachable is not None:
            raise self.unreachable

    def _known(self, sandbox_id: str) -> SandboxStatus:
        try:
            return self.statuses[sandbox_id]
        except KeyError:
            raise SandboxNotFound(f"the journal does not know {sandbox_id}") from None

    def _live(self, sandbox_id: str) -> SandboxStatus:
        status = self._known(sandbox_id)
        if status.state in TERMINAL:
            raise SandboxNotFound(f"{sandbox_id} has ended")
        return status

    def _must_be(self, sandbox_id: str, state: State) -> None:
        status = self._live(sandbox_id)
        if status.state is not state:
            raise StateConflict(
                f"sandbox {sandbox_id} is {status.state}", details={"state": status.state}
            )


def _parts(names: Iterable[str], source: str) -> list[str]:
    """What a source means, by path or by pattern."""
    if source == ".":
        return [source]
    wanted = source.split("/")
    parts = [name.split("/")[: len(wanted)] for name in names]
    hits = (
        part
        for part in parts
        if len(part) == len(wanted) and all(map(fnmatch.fnmatchcase, part, wanted))
    )
    return list(dict.fromkeys("/".join(part) for part in hits))

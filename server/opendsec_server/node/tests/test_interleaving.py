# SPDX-License-Identifier: AGPL-3.0-only
"""Pause, resume, snapshot, kill and crashes of one sandbox at once, in every order that a drawn
schedule can bring about: each call ends, with its result or a typed answer, and nothing is lost.

The life cycle and the operations are the real ones. The backend, the disk pool and the journal
are models that let the schedule decide which of their waits ends next, and which of them fail.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendsec_server.contract.errors import (
    NodeUnavailable,
    OpendsecError,
    ResumeFailed,
    SnapshotFailed,
    SnapshotNotFound,
)
from opendsec_server.contract.node import BackendInfo, Capabilities, Snapshot
from opendsec_server.contract.states import EndReason, State
from opendsec_server.node import process
from opendsec_server.node.journal import Record
from opendsec_server.node.lifecycle import Lifecycle
from opendsec_server.node.paths import NodePaths
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.start import StartPrograms
from opendsec_server.node.suspend import Suspend
from opendsec_server.node.tests.machine import small_spec

STEPS_MAX = 400
CALLS = (
    "pause full",
    "pause filesystem",
    "resume",
    "reboot",
    "snapshot",
    "kill",
    "time out",
    "die",
)


@dataclass
class Schedule:
    """Which wait ends next, and how. Draws are bytes, so that failures shrink to short ones."""

    draws: list[int]
    waiting: list[asyncio.Future[bool]] = field(default_factory=list)

    def draw(self, below: int) -> int:
        return self.draws.pop() % below if self.draws else 0

    async def wait(self) -> bool:
        """Wait for one's turn; False: it is to fail."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        return await turn

    def step(self, failures: bool) -> bool:
        """Let one of the waits end."""
        self.waiting = [w for w in self.waiting if not w.done()]
        if not self.waiting:
            return False
        turn = self.waiting.pop(self.draw(len(self.waiting)))
        turn.set_result(not (failures and self.draw(6) == 5))
        return True


class Machine:
    """A model of what the backend does to one sandbox; it checks that it is asked sensibly."""

    budget_s = 30.0
    name = "run"

    def __init__(self, schedule: Schedule, *, memory: bool) -> None:
        self.schedule = schedule
        self.info = BackendInfo(
            name="microvm" if memory else "container",
            capabilities=Capabilities(
                own_kernel=memory,
                memory_snapshot=memory,
                pause_survives_reboot=memory,
                fork=True,
                disk_images=False,
                console=False,
                passthrough=False,
            ),
        )
        self.keep_hooks = [SimpleNamespace(name="disk", setup=self._make_disk, teardown=self._drop)]
        self.run_hooks = [self]
        self.disk = False
        self.frozen = False
        self.alive: int | None = None
        self.inside = 0
        self.saved = False

    async def _busy(self, error: type[Exception]) -> None:
        """One at a time, and each may fail."""
        assert self.inside == 0, "two operations on one sandbox at once"
        self.inside += 1
        try:
            if not await self.schedule.wait():
                raise error("drawn")
        finally:
            self.inside -= 1

    async def _make_disk(self, box: Sandbox) -> None:
        self.disk = True

    async def _drop(self, box: Sandbox) -> None:
        assert self.alive is None, "the disk is removed under a running sandbox"
        self.disk = False

    async def setup(self, box: Sandbox) -> None:
        assert self.disk and self.alive is None
        await self._busy(ResumeFailed)
        read, self.alive = os.pipe()
        box.pidfd, box.record.pid, self.frozen = read, 1, False

    async def teardown(self, box: Sandbox) -> None:
        if box.pidfd is not None:
            os.close(box.pidfd)
            box.pidfd = None
        if self.alive is not None:
            os.close(self.alive)
        self.alive, self.frozen = None, False

    def die(self) -> None:
        if self.alive is not None:
            os.close(self.alive)
            self.alive = None

    async def settle(self, box: Sandbox) -> None:
        await self._busy(SnapshotFailed)

    async def disconnect(self, box: Sandbox) -> None:
        return

    async def freeze(self, box: Sandbox) -> None:
        await self._busy(SnapshotFailed)
        self.frozen = True

    async def thaw(self, box: Sandbox) -> None:
        self.frozen = False

    async def save_memory(self, box: Sandbox, target: Path) -> int:
        assert self.frozen or self.alive is None
        target.mkdir()
        await self._busy(SnapshotFailed)
        return 1

    async def seal_memory(self, directory: Path, *, durable: bool) -> None:
        if not await self.schedule.wait():
            raise SnapshotFailed("drawn")

    async def check_memory(self, directory: Path) -> None:
        assert directory.is_dir()

    async def put_away(self, box: Sandbox) -> None:
        return

    async def take_up(self, box: Sandbox) -> None:
        return

    def memory_bytes(self, box: Sandbox) -> int:
        return 1

    def memory_kills(self, box: Sandbox) -> int:
        return 0

    def why_ended(self, box: Sandbox) -> tuple[EndReason, str]:
        return EndReason.EXITED, "it died"


class Journal:
    """Takes everything, when its turn comes; sometimes it cannot."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.last: Record | None = None
        self.order = asyncio.Lock()

    async def save(self, record: Record, transition: Any) -> None:
        copy = msgspec.structs.replace(record)
        async with self.order:  # it is a queue
            if not await self.schedule.wait():
                raise NodeUnavailable("drawn")
            self.last = copy

    async def find(self, sandbox_id: str) -> Record | None:
        return None


class Snapshots:
    """Rows only."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Snapshot, bool]] = {}

    def get(self, snapshot_id: str) -> Snapshot:
        info, ready = self.rows.get(snapshot_id, (None, False))
        if info is None or not ready:
            raise SnapshotNotFound("none")
        return info

    async def begin(self, info: Snapshot, *, ephemeral: bool, control_token: str) -> None:
        self.rows[info.snapshot_id] = (info, False)

    async def complete(self, info: Snapshot) -> None:
        self.rows[info.snapshot_id] = (info, True)

    async def remove(self, snapshot_id: str) -> bool:
        return self.rows.pop(snapshot_id, None) is not None


@dataclass
class World:
    """One sandbox that runs, and everything around it."""

    schedule: Schedule
    machine: Machine
    journal: Journal
    snapshots: Snapshots
    lifecycle: Lifecycle
    suspend: Suspend
    box: Sandbox

    def begin(self, call: str) -> Coroutine[Any, Any, Any] | None:
        box, suspend = self.box, self.suspend
        later = time.time() + 600
        if call.startswith("pause"):
            return suspend.pause(box, "full" if call.endswith("full") else "filesystem")
        if call in ("resume", "reboot"):
            return suspend.resume(box, later, reboot=call == "reboot")
        if call == "snapshot":
            number = f"s{len(self.snapshots.rows)}"
            return suspend.snapshot(box, number, "filesystem", ephemeral=False)
        if call == "kill":
            return self.lifecycle.kill(box, EndReason.KILLED)
        if call == "time out":
            return suspend.time_out(box)
        self.machine.die()
        return None


async def world(schedule: Schedule, directory: Path, *, memory: bool) -> World:
    machine = Machine(schedule, memory=memory)
    journal, snapshots = Journal(schedule), Snapshots()
    spec = small_spec(backend=machine.info.name, on_timeout="pause")
    admit = SimpleNamespace(check=lambda: None)
    lifecycle = Lifecycle(
        journal,  # type: ignore[arg-type]
        {machine.info.name: machine},  # type: ignore[dict-item]
        snapshots,  # type: ignore[arg-type]
        admit,  # type: ignore[arg-type]
        StartPrograms(NodePaths(directory, directory)),
        10,
    )
    (directory / "snapshots").mkdir()
    pool = SimpleNamespace(
        sync=lambda: None,
        used_bytes=lambda _name: 1,
        create_snapshot=lambda _sandbox, _name: directory / "snapshots",
    )
    paths = NodePaths(directory, directory)
    paths.disk(spec.sandbox_id).mkdir(parents=True)
    meters = SimpleNamespace(read=lambda _box: None)
    services = SimpleNamespace(pool=pool, paths=paths, snapshots=snapshots, meters=meters)
    suspend = Suspend(services, lifecycle)  # type: ignore[arg-type]
    lifecycle.time_out, lifecycle.lost_memory = suspend.time_out, suspend.lost_memory
    box = Sandbox(Record(spec=spec, state=State.STARTING, end_at=time.time() + 600))
    lifecycle.boxes[box.sandbox_id] = box
    await machine._make_disk(box)
    setting_up = asyncio.ensure_future(machine.setup(box))
    await asyncio.sleep(0)
    schedule.step(failures=False)
    await setting_up
    moving = asyncio.ensure_future(lifecycle.move(box, State.RUNNING, cause="create"))
    await asyncio.sleep(0)
    schedule.step(failures=False)
    await moving
    lifecycle.watch(box)
    return World(schedule, machine, journal, snapshots, lifecycle, suspend, box)


async def drive(w: World, tasks: list[asyncio.Task[Any]], *, failures: bool) -> None:
    """Let waits end one by one until every call has its answer."""
    for _ in range(STEPS_MAX):
        for _ in range(8):  # let whatever can go on go on
            await asyncio.sleep(0)
        if not w.schedule.step(failures):
            if all(task.done() for task in tasks) and not w.lifecycle._tasks:
                return
            await asyncio.sleep(0.002)  # a thread, or the pause before the journal's next try
    raise AssertionError(f"a call never ends: {[t for t in tasks if not t.done()]}")


async def example(calls: list[int], draws: list[int], directory: Path, *, memory: bool) -> None:
    w = await world(Schedule(draws), directory, memory=memory)
    box, tasks, killed = w.box, [], False
    died = False
    for call in calls:
        name = CALLS[call]
        killed = killed or name == "kill"
        died = died or name == "die"
        begun = w.begin(name)
        if begun is not None:
            tasks.append(asyncio.ensure_future(begun))
        for _ in range(w.schedule.draw(4)):
            await asyncio.sleep(0)
            w.schedule.step(failures=True)
    await drive(w, tasks, failures=True)
    for task in tasks:
        error = task.exception()
        assert error is None or isinstance(error, OpendsecError), repr(error)
    await check_end(w, killed=killed, died=died)
    w.lifecycle.unwatch(box)
    await w.machine.teardown(box)


async def check_end(w: World, *, killed: bool, died: bool) -> None:
    box, machine = w.box, w.machine
    assert box.operation is None
    if killed:
        assert box.state is State.ENDED
        assert (machine.disk, machine.alive) == (False, None)
        assert box.sandbox_id not in w.lifecycle.boxes
        return
    assert all(ready for _info, ready in w.snapshots.rows.values())
    if box.state is State.ENDED:
        assert died, "it was lost, and nobody ended it"
        return
    assert w.journal.last is not None
    assert w.journal.last.state is box.state
    assert machine.disk
    if box.state is State.PAUSED:
        in_place = not machine.info.capabilities.pause_survives_reboot
        if box.record.pause_mode == "full" and in_place:
            assert machine.frozen or died
        elif box.record.pause_mode == "full":
            assert machine.alive is None
            assert w.suspend._paths.saved_memory(box.sandbox_id).is_dir()
        resuming = asyncio.ensure_future(w.begin("resume"))  # type: ignore[arg-type]
        await drive(w, [resuming], failures=False)
        if died and resuming.exception() is not None:
            return
        await resuming
    assert box.state is State.RUNNING or died
    assert died or (machine.alive is not None and not machine.frozen)


@pytest.mark.parametrize("memory", [False, True], ids=["in place", "to disk"])
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    calls=st.lists(st.integers(0, len(CALLS) - 1), min_size=1, max_size=7),
    draws=st.lists(st.integers(0, 255), max_size=120),
)
def test_every_call_is_answered_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    memory: bool,
    calls: list[int],
    draws: list[int],
) -> None:
    monkeypatch.setattr(process, "reap", lambda _fd: 0)
    monkeypatch.setattr("opendsec_server.node.limits.JOURNAL_RETRY_S", 0.001)
    directory = tmp_path_factory.mktemp("sandbox")
    asyncio.run(example(calls, draws, directory, memory=memory))


def test_the_model_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without failures, one after the other: what each call must come to."""
    monkeypatch.setattr(process, "reap", lambda _fd: 0)

    async def story() -> list[str]:
        w = await world(Schedule([]), tmp_path, memory=True)
        seen = []
        for call in ("pause full", "pause full", "resume", "pause filesystem", "reboot", "kill"):
            task = asyncio.ensure_future(w.begin(call))  # type: ignore[arg-type]
            await drive(w, [task], failures=False)
            error = task.exception()
            seen.append(error.code if isinstance(error, OpendsecError) else str(w.box.state))
        return seen

    assert asyncio.run(story()) == [
        "paused", "already_paused", "running", "paused", "running", "ended",
    ]  # fmt: skip

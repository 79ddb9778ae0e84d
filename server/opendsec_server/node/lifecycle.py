# SPDX-License-Identifier: AGPL-3.0-only
"""The life of sandboxes: the one place where states change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from opendsec_server.contract.errors import (
    AgentUnresponsive,
    Internal,
    NodeFull,
    NodeUnavailable,
    OpendsecError,
    SandboxStartFailed,
    StartTimeout,
    StateConflict,
)
from opendsec_server.contract.node import NodeEvent, SandboxSpec
from opendsec_server.contract.states import TERMINAL, EndReason, State, can_move

from . import agent_client, limits, process
from .backends import Backend
from .deadlines import Deadlines
from .events import Events
from .hooks import Hook, set_up, tear_down
from .hooks.admit import Admit
from .journal import Journal, Record, Transition
from .sandbox import Sandbox, usage_of
from .snapshots import Snapshots
from .start import StartPrograms, start_budget_s

T = TypeVar("T")

log = structlog.get_logger("opendsec.node")


class _AbortedError(Exception):
    """The sandbox was killed while it was starting."""


class Lifecycle:
    """Starts, watches and ends sandboxes.

    Args:
        journal: Told of every transition before anybody else.
        backends: By name.
        snapshots: What can be started from.
        admit: Says whether there is room.
        programs: Starts what is to run in a sandbox from its start on.
        sandboxes_max: Live sandboxes at one time.

    Attributes:
        time_out: What to do with a sandbox that is to be paused at its end time.
        lost_memory: What to do with a paused sandbox whose processes are gone.
    """

    time_out: Callable[[Sandbox], Coroutine[Any, Any, None]]
    lost_memory: Callable[[Sandbox, str], Coroutine[Any, Any, None]]

    def __init__(
        self,
        journal: Journal,
        backends: Mapping[str, Backend],
        snapshots: Snapshots,
        admit: Admit,
        programs: StartPrograms,
        sandboxes_max: int,
    ) -> None:
        self._journal = journal
        self._backends = backends
        self._snapshots = snapshots
        self._admit_hook = admit
        self.programs = programs
        self._sandboxes_max = sandboxes_max
        self._turns = asyncio.Semaphore(limits.STARTS_AT_ONCE_PER_CORE * (os.cpu_count() or 1))
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leftovers: dict[str, Sandbox] = {}
        self.boxes: dict[str, Sandbox] = {}
        self.events = Events()
        self.deadlines = Deadlines(self._deadline)

    def backend_of(self, box: Sandbox) -> Backend:
        """The backend that a sandbox is of."""
        return self._backends[box.spec.backend]

    def known(self) -> set[str]:
        """Ids of all sandboxes of which a backend finds something on the machine."""
        return set().union(*(backend.known() for backend in self._backends.values()))

    @property
    def closing(self) -> bool:
        """Whether the daemon is shutting down."""
        return self._closing

    # --- states -------------------------------------------------------------

    async def save(self, box: Sandbox) -> None:
        """Journal what changed without a change of state."""
        await self._journal.save(box.record, None)

    async def extend(self, box: Sandbox, end_at: float, *, only_extend: bool) -> None:
        """Replace the end time."""
        if only_extend and end_at <= box.record.end_at:
            return
        box.record.end_at = end_at
        await self.save(box)
        if box.state is State.RUNNING:
            self.deadlines.set(f"ttl:{box.sandbox_id}", end_at)

    async def move(
        self,
        box: Sandbox,
        target: State,
        *,
        cause: str,
        reason: EndReason | None = None,
        message: str | None = None,
    ) -> None:
        """One transition: journal, then memory's readers.

        Raises:
            Internal: the table does not allow it (a defect).
            NodeUnavailable: the journal did not take it; nothing has changed.
        """
        source = box.state
        if not can_move(source, target):
            raise Internal(f"sandbox {box.sandbox_id}: no way from {source} to {target}")
        now = time.time()
        record = box.record
        before = msgspec.structs.replace(record)
        record.state = target
        record.seq += 1
        record.reason = reason or record.reason
        record.message = message or record.message
        if target is State.RUNNING and record.started_at is None:
            record.started_at = now
        if target in TERMINAL:
            record.ended_at = now
        transition = Transition(
            source=source, target=target, at=now, reason=reason, message=message, cause=cause
        )
        try:
            await self._journal.save(record, transition)
        except NodeUnavailable:
            box.record = before
            raise
        self.events.publish(
            NodeEvent(
                sandbox_id=box.sandbox_id,
                state=target,
                at=now,
                reason=reason,
                message=message,
                seq=record.seq,
                usage=usage_of(record.meter) if target in TERMINAL else None,
            )
        )
        log.info("sandbox", sandbox_id=box.sandbox_id, state=str(target), cause=cause,
                 **({"reason": str(reason)} if reason else {}))  # fmt: skip

    # --- start --------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> Record:
        """Make and start a sandbox, or join the making of it. See ``NodeClient.create``."""
        box = self.boxes.get(spec.sandbox_id)
        if box is None:
            ended = await self._journal.find(spec.sandbox_id)
            box = self.boxes.get(spec.sandbox_id)
            if box is None and ended is not None:
                return _outcome_of(ended)
        if box is None:
            box = self._admit(spec)
        if box.start_task is not None:
            await asyncio.shield(box.start_task)
        if box.start_error is not None:
            raise box.start_error
        return box.record

    def _admit(self, spec: SandboxSpec) -> Sandbox:
        if self._closing:
            raise NodeUnavailable("the node is shutting down")
        if len(self.boxes) >= self._sandboxes_max:
            raise NodeFull(
                f"the node holds its maximum of {self._sandboxes_max} sandboxes", retry_after_s=10
            )
        starting = sum(1 for b in self.boxes.values() if b.state is State.PENDING)
        if starting >= limits.STARTS_QUEUED_MAX:
            raise NodeFull(f"{starting} sandboxes already wait to be started", retry_after_s=5)
        info = self._backends[spec.backend].info
        record = Record(
            spec=spec,
            state=State.PENDING,
            end_at=spec.end_at,
            accelerator=info.accelerator,
            vmm=info.vmm,
        )
        box = Sandbox(record)
        self.boxes[spec.sandbox_id] = box
        box.start_task = self.spawn(self._start(box), f"start-{spec.sandbox_id}")
        return box

    def admit_again(self) -> None:
        """Whether a known sandbox may take more of the machine now.

        Raises:
            NodeFull, NodeUnavailable: no.
        """
        if self._closing:
            raise NodeUnavailable("the node is shutting down")
        self._admit_hook.check()

    async def _start(self, box: Sandbox) -> None:
        """Never raises: the outcome is in the box."""
        try:
            await self.save(box)
            begun = time.time()
            with self._snapshots.held(box.spec.snapshot_id):
                await self._prepare(box)
                async with self.turn(box) as deadline:
                    await self.move(box, State.STARTING, cause="create")
                    async with asyncio.timeout_at(deadline):
                        await set_up(self._hooks(box), box, lambda: check_abort(box))
            # Others need not wait for it.
            await self.programs.run(box)
            check_abort(box)
            if box.spec.start is not None:
                # Its time begins when it can be used.
                box.record.end_at += time.time() - begun
            await self.move(box, State.RUNNING, cause="create")
        except Exception as exc:
            await self._start_failed(box, exc)
            return
        box.start_task = None
        self.watch(box)
        if box.abort_reason is not None:
            box.start_error = _killed_while_starting()
            self.end(box, box.abort_reason, cause="kill")

    async def _prepare(self, box: Sandbox) -> None:
        """What takes as long as a start command may is not made while others wait for a turn."""
        if box.spec.start is not None:
            budget_s = self.backend_of(box).budget_s + start_budget_s(box.spec)
            async with asyncio.timeout(budget_s):
                await self.backend_of(box).prepare(box)

    @contextlib.asynccontextmanager
    async def turn(self, box: Sandbox) -> AsyncIterator[float]:
        """Wait for a sandbox's turn to be set up; gives the loop time by which it must be.

        Raises:
            StartTimeout: it took too long.
        """
        deadline = asyncio.get_running_loop().time() + self.backend_of(box).budget_s
        await self._wait_turn(box, deadline)
        try:
            yield deadline
        finally:
            self._turns.release()

    def _hooks(self, box: Sandbox) -> list[Hook]:
        backend = self.backend_of(box)
        return [*backend.keep_hooks, *backend.run_hooks]

    async def _wait_turn(self, box: Sandbox, deadline: float) -> None:
        turn = asyncio.ensure_future(self._turns.acquire())
        aborted = asyncio.ensure_future(box.aborted.wait())
        left_s = deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait({turn, aborted}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            aborted.cancel()
            if not turn.done():
                turn.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await turn
        if turn.cancelled():
            check_abort(box)
            raise StartTimeout(
                "the sandbox waited too long for its turn to be started",
                remediation="The node is busy starting others. Retry with the same key.",
                details={"time_out_of": "waiting for a turn to start"},
            )

    def _add_evidence(self, box: Sandbox, error: OpendsecError) -> None:
        """How its first process ended, and what was killed at its memory limit, if that is why it
        did not start."""
        if box.pidfd is None:
            return
        if process.has_ended(box.pidfd):
            if box.exit_code is None:
                box.exit_code = process.reap(box.pidfd)
            error.details["ended"], error.details["evidence"] = self.backend_of(box).why_ended(box)
        kills = self.backend_of(box).memory_kills(box)
        if kills:
            # Its limit is too small for what it starts.
            error.fault, error.retryable = "user", False
            error.details |= {"oom_kills": kills, "memory_mb": box.spec.memory_mb}
            error.message += (
                f"; the kernel killed {kills} of its processes at the limit of "
                f"{box.spec.memory_mb} MiB"
            )

    async def _start_failed(self, box: Sandbox, exc: Exception) -> None:
        if isinstance(exc, _AbortedError) or box.abort_reason is not None:
            reason = box.abort_reason or EndReason.KILLED
            box.start_error = _killed_while_starting()
            await self._finish(box, State.ENDED, reason, cause="kill", message=None)
            return
        if isinstance(exc, OpendsecError):
            box.start_error = exc
        elif isinstance(exc, TimeoutError):
            budget_s = self.backend_of(box).budget_s
            box.start_error = StartTimeout(
                f"the sandbox did not come up within {budget_s:.0f} s",
                details={"time_out_of": "start", "limit_s": budget_s},
            )
        else:
            log.exception("start failed", sandbox_id=box.sandbox_id, exc_info=exc)
            box.start_error = SandboxStartFailed(f"the sandbox could not be set up: {exc}")
        self._add_evidence(box, box.start_error)
        await self._finish(
            box,
            State.FAILED,
            EndReason.START_FAILED,
            cause="create",
            message=box.start_error.message,
        )

    # --- watch --------------------------------------------------------------

    def watch(self, box: Sandbox) -> None:
        """Notice the end of the first process, and arm the deadlines."""
        assert box.pidfd is not None
        asyncio.get_running_loop().add_reader(box.pidfd, self._exited, box)
        self.arm(box)

    def arm(self, box: Sandbox) -> None:
        """Set the deadlines of a running sandbox from its record; a paused one has none."""
        if box.state is State.PAUSED:
            return
        self.deadlines.set(f"ttl:{box.sandbox_id}", box.record.end_at)
        if box.spec.idle_timeout_s is not None:
            self.deadlines.set(f"idle:{box.sandbox_id}", time.time() + box.spec.idle_timeout_s)

    def disarm(self, box: Sandbox) -> None:
        """Forget the deadlines."""
        self.deadlines.clear(f"ttl:{box.sandbox_id}")
        self.deadlines.clear(f"idle:{box.sandbox_id}")

    def unwatch(self, box: Sandbox) -> None:
        """Forget first process and deadlines."""
        if box.pidfd is not None:
            asyncio.get_running_loop().remove_reader(box.pidfd)
        self.disarm(box)

    def _exited(self, box: Sandbox) -> None:
        assert box.pidfd is not None
        self.unwatch(box)
        box.exit_code = process.reap(box.pidfd)
        reason, message = self.backend_of(box).why_ended(box)
        if box.state is State.PAUSED and box.end_task is None:
            self.spawn(self.lost_memory(box, message), f"lost-memory-{box.sandbox_id}")
        else:
            self.end(box, reason, cause="exit", message=message)

    def _deadline(self, key: str) -> None:
        kind, _, sandbox_id = key.partition(":")
        box = self.boxes.get(sandbox_id)
        if box is None:
            return
        if kind == "ttl" and box.spec.on_timeout == "pause":
            self.spawn(self.time_out(box), f"pause-at-end-{sandbox_id}")
        elif kind == "ttl":
            self.end(box, EndReason.TIMEOUT, cause="deadline", message="its end time was reached")
        else:
            self.spawn(self._check_idle(box), f"idle-{sandbox_id}")

    async def _check_idle(self, box: Sandbox) -> None:
        """Ask the agent only now: activity does not touch the node."""
        idle_s = box.spec.idle_timeout_s
        if box.slot is None or idle_s is None or box.state is not State.RUNNING:
            return
        now = time.time()
        try:
            status = await agent_client.status(box.slot.address, box.spec.control_token)
            busy = status.active_streams > 0
            due = (now if busy else status.last_activity_ms / 1000) + idle_s
        except AgentUnresponsive as exc:
            log.warning("idle check", sandbox_id=box.sandbox_id, error=exc.message)
            due = now + idle_s
        if due <= now:
            self.end(
                box, EndReason.IDLE, cause="deadline", message=f"no request for {idle_s} seconds"
            )
        elif box.state is State.RUNNING:
            again = max(due, now + limits.IDLE_RECHECK_FLOOR_S)
            self.deadlines.set(f"idle:{box.sandbox_id}", again)

    # --- end ----------------------------------------------------------------

    def end(
        self, box: Sandbox, reason: EndReason, *, cause: str, message: str | None = None
    ) -> asyncio.Task[None]:
        """Take a sandbox down, whatever its state; returns the task that does."""
        if box.end_task is not None:
            return box.end_task
        if box.start_task is not None:
            # The task that starts it also takes it down: two at once would race.
            if box.abort_reason is None:
                box.abort_reason = reason
                box.aborted.set()
            return box.start_task
        box.end_task = self.spawn(
            self._end(box, reason, cause=cause, message=message), f"end-{box.sandbox_id}"
        )
        return box.end_task

    async def _end(
        self, box: Sandbox, reason: EndReason, *, cause: str, message: str | None
    ) -> None:
        while (operation := box.operation) is not None:
            # It is told to give up, and brings the sandbox into a state that can end.
            box.abort_reason = box.abort_reason or reason
            box.aborted.set()
            await asyncio.wait({operation.task})
        await self._finish(box, State.ENDED, reason, cause=cause, message=message)

    async def kill(self, box: Sandbox, reason: EndReason) -> None:
        """End a sandbox and wait until nothing of it runs."""
        await asyncio.shield(self.end(box, reason, cause="kill"))
        if box.end_task is not None:
            await asyncio.shield(box.end_task)

    async def _finish(
        self,
        box: Sandbox,
        target: State,
        reason: EndReason,
        *,
        cause: str,
        message: str | None,
    ) -> None:
        """A journal that cannot be written holds up the record, never the end itself.

        Raises:
            NodeUnavailable: nothing of the sandbox runs any more; its end is recorded later.
        """
        self.unwatch(box)
        if box.state is not State.STOPPING:
            try:
                await self.move(box, State.STOPPING, cause=cause, reason=reason, message=message)
            except NodeUnavailable as exc:
                log.error("end goes on", sandbox_id=box.sandbox_id, error=exc.message)
                box.record.state = State.STOPPING
        await self._take_down(box)

        async def record_end() -> None:
            await self.move(box, target, cause=cause, reason=reason, message=message)
            self.boxes.pop(box.sandbox_id, None)

        try:
            await record_end()
        except NodeUnavailable:
            self.spawn(self._record_later(record_end), f"record-{box.sandbox_id}")
            raise

    async def _record_later(self, record_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        # The next start finds out what is not recorded when this one ends.
        while not self._closing:
            await asyncio.sleep(limits.JOURNAL_RETRY_S)
            with contextlib.suppress(NodeUnavailable):
                await record_end()
                return

    async def finish_interrupted(
        self, box: Sandbox, target: State, reason: EndReason, message: str | None
    ) -> None:
        """Bring a sandbox to its end that an earlier daemon left half-way."""
        await self._finish(box, target, reason, cause="reconcile", message=message)

    async def remove_stranger(self, box: Sandbox) -> None:
        """Remove what no journal row owns, of whatever backend it was."""
        for backend in self._backends.values():
            box.record.spec = msgspec.structs.replace(box.spec, backend=backend.info.name)
            await self._take_down(box)

    async def _take_down(self, box: Sandbox) -> None:
        failures = await tear_down(self._hooks(box), box)
        for hook, error in failures:
            log.error("teardown", sandbox_id=box.sandbox_id, hook=hook, error=repr(error))
        if failures:
            self._leftovers[box.sandbox_id] = box

    async def retry_leftovers(self) -> None:
        """Try again to remove what a teardown could not."""
        for sandbox_id, box in list(self._leftovers.items()):
            if not await tear_down(self._hooks(box), box):
                del self._leftovers[sandbox_id]

    def memory_in_use(self) -> set[Path]:
        """Directories of saved memory that running machines map."""
        bases = (box.record.ram_base for box in self.boxes.values())
        return {Path(base) for base in bases if base is not None}

    @property
    def leftovers(self) -> int:
        """Ended sandboxes of which something could not be removed yet."""
        return len(self._leftovers)

    # --- the daemon's end ---------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A task that the daemon's end waits for."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OpendsecError):
            log.warning("task failed", task=task.get_name(), error=error.message)
        elif error is not None:
            log.error("task failed", task=task.get_name(), exc_info=error)

    async def drain(self, timeout_s: float) -> None:
        """Take no more creates; let starts and ends in progress come to their end."""
        self._closing = True
        self.deadlines.stop()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for box in self.boxes.values():
            if box.state in (State.PENDING, State.STARTING):
                box.abort_reason = EndReason.KILLED
                box.aborted.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def let_go(self) -> None:
        """Stop watching sandboxes that go on without us."""
        for box in self.boxes.values():
            self.unwatch(box)
            if box.pidfd is not None:
                os.close(box.pidfd)
                box.pidfd = None
            if box.slot is not None and box.slot.netns_fd >= 0:
                os.close(box.slot.netns_fd)
                box.slot.netns_fd = -1
        self.boxes.clear()
        self.events.close()


def check_abort(box: Sandbox) -> None:
    """Stop setting up a sandbox that is to end."""
    if box.abort_reason is not None:
        raise _AbortedError


def _killed_while_starting() -> StateConflict:
    return StateConflict("the sandbox was killed while it was starting")


def _outcome_of(ended: Record) -> Record:
    """What a repeated create of an ended sandbox gets."""
    if ended.reason is EndReason.START_FAILED:
        raise SandboxStartFailed(
            ended.message or "the sandbox could not be started",
            remediation="Create another sandbox; this id was used up by the failed start.",
        )
    return ended

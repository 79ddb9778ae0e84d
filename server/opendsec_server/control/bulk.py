# SPDX-License-Identifier: AGPL-3.0-only
"""One thing done to many sandboxes. Each succeeds or fails by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import msgspec
import structlog

from opendsec_server.contract.errors import (
    AgentUnresponsive,
    Conflict,
    Internal,
    OpendsecError,
    SandboxNotFound,
    StateConflict,
)
from opendsec_server.contract.images import ExecEvent
from opendsec_server.contract.node import NodeClient
from opendsec_server.contract.states import State
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.sandboxes import get_sandboxes
from opendsec_server.store.store import Store

from .grouped import GroupedLedger
from .iam import Caller
from .ledger import Ledger
from .lifecycle import Lifecycle
from .params import check_timeout
from .selection import Selection, selected_ids

log = structlog.get_logger(__name__)

AT_ONCE = 32
"""Kills and new ends under way at one time."""
RESULTS_AHEAD_MAX = 64
"""A slow reader holds the work back when so many results wait for it."""
READER_STALLED_S = 120.0
"""One that takes nothing for so long counts as gone."""
LOADED_TOGETHER = 200
STOP_WAIT_S = 5.0
_SHELL = 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; fi; exec /bin/sh -l -c "$1"'


class Command(msgspec.Struct, kw_only=True, frozen=True):
    """What is run in each."""

    command: str
    user: str | None
    workdir: str | None
    env: dict[str, str]
    timeout_s: int
    output_bytes: int


class CommandResult(msgspec.Struct, kw_only=True, frozen=True):
    """What it came to in one."""

    exit_code: int | None
    """None: its time was over."""
    signal: int | None
    timed_out: bool
    stdout: bytes
    stderr: bytes
    stdout_cut: bool
    stderr_cut: bool
    took_s: float


class Done(msgspec.Struct, kw_only=True, frozen=True):
    """What became of one sandbox's part."""

    sandbox_id: str
    state: State | None = None
    end_at: float | None = None
    result: CommandResult | None = None
    error: OpendsecError | None = None


Told = Callable[[Sequence[str]], None]
"""Is told which sandboxes an operation is about."""
_One = Callable[[SandboxRecord], Awaitable[Done]]


def _nobody(_: Sequence[str]) -> None:
    pass


class _Reader:
    """Whoever is told of results, as long as there is somebody."""

    def __init__(self) -> None:
        self._results: asyncio.Queue[Done | None] = asyncio.Queue(RESULTS_AHEAD_MAX)
        self._gone = False

    async def tell(self, result: Done | None) -> None:
        """Wait for room for a result; None is the end."""
        if self._gone:
            return
        try:
            async with asyncio.timeout(READER_STALLED_S):
                await self._results.put(result)
        except TimeoutError:
            self._leave()

    def _leave(self) -> None:
        self._gone = True
        # Those that wait for room go on.
        while not self._results.empty():
            self._results.get_nowait()
        self._results.put_nowait(None)

    async def results(self) -> AsyncGenerator[Done, None]:
        """Results as they come.

        Raises:
            Conflict: they were read too slowly, and some are lost.
        """
        try:
            while (result := await self._results.get()) is not None:
                yield result
            if self._gone:
                raise Conflict(
                    "the results were read too slowly, and some are lost; the work was done",
                    remediation="List the sandboxes to see what became of them.",
                )
        finally:
            self._leave()


class Bulk:
    """Kills, prolongs, and runs commands. The work goes on when its reader goes away.

    Args:
        store: Where records are.
        node: Where sandboxes are.
        lifecycle: Does each.
        ledger: Records ends, many at once.
    """

    def __init__(
        self, *, store: Store, node: NodeClient, lifecycle: Lifecycle, ledger: Ledger
    ) -> None:
        self._store = store
        self._node = node
        self._lifecycle = lifecycle
        self._ledger = GroupedLedger(ledger)
        self._working: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Give what is under way a moment to end, then cut it off."""
        if self._working:
            _, late = await asyncio.wait(self._working, timeout=STOP_WAIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def kill(
        self, caller: Caller, selection: Selection, told: Told = _nobody
    ) -> AsyncGenerator[Done, None]:
        """End sandboxes in any state. One that has ended before counts as done.

        Args:
            caller: Whose they are.
            selection: Which.
            told: Called with their ids before anything is done.

        Raises:
            InvalidRequest: the selection makes no sense.
            StoreUnavailable: it is not known which. Nothing was done.
        """
        names = await selected_ids(self._store, caller, selection)
        told(names)

        async def one(record: SandboxRecord) -> Done:
            if not record.terminal:
                change = await self._lifecycle.end_on_node(record)
                await self._ledger.apply(change)
            return Done(sandbox_id=record.sandbox_id, state=State.ENDED)

        return self._results(caller, names, one, AT_ONCE)

    async def set_timeout(
        self, caller: Caller, selection: Selection, timeout_s: int, told: Told = _nobody
    ) -> AsyncGenerator[Done, None]:
        """Let sandboxes end ``timeout_s`` from now.

        Raises:
            InvalidRequest: the selection makes no sense, or they would live too long.
            StoreUnavailable: it is not known which. Nothing was done.
        """
        check_timeout(timeout_s)
        names = await selected_ids(self._store, caller, selection)
        told(names)

        async def one(record: SandboxRecord) -> Done:
            name = record.sandbox_id
            record = await self._lifecycle.set_timeout(caller, name, timeout_s)
            return Done(sandbox_id=name, state=record.state, end_at=record.end_at)

        return self._results(caller, names, one, AT_ONCE)

    async def exec(
        self,
        caller: Caller,
        selection: Selection,
        command: Command,
        concurrency: int,
        told: Told = _nobody,
    ) -> AsyncGenerator[Done, None]:
        """Run a command in each that runs.

        Raises:
            InvalidRequest: the selection makes no sense.
            StoreUnavailable: it is not known which. Nothing was done.
        """
        names = await selected_ids(self._store, caller, selection)
        told(names)

        async def one(record: SandboxRecord) -> Done:
            return await self._exec(record, command)

        return self._results(caller, names, one, concurrency)

    async def _exec(self, record: SandboxRecord, command: Command) -> Done:
        if record.terminal:
            raise SandboxNotFound(f"sandbox `{record.sandbox_id}` has ended")
        if record.state is not State.RUNNING:
            raise StateConflict(
                f"sandbox `{record.sandbox_id}` is {record.state}",
                details={"state": record.state},
            )
        started = time.monotonic()
        kept = {"stdout": bytearray(), "stderr": bytearray()}
        cut = {"stdout": False, "stderr": False}
        end: ExecEvent | None = None
        events = self._node.exec(
            record.sandbox_id,
            ("/bin/sh", "-c", _SHELL, "sh", command.command),
            user=command.user,
            workdir=command.workdir or record.default_workdir,
            env=command.env,
            timeout_s=command.timeout_s,
        )
        async for event in events:
            if event.kind == "end":
                end = event
                continue
            have = kept[event.kind]
            room = command.output_bytes - len(have)
            have += event.data[: max(0, room)]
            cut[event.kind] = cut[event.kind] or len(event.data) > room
        if end is None:
            raise AgentUnresponsive("what became of the command is not known")
        code = end.exit_code
        if code is None and end.signal is not None and not end.timed_out:
            code = 128 + end.signal
        result = CommandResult(
            exit_code=code,
            signal=end.signal,
            timed_out=end.timed_out,
            stdout=bytes(kept["stdout"]),
            stderr=bytes(kept["stderr"]),
            stdout_cut=cut["stdout"],
            stderr_cut=cut["stderr"],
            took_s=time.monotonic() - started,
        )
        return Done(sandbox_id=record.sandbox_id, result=result)

    # --- many ---------------------------------------------------------------

    def _results(
        self, caller: Caller, names: Sequence[str], one: _One, at_once: int
    ) -> AsyncGenerator[Done, None]:
        reader = _Reader()
        work = self._work(caller, names, one, at_once, reader)
        task = asyncio.create_task(work, name="bulk")
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return reader.results()

    async def _work(
        self,
        caller: Caller,
        names: Sequence[str],
        one: _One,
        at_once: int,
        reader: _Reader,
    ) -> None:
        turns = asyncio.Semaphore(at_once)
        under_way: set[asyncio.Task[None]] = set()

        async def see_through(name: str, record: SandboxRecord | None) -> None:
            try:
                await reader.tell(await _tried(caller, name, record, one))
            finally:
                turns.release()

        try:
            for first in range(0, len(names), LOADED_TOGETHER):
                some = names[first : first + LOADED_TOGETHER]
                try:
                    records = await get_sandboxes(self._store, some)
                except OpendsecError as exc:
                    for name in some:
                        await reader.tell(Done(sandbox_id=name, error=exc))
                    continue
                for name in some:
                    await turns.acquire()
                    task = asyncio.create_task(see_through(name, records.get(name)))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
            if under_way:
                await asyncio.wait(set(under_way))
            await reader.tell(None)
        except asyncio.CancelledError:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            raise


async def _tried(caller: Caller, name: str, record: SandboxRecord | None, one: _One) -> Done:
    try:
        if record is None or record.project_id != caller.project_id:
            raise SandboxNotFound(f"there is no sandbox `{name[:64]}`")
        return await one(record)
    except OpendsecError as exc:
        return Done(sandbox_id=name, error=exc)
    except Exception:
        log.exception("an operation on many failed for one", sandbox_id=name)
        return Done(sandbox_id=name, error=Internal("this failed because of a defect"))

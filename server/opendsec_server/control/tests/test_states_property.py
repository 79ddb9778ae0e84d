# SPDX-License-Identifier: AGPL-3.0-only
"""Property: whatever calls on sandboxes run at the same time, in whatever order their steps and
the node's events come, with failures, lost answers, crashes and a store that breaks: every call
is answered with success or a typed error of its own, records agree with the node once all is
quiet, what ended stays ended, and no snapshot, row or sandbox is left that nobody asked for."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    AlreadyPaused,
    IdempotencyInProgress,
    IdempotencyOutcomeUnknown,
    NodeFull,
    NodeUnavailable,
    NotSupported,
    OpendsecError,
    QuotaExceeded,
    ResumeFailed,
    SandboxNotFound,
    SnapshotFailed,
    StateConflict,
    StoreUnavailable,
    TemplateNotFound,
)
from opendsec_server.contract.states import TERMINAL, State, can_move
from opendsec_server.control.params import CreateParams
from opendsec_server.control.saving import Forked, ForkParams, Saved, SnapshotParams
from opendsec_server.control.services import Services
from opendsec_server.store import snapshots as rows
from opendsec_server.store.sandboxes import SandboxFilter

from .conftest import first_caller
from .fake_node import FakeNode
from .seed import seeded
from .store_faults import broken_store

STUCK_S = 30
"""An example that takes longer waits for something that never comes."""

ALWAYS: tuple[type[OpendsecError], ...] = (SandboxNotFound, StateConflict, StoreUnavailable)
TYPED: dict[str, tuple[type[OpendsecError], ...]] = {
    "pause": (AlreadyPaused, SnapshotFailed, NodeUnavailable),
    "connect": (ResumeFailed, NodeFull, QuotaExceeded, NodeUnavailable),
    "traffic": (ResumeFailed, NodeFull, QuotaExceeded, NodeUnavailable),
    "kill": (),
    "timeout": (),
    "snapshot": (
        SnapshotFailed, NodeFull, NodeUnavailable, NotSupported, IdempotencyInProgress,
        IdempotencyOutcomeUnknown,
    ),
    "fork": (
        SnapshotFailed, NodeFull, NodeUnavailable, NotSupported, IdempotencyInProgress,
        IdempotencyOutcomeUnknown,
    ),
    "from snapshot": (TemplateNotFound, NodeFull, QuotaExceeded, NodeUnavailable),
    "delete snapshot": (),
}  # fmt: skip
"""What each call may be answered beside success and ``ALWAYS``."""

modes = st.sampled_from(["full", "full", "filesystem"])
keys = st.sampled_from([None, "k1", "k2"])
kinds = st.sampled_from(["container", "microvm"])


class States(RuleBasedStateMachine):
    """Starts calls and lets them move on step by step."""

    sandboxes: Bundle[str] = Bundle("sandboxes")
    snapshots: Bundle[str] = Bundle("snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="opendsec-states-"))
        self.node = FakeNode(microvm="tcg")
        self.node.between = self.step_of_the_node
        self.waiting: list[asyncio.Event] = []
        self.calls: list[tuple[str, asyncio.Task[Any]]] = []
        self.killed: set[str] = set()
        """Whose kill was answered with success."""
        self.keyed: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
        """Results by operation, object, parameters and key."""
        self.wanted: set[str] = set()
        """Sandboxes that a caller was given, or made by hand."""

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(STUCK_S):
                return await work

        return self.runner.run(bounded())

    async def step_of_the_node(self, name: str) -> None:
        """Every pause, resume and snapshot waits half-way until it is let on."""
        here = asyncio.Event()
        self.waiting.append(here)
        await here.wait()

    @initialize(target=sandboxes)
    def begin(self) -> Any:
        config = Config(state_dir=str(seeded(self.directory)))

        async def start() -> list[str]:
            self.services = await Services.start(config, self.node)
            self.caller = await first_caller(self.services)
            names = []
            for backend in ("container", "microvm"):
                params = CreateParams(backend=backend, auto_resume=True, on_timeout="pause")
                made = await self.services.creates.create(self.caller, params)
                names.append(made.record.sandbox_id)
            self.wanted.update(names)
            return names

        self.config = config
        return multiple(*self.run(start()))

    def call(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        async def begin() -> None:
            self.calls.append((name, asyncio.create_task(work)))
            await asyncio.sleep(0)

        self.run(begin())

    # --- calls --------------------------------------------------------------

    @rule(name=sandboxes, mode=modes)
    def pause(self, name: str, mode: Any) -> None:
        self.call("pause", self.services.lifecycle.pause(self.caller, name, mode))

    @rule(name=sandboxes, reboot=st.booleans())
    def connect(self, name: str, reboot: bool) -> None:
        self.call("connect", self.services.lifecycle.connect(self.caller, name, 60, reboot=reboot))

    @rule(name=sandboxes)
    def traffic(self, name: str) -> None:
        work = self.services.routes.find(name, port=80, access_token=None, traffic_token=None)
        self.call("traffic", work)

    @rule(name=sandboxes)
    def kill(self, name: str) -> None:
        async def work() -> None:
            await self.services.lifecycle.kill(self.caller, name)
            self.killed.add(name)

        self.call("kill", work())

    @rule(name=sandboxes, timeout_s=st.sampled_from([0, 60]))
    def timeout(self, name: str, timeout_s: int) -> None:
        self.call("timeout", self.services.lifecycle.set_timeout(self.caller, name, timeout_s))

    @rule(name=sandboxes, mode=modes, key=keys)
    def snapshot(self, name: str, mode: Any, key: str | None) -> None:
        # A key stands for one request: another one has another key.
        full_key = None if key is None else f"s-{name}-{mode}-{key}"

        async def work() -> None:
            saved: Saved = await self.services.saving.snapshot(
                self.caller, name, SnapshotParams(mode=mode), key=full_key
            )
            if full_key is not None:
                self.keyed.setdefault((full_key,), set()).add((saved.snapshot.snapshot_id,))

        self.call("snapshot", work())

    @rule(name=sandboxes, mode=modes, key=keys, count=st.integers(1, 2))
    def fork(self, name: str, mode: Any, key: str | None, count: int) -> None:
        full_key = None if key is None else f"f-{name}-{mode}-{count}-{key}"

        async def work() -> None:
            forked: Forked = await self.services.saving.fork(
                self.caller, name, ForkParams(mode=mode, count=count), key=full_key
            )
            made = tuple(c.record.sandbox_id for c in forked.children if c.record)
            assert len(forked.children) == count
            self.wanted.update(made)
            if full_key is not None and made:
                self.keyed.setdefault((full_key,), set()).add(made)

        self.call("fork", work())

    @rule(number=st.integers(0, 3))
    def from_snapshot(self, number: int) -> None:
        ready = sorted(set(self.node.saved) - self.node.ephemeral)
        if not ready:
            return
        params = CreateParams(template=ready[number % len(ready)])

        async def work() -> None:
            made = await self.services.creates.create(self.caller, params)
            self.wanted.add(made.record.sandbox_id)

        self.call("from snapshot", work())

    @rule(number=st.integers(0, 3))
    def delete_snapshot(self, number: int) -> None:
        ready = sorted(set(self.node.saved) - self.node.ephemeral)
        if ready:

            async def work() -> None:
                from opendsec_server.contract.errors import SnapshotNotFound

                try:
                    await self.services.snapshots.delete(self.caller, ready[number % len(ready)])
                except SnapshotNotFound:
                    return

            self.call("delete snapshot", work())

    # --- what happens meanwhile -----------------------------------------------

    @rule(number=st.integers(0, 5))
    def let_on(self, number: int) -> None:
        """One step that waits on the node is done."""

        async def step() -> None:
            if self.waiting:
                self.waiting.pop(number % len(self.waiting)).set()
            await asyncio.sleep(0)

        self.run(step())

    @rule()
    def pass_time(self) -> None:
        self.run(asyncio.sleep(0.002))

    @rule(name=sandboxes)
    def expire(self, name: str) -> None:
        async def work() -> None:
            status = self.node.statuses[name]
            if status.state is State.RUNNING:
                self.node.expire(name)

        self.run(work())

    @rule(
        what=st.sampled_from(["pause", "resume", "snapshot"]),
        how=st.sampled_from(["fails", "loses", "well", "well"]),
    )
    def faults(self, what: str, how: str) -> None:
        failures = {"pause": SnapshotFailed("x"), "snapshot": NodeFull("x")}
        self.node.fail.pop(what, None)
        self.node.lose_answer.pop(what, None)
        if how == "fails":
            self.node.fail[what] = failures.get(what, ResumeFailed("x"))
        elif how == "loses":
            self.node.lose_answer[what] = NodeUnavailable("x")

    @rule()
    def reconcile(self) -> None:
        self.run(self.services.watcher._reconcile_or_log())

    @rule()
    def events_are_missed(self) -> None:
        for queue in self.node._listeners:
            while not queue.empty():
                queue.get_nowait()

    @rule()
    def store_breaks(self) -> None:
        async def moment() -> None:
            with broken_store(self.services):
                await asyncio.sleep(0.002)

        self.run(moment())

    @rule()
    def crash(self) -> None:
        """The control plane is gone and starts anew: nothing is finished, nothing is undone."""

        async def work() -> None:
            services = self.services
            tasks = [task for _, task in self.calls]
            for attempts in (
                services.saving._forks, services.saving._saves, services.creates.attempts,
                services.lifecycle._pauses, services.lifecycle._resumes,
            ):  # fmt: skip
                tasks += attempts.tasks
            tasks += services.routes._resumes.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.collect()
            # Of what else there is nothing is at work.
            await services.stop()
            self.services = await Services.start(self.config, self.node)
            self.caller = await first_caller(self.services)

        self.run(work())

    # --- what must hold -------------------------------------------------------

    def collect(self) -> None:
        """Look at the answers that have come."""
        waiting = []
        for name, task in self.calls:
            if not task.done():
                waiting.append((name, task))
            elif not task.cancelled():
                error = task.exception()
                allowed = (*ALWAYS, *TYPED[name])
                assert error is None or isinstance(error, allowed), (name, error)
        self.calls = waiting

    @invariant()
    def answers_are_typed(self) -> None:
        self.collect()

    @invariant()
    def what_was_killed_stays_so(self) -> None:
        for name in self.killed:
            assert self.node.statuses[name].state in TERMINAL

    @invariant()
    def same_key_same_result(self) -> None:
        for place, results in self.keyed.items():
            assert len(results) == 1, (place, results)

    def teardown(self) -> None:
        try:
            if hasattr(self, "services"):
                self.run(self.come_to_rest())
        finally:
            self.runner.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    async def come_to_rest(self) -> None:
        self.node.fail, self.node.lose_answer = {}, {}
        self.node.between = None
        for _ in range(200):
            for here in self.waiting:
                here.set()
            self.waiting.clear()
            if all(task.done() for _, task in self.calls):
                break
            await asyncio.sleep(0.005)
        await asyncio.gather(*(task for _, task in self.calls), return_exceptions=True)
        self.collect()
        assert not self.calls, "a call was never answered"
        self.same_key_same_result()
        self.what_was_killed_stays_so()
        await self.node.settled()
        await self.services.watcher.reconcile()
        await asyncio.sleep(0.01)
        await self.services.watcher.reconcile()
        await self.compare()
        await self.services.stop()

    async def compare(self) -> None:
        lifecycle = self.services.lifecycle
        page = await lifecycle.page(SandboxFilter(project_id=self.caller.project_id, limit=10_000))
        records = {record.sandbox_id: record for record in page.records}
        for name, status in self.node.statuses.items():
            record = records[name]
            assert record.state is status.state, (name, record.state, status.state)
            if status.state not in TERMINAL:
                assert record.paused_mode == status.pause_mode
                if status.state is State.RUNNING:
                    assert record.end_at == status.end_at
            _, kept = await lifecycle.transitions(self.caller, name)
            for before, after in itertools.pairwise(kept):
                assert before.to_state is after.from_state, kept
            assert all(can_move(t.from_state, t.to_state) for t in kept)
        assert self.wanted <= set(records)
        for record in records.values():
            assert record.terminal or record.sandbox_id in self.node.statuses, record
        for row in await rows.unfinished_snapshots(self.services.store, "n0de"):
            # Given up, and remembered for a while, should the node come to hold it after all.
            assert row.state == "deleting", row
        assert not self.node.ephemeral, "a fork's snapshot was left"
        assert set(self.node.saved) == await rows.ids_of_ready(self.services.store, "n0de")


States.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
# On a busy machine its examples take longer than a test usually may.
TestStates = pytest.mark.timeout(300)(pytest.mark.slow(States.TestCase))

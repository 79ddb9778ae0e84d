# SPDX-License-Identifier: AGPL-3.0-only
"""Trajectories, as the API stands on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
import structlog

from opendsec_server.contract.errors import (
    ActionInProgress,
    ActionMismatch,
    ActionNotFound,
    ActionUnknown,
    Internal,
    InvalidRequest,
    NodeUnavailable,
    OpendsecError,
    SandboxNotFound,
    StateConflict,
    TrajectoryFull,
    TrajectoryNotFound,
)
from opendsec_server.contract.node import NodeClient
from opendsec_server.contract.states import State
from opendsec_server.control.attempts import Attempts
from opendsec_server.control.iam import Caller
from opendsec_server.control.lifecycle import Lifecycle
from opendsec_server.control.saving import Saving
from opendsec_server.store import snapshots
from opendsec_server.store import trajectories as rows
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.store import Store
from opendsec_server.store.trajectories import Action, Counted, Ending, Rollout

from . import causes, forward
from .forward import How, OfUnknown, Step
from .params import (
    TRAJECTORY,
    ActionParams,
    check_action,
    check_action_id,
    pack_params,
    unpack_params,
)
from .results import ActionResult, pack
from .runner import LEASE_S, RESOLVE_PATIENCE_S, Runner

log = structlog.get_logger(__name__)

EXPORT_PAGE = 200
POLL_S = 0.25
"""Between looks at an action that another process runs."""


class Acted(msgspec.Struct, kw_only=True, frozen=True):
    """The action of a call."""

    action: Action
    replayed: bool
    """It was recorded by an earlier call; this one ran nothing."""


class Forwarded(msgspec.Struct, kw_only=True, frozen=True):
    """One step of a fast-forward."""

    index: int
    of: int
    action_id: str
    step: int | None
    how: How
    diverged: bool = False
    """It ran again, and ended in another way than before."""
    cause: str | None = None


class _Forwarding:
    """A fast-forward that is at work, and what it has done so far."""

    def __init__(self, key: tuple[object, ...]) -> None:
        self.key = key
        self.lines: list[Forwarded] = []
        self.over = False
        self.error: OpendsecError | None = None
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Wake the readers."""
        self._news.set()
        self._news = asyncio.Event()

    async def read(self) -> AsyncGenerator[Forwarded, None]:
        """All lines from the first on.

        Raises:
            OpendsecError: why it stopped.
        """
        seen = 0
        while True:
            news = self._news
            while seen < len(self.lines):
                yield self.lines[seen]
                seen += 1
            if self.over:
                break
            await news.wait()
        if self.error is not None:
            raise self.error


class Page(msgspec.Struct, kw_only=True, frozen=True):
    """Some actions of a log."""

    actions: list[Action]
    more: bool


class Outcomes(msgspec.Struct, kw_only=True, frozen=True):
    """What became of a task's sandboxes and actions."""

    sandboxes: list[Counted]
    actions: list[Counted]


class Trajectories:
    """Records actions, runs each once, and tells what became of them."""

    def __init__(
        self, *, store: Store, node: NodeClient, lifecycle: Lifecycle, saving: Saving, seat: str
    ) -> None:
        self._store = store
        self._node = node
        self._lifecycle = lifecycle
        self._runner = Runner(store=store, node=node, lifecycle=lifecycle, saving=saving, seat=seat)
        self._forwards: Attempts[None] = Attempts("fast-forward")
        self._forwarding: dict[str, _Forwarding] = {}

    async def start(self) -> None:
        """Find out what became of actions that an earlier process had begun.

        Raises:
            StoreUnavailable: not known which.
        """
        await self._runner.start()

    async def stop(self) -> None:
        """Stop watching. Programs go on; the next start asks what became of them."""
        for task in self._forwards.tasks:
            task.cancel()
        await self._forwards.stop()
        await self._runner.stop()

    # --- one action ---------------------------------------------------------

    async def act(
        self, caller: Caller, sandbox_id: str, params: ActionParams, *, wait_s: float
    ) -> Acted:
        """Record an action and run it; or answer what is recorded of it.

        It goes on when the caller goes away.

        Args:
            caller: Whose sandbox it is.
            sandbox_id: Which.
            params: What to do.
            wait_s: Answer after so long, also if it still runs.

        Raises:
            InvalidRequest: a field is out of range.
            SandboxNotFound: not one of the caller's.
            SandboxEnded, SandboxLost: it cannot run there any more. What was recorded is told.
            ActionMismatch: the id was used for something else.
            ActionInProgress: a snapshot waits for other actions, or they for it.
            TrajectoryFull: nothing was recorded, and nothing ran.
            StateConflict: the sandbox does not run now, and is not resumed by requests.
            AgentUnresponsive, NodeUnavailable, StoreUnavailable: nothing ran.
        """
        check_action(params)
        record = await self._lifecycle.get(caller, sandbox_id)
        if params.kind == "snapshot":
            caller.require("snapshots:write")
        known = await rows.get_action(self._store, sandbox_id, params.action_id)
        if known is not None and known.state != "not_run":
            return await self._recorded(known, params, wait_s)
        if record.terminal:
            raise causes.end_of(record)
        instance, oom_before = await self._probe(caller, record, params)
        now = time.time()
        begun = await rows.begin_action(
            self._store,
            Action(
                sandbox_id=sandbox_id,
                action_id=params.action_id,
                project_id=record.project_id,
                task_id=record.task_id,
                rollout_id=params.rollout_id,
                step=params.step,
                kind=params.kind,
                params=pack_params(params),
                params_sha256=params.sha256(),
                instance=instance,
                oom_before=oom_before,
                recorded_at=now,
                owner=self._runner.owner,
                lease_until=now + LEASE_S,
            ),
            TRAJECTORY,
        )
        if begun.full:
            raise _full(sandbox_id)
        if begun.busy is not None:
            raise ActionInProgress(
                f"action `{begun.busy}` of this sandbox runs",
                details={"action_id": begun.busy},
                retry_after_s=1,
            )
        if not begun.new:
            return await self._recorded(begun.action, params, wait_s)
        task = self._runner.run(begun.action, params, caller)
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        ended = bool(done) and not task.cancelled()
        return Acted(action=task.result() if ended else begun.action, replayed=False)

    async def _recorded(self, known: Action, params: ActionParams, wait_s: float) -> Acted:
        if known.params_sha256 != params.sha256():
            raise ActionMismatch(
                f"action `{known.action_id}` was something else",
                details={"action_id": known.action_id, "kind": known.kind, "state": known.state},
            )
        return Acted(action=await self._wait(known, wait_s), replayed=True)

    async def _probe(
        self, caller: Caller, record: SandboxRecord, params: ActionParams
    ) -> tuple[str | None, int]:
        """Which guest agent there is before the action begins. Wakes a sandbox that requests
        wake."""
        if params.kind == "snapshot":
            return None, 0
        sandbox_id = record.sandbox_id
        if record.state in (State.PENDING, State.STARTING):
            record = await self._lifecycle.get_started(caller, sandbox_id)
        try:
            try:
                program = await self._node.kept(sandbox_id, "opendsec-action")
            except StateConflict as exc:
                if exc.details.get("state") != State.PAUSED or not record.auto_resume:
                    raise
                await self._lifecycle.connect(caller, sandbox_id, None)
                program = await self._node.kept(sandbox_id, "opendsec-action")
        except SandboxNotFound:
            await self._lifecycle.refresh(sandbox_id)
            record = await self._lifecycle.get(caller, sandbox_id)
            if record.terminal:
                raise causes.end_of(record) from None
            raise
        return program.instance, program.oom_total

    def _orphaned(self, action: Action) -> bool:
        """Its process has died, or it was recorded and its caller went away."""
        return (
            action.state == "running"
            and self._runner.at_work(action) is None
            and not action.held(time.time())
        )

    async def _wait(self, action: Action, wait_s: float) -> Action:
        # What became of a snapshot is found out in a caller's name only, see ``resolve``.
        if self._orphaned(action) and action.kind != "snapshot":
            self._runner.settle(action)
        deadline = time.monotonic() + wait_s
        while action.state == "running" and (left_s := deadline - time.monotonic()) > 0:
            task = self._runner.at_work(action)
            if task is not None:
                done, _ = await asyncio.wait({task}, timeout=left_s)
                if done and not task.cancelled() and task.exception() is None:
                    return task.result()
            else:
                await asyncio.sleep(min(POLL_S, left_s))
            again = await rows.get_action(self._store, action.sandbox_id, action.action_id)
            if again is None:
                break
            action = again
        return action

    async def get(
        self, caller: Caller, sandbox_id: str, action_id: str, *, wait_s: float = 0.0
    ) -> Action:
        """What is recorded of an action; waits for its end.

        Raises:
            SandboxNotFound: not one of the caller's.
            ActionNotFound: there is none of that id.
        """
        check_action_id(action_id)
        await self._lifecycle.get(caller, sandbox_id)
        action = await rows.get_action(self._store, sandbox_id, action_id)
        if action is None:
            raise ActionNotFound(f"the sandbox has no action `{action_id}`")
        return await self._wait(action, wait_s)

    async def resolve(
        self,
        caller: Caller,
        sandbox_id: str,
        action_id: str,
        *,
        state: str | None = None,
        result: ActionResult | None = None,
    ) -> Action:
        """Find out what became of an action whose outcome is not known, or state it.

        Args:
            caller: Whose sandbox it is.
            sandbox_id: Which.
            action_id: Which.
            state: None: ask the sandbox once more. ``done`` or ``not_run``: the caller knows.
            result: Of one that is stated to be done.

        Raises:
            SandboxNotFound, ActionNotFound: there is none.
            StateConflict: it is known what became of it, and it was not that; or it runs.
        """
        action = await self.get(caller, sandbox_id, action_id)
        if action.state == "unknown" or self._orphaned(action):
            task = self._runner.settle(action, caller=caller, patience_s=RESOLVE_PATIENCE_S)
            done, _ = await asyncio.wait({task}, timeout=2 * RESOLVE_PATIENCE_S)
            if done and not task.cancelled() and task.exception() is None:
                action = task.result()
        elif action.state == "running" and state is not None:
            # Who runs it knows better than anybody who asks the sandbox.
            action = await self._wait(action, 2 * RESOLVE_PATIENCE_S)
        if state is None or action.state == state:
            return action
        if action.state != "unknown":
            raise StateConflict(
                f"action `{action_id}` is {action.state}: that is known",
                details={"state": action.state},
            )
        return await rows.end_action(
            self._store,
            action,
            Ending(
                state="done" if state == "done" else "not_run",
                ended_at=time.time(),
                result=pack(result or ActionResult()) if state == "done" else None,
                fault=None,
                cause="stated",
                evidence=action.evidence,
                resolved_by="caller",
            ),
        )

    # --- logs ---------------------------------------------------------------

    async def page(self, caller: Caller, sandbox_id: str, *, after: int, limit: int) -> Page:
        """Actions of a sandbox, in order, also after its end.

        Raises:
            SandboxNotFound: not one of the caller's.
        """
        await self._lifecycle.get(caller, sandbox_id)
        found = await rows.actions_of(self._store, sandbox_id, after=after, limit=limit + 1)
        return Page(actions=found[:limit], more=len(found) > limit)

    async def export_sandbox(self, caller: Caller, sandbox_id: str) -> AsyncGenerator[Action, None]:
        """Every action of a sandbox, in order.

        Raises:
            SandboxNotFound: not one of the caller's.
        """
        await self._lifecycle.get(caller, sandbox_id)
        return self._all_of_sandbox(sandbox_id)

    async def _all_of_sandbox(self, sandbox_id: str) -> AsyncGenerator[Action, None]:
        after, more = 0, True
        while more:
            found = await rows.actions_of(self._store, sandbox_id, after=after, limit=EXPORT_PAGE)
            for action in found:
                yield action
                after = action.seq
            more = len(found) == EXPORT_PAGE

    async def export_rollout(self, caller: Caller, rollout_id: str) -> AsyncGenerator[Action, None]:
        """Every action of a rollout over all sandboxes, in the order of their record.

        Raises:
            TrajectoryNotFound: none of the caller's has this id.
        """
        project_id = caller.project_id
        if not await rows.actions_of_rollout(self._store, project_id, rollout_id, limit=1):
            raise TrajectoryNotFound(f"there is no trajectory `{rollout_id[:64]}`")
        return self._all_of_rollout(project_id, rollout_id)

    async def _all_of_rollout(
        self, project_id: str, rollout_id: str
    ) -> AsyncGenerator[Action, None]:
        after: tuple[float, str, int] | None = None
        more = True
        while more:
            found = await rows.actions_of_rollout(
                self._store, project_id, rollout_id, after=after, limit=EXPORT_PAGE
            )
            for action in found:
                yield action
                after = (action.recorded_at, action.sandbox_id, action.seq)
            more = len(found) == EXPORT_PAGE

    async def rollouts(
        self,
        caller: Caller,
        *,
        task_id: str | None,
        after: str | None,
        limit: int,
    ) -> tuple[list[Rollout], bool]:
        """A project's rollouts by their ids; and whether there are more."""
        found = await rows.rollouts(
            self._store,
            caller.project_id,
            task_id=task_id,
            sandbox_id=caller.sandbox_id,
            after=after,
            limit=limit + 1,
        )
        return found[:limit], len(found) > limit

    async def outcomes(self, caller: Caller, task_id: str) -> Outcomes:
        """What became of a task's sandboxes and actions, by cause."""
        of_sandboxes, of_actions = await rows.outcomes(self._store, caller.project_id, task_id)
        return Outcomes(sandboxes=list(of_sandboxes), actions=list(of_actions))

    # --- fast-forward -------------------------------------------------------

    async def fast_forward(
        self,
        caller: Caller,
        sandbox_id: str,
        *,
        source_id: str,
        through: str | None = None,
        holds: str | None = None,
        of_unknown: OfUnknown = "stop",
    ) -> AsyncGenerator[Forwarded, None]:
        """Bring a sandbox to where another one was, by its log.

        It goes on when the caller goes away, and is safe to repeat: what its log has already is
        not done again, and a call beside one that is at work reads along.

        Args:
            caller: Whose sandboxes they are.
            sandbox_id: The new one.
            source_id: The other one; it may have ended.
            through: The last action to take. None: all.
            holds: The new one holds the effects of actions up to this one. None: as the snapshot
                that it was made from says; if it was made from none, of none.
            of_unknown: What to do with actions of which nobody knows whether they happened.

        Raises:
            SandboxNotFound: one is not the caller's.
            SandboxEnded, SandboxLost: the new one has ended.
            InvalidRequest: ``through`` or ``holds`` is not in the log; or the new one was made
                from a snapshot of the other whose place in the log is not known.
            ActionUnknown: nothing was done.
            ActionInProgress: another fast-forward of it is at work.
        """
        target = await self._lifecycle.get(caller, sandbox_id)
        await self._lifecycle.get(caller, source_id)
        if sandbox_id == source_id:
            raise InvalidRequest("source: a sandbox is where it is")
        if target.terminal:
            raise causes.end_of(target)
        key = (source_id, through, holds, of_unknown)
        at_work = self._forward_at_work(sandbox_id, key)
        if at_work is not None:
            return at_work.read()
        actions = [action async for action in self._all_of_sandbox(source_id)]
        place = await self._place(target, source_id, actions, holds)
        steps = forward.plan(actions, holds=place, through=through, of_unknown=of_unknown)
        # Another call may have been quicker while the log was read.
        at_work = self._forward_at_work(sandbox_id, key)
        if at_work is not None:
            return at_work.read()
        at_work = self._forwarding[sandbox_id] = _Forwarding(key)
        self._forwards.spawn(self._forward(caller, target, steps, at_work))
        return at_work.read()

    def _forward_at_work(self, sandbox_id: str, key: tuple[object, ...]) -> _Forwarding | None:
        at_work = self._forwarding.get(sandbox_id)
        if at_work is not None and at_work.key != key:
            raise ActionInProgress("another fast-forward of this sandbox is at work")
        return at_work

    async def _place(
        self, target: SandboxRecord, source_id: str, actions: list[Action], holds: str | None
    ) -> int:
        if holds is not None:
            found = next((action.seq for action in actions if action.action_id == holds), None)
            if found is None:
                raise InvalidRequest(f"holds: the log has no action `{holds[:64]}`")
            return found
        if target.snapshot_id is None:
            return 0
        place = forward.place_of_snapshot(actions, target.snapshot_id)
        if place is not None:
            return place
        snapshot = await snapshots.get_snapshot(self._store, target.snapshot_id)
        if snapshot is not None and snapshot.source_id == source_id:
            raise InvalidRequest(
                "the sandbox was made from a snapshot that is not in the log",
                remediation="Take snapshots as actions; or say in `holds` which action was the "
                "last before it.",
            )
        return 0

    async def _forward(
        self, caller: Caller, target: SandboxRecord, steps: list[Step], to: _Forwarding
    ) -> None:
        try:
            for index, step in enumerate(steps):
                action = step.action
                if step.how == "ran":
                    action = await self._again(caller, target.sandbox_id, step.action)
                elif step.how == "copied":
                    action = await self._copy(target, step.action)
                to.lines.append(
                    Forwarded(
                        index=index,
                        of=len(steps),
                        action_id=action.action_id,
                        step=action.step,
                        how=step.how,
                        diverged=step.how == "ran" and forward.diverged(step.action, action),
                        cause=action.cause,
                    )
                )
                to.tell()
        except OpendsecError as exc:
            to.error = exc
        except asyncio.CancelledError:
            to.error = NodeUnavailable("the server is stopping")
            raise
        except Exception:
            log.exception("a fast-forward failed unexpectedly", sandbox_id=target.sandbox_id)
            to.error = Internal("a defect; it is in the server's log")
        finally:
            to.over = True
            to.tell()
            if self._forwarding.get(target.sandbox_id) is to:
                del self._forwarding[target.sandbox_id]

    async def _copy(self, target: SandboxRecord, source: Action) -> Action:
        copied = await rows.copy_action(
            self._store,
            msgspec.structs.replace(
                source,
                sandbox_id=target.sandbox_id,
                project_id=target.project_id,
                task_id=target.task_id,
                attempt=1,
                origin=source.sandbox_id,
                replayed=False,
            ),
            TRAJECTORY,
        )
        if copied.full:
            raise _full(target.sandbox_id)
        _same(copied.action, source)
        return copied.action

    async def _again(self, caller: Caller, sandbox_id: str, source: Action) -> Action:
        params = unpack_params(source.params)
        acted = await self.act(caller, sandbox_id, params, wait_s=60.0)
        action = acted.action
        while action.state == "running":
            action = await self._wait(action, 60.0)
        if action.origin is None:
            await rows.set_replayed(self._store, action, source.sandbox_id)
            action = msgspec.structs.replace(action, origin=source.sandbox_id, replayed=True)
        if action.state != "done":
            raise ActionUnknown(
                f"action `{action.action_id}` was to be run again, and is {action.state}",
                details={"action_id": action.action_id, "cause": action.cause},
            )
        return action


def _same(action: Action, source: Action) -> None:
    if action.params_sha256 != source.params_sha256:
        raise ActionMismatch(
            f"the sandbox has an action `{action.action_id}` of its own, which is something else",
            details={"action_id": action.action_id},
        )


def _full(sandbox_id: str) -> OpendsecError:
    return TrajectoryFull(
        f"the trajectory of sandbox `{sandbox_id}` is full",
        details={"actions_max": TRAJECTORY.actions, "bytes_max": TRAJECTORY.bytes},
    )

# SPDX-License-Identifier: AGPL-3.0-only
"""Running actions, and finding out what became of those that nobody saw the end of.

A program is started under a tag of its own (sandbox, action, attempt) and its outcome is kept by
the guest agent. So whatever dies on the way here, the agent is asked: it knows the outcome, or it
is the same agent as before and knows no such tag (then the program never ran, and the tag is ruled
out so that it never will), or it is another agent, and nobody knows.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog

from opendsec_server.contract.actions import KeptProgram, ProgramOrder
from opendsec_server.contract.errors import (
    ActionUnknown,
    Conflict,
    FileNotFound,
    IdempotencyInProgress,
    IdempotencyOutcomeUnknown,
    Internal,
    NodeFull,
    NodeUnavailable,
    OpendsecError,
    PayloadTooLarge,
    SandboxLost,
    SandboxNotFound,
    StateConflict,
    StoreUnavailable,
    UserError,
)
from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.node import NodeClient
from opendsec_server.control.attempts import Attempts
from opendsec_server.control.iam import Caller
from opendsec_server.control.lifecycle import Lifecycle
from opendsec_server.control.saving import Saving, SnapshotParams
from opendsec_server.store import trajectories as rows
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store
from opendsec_server.store.trajectories import Action, Ending

from . import causes
from .causes import Verdict
from .params import FILE_BYTES_MAX, ActionParams, content_sha256, unpack_params
from .results import ActionError, ActionResult, pack, result_of

log = structlog.get_logger(__name__)

ASK_WAIT_S = 20.0
"""How long one question to a guest agent waits for the program's end."""
RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
PATIENCE_S = 60.0
"""How long a guest agent that does not answer is asked before the outcome is called unknown."""
RESOLVE_PATIENCE_S = 5.0
END_RECORDED_WAIT_S = 10.0
"""How long the record of an ended sandbox may take to say why."""
STORE_RETRY_S = 0.5
LEASE_S = 15.0
"""How long other processes leave an action to the one that runs it after that was last heard of."""
RENEW_INTERVAL_S = 4.0


def tag_of(action: Action) -> str:
    """Under which the guest agent knows this attempt."""
    return f"opendsec-action:{action.sandbox_id}:{action.action_id}:{action.attempt}"


def snapshot_key(action: Action) -> str:
    """The idempotency key of an action's snapshot."""
    text = f"{action.sandbox_id}:{action.action_id}:{action.attempt}"
    return f"action-{hashlib.sha256(text.encode()).hexdigest()}"


class Runner:
    """Runs recorded actions and records their ends. What it does goes on when callers go away."""

    def __init__(
        self, *, store: Store, node: NodeClient, lifecycle: Lifecycle, saving: Saving, seat: str
    ) -> None:
        self._store = store
        self._node = node
        self._lifecycle = lifecycle
        self._saving = saving
        self._seat = f"{seat}:"
        self.owner = f"{seat}:{random_chars(12)}"
        """Whose the actions are that this process runs."""
        self._attempts: Attempts[Action] = Attempts("action")
        self._by_action: dict[tuple[str, str], asyncio.Task[Action]] = {}
        self._held: dict[tuple[str, str], Action] = {}
        """What this process is at work on."""
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find out what became of the actions that this place's earlier process had begun.

        Raises:
            StoreUnavailable: not known which.
        """
        await self._take(self._seat)
        self._keeping = asyncio.create_task(self._keep(), name="actions-keep")

    async def stop(self) -> None:
        """Leave what runs to the guest agents: the next start, or another process, asks them."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        held = list(self._held.values())
        for task in self._by_action.values():
            task.cancel()
        await asyncio.gather(*self._by_action.values(), return_exceptions=True)
        with contextlib.suppress(StoreUnavailable):
            # Others need not wait for the end of the lease.
            await rows.renew_actions(self._store, self.owner, held, 0.0)

    # --- whose they are -----------------------------------------------------

    async def _keep(self) -> None:
        """Keep own leases, and find out about what others have left."""
        while True:
            await asyncio.sleep(RENEW_INTERVAL_S)
            try:
                held = list(self._held.values())
                await rows.renew_actions(self._store, self.owner, held, time.time() + LEASE_S)
                await self._take(None)
            except OpendsecError as exc:
                log.warning("actions not looked after", code=exc.code, why=exc.message)
            except Exception as exc:
                log.error("actions not looked after", exc_info=exc)

    async def _take(self, seat: str | None) -> None:
        now = time.time()
        claimed = await rows.claim_actions(
            self._store, self.owner, seat=seat, now=now, lease_until=now + LEASE_S
        )
        for action in claimed:
            self.settle(action)

    def at_work(self, action: Action) -> asyncio.Task[Action] | None:
        """What this process does about an action now."""
        return self._by_action.get((action.sandbox_id, action.action_id))

    def run(self, action: Action, params: ActionParams, caller: Caller) -> asyncio.Task[Action]:
        """Run an action that was recorded a moment ago."""
        return self._spawn(action, self._run(action, params, caller))

    def settle(
        self, action: Action, *, caller: Caller | None = None, patience_s: float = PATIENCE_S
    ) -> asyncio.Task[Action]:
        """Find out what became of an action. It is not run by this.

        Args:
            action: ``running`` or ``unknown``.
            caller: Who asks. A snapshot is looked for in a caller's name only.
            patience_s: How long a guest agent may not answer.
        """
        task = self.at_work(action)
        if task is not None:
            return task
        return self._spawn(action, self._settle(action, caller, patience_s))

    def _spawn(self, action: Action, work: Coroutine[Any, Any, Action]) -> asyncio.Task[Action]:
        task = self._attempts.spawn(work)
        place = (action.sandbox_id, action.action_id)
        self._by_action[place] = task
        self._held[place] = action

        def done(ended: asyncio.Task[Action]) -> None:
            if self._by_action.get(place) is ended:
                del self._by_action[place]
                del self._held[place]

        task.add_done_callback(done)
        return task

    # --- running ------------------------------------------------------------

    async def _run(self, action: Action, params: ActionParams, caller: Caller) -> Action:
        try:
            if params.kind == "exec":
                ending = await self._exec(action, params)
            elif params.kind == "write_file":
                ending = await self._write(action, params)
            elif params.kind == "read_file":
                ending = await self._read(action, params)
            else:
                ending = await self._snapshot(action, params, caller)
        except Exception as exc:
            ending = _defect(action, exc)
        return await self._end(action, ending)

    async def _exec(self, action: Action, params: ActionParams) -> Ending:
        order = ProgramOrder(
            argv=params.argv,
            instance=action.instance,
            user=params.user,
            workdir=params.workdir,
            env=params.env,
            timeout_s=params.timeout_s,
            output_bytes=params.output_bytes,
        )
        try:
            await self._node.start_kept(action.sandbox_id, tag_of(action), order)
        except (StateConflict, SandboxNotFound, NodeFull) as exc:
            return await self._refused(action, exc)
        except Conflict:
            # Ruled out by who thought this process dead, or begun by a request of ours that was
            # sent twice. The agent knows which.
            pass
        except UserError as exc:
            return _cannot(exc)
        except OpendsecError as exc:
            log.info("start of an action not answered", action_id=action.action_id, code=exc.code)
        return await self._follow(action, params, PATIENCE_S)

    async def _write(self, action: Action, params: ActionParams) -> Ending:
        data = params.data()
        try:
            await self._node.write_file(
                action.sandbox_id, params.path or "", data, user=params.user
            )
        except (StateConflict, SandboxNotFound, NodeFull) as exc:
            return await self._refused(action, exc)
        except UserError as exc:
            return _cannot(exc)
        except OpendsecError:
            return await self._compare(action, params, PATIENCE_S)
        return _written(data)

    async def _read(self, action: Action, params: ActionParams) -> Ending:
        try:
            data = await self._node.read_file(
                action.sandbox_id, params.path or "", user=params.user, bytes_max=FILE_BYTES_MAX
            )
        except (StateConflict, SandboxNotFound) as exc:
            return await self._refused(action, exc)
        except UserError as exc:
            return _cannot(exc)
        except OpendsecError as exc:
            # Reading changes nothing: another attempt is as good.
            return _not_run(exc)
        result = ActionResult(
            content=base64.b64encode(data).decode(),
            content_sha256=content_sha256(data),
            bytes=len(data),
        )
        return _done(result, Verdict(cause="ok", fault=None))

    async def _snapshot(self, action: Action, params: ActionParams, caller: Caller) -> Ending:
        """Exactly once by its key, so that asking and doing are the same."""
        wanted = SnapshotParams(mode=params.mode, name=params.name)
        try:
            saved = await self._saving.snapshot(
                caller, action.sandbox_id, wanted, key=snapshot_key(action)
            )
        except SandboxNotFound as exc:
            return await self._refused(action, exc)
        except (
            IdempotencyInProgress, IdempotencyOutcomeUnknown, NodeUnavailable, StoreUnavailable,
        ) as exc:  # fmt: skip
            return _unknown(causes.of_error(exc))
        except StateConflict as exc:
            return _not_run(exc)
        except UserError as exc:
            return _cannot(exc)
        except OpendsecError as exc:
            return _not_run(exc)
        result = ActionResult(snapshot_id=saved.snapshot.snapshot_id)
        return _done(result, Verdict(cause="ok", fault=None))

    # --- finding out --------------------------------------------------------

    async def _settle(self, action: Action, caller: Caller | None, patience_s: float) -> Action:
        params = unpack_params(action.params)
        try:
            if params.kind == "exec":
                ending = await self._follow(action, params, patience_s)
            elif params.kind == "write_file":
                ending = await self._compare(action, params, patience_s)
            elif params.kind == "read_file":
                ending = _not_run(_not_begun())
            elif caller is not None:
                ending = await self._snapshot(action, params, caller)
            else:
                ending = _unknown(
                    Verdict(cause="server_restarted", fault="platform"),
                )
        except Exception as exc:
            ending = _defect(action, exc)
        if ending.state != "unknown" and action.state == "unknown":
            ending = _by_guest(ending)
        return await self._end(action, ending)

    async def _follow(self, action: Action, params: ActionParams, patience_s: float) -> Ending:
        """Wait for a program's end, or learn that it never began."""
        silent_since: float | None = None
        pause_s = RETRY_FIRST_S
        while True:
            try:
                program = await self._node.kept(
                    action.sandbox_id, tag_of(action), wait_s=ASK_WAIT_S, void=True
                )
            except SandboxNotFound:
                return await self._after_end(action)
            except StateConflict:
                # It is paused, and goes on one day.
                silent_since = None
            except OpendsecError as exc:
                now = time.monotonic()
                silent_since = now if silent_since is None else silent_since
                if now - silent_since >= patience_s:
                    return _unknown(causes.of_error(exc))
            else:
                silent_since, pause_s = None, RETRY_FIRST_S
                ending = _ending_of(action, params, program)
                if ending is not None:
                    return ending
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _compare(self, action: Action, params: ActionParams, patience_s: float) -> Ending:
        """A file that has the content was written, whoever wrote it last."""
        data, silent_since, pause_s = params.data(), time.monotonic(), RETRY_FIRST_S
        while True:
            verdict: Verdict
            try:
                found = await self._node.read_file(
                    action.sandbox_id, params.path or "", user=params.user, bytes_max=len(data)
                )
                if found == data:
                    return _written(data)
                verdict = _differs("other content")
            except SandboxNotFound:
                return await self._after_end(action)
            except StateConflict:
                silent_since = time.monotonic()
                verdict = Verdict(cause="paused", fault=None)
            except FileNotFound:
                verdict = _differs("no such file")
            except PayloadTooLarge:
                verdict = _differs("more content")
            except OpendsecError as exc:
                verdict = causes.of_error(exc)
            # The request may still be on its way: so nothing is said to be not run.
            if time.monotonic() - silent_since >= min(patience_s, RESOLVE_PATIENCE_S):
                return _unknown(verdict)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _after_end(self, action: Action) -> Ending:
        """What it did is gone with the sandbox; what it did outside of it nobody knows."""
        return _unknown(causes.of_error(await self._end_of(action)))

    async def _refused(self, action: Action, error: OpendsecError) -> Ending:
        """It did not begin."""
        if isinstance(error, SandboxNotFound):
            error = await self._end_of(action)
        return _not_run(error)

    async def _end_of(self, action: Action) -> OpendsecError:
        deadline = time.monotonic() + END_RECORDED_WAIT_S
        while True:
            await self._lifecycle.refresh(action.sandbox_id)
            with contextlib.suppress(StoreUnavailable):
                record = await get_sandbox(self._store, action.sandbox_id)
                if record is not None and record.terminal:
                    return causes.end_of(record)
            if time.monotonic() >= deadline:
                return SandboxLost(f"the node does not know sandbox `{action.sandbox_id}`")
            await asyncio.sleep(RETRY_FIRST_S)

    # --- recording ----------------------------------------------------------

    async def _end(self, action: Action, ending: Ending) -> Action:
        """Record an end; only then the agent may forget it."""
        while True:
            try:
                ended = await rows.end_action(self._store, action, ending)
                break
            except StoreUnavailable as exc:
                log.warning("end of an action waits for the store", why=exc.message)
                await asyncio.sleep(STORE_RETRY_S)
        if ended.kind == "exec" and ended.state == "done":
            with contextlib.suppress(OpendsecError):
                await self._node.forget_kept(ended.sandbox_id, tag_of(ended))
        return ended


def _ending_of(action: Action, params: ActionParams, program: KeptProgram) -> Ending | None:
    """None: it runs."""
    if program.state in ("starting", "running"):
        return None
    if program.state == "ended":
        result = result_of(program)
        if program.lost:
            return _unknown(Verdict(cause="exit_status_lost", fault="platform"), result)
        return _done(result, causes.of_program(params, program, action.oom_before))
    if program.instance == action.instance:
        return _not_run(_not_begun())
    return _unknown(
        Verdict(
            cause="agent_restarted",
            fault="platform",
            evidence={"message": "the guest agent was started anew since, and knows nothing of it"},
        )
    )


def _not_begun() -> OpendsecError:
    return NodeUnavailable(
        "the action did not begin: its request was lost on the way",
        remediation="Send it again, with the same action id.",
    )


def _done(result: ActionResult, verdict: Verdict) -> Ending:
    return Ending(
        state="done",
        ended_at=time.time(),
        result=pack(result),
        fault=verdict.fault,
        cause=verdict.cause,
        evidence=pack(verdict.evidence) if verdict.evidence else None,
    )


def _written(data: bytes) -> Ending:
    result = ActionResult(content_sha256=content_sha256(data), bytes=len(data))
    return _done(result, Verdict(cause="ok", fault=None))


def error_text(error: OpendsecError) -> str:
    """An error as the store keeps it."""
    return pack(
        ActionError(
            code=error.code,
            message=error.message,
            remediation=error.remediation,
            retryable=error.retryable,
            fault=error.fault,
            details=error.details,
        )
    )


def _failed(error: OpendsecError, *, again: bool) -> Ending:
    verdict = causes.of_error(error)
    return Ending(
        state="not_run" if again else "done",
        ended_at=time.time(),
        error=error_text(error),
        fault=verdict.fault,
        cause=verdict.cause,
        evidence=pack(verdict.evidence),
    )


def _cannot(error: OpendsecError) -> Ending:
    """The caller's mistake: it would be one again."""
    return _failed(error, again=False)


def _not_run(error: OpendsecError) -> Ending:
    return _failed(error, again=True)


def _unknown(verdict: Verdict, result: ActionResult | None = None) -> Ending:
    return Ending(
        state="unknown",
        ended_at=None,
        result=None if result is None else pack(result),
        error=error_text(
            ActionUnknown(
                "what became of the action is not known", details={"cause": verdict.cause}
            )
        ),
        fault=verdict.fault,
        cause=verdict.cause,
        evidence=pack(verdict.evidence) if verdict.evidence else None,
    )


def _differs(how: str) -> Verdict:
    return Verdict(cause="file_differs", fault="platform", evidence={"found": how})


def _by_guest(ending: Ending) -> Ending:
    return msgspec.structs.replace(ending, resolved_by="guest")


def _defect(action: Action, exc: Exception) -> Ending:
    log.error("an action failed unexpectedly", action_id=action.action_id, exc_info=exc)
    return _unknown(causes.of_error(Internal("a defect; it is in the server's log")))

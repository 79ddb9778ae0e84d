# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_trajectories.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""Actions: done once, recorded, and told again. Trajectories: what was done, in order."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from opendsec import _limits
from opendsec._answers import from_native
from opendsec._errors import ActionUnknown, InvalidRequest, OpendsecError, SandboxEnded
from opendsec._models import StateMode
from opendsec._retry import Repeat
from opendsec._trajectory_models import (
    Action,
    ForwardStep,
    OfUnknown,
    TaskOutcomes,
    TrajectoryInfo,
)

from ._concurrency import sleep
from ._ndjson import open_lines
from ._process import Command
from ._transport import Transport

if TYPE_CHECKING:
    from ._client import Client
    from ._sandbox import Sandbox


class _ActionPage(msgspec.Struct):
    actions: list[Action] = []
    next_after: int | None = None


class _TrajectoryPage(msgspec.Struct):
    trajectories: list[TrajectoryInfo] = []
    next_after: str | None = None


class Actions:
    """Things that are done in one sandbox, each once.

    Each has an id, chosen by the caller. The server records it before it runs, and its result
    after. The same id again answers what was recorded and runs nothing, whatever died in between:
    this program, the server, the sandbox. So a program that was preempted starts again from the
    beginning, asks for the same actions, and goes on where it was.

    Every method that does something can raise:

    * ``ActionMismatch``: the id was used for something else.
    * ``ActionUnknown``: whether it happened, or how it ended, is not known, and asking again did
      not tell. It is never run again by itself; see ``resolve``.
    * ``SandboxEnded``, ``SandboxLost``: the sandbox has ended; the second: by our fault.
    * any other ``OpendsecError``: it was not done. Those that may work later were tried again.
    """

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = f"/v1/sandboxes/{quote(sandbox_id, safe='')}"

    def exec(
        self,
        action_id: str,
        command: Command,
        *,
        rollout_id: str | None = None,
        step: int | None = None,
        once: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float = _limits.ACTION_TIMEOUT_S_DEFAULT,
        output_limit_bytes: int = _limits.ACTION_OUTPUT_BYTES_DEFAULT,
    ) -> Action:
        """Run a command to its end. That it failed is no exception: look at the answer.

        Args:
            action_id: Its name, once in the sandbox.
            command: A line for ``bash -l -c``, or a program with its arguments.
            rollout_id: The trajectory it belongs to; it may go over several sandboxes.
            step: Its place there, as the caller counts.
            once: It has effects outside of the sandbox: a fast-forward takes over its result, and
                does not run it again.
            cwd: Where it runs. None: the sandbox's default.
            env: Added to the sandbox's environment. Kept with the action.
            user: Account that it runs as. None: the sandbox's default.
            timeout_s: It is killed after so many seconds, with all it started.
            output_limit_bytes: Kept of each output: the first and the last half.
        """
        if isinstance(command, str):
            argv: Sequence[str] = ("/bin/bash", "-l", "-c", command)
        else:
            argv = command
        return self._act(
            {
                "action_id": action_id,
                "kind": "exec",
                "rollout_id": rollout_id,
                "step": step,
                "once": once,
                "argv": list(argv),
                "workdir": cwd,
                "env": dict(env or {}),
                "user": user,
                "timeout_s": timeout_s,
                "output_bytes": output_limit_bytes,
            }
        )

    def write_file(
        self,
        action_id: str,
        path: str,
        content: bytes | str,
        *,
        rollout_id: str | None = None,
        step: int | None = None,
        user: str | None = None,
    ) -> Action:
        """Write a file of at most 1 MiB; directories above it are made.

        Args:
            action_id: As of ``exec``.
            path: A relative path starts at the user's home.
            content: Text is written as UTF-8.
            rollout_id: As of ``exec``.
            step: As of ``exec``.
            user: Who owns it. None: the sandbox's default.
        """
        data = content.encode() if isinstance(content, str) else content
        return self._act(
            {
                "action_id": action_id,
                "kind": "write_file",
                "rollout_id": rollout_id,
                "step": step,
                "path": path,
                "content": base64.b64encode(data).decode(),
                "user": user,
            }
        )

    def read_file(
        self,
        action_id: str,
        path: str,
        *,
        rollout_id: str | None = None,
        step: int | None = None,
        user: str | None = None,
    ) -> Action:
        """Read a file of at most 1 MiB as it is now; its ``content`` is recorded.

        Raises:
            FileNotFound: there is none. That is recorded too.
            PayloadTooLarge: use ``sandbox.files``.
        """
        return self._act(
            {
                "action_id": action_id,
                "kind": "read_file",
                "rollout_id": rollout_id,
                "step": step,
                "path": path,
                "user": user,
            }
        )

    def snapshot(
        self,
        action_id: str,
        *,
        mode: StateMode = "filesystem",
        name: str | None = None,
        rollout_id: str | None = None,
        step: int | None = None,
    ) -> Action:
        """Save the sandbox at this place of its log. Waits until no other action runs.

        Args:
            action_id: As of ``exec``.
            mode: ``filesystem``: the disk. ``full``: with memory, where the backend can.
            name: Of the snapshot.
            rollout_id: As of ``exec``.
            step: As of ``exec``.
        """
        return self._act(
            {
                "action_id": action_id,
                "kind": "snapshot",
                "rollout_id": rollout_id,
                "step": step,
                "mode": mode,
                "name": name,
            }
        )

    def _act(self, body: Mapping[str, Any]) -> Action:
        wait_s = _limits.ACTION_WAIT_S
        body = {**body, "wait_s": wait_s}
        tries = 0
        while True:
            action = self._transport.api(
                "POST",
                f"{self._path}/actions",
                Action,
                body=body,
                timeout_s=wait_s + _limits.REQUEST_TIMEOUT_S,
                repeat=Repeat.IDEMPOTENT,
            )
            if action.state == "unknown":
                action = self.resolve(action.action_id)
            if action.state == "unknown":
                raise _unknown(action)
            error = None if action.error is None else from_native(action.error)
            if action.state == "done":
                if error is not None:
                    raise error
                return action
            if action.state == "not_run":
                # Nothing happened; the same id again is another attempt.
                tries += 1
                error = error or _unknown(action)
                pause_s = self._transport.retry.pause_s(error, tries, Repeat.IDEMPOTENT)
                if pause_s is None:
                    raise error
                sleep(pause_s)

    def get(self, action_id: str, *, wait_s: float = 0) -> Action:
        """What is recorded of an action, whatever its state.

        Args:
            action_id: Which.
            wait_s: Wait so long for its end, 60 s at most.

        Raises:
            ActionNotFound: there is none.
        """
        return self._transport.api(
            "GET",
            self._of(action_id),
            Action,
            params={"wait_s": int(wait_s)},
            timeout_s=wait_s + _limits.REQUEST_TIMEOUT_S,
        )

    def list(self) -> Iterator[Action]:
        """All actions in order, page by page; also after the sandbox has ended."""
        params: dict[str, str | int | list[str]] = {}
        while True:
            page = self._transport.api("GET", f"{self._path}/actions", _ActionPage, params=params)
            for action in page.actions:
                yield action
            if page.next_after is None:
                return
            params["after"] = page.next_after

    def resolve(
        self,
        action_id: str,
        *,
        happened: bool | None = None,
        exit_code: int | None = None,
    ) -> Action:
        """Find out what became of an action whose outcome is unknown. Runs nothing.

        Args:
            action_id: Which.
            happened: None: ask the sandbox once more. Else the caller states it: True, it was
                done; False, nothing of it happened, and its id may be used again.
            exit_code: Of one that happened.

        Raises:
            ActionNotFound: there is none.
            StateConflict: it is known what became of it, and it was something else.
        """
        body: dict[str, Any] = {}
        if happened is not None:
            body["state"] = "done" if happened else "not_run"
            body["exit_code"] = exit_code
        return self._transport.api("POST", f"{self._of(action_id)}/resolve", Action, body=body)

    def _of(self, action_id: str) -> str:
        if not action_id:
            raise InvalidRequest("The action id is empty.")
        return f"{self._path}/actions/{quote(action_id, safe='')}"

    def export(self) -> Iterator[Action]:
        """All actions in order, in one answer, with the contents of files that were written."""
        lines = open_lines(self._transport, "GET", f"{self._path}/trajectory", Action)
        with lines:
            for action in lines:
                yield action

    def fast_forward(
        self,
        source: str,
        *,
        through: str | None = None,
        holds: str | None = None,
        unknown: OfUnknown = "stop",
    ) -> Iterator[ForwardStep]:
        """Bring this sandbox to where another one was, by the other's log.

        What this one's snapshot holds is taken over as recorded; later commands and writes run
        again, in order. Safe to repeat. It goes on when you stop reading.

        Args:
            source: Id of the other sandbox, which may have ended.
            through: The last action to take. None: all.
            holds: This sandbox holds the effects of actions up to this one. None: of those before
                the snapshot that it was made from.
            unknown: What to do with actions of which nobody knows whether they happened:
                ``stop`` before anything is done, ``skip`` them, or ``run`` them.

        Raises:
            ActionUnknown: the log has such actions; nothing was done. Or one that ran again here
                came to no known end.
        """
        body = {"source": source, "through": through, "holds": holds, "unknown": unknown}
        lines = open_lines(
            self._transport, "POST", f"{self._path}/fast-forward", ForwardStep, body=body
        )
        with lines:
            for step in lines:
                yield step


class Trajectories:
    """What was done in the project's sandboxes, also in those that have ended."""

    def __init__(self, client: Client, transport: Transport) -> None:
        self._client = client
        self._transport = transport

    def of(self, sandbox_id: str) -> Actions:
        """The actions of one sandbox, which may have ended."""
        if not sandbox_id:
            raise InvalidRequest("The sandbox id is empty.")
        return Actions(self._transport, sandbox_id)

    def list(self, *, task_id: str | None = None) -> Iterator[TrajectoryInfo]:
        """The rollouts of the project by their ids, page by page.

        Args:
            task_id: Only those of sandboxes of this task.
        """
        params: dict[str, str | int | list[str]] = {}
        if task_id is not None:
            params["task_id"] = task_id
        while True:
            page = self._transport.api("GET", "/v1/trajectories", _TrajectoryPage, params=params)
            for trajectory in page.trajectories:
                yield trajectory
            if page.next_after is None:
                return
            params["after"] = page.next_after

    def export(self, rollout_id: str) -> Iterator[Action]:
        """Every action of a rollout over all sandboxes, in the order of their record.

        Raises:
            TrajectoryNotFound: there is none.
        """
        if not rollout_id:
            raise InvalidRequest("The rollout id is empty.")
        path = f"/v1/trajectories/{quote(rollout_id, safe='')}"
        lines = open_lines(self._transport, "GET", path, Action)
        with lines:
            for action in lines:
                yield action

    def outcomes(self, task_id: str) -> TaskOutcomes:
        """What became of a task's sandboxes and actions, by whose fault it was."""
        if not task_id:
            raise InvalidRequest("The task id is empty.")
        path = f"/v1/tasks/{quote(task_id, safe='')}/outcomes"
        return self._transport.api("GET", path, TaskOutcomes)

    def branch(
        self,
        source: str,
        action_id: str,
        count: int = 1,
        *,
        timeout_s: float = 300,
        task_id: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Sequence[Sandbox | OpendsecError]:
        """Sandboxes that go on from a snapshot in a log: made from it, with the log up to it.

        Each succeeds or fails for itself: look at each. One that failed is killed.

        Args:
            source: Id of the sandbox whose log it is; it may have ended.
            action_id: Of the snapshot.
            count: How many.
            timeout_s: As of ``Client.create``.
            task_id: As of ``Client.create``.
            metadata: As of ``Client.create``.

        Raises:
            ActionNotFound: the log has no such action.
            InvalidRequest: the action is no snapshot.
        """
        snapshot_id = (self.of(source).get(action_id)).snapshot_id
        if snapshot_id is None:
            raise InvalidRequest(f"Action `{action_id}` has taken no snapshot.")
        made: list[Sandbox | OpendsecError] = []
        for _ in range(count):
            try:
                sandbox = self._client.create(
                    snapshot_id, timeout_s=timeout_s, task_id=task_id, metadata=metadata
                )
            except OpendsecError as error:
                made.append(error)
                continue
            try:
                for _step in sandbox.actions.fast_forward(source, through=action_id):
                    pass
            except OpendsecError as error:
                made.append(error)
                # Nobody else knows of it.
                with contextlib.suppress(OpendsecError):
                    sandbox.kill()
            else:
                made.append(sandbox)
        return made


def _unknown(action: Action) -> OpendsecError:
    """What nobody knows is not the program's failure, unless it ended its own sandbox."""
    details = {"action_id": action.action_id, "cause": action.cause, "evidence": action.evidence}
    if action.fault == "user":
        return SandboxEnded(
            f"The sandbox ended while action `{action.action_id}` ran.", details=details
        )
    return ActionUnknown(
        f"What became of action `{action.action_id}` is not known ({action.cause}).",
        details=details,
    )

# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_tasks.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""Tasks: all sandboxes of one job, as one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import msgspec

from opendsec import _limits
from opendsec._errors import InvalidRequest, OpendsecError
from opendsec._models import StateMode
from opendsec._retry import Patience
from opendsec._task_models import (
    KEEP,
    Keep,
    TaskInfo,
    TaskOperationInfo,
    TaskOutcome,
    TaskSandboxes,
    TaskState,
    TaskWait,
)

from ._concurrency import Listener, sleep, tell
from ._ndjson import open_lines
from ._transport import Transport


class _TaskPage(msgspec.Struct):
    tasks: list[TaskInfo] = []
    next_cursor: str | None = None


class _Operations(msgspec.Struct):
    operations: list[TaskOperationInfo] = []


class _Line(msgspec.Struct):
    """A line about an operation: one of these kinds."""

    operation: TaskOperationInfo | None = None
    progress: TaskOperationInfo | None = None
    sandbox_id: str | None = None
    seq: int = 0
    outcome: str = "done"
    error: dict[str, Any] | None = None
    memory_freed_bytes: int = 0


class _Waited(msgspec.Struct):
    sandboxes: TaskSandboxes = TaskSandboxes()


class TaskOperation:
    """A pause, resume or kill of a whole task, that the server carries out.

    Iterate over it for the outcome of each sandbox as it comes, or ``wait()``. Reading is only
    watching: it goes on without it, and after a restart of the server; a connection that broke is
    made again, and no outcome comes twice.

    Attributes:
        task_id: Which task.
        info: What is known of it by now.
    """

    def __init__(self, transport: Transport, task_id: str, info: TaskOperationInfo) -> None:
        self._transport = transport
        self._after = 0
        self.task_id = task_id
        self.info = info

    def __iter__(self) -> Iterator[TaskOutcome]:
        """Outcomes not read yet, up to the last.

        Raises:
            ConnectionFailed: the server stayed away.
        """
        path = f"{_path(self.task_id)}/operations/{quote(self.info.operation_id, safe='')}/outcomes"
        patience = Patience(self._transport.retry)
        while True:
            patience.asking()
            try:
                lines = open_lines(
                    self._transport, "GET", path, _Line, params={"after": self._after}
                )
                with lines:
                    for line in lines:
                        patience.heard()
                        if line.sandbox_id is None:
                            self.info = line.operation or line.progress or self.info
                            continue
                        self._after = line.seq
                        yield TaskOutcome(
                            sandbox_id=line.sandbox_id,
                            seq=line.seq,
                            outcome=line.outcome,
                            error=line.error,
                            memory_freed_bytes=line.memory_freed_bytes,
                        )
                self.info = msgspec.convert(lines.done, TaskOperationInfo, strict=False)
                return
            except OpendsecError as error:
                if patience.spent(error):
                    raise
            sleep(_limits.RECONNECT_PAUSE_S)

    def wait(self, on_progress: Listener[TaskOperationInfo] | None = None) -> TaskOperationInfo:
        """Wait for its end; returns the counts. Sandboxes that failed do not raise: look at
        ``failed``, and iterate to learn why.

        Args:
            on_progress: Called with the counts as they grow.
        """
        done, failed, freed = self.info.done, self.info.failed, self.info.memory_freed_bytes
        if self._after == 0:
            done = failed = freed = 0
        for outcome in self:
            failed += outcome.outcome == "error"
            done += outcome.outcome != "error"
            freed += outcome.memory_freed_bytes
            if on_progress is not None:
                now = msgspec.structs.replace(
                    self.info, done=done, failed=failed, memory_freed_bytes=freed
                )
                tell(on_progress, now)
        return self.info


class Tasks:
    """The tasks of the key's project. A task is made by the first sandbox with its ``task_id``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        task_id: str,
        *,
        deadline: datetime | float | None = None,
        sandboxes_max: int | None = None,
        cpu_seconds_max: float | None = None,
    ) -> TaskInfo:
        """Make a task with limits from the start. Again with the same limits: the same task.

        Args:
            task_id: The job's name.
            deadline: When it ends with all of its sandboxes: a time, or seconds from now.
            sandboxes_max: Sandboxes that may be made in it in all.
            cpu_seconds_max: Processor time after which it ends with all of its sandboxes.

        Raises:
            TaskExists: it is there, with other limits.
        """
        body = {
            "task_id": task_id,
            "deadline_at": _moment(deadline),
            "sandboxes_max": sandboxes_max,
            "cpu_seconds_max": cpu_seconds_max,
        }
        return self._transport.api("POST", "/v1/tasks", TaskInfo, body=body)

    def get(self, task_id: str) -> TaskInfo:
        """A task, with what its sandboxes have used until now.

        Raises:
            TaskNotFound: there is none.
        """
        return self._transport.api("GET", _path(task_id), TaskInfo)

    def list(
        self, *, states: Sequence[TaskState] = (), limit: int | None = None
    ) -> Iterator[TaskInfo]:
        """Tasks, newest first, page by page.

        Args:
            states: In one of these. Empty: all.
            limit: End after so many. None: all.
        """
        params: dict[str, str | int | list[str]] = {}
        if states:
            params["state"] = ",".join(states)
        left = limit
        while left is None or left > 0:
            params["limit"] = (
                _limits.LIST_PAGE_MAX if left is None else min(left, _limits.LIST_PAGE_MAX)
            )
            page = self._transport.api("GET", "/v1/tasks", _TaskPage, params=params)
            for task in page.tasks:
                yield task
            if page.next_cursor is None:
                return
            params["cursor"] = page.next_cursor
            if left is not None:
                left -= len(page.tasks)

    def set(
        self,
        task_id: str,
        *,
        deadline: datetime | float | Keep | None = KEEP,
        sandboxes_max: int | Keep | None = KEEP,
        cpu_seconds_max: float | Keep | None = KEEP,
        reopen: bool = False,
    ) -> TaskInfo:
        """Change limits of a task; None removes one.

        Args:
            task_id: Which.
            deadline: A time, or seconds from now.
            sandboxes_max: As of ``create``.
            cpu_seconds_max: As of ``create``.
            reopen: Let one that has ended take sandboxes again.

        Raises:
            TaskNotFound: there is none.
            Conflict: it has ended, and is not to be reopened.
        """
        body: dict[str, Any] = {"reopen": reopen}
        if not isinstance(deadline, Keep):
            body["deadline_at"] = _moment(deadline)
        if not isinstance(sandboxes_max, Keep):
            body["sandboxes_max"] = sandboxes_max
        if not isinstance(cpu_seconds_max, Keep):
            body["cpu_seconds_max"] = cpu_seconds_max
        return self._transport.api("PATCH", _path(task_id), TaskInfo, body=body)

    def pause(self, task_id: str, mode: StateMode = "full") -> TaskOperation:
        """Begin to pause every sandbox of a task; nothing is started in it until it is resumed.

        Args:
            task_id: Which.
            mode: What each pause keeps.

        Raises:
            TaskNotFound: there is none.
            TaskEnded: it has ended.
        """
        return self._operate(task_id, "pause", {"mode": mode})

    def resume(self, task_id: str, *, timeout_s: int | None = None) -> TaskOperation:
        """Begin to let every paused sandbox of a task run on.

        Args:
            task_id: Which.
            timeout_s: How long each may live from then on. None: what it was created with.

        Raises:
            TaskNotFound: there is none.
            TaskEnded: it has ended.
        """
        return self._operate(task_id, "resume", {"timeout_s": timeout_s})

    def kill(self, task_id: str, *, end: bool = True) -> TaskOperation:
        """Begin to end every sandbox of a task.

        Args:
            task_id: Which.
            end: The task ends with them: creates that come late are refused.

        Raises:
            TaskNotFound: there is none.
        """
        return self._operate(task_id, "kill", {"end": end})

    def operations(self, task_id: str) -> Sequence[TaskOperationInfo]:
        """The latest operations on a task, newest first.

        Raises:
            TaskNotFound: there is none.
        """
        path = f"{_path(task_id)}/operations"
        return (self._transport.api("GET", path, _Operations)).operations

    def operation(self, task_id: str, operation_id: str) -> TaskOperation:
        """An operation that was begun before, to be followed from its first outcome on.

        Raises:
            TaskOperationNotFound: the task has none of this id.
        """
        path = f"{_path(task_id)}/operations/{quote(operation_id, safe='')}"
        info = self._transport.api("GET", path, TaskOperationInfo)
        return TaskOperation(self._transport, task_id, info)

    def wait(
        self,
        task_id: str,
        until: TaskWait = "ended",
        *,
        timeout_s: int = 3_600,
        on_change: Listener[TaskSandboxes] | None = None,
    ) -> bool:
        """Wait for a task's sandboxes.

        Args:
            task_id: Which.
            until: For what.
            timeout_s: How long.
            on_change: Called with the counts each time they change.

        Returns:
            Whether it is so; False: the time was over before.

        Raises:
            TaskNotFound: there is none.
            ConnectionFailed: the server stayed away.
        """
        over_at = time.monotonic() + timeout_s
        patience = Patience(self._transport.retry)
        while True:
            patience.asking()
            left_s = max(0, round(over_at - time.monotonic()))
            try:
                lines = open_lines(
                    self._transport,
                    "GET",
                    f"{_path(task_id)}/wait",
                    _Waited,
                    params={"until": until, "timeout_s": left_s},
                )
                with lines:
                    for line in lines:
                        patience.heard()
                        if on_change is not None:
                            tell(on_change, line.sandboxes)
                return bool((lines.done or {}).get("reached"))
            except OpendsecError as error:
                if patience.spent(error):
                    raise
            sleep(_limits.RECONNECT_PAUSE_S)

    def _operate(self, task_id: str, kind: str, body: dict[str, Any]) -> TaskOperation:
        info = self._transport.api(
            "POST",
            f"{_path(task_id)}/{kind}",
            TaskOperationInfo,
            params={"stream": "false"},
            body=body,
            # Sent twice, it is one operation.
            headers={"Idempotency-Key": f"sdk-{uuid.uuid4()}"},
        )
        return TaskOperation(self._transport, task_id, info)


def _path(task_id: str) -> str:
    """Its path; the id is quoted, so that a bad one cannot name another path."""
    if task_id in ("", ".", ".."):
        raise InvalidRequest(f"`{task_id}` is no task id that can be asked for.")
    return f"/v1/tasks/{quote(task_id, safe='')}"


def _moment(deadline: datetime | float | None) -> str | None:
    if deadline is None:
        return None
    if isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise InvalidRequest("The deadline names no time zone.")
        return deadline.astimezone(UTC).isoformat()
    try:
        return (datetime.now(UTC) + timedelta(seconds=deadline)).isoformat()
    except (OverflowError, ValueError):
        raise InvalidRequest("The deadline is too far away.") from None

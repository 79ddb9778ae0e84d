# SPDX-License-Identifier: Apache-2.0
"""What calls about tasks return."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

import msgspec

TaskState = Literal["open", "paused", "ended"]
TaskWait = Literal["ended", "running", "paused", "idle"]
"""``ended``: no sandbox is left. ``running``, ``paused``: every one that is left is. ``idle``: none
is between two states."""


class Keep:
    """Stands for a limit that is not to be changed."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = Keep()


class TaskUsage(msgspec.Struct, kw_only=True, frozen=True):
    """What the sandboxes of a task have used together, ended ones too.

    Attributes:
        cpu_seconds: Processor time.
        memory_mb_seconds: MiB held, without file cache, times seconds.
        disk_bytes: Held now by those that have not ended.
        egress_bytes: Sent on their network links; answers to the API are among them.
        ingress_bytes: Received on their network links.
    """

    cpu_seconds: float = 0.0
    memory_mb_seconds: float = 0.0
    disk_bytes: int = 0
    egress_bytes: int = 0
    ingress_bytes: int = 0


class TaskEnd(msgspec.Struct, kw_only=True, frozen=True):
    """Sandboxes of a task that ended alike.

    Attributes:
        reason: As of ``SandboxInfo.end_reason``.
        fault: Whose fault it was; None: it was asked for, or agreed on.
    """

    reason: str | None = None
    fault: str | None = None
    count: int = 0


class TaskSandboxes(msgspec.Struct, kw_only=True, frozen=True):
    """The sandboxes of a task, counted.

    Attributes:
        live: How many have not ended.
        by_state: Those, by state.
        by_backend: Those, by backend.
        ended: The others.
    """

    live: int = 0
    by_state: dict[str, int] = {}
    by_backend: dict[str, int] = {}
    ended: tuple[TaskEnd, ...] = ()


class TaskOperationInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A pause, resume or kill of all sandboxes of a task.

    Attributes:
        kind: ``pause``, ``resume`` or ``kill``.
        finished_at: None: it is under way.
        superseded_by: The operation that took its place before it was finished.
        asked: Sandboxes that it is for.
        done: Sandboxes of which it is so now.
        failed: Sandboxes of which it is not; their outcomes say why.
        memory_freed_bytes: By a pause.
    """

    operation_id: str
    kind: str = ""
    created_at: datetime | None = None
    finished_at: datetime | None = None
    superseded_by: str | None = None
    asked: int = 0
    done: int = 0
    failed: int = 0
    memory_freed_bytes: int = 0


class TaskOutcome(msgspec.Struct, kw_only=True, frozen=True):
    """What became of one sandbox in an operation on its task.

    Attributes:
        seq: The order of outcomes, from 1 on.
        outcome: ``done``; ``already``: it was so before; ``gone``: it had ended; ``error``.
        error: Of an ``error``: as the server says, with ``code``, ``message`` and ``fault``.
        memory_freed_bytes: By a pause.
    """

    sandbox_id: str
    seq: int = 0
    outcome: str = "done"
    error: dict[str, Any] | None = None
    memory_freed_bytes: int = 0


class TaskInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A task as the server describes it.

    Attributes:
        state: ``open``; ``paused``: nothing is started in it; ``ended``: it takes no more.
        used_at: When a sandbox was last made in it.
        deadline_at: When it ends with all of its sandboxes.
        sandboxes_max: Sandboxes that may be made in it in all.
        cpu_seconds_max: Processor time after which it ends with all of its sandboxes.
        made: Sandboxes made in it; those whose start failed do not count.
        end_reason: ``killed``, ``task_deadline`` or ``task_budget``.
        operation: The newest; None in lists.
    """

    task_id: str
    state: str = "open"
    created_at: datetime | None = None
    used_at: datetime | None = None
    deadline_at: datetime | None = None
    sandboxes_max: int | None = None
    cpu_seconds_max: float | None = None
    made: int = 0
    ended_at: datetime | None = None
    end_reason: str | None = None
    sandboxes: TaskSandboxes = TaskSandboxes()
    usage: TaskUsage = TaskUsage()
    operation: TaskOperationInfo | None = None

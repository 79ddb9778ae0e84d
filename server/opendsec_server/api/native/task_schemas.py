# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of ``/v1/tasks``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from opendsec_server.contract import limits
from opendsec_server.contract.errors import Fault
from opendsec_server.contract.node import Backend, StateMode
from opendsec_server.contract.states import EndReason, State
from opendsec_server.store.task_operations import OperationKind, Outcome
from opendsec_server.store.tasks import TaskState

from .schemas import Time, TimeoutS

TaskId = Annotated[
    str, Meta(min_length=1, max_length=limits.TASK_ID_CHARS_MAX, examples=["train-7"])
]
Deadline = Annotated[
    str,
    Meta(
        max_length=64,
        description="RFC 3339. At this time every sandbox of the task ends, with the reason "
        "`task_deadline`, and it takes no more.",
        examples=["2031-05-01T12:00:00Z"],
    ),
]
SandboxesMax = Annotated[
    int,
    Meta(
        ge=1,
        le=2**31 - 1,
        description="Sandboxes that may be made in the task in all. Creates beyond it are refused "
        "(`task_budget_reached`); those that run go on.",
        examples=[1_000],
    ),
]
CpuSecondsMax = Annotated[
    float,
    Meta(
        gt=0,
        le=1e15,
        description="When its sandboxes have used so much processor time together, all of them "
        "end, with the reason `task_budget`, and it takes no more.",
        examples=[36_000],
    ),
]


class CreateTask(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A task with limits. One without is made by its first sandbox."""

    task_id: TaskId
    deadline_at: Deadline | None = None
    sandboxes_max: SandboxesMax | None = None
    cpu_seconds_max: CpuSecondsMax | None = None


class ChangeTask(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Limits to change: those that are left out stay, null removes one."""

    deadline_at: Deadline | UnsetType | None = UNSET
    sandboxes_max: SandboxesMax | UnsetType | None = UNSET
    cpu_seconds_max: CpuSecondsMax | UnsetType | None = UNSET
    reopen: Annotated[bool, Meta(description="Let a task that has ended take sandboxes again.")] = (
        False
    )


class PauseTask(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What the pause of each sandbox keeps."""

    mode: Annotated[StateMode, Meta(description="As of the pause of one sandbox.")] = "full"


class ResumeTask(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How its sandboxes run on."""

    timeout_s: Annotated[
        TimeoutS | None, Meta(description="Default: what each was created with.")
    ] = None


class KillTask(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Whether only its sandboxes end, or the task too."""

    end: Annotated[
        bool,
        Meta(
            description="The task ends with its sandboxes: creates that come late are refused "
            "(`task_ended`). False: it takes sandboxes at any time, during the kill too."
        ),
    ] = True


class TaskUsage(Struct, kw_only=True, frozen=True):
    """What the sandboxes of a task have used, ended ones too."""

    cpu_seconds: float
    memory_mb_seconds: Annotated[
        float, Meta(description="MiB held, without file cache, times seconds.")
    ]
    disk_bytes: Annotated[int, Meta(description="Held now by those that have not ended.")]
    egress_bytes: Annotated[
        int,
        Meta(description="Sent on their network links; answers to the API are among them."),
    ]
    ingress_bytes: int


class TaskEnd(Struct, kw_only=True, frozen=True):
    """Sandboxes of a task that ended alike."""

    reason: EndReason | None
    fault: Annotated[Fault | None, Meta(description="Null: it was asked for, or agreed on.")]
    count: int


class TaskSandboxes(Struct, kw_only=True, frozen=True):
    """The sandboxes of a task, counted."""

    live: int
    by_state: Annotated[dict[State, int], Meta(description="Of those that have not ended.")]
    by_backend: Annotated[dict[Backend, int], Meta(description="Of those that have not ended.")]
    ended: list[TaskEnd]


class TaskOperation(Struct, kw_only=True, frozen=True):
    """A pause, resume or kill of all sandboxes of a task."""

    operation_id: str
    kind: OperationKind
    created_at: Time
    finished_at: Time | None
    superseded_by: Annotated[
        str | None, Meta(description="The operation that took its place before it was finished.")
    ]
    asked: Annotated[int, Meta(description="Sandboxes that it is for.")]
    done: int
    failed: int
    memory_freed_bytes: int


class TaskOperationList(Struct, kw_only=True, frozen=True):
    """Operations on a task, newest first."""

    operations: list[TaskOperation]


class Task(Struct, kw_only=True, frozen=True):
    """One task."""

    task_id: str
    state: TaskState
    created_at: Time
    used_at: Annotated[str, Meta(description="When a sandbox was last made in it. RFC 3339.")]
    deadline_at: Time | None
    sandboxes_max: int | None
    cpu_seconds_max: float | None
    made: Annotated[
        int,
        Meta(description="Sandboxes made in it; those whose start failed do not count."),
    ]
    ended_at: Time | None
    end_reason: EndReason | None
    sandboxes: TaskSandboxes
    usage: TaskUsage
    operation: Annotated[
        TaskOperation | None, Meta(description="The newest. Null in lists, too.")
    ] = None


class TaskList(Struct, kw_only=True, frozen=True):
    """One page of tasks."""

    tasks: list[Task]
    next_cursor: str | None


class TaskLine(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A line of an operation's answer: one of these."""

    operation: Annotated[TaskOperation | None, Meta(description="The first line.")] = None
    sandbox_id: str | None = None
    seq: Annotated[
        int | None,
        Meta(description="With `sandbox_id`: the order of outcomes, from 1 on. `after` takes it."),
    ] = None
    outcome: Annotated[
        Outcome | None,
        Meta(
            description="`already`: it was so before. `gone`: it had ended meanwhile. `error`: "
            "`error` says why."
        ),
    ] = None
    memory_freed_bytes: int | None = None
    error: dict[str, Any] | None = None
    progress: Annotated[TaskOperation | None, Meta(description="Counts until now.")] = None


WaitFor = Literal["ended", "running", "paused", "idle"]

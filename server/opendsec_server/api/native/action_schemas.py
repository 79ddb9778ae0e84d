# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of actions and trajectories."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from opendsec_server.contract import limits
from opendsec_server.contract.errors import Fault
from opendsec_server.contract.node import StateMode
from opendsec_server.control.trajectories import params
from opendsec_server.control.trajectories.forward import How, OfUnknown
from opendsec_server.control.trajectories.results import ActionError, ActionResult
from opendsec_server.store.trajectories import ActionKind, ActionState

from .schemas import StringMap

ActionId = Annotated[
    str,
    Meta(
        pattern=f"^{params.ACTION_ID_RE.pattern}$",
        description="The caller's name for it, once in a sandbox.",
        examples=["rollout-17.step-3"],
    ),
]
WaitS = Annotated[
    float,
    Meta(
        ge=0,
        le=params.WAIT_S_MAX,
        description="Answer after so many seconds, also if it still runs. Ask again then.",
    ),
]


class CreateAction(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Something to do in a sandbox, once. Which fields count depends on `kind`."""

    action_id: ActionId
    kind: ActionKind
    rollout_id: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=limits.TASK_ID_CHARS_MAX,
                description="The trajectory it belongs to, which may go over several sandboxes.",
            ),
        ]
        | None
    ) = None
    step: Annotated[int, Meta(ge=0, le=params.STEP_MAX)] | None = None
    once: Annotated[
        bool,
        Meta(
            description="It has effects outside of the sandbox: a fast-forward takes over its "
            "result, and does not run it again."
        ),
    ] = False
    argv: Annotated[
        list[str],
        Meta(
            max_length=params.ARGV_MAX,
            description="`exec`: program and arguments; no shell is added.",
            examples=[["python3", "-c", "print(1)"]],
        ),
    ] = []
    user: Annotated[str, Meta(min_length=1, max_length=params.USER_CHARS_MAX)] | None = None
    workdir: Annotated[str, Meta(max_length=params.PATH_CHARS_MAX)] | None = None
    env: Annotated[
        StringMap, Meta(description="`exec`: added to the sandbox's. Kept with the action.")
    ] = {}
    timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            le=params.EXEC_TIMEOUT_S_MAX,
            description="`exec`: after it the whole process tree is killed.",
        ),
    ] = params.EXEC_TIMEOUT_S_DEFAULT
    output_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=params.OUTPUT_BYTES_MAX,
            description="`exec`: kept of each of stdout and stderr: the first and the last half.",
        ),
    ] = params.OUTPUT_BYTES_DEFAULT
    path: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=params.PATH_CHARS_MAX,
                description="`write_file`, `read_file`.",
            ),
        ]
        | None
    ) = None
    content: Annotated[
        str | None,
        Meta(description=f"`write_file`: base64, {params.FILE_BYTES_MAX} bytes at most."),
    ] = None
    mode: Annotated[StateMode, Meta(description="`snapshot`: what it holds.")] = "filesystem"
    name: Annotated[str | None, Meta(description="`snapshot`: its name.")] = None
    wait_s: WaitS = params.WAIT_S_DEFAULT


class ActionAsked(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What an action does."""

    argv: list[str] = []
    user: str | None = None
    workdir: str | None = None
    env: StringMap = {}
    timeout_s: float | None = None
    output_bytes: int | None = None
    path: str | None = None
    content: Annotated[str | None, Meta(description="Base64. In exports only.")] = None
    content_sha256: str | None = None
    bytes: int | None = None
    mode: StateMode | None = None
    name: str | None = None


class Action(Struct, kw_only=True, frozen=True):
    """Something that was done in a sandbox."""

    sandbox_id: str
    action_id: str
    seq: Annotated[int, Meta(description="Its place in the sandbox's log.")]
    kind: ActionKind
    state: Annotated[
        ActionState,
        Meta(
            description="`done`: it ended, and how is known, or it cannot be done. `not_run`: "
            "nothing of it happened; the same id may be sent again. `unknown`: whether it "
            "happened, or how it ended, is not known; it is never run again by itself."
        ),
    ]
    task_id: str | None
    rollout_id: str | None
    step: int | None
    once: bool
    attempt: int
    asked: ActionAsked
    recorded_at: str
    ended_at: str | None
    result: ActionResult | None
    error: ActionError | None
    fault: Annotated[
        Fault | None,
        Meta(description="Whose it is that it failed. None: it did what it was asked for."),
    ]
    cause: Annotated[
        str | None,
        Meta(
            description="In one word: `ok`, `exit_code`, `signal`, `time_out`, `oom_kill`, "
            "`no_room`, `sandbox_lost`, …",
        ),
    ]
    evidence: Annotated[dict[str, Any], Meta(description="The figures that show it.")]
    origin: Annotated[
        str | None, Meta(description="The sandbox whose action a fast-forward repeated here.")
    ]
    replayed: Annotated[bool, Meta(description="It ran again here; false: only its record.")]
    resolved_by: Literal["guest", "caller"] | None


class ActionList(Struct, kw_only=True, frozen=True):
    """Some actions of a sandbox, in order."""

    actions: list[Action]
    next_after: Annotated[int | None, Meta(description="`after` of the next page.")]


class ResolveAction(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What became of an action."""

    state: Annotated[
        Literal["done", "not_run"] | None,
        Meta(description="None: ask the sandbox. Else the caller knows."),
    ] = None
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None


class FastForward(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How to bring a sandbox to where another one was."""

    source: Annotated[str, Meta(max_length=64, description="The other sandbox; may have ended.")]
    through: Annotated[
        str | None, Meta(description="The last action to take over. None: all of the log.")
    ] = None
    holds: Annotated[
        str | None,
        Meta(
            description="The new sandbox holds the effects of actions up to this one. Default: "
            "those before the snapshot that it was made from."
        ),
    ] = None
    unknown: Annotated[
        OfUnknown,
        Meta(description="What to do with actions of which nobody knows whether they happened."),
    ] = "stop"


class ForwardLine(Struct, kw_only=True, frozen=True):
    """One step of a fast-forward."""

    index: int
    of: int
    action_id: str
    step: int | None
    how: How
    diverged: bool
    cause: str | None


class Trajectory(Struct, kw_only=True, frozen=True):
    """The actions with one rollout id, over all sandboxes."""

    rollout_id: str
    task_id: str | None
    sandboxes: int
    actions: int
    open: Annotated[int, Meta(description="Actions that run, or whose outcome is not known.")]
    last_step: int | None
    began_at: str
    last_at: str


class TrajectoryList(Struct, kw_only=True, frozen=True):
    """A project's trajectories, by their ids."""

    trajectories: list[Trajectory]
    next_after: str | None


class OutcomeCount(Struct, kw_only=True, frozen=True):
    """How many of one kind."""

    state: str
    cause: str | None
    fault: Fault | None
    count: int


class OutcomeSum(Struct, kw_only=True, frozen=True):
    """Outcomes of a task's sandboxes, or of its actions."""

    total: int
    user: int
    platform: int
    capacity: int
    none: Annotated[int, Meta(description="Nobody's fault: it went well, goes on, or was asked.")]
    unknown: Annotated[int, Meta(description="Of these, how many have an unknown outcome.")]
    by_cause: list[OutcomeCount]


class TaskOutcomes(Struct, kw_only=True, frozen=True):
    """What became of a task, by whose fault it was."""

    task_id: str
    sandboxes: OutcomeSum
    actions: OutcomeSum

# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of batches and of bulk operations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from opendsec_server.contract import limits
from opendsec_server.contract.errors import Fault

from .schemas import CreateSandbox, Error, Labels, Sandbox, TimeoutS

BatchState = Literal["running", "cancelling", "done"]
SandboxId = Annotated[str, Meta(max_length=64)]


class CreateBatch(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Sandboxes to make. One of `count` and `items`."""

    count: Annotated[
        Annotated[int, Meta(ge=1, le=limits.BATCH_ITEMS_MAX)] | None,
        Meta(description="How many, all as `sandbox` says.", examples=[1000]),
    ] = None
    sandbox: Annotated[
        CreateSandbox, Meta(description="What all have in common: as in `POST /v1/sandboxes`.")
    ] = CreateSandbox()
    items: Annotated[
        Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=limits.BATCH_ITEMS_MAX)]
        | None,
        Meta(
            description="One for each sandbox: the fields of `sandbox` that it has otherwise. "
            "`env` and `metadata` are added to the common ones, every other field replaces it.",
            examples=[[{"metadata": {"rollout": "0"}}, {"metadata": {"rollout": "1"}}]],
        ),
    ] = None
    wait_s: Annotated[
        int,
        Meta(
            ge=1,
            le=limits.BATCH_WAIT_S_MAX,
            description="How long an item may wait for its turn. Its time to start, and its "
            "`timeout_s`, begin with the turn.",
        ),
    ] = limits.BATCH_WAIT_S_DEFAULT


class BatchFailure(Struct, kw_only=True, frozen=True):
    """Items of a batch that failed for the same cause."""

    code: Annotated[str, Meta(description="Of their errors.", examples=["quota_exceeded"])]
    fault: Fault
    count: int


class Batch(Struct, kw_only=True, frozen=True):
    """Many creates asked for in one call. Always: `asked` = `made` + `failed` + `starting` +
    `waiting`."""

    batch_id: Annotated[str, Meta(pattern="^b[a-z0-9]{19}$", examples=["b0123456789abcdefghi"])]
    project_id: str
    state: BatchState
    asked: int
    made: int
    failed: int
    starting: int
    waiting: int
    created_at: str
    cancelled_at: str | None
    finished_at: str | None
    failures: Annotated[
        list[BatchFailure] | None,
        Meta(
            description="The failed ones by cause, most frequent first. Null in lists and in lines."
        ),
    ] = None


class BatchList(Struct, kw_only=True, frozen=True):
    """A page of batches."""

    batches: list[Batch]
    next_cursor: Annotated[str | None, Meta(description="None: this is the last page.")]


class BatchLine(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A line of a batch's results: the batch itself, first; then each item's outcome as it comes.
    The last line is `{"done": {"asked", "made", "failed"}}`."""

    batch: Batch | None = None
    index: Annotated[int | None, Meta(description="Of the item, from 0 on.")] = None
    seq: Annotated[
        int | None,
        Meta(description="The order in which outcomes came, from 1 on: where to go on reading."),
    ] = None
    sandbox: Annotated[Sandbox | None, Meta(description="It was made; as it is now.")] = None
    error: Annotated[Error | None, Meta(description="It was not made.")] = None


class Selection(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Sandboxes of the project that have not ended. Either `ids`, or at least one of the others;
    all that are given must fit."""

    ids: Annotated[
        Annotated[list[SandboxId], Meta(min_length=1, max_length=limits.BATCH_ITEMS_MAX)] | None,
        Meta(description="These. Of each is answered, whatever became of it."),
    ] = None
    task_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=limits.TASK_ID_CHARS_MAX)] | None,
        Meta(description="The caller's job.", examples=["train-7"]),
    ] = None
    labels: Annotated[Labels, Meta(description="It has all of them.")] = []
    batch_id: Annotated[str | None, Meta(description="It was made by this batch.")] = None


class BulkKill(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Sandboxes to end."""

    select: Selection


class BulkTimeout(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Sandboxes to give a new end, sooner or later than before."""

    select: Selection
    timeout_s: TimeoutS


class BulkExec(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A command to run in many sandboxes."""

    select: Selection
    command: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=limits.BULK_COMMAND_CHARS_MAX,
            description="Run by `/bin/bash -lc`, or `/bin/sh -lc` where there is none.",
            examples=["pytest -q"],
        ),
    ]
    user: Annotated[
        Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARS_MAX)] | None,
        Meta(description="Default: the sandbox's."),
    ] = None
    workdir: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4_096)] | None,
        Meta(description="Default: the sandbox's."),
    ] = None
    env: Annotated[dict[str, str], Meta(max_length=limits.ENV_KEYS_MAX)] = {}
    timeout_s: Annotated[
        int,
        Meta(
            ge=1,
            le=limits.BULK_EXEC_TIMEOUT_S_MAX,
            description="After it the command's whole process tree is killed.",
        ),
    ] = 60
    output_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=limits.BULK_OUTPUT_BYTES_MAX,
            description="Of stdout and of stderr each the first so many bytes are kept.",
        ),
    ] = limits.BULK_OUTPUT_BYTES_DEFAULT
    concurrency: Annotated[
        int,
        Meta(
            ge=1,
            le=limits.BULK_CONCURRENCY_MAX,
            description="Commands that run at one time.",
        ),
    ] = limits.BULK_CONCURRENCY_DEFAULT


class CommandResult(Struct, kw_only=True, frozen=True):
    """What a command came to. What is no UTF-8 in its output is replaced."""

    exit_code: Annotated[
        int | None,
        Meta(
            description="As a shell counts it: 128 + signal when one ended it. None: its time was "
            "over, and it was killed."
        ),
    ]
    signal: int | None
    timed_out: bool
    stdout: str
    stderr: str
    stdout_cut: Annotated[bool, Meta(description="There was more than `output_bytes`.")]
    stderr_cut: bool
    took_s: float


class BulkLine(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A line of a bulk operation: what became of one sandbox. The last line is
    `{"done": {"selected", "ok", "failed"}}`."""

    sandbox_id: str = ""
    state: Annotated[str | None, Meta(description="After a kill or a new end.")] = None
    end_at: Annotated[str | None, Meta(description="After a new end.")] = None
    result: Annotated[CommandResult | None, Meta(description="Of a command.")] = None
    error: Error | None = None

# SPDX-License-Identifier: Apache-2.0
"""Actions of sandboxes, what came of them, and whose fault it was."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any, Literal

import msgspec

from ._errors import Fault

ActionKind = Literal["exec", "write_file", "read_file", "snapshot"]
ActionState = Literal["running", "done", "not_run", "unknown"]
OfUnknown = Literal["stop", "skip", "run"]


class ActionOutput(msgspec.Struct, kw_only=True, frozen=True):
    """One output of a command. Where it was too long, its middle is missing.

    Attributes:
        head: Its beginning; all of it, if ``cut_bytes`` is 0.
        tail: Its end.
        bytes: All that was written, also what is missing.
        cut_bytes: Missing between head and tail.
        encoding: ``base64``: head and tail are not text.
    """

    head: str = ""
    tail: str = ""
    bytes: int = 0
    cut_bytes: int = 0
    encoding: Literal["utf-8", "base64"] = "utf-8"

    @property
    def text(self) -> str:
        """As text, with a mark where something is missing; what is not UTF-8 becomes U+FFFD."""
        head, tail = self.head, self.tail
        if self.encoding == "base64":
            head, tail = (
                base64.b64decode(part).decode("utf-8", "replace") for part in (head, tail)
            )
        return f"{head}\n[… {self.cut_bytes} bytes cut …]\n{tail}" if self.cut_bytes else head


class _Result(msgspec.Struct, kw_only=True, frozen=True):
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    stdout: ActionOutput = ActionOutput()
    stderr: ActionOutput = ActionOutput()
    content: str | None = None
    content_sha256: str | None = None
    bytes: int | None = None
    snapshot_id: str | None = None


class Action(msgspec.Struct, kw_only=True, frozen=True):
    """Something that was done in a sandbox, as the server recorded it.

    Attributes:
        seq: Its place in the sandbox's log.
        state: ``done``: it ended, and how is known, or it cannot be done (``error``).
            ``not_run``: nothing of it happened. ``unknown``: whether it happened, or how it
            ended, is not known.
        asked: What it does.
        error: Why it was not done.
        fault: Whose it is that it failed. None: it did what it was asked for.
        cause: In one word: ``ok``, ``exit_code``, ``signal``, ``time_out``, ``oom_kill``, ….
        evidence: The figures that show it.
        origin: The sandbox whose action a fast-forward repeated here.
        replayed: It ran again here; False: only its record was taken over.
        resolved_by: Who found out what became of an unknown one.
    """

    sandbox_id: str
    action_id: str
    seq: int
    kind: ActionKind
    state: ActionState
    task_id: str | None = None
    rollout_id: str | None = None
    step: int | None = None
    once: bool = False
    attempt: int = 1
    asked: dict[str, Any] = {}
    recorded_at: datetime | None = None
    ended_at: datetime | None = None
    result: _Result | None = None
    error: dict[str, Any] | None = None
    fault: Fault | None = None
    cause: str | None = None
    evidence: dict[str, Any] = {}
    origin: str | None = None
    replayed: bool = False
    resolved_by: Literal["guest", "caller"] | None = None

    @property
    def ok(self) -> bool:
        """Whether it did what it was asked for; a command: exited with 0."""
        return self.state == "done" and self.error is None and self.fault is None

    @property
    def exit_code(self) -> int | None:
        """Of a command that exited by itself."""
        return None if self.result is None else self.result.exit_code

    @property
    def signal(self) -> int | None:
        """That ended a command."""
        return None if self.result is None else self.result.signal

    @property
    def timed_out(self) -> bool:
        """Whether a command was killed because its time was over."""
        return self.result is not None and self.result.timed_out

    @property
    def stdout(self) -> str:
        """Of a command, with a mark where something is missing."""
        return "" if self.result is None else self.result.stdout.text

    @property
    def stderr(self) -> str:
        """Of a command, with a mark where something is missing."""
        return "" if self.result is None else self.result.stderr.text

    @property
    def truncated(self) -> bool:
        """Whether something of a command's output is missing."""
        result = self.result
        return result is not None and bool(result.stdout.cut_bytes or result.stderr.cut_bytes)

    @property
    def content(self) -> bytes | None:
        """Of a file that was read."""
        content = None if self.result is None else self.result.content
        return None if content is None else base64.b64decode(content)

    @property
    def snapshot_id(self) -> str | None:
        """Of a snapshot that was taken."""
        return None if self.result is None else self.result.snapshot_id


class ForwardStep(msgspec.Struct, kw_only=True, frozen=True):
    """What a fast-forward did with one action.

    Attributes:
        index: Which, from 0 on.
        of: How many there are.
        how: ``copied``: its record was taken over. ``ran``: it was run again. ``skipped``.
        diverged: It ran again, and ended in another way than before.
    """

    index: int
    of: int
    action_id: str
    step: int | None = None
    how: Literal["copied", "ran", "skipped"]
    diverged: bool = False
    cause: str | None = None


class TrajectoryInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The actions with one rollout id, over all sandboxes.

    Attributes:
        open: How many run, or have an unknown outcome.
    """

    rollout_id: str
    task_id: str | None = None
    sandboxes: int
    actions: int
    open: int
    last_step: int | None = None
    began_at: datetime
    last_at: datetime


class OutcomeCount(msgspec.Struct, kw_only=True, frozen=True):
    """How many of one kind."""

    state: str
    cause: str | None = None
    fault: Fault | None = None
    count: int


class OutcomeSum(msgspec.Struct, kw_only=True, frozen=True):
    """Outcomes by whose fault they are.

    Attributes:
        none: Nobody's: it went well, goes on, or was asked for.
        unknown: How many of all have an unknown outcome.
    """

    total: int
    user: int
    platform: int
    capacity: int
    none: int
    unknown: int
    by_cause: list[OutcomeCount] = []


class TaskOutcomes(msgspec.Struct, kw_only=True, frozen=True):
    """What became of a task's sandboxes and actions."""

    task_id: str
    sandboxes: OutcomeSum
    actions: OutcomeSum

# SPDX-License-Identifier: Apache-2.0
"""Batches of creates, and what one thing done to many sandboxes came to."""

from __future__ import annotations

from datetime import datetime

import msgspec

from ._errors import OpendsecError


class BatchFailure(msgspec.Struct, kw_only=True, frozen=True):
    """Items of a batch that failed for the same cause.

    Attributes:
        code: Of their errors.
        fault: ``user``, ``platform`` or ``capacity``.
    """

    code: str
    fault: str
    count: int


class BatchInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A batch of creates. ``asked`` is the sum of ``made``, ``failed``, ``starting`` and
    ``waiting``.

    Attributes:
        state: ``running``, ``cancelling`` or ``done``.
        made: Sandboxes that were made, whatever became of them since.
        failed: Items that came out as an error.
        starting: Items that have begun.
        waiting: Items whose turn has not come.
        failures: The failed ones by cause, most frequent first; None in lists.
    """

    batch_id: str
    project_id: str = ""
    state: str = "running"
    asked: int = 0
    made: int = 0
    failed: int = 0
    starting: int = 0
    waiting: int = 0
    created_at: datetime | None = None
    cancelled_at: datetime | None = None
    finished_at: datetime | None = None
    failures: list[BatchFailure] | None = None

    @property
    def done(self) -> bool:
        """Whether the outcome of every item is known."""
        return self.finished_at is not None


class BulkCommandResult(msgspec.Struct, kw_only=True, frozen=True):
    """How a command ended in one of many sandboxes.

    Attributes:
        exit_code: 128 + n if signal n ended it. None: its time was over, and it was killed.
        stdout: Its output, up to the limit; what is not UTF-8 becomes U+FFFD.
        stdout_cut: Whether it wrote more.
    """

    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    stdout: str = ""
    stderr: str = ""
    stdout_cut: bool = False
    stderr_cut: bool = False
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0


class BulkOutcome(msgspec.Struct, kw_only=True, frozen=True):
    """What became of one of many sandboxes.

    Attributes:
        sandbox_id: Which.
        state: After a kill or a new end.
        result: Of a command that ran, also of one that failed.
        error: It was not done.
    """

    sandbox_id: str
    state: str | None = None
    result: BulkCommandResult | None = None
    error: OpendsecError | None = None

    @property
    def ok(self) -> bool:
        """Whether it was done; a command also has to exit with 0."""
        return self.error is None and (self.result is None or self.result.ok)

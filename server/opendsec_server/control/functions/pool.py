# SPDX-License-Identifier: AGPL-3.0-only
"""One pool at work: its queue, its workers, and what hinders it."""

from __future__ import annotations

import time
from collections.abc import Callable

from opendsec_server.contract.errors import OpendsecError
from opendsec_server.control.iam import Caller
from opendsec_server.store.functions import PoolRecord

from .model import Code, Limits, Outcome
from .shares import Lanes
from .worker import Worker

RETRY_BASE_S = 0.5
RETRY_MAX_S = 20.0
PATIENCE_S = 60.0
"""Calls of a pool that has no worker, and cannot get one, fail after so long."""


class Job:
    """A call that waits or runs."""

    __slots__ = ("code", "deliver", "item", "lane", "limits", "over", "since", "size_bytes")

    def __init__(
        self, lane: str, code: Code, item: bytes, limits: Limits, deliver: Callable[[Outcome], None]
    ) -> None:
        self.lane = lane
        self.code = code
        self.item = item
        self.limits = limits
        self.deliver = deliver
        self.size_bytes = len(item)
        self.since = time.monotonic()
        self.over = False

    def finish(self, outcome: Outcome) -> None:
        """Hand the outcome on, once."""
        if not self.over:
            self.over = True
            self.deliver(outcome)


class Pool:
    """See the module. Only bookkeeping; ``service`` decides."""

    def __init__(self, record: PoolRecord, caller: Caller, *, kept: bool = True) -> None:
        self.record = record
        self.kept = kept
        """The store has it. False: the one that every project has without asking."""
        self.caller = caller
        """In whose name workers are made: the last one who called."""
        self.lanes: Lanes[Job] = Lanes()
        self.idle: list[Worker] = []
        self.busy: dict[Worker, Job] = {}
        self.starting = 0
        self.ending = 0
        self.deleted = False
        self.python = ""
        self.finished = 0
        self.retry_at = 0.0
        self.failures = 0
        self.last_error: OpendsecError | None = None

    @property
    def live(self) -> int:
        """Workers that there are or soon will be."""
        return len(self.idle) + len(self.busy) + self.starting

    @property
    def running(self) -> int:
        """Calls that run. A worker that cleans up after one is free in a moment."""
        return sum(not job.over for job in self.busy.values())

    @property
    def wanted(self) -> int:
        """How many workers it could use now."""
        spec = self.record.spec
        return min(spec.workers_max, max(spec.workers_min, len(self.lanes) + self.running))

    def start_failed(self, error: OpendsecError) -> bool:
        """Note that a worker could not be made. True: what waits must fail with it."""
        self.failures += 1
        self.last_error = error
        self.retry_at = time.monotonic() + min(RETRY_MAX_S, RETRY_BASE_S * 2**self.failures)
        if self.idle or self.busy or self.starting:
            return False
        return not error.retryable or error.fault == "user"

    def start_worked(self) -> None:
        """Note that workers can be made."""
        self.failures = 0
        self.last_error = None
        self.retry_at = 0.0

    def out_of_patience(self, now: float) -> OpendsecError | None:
        """Why what waits must fail now. None: it may wait on."""
        if self.last_error is None or self.idle or self.busy or self.starting:
            return None
        return self.last_error if self.failures and self._oldest_waits(now) else None

    def _oldest_waits(self, now: float) -> bool:
        first = self.lanes.first()
        return first is not None and now - first.since > PATIENCE_S

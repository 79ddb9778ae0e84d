# SPDX-License-Identifier: AGPL-3.0-only
"""The one place where a sandbox's recorded state changes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog

from opendsec_server.contract.errors import Fault
from opendsec_server.contract.node import SandboxStatus
from opendsec_server.contract.states import TERMINAL, EndReason, State
from opendsec_server.store.changes import apply_changes
from opendsec_server.store.records import SandboxRecord, StateChange
from opendsec_server.store.store import Store, Work

from .invalidations import Invalidations
from .metrics import ControlMetrics

log = structlog.get_logger(__name__)

_FAULTS: dict[EndReason, Fault] = {
    EndReason.EXITED: "user",
    EndReason.OOM: "user",
    EndReason.START_FAILED: "platform",
    EndReason.START_TIMEOUT: "platform",
    EndReason.NO_ROOM: "capacity",
    EndReason.NODE_UNAVAILABLE: "platform",
    EndReason.LOST: "platform",
    EndReason.KERNEL_PANIC: "platform",
    EndReason.VMM_FAILED: "platform",
}
"""An end that was asked for, or agreed on as a time-out, is nobody's fault."""


def fault_of(reason: EndReason | None) -> Fault | None:
    """Whose fault it is that a sandbox ended for this reason."""
    return None if reason is None else _FAULTS.get(reason)


PAUSES = frozenset({State.PAUSING, State.PAUSED, State.RESUMING})
"""A pause, from its begin to the end of the resume."""


def change_from_status(
    status: SandboxStatus, *, cause: str, now: float, again: bool = False
) -> StateChange:
    """The change that a node's word on a sandbox means for its record.

    Args:
        status: The node's word.
        cause: Who asked or saw.
        now: The time of a change that the status does not date.
        again: It ran before: that it runs is not its start.
    """
    at = status.ended_at if status.state in TERMINAL else status.started_at
    if again or status.state in PAUSES:
        at = now
    return StateChange(
        sandbox_id=status.sandbox_id,
        state=status.state,
        at=now if at is None else at,
        cause=cause,
        reason=status.reason,
        message=status.message,
        fault=fault_of(status.reason),
        started_at=status.started_at,
        end_at=status.end_at,
        paused_mode=status.pause_mode,
        accelerator=status.accelerator,
        vmm=status.vmm,
        seq=status.seq,
        usage=status.usage,
    )


def with_status(record: SandboxRecord, status: SandboxStatus) -> SandboxRecord:
    """The record with what the node has just said: true before the store has it."""
    return msgspec.structs.replace(
        record,
        state=status.state,
        started_at=record.started_at or status.started_at,
        end_at=status.end_at,
        ended_at=status.ended_at,
        end_reason=status.reason if status.state in TERMINAL else None,
        message=status.message if status.state in TERMINAL else None,
        paused_mode=status.pause_mode if status.state in PAUSES else None,
        accelerator=status.accelerator,
        vmm=status.vmm or record.vmm,
        node_seq=status.seq,
    )


class Ledger:
    """Applies changes to the store, and tells edges, metrics and the log."""

    def __init__(self, store: Store, invalidations: Invalidations, metrics: ControlMetrics) -> None:
        self._store = store
        self._invalidations = invalidations
        self._metrics = metrics

    async def apply(
        self, changes: Sequence[StateChange], *, first: Work | None = None
    ) -> list[StateChange]:
        """Apply changes in one transaction; returns those that were news.

        Args:
            changes: What is known.
            first: What else the transaction is to do, before.

        Raises:
            StoreUnavailable: none was applied. Edges were told all the same.
        """
        for change in changes:
            # Of what the node reported the edges know already: the watcher told them first.
            if change.state is not State.RUNNING and change.cause != "node":
                self._invalidations.publish(change.sandbox_id)
        applied = await apply_changes(self._store, changes, first=first)
        for change in applied:
            if change.state in TERMINAL:
                self._metrics.ended.labels(change.reason or change.state).inc()
                log.info(
                    "sandbox ended",
                    sandbox_id=change.sandbox_id,
                    state=change.state,
                    reason=change.reason,
                    message=change.message,
                    cause=change.cause,
                )
        return applied

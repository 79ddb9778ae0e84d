# SPDX-License-Identifier: AGPL-3.0-only
"""States of a sandbox and the one table of allowed transitions.

``pending → starting → running ⇄ pausing/paused/resuming → stopping → ended(reason)``,
plus ``failed(fault)``. Every state accepts delete.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a sandbox is in its life."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPING = "stopping"
    ENDED = "ended"
    FAILED = "failed"


class EndReason(StrEnum):
    """Why a sandbox ended. Kept with the record, also after the sandbox is gone."""

    KILLED = "killed"  # by request
    TIMEOUT = "timeout"  # its absolute end time was reached
    IDLE = "idle"  # no request for idle_timeout_s
    EXITED = "exited"  # its PID 1 ended by itself
    OOM = "oom"  # the kernel killed PID 1 at the memory limit
    KERNEL_PANIC = "kernel_panic"  # the guest's own kernel gave up
    VMM_FAILED = "vmm_failed"  # the program behind the virtual machine ended or was killed
    START_FAILED = "start_failed"  # for none of the reasons below
    START_TIMEOUT = "start_timeout"  # it was not ready in time
    IMAGE_PULL = "image_pull"  # its image could not be had
    NO_ROOM = "no_room"  # no node had room for it
    NODE_UNAVAILABLE = "node_unavailable"  # its node was lost while it started
    TASK_DEADLINE = "task_deadline"  # the deadline of its task was reached
    TASK_BUDGET = "task_budget"  # the budget of its task was used up
    LOST = "lost"  # found gone at reconcile (host reboot, kernel kill)


TERMINAL = frozenset({State.ENDED, State.FAILED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.STARTING, State.STOPPING, State.ENDED, State.FAILED}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPING, State.ENDED, State.FAILED}),
    State.RUNNING: frozenset({State.PAUSING, State.STOPPING, State.ENDED, State.FAILED}),
    State.PAUSING: frozenset(
        {State.PAUSED, State.RUNNING, State.STOPPING, State.ENDED, State.FAILED}
    ),
    State.PAUSED: frozenset({State.RESUMING, State.STOPPING, State.ENDED, State.FAILED}),
    State.RESUMING: frozenset(
        {State.RUNNING, State.PAUSED, State.STOPPING, State.ENDED, State.FAILED}
    ),
    State.STOPPING: frozenset({State.ENDED, State.FAILED}),
    State.ENDED: frozenset(),
    State.FAILED: frozenset(),
}

TRANSITIONS_KEPT_MAX = 100
"""How many transitions of one sandbox are kept for its record."""


def can_move(source: State, target: State) -> bool:
    """Whether the table allows ``source → target``."""
    return target in TRANSITIONS[source]

# SPDX-License-Identifier: AGPL-3.0-only
"""After a start: adopt what lives, bring to its end what is dead, remove what has no owner."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import structlog

from opendsec_server.contract.node import StateMode
from opendsec_server.contract.states import EndReason, State

from .journal import Record
from .lifecycle import Lifecycle
from .sandbox import Sandbox, placeholder
from .services import Services
from .suspend import Suspend

log = structlog.get_logger("opendsec.node")

_SUSPENDED = (State.PAUSING, State.PAUSED, State.RESUMING)


@dataclass
class Reconciliation:
    """What was found.

    Attributes:
        adopted: Ids of sandboxes whose processes live on.
        slots: Numbers of their slots.
        interrupted: Adopted, in the middle of an operation.
        put_away: Nothing of them runs, or nothing that could go on.
        unfinished: Dead or half-made, with what is to be said of them.
    """

    adopted: list[str] = field(default_factory=list)
    slots: set[int] = field(default_factory=set)
    interrupted: list[Sandbox] = field(default_factory=list)
    put_away: list[Sandbox] = field(default_factory=list)
    unfinished: list[tuple[Sandbox, State, EndReason, str]] = field(default_factory=list)


async def adopt_living(services: Services, lifecycle: Lifecycle) -> Reconciliation:
    """First half, before slots are made: take back every sandbox that still runs."""
    found = Reconciliation()
    for record in await services.journal.live():
        box = Sandbox(record)
        lifecycle.boxes[box.sandbox_id] = box
        if _can_be_adopted(lifecycle, box) and lifecycle.backend_of(box).adopt(box):
            found.adopted.append(box.sandbox_id)
            assert record.slot is not None
            found.slots.add(record.slot)
            lifecycle.watch(box)
            if record.state in (State.PAUSING, State.RESUMING):
                found.interrupted.append(box)
        elif record.state in _SUSPENDED and record.pause_mode is not None:
            found.put_away.append(box)
        else:
            found.unfinished.append((box, *_verdict(services, record)))
    return found


def _can_be_adopted(lifecycle: Lifecycle, box: Sandbox) -> bool:
    """Whether a living process of it may go on: it must be the whole sandbox, not half of one."""
    if box.state is State.RESUMING:
        capabilities = lifecycle.backend_of(box).info.capabilities
        return not capabilities.pause_survives_reboot and box.record.pause_mode == "full"
    return box.state in (State.RUNNING, State.PAUSING, State.PAUSED)


def _verdict(services: Services, record: Record) -> tuple[State, EndReason, str]:
    if record.state is State.STOPPING:
        return (
            State.FAILED if record.reason is EndReason.START_FAILED else State.ENDED,
            record.reason or EndReason.KILLED,
            record.message or "the node restarted while it was ending",
        )
    if record.state in (State.PENDING, State.STARTING):
        return State.FAILED, EndReason.START_FAILED, "the node restarted while it was starting"
    if record.boot_id != services.boot_id:
        return State.ENDED, EndReason.LOST, "the machine was restarted"
    return State.ENDED, EndReason.LOST, "its first process ended while the node was away"


async def remove_dead(
    services: Services, lifecycle: Lifecycle, suspend: Suspend, found: Reconciliation
) -> None:
    """Second half: what is dead or half-made, and what nobody owns, goes."""
    await asyncio.gather(
        *(lifecycle.finish_interrupted(*item) for item in found.unfinished),
        *(suspend.continue_interrupted(box) for box in found.interrupted),
        *(_settle_paused(services, suspend, box) for box in found.put_away),
    )
    strangers = lifecycle.known() | set(services.pool.subvolumes())
    for sandbox_id in sorted(strangers - lifecycle.boxes.keys()):
        log.warning("removing what no sandbox owns", sandbox_id=sandbox_id)
        await lifecycle.remove_stranger(placeholder(sandbox_id))


async def _settle_paused(services: Services, suspend: Suspend, box: Sandbox) -> None:
    """Paused it is and stays; what is left of a half-made run goes."""
    record = box.record
    mode: StateMode = record.pause_mode or "filesystem"
    message = None
    if mode == "full" and not services.paths.saved_memory(box.sandbox_id).is_dir():
        mode = "filesystem"
        why = "the machine was restarted"
        if record.boot_id == services.boot_id:
            why = "its processes ended while the node was away"
        message = f"its memory was lost while it was paused ({why}); its disk is kept"
    await suspend.settle_paused(box, mode, message)

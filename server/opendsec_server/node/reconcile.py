# SPDX-License-Identifier: AGPL-3.0-only
"""After a start: adopt what lives, bring to its end what is dead, remove what has no owner."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

import structlog

from opendsec_server.contract.states import EndReason, State

from . import process
from .journal import Record
from .lifecycle import Lifecycle
from .network.slots import Slot
from .sandbox import Sandbox, placeholder
from .services import Services

log = structlog.get_logger("opendsec.node")


@dataclass
class Reconciliation:
    """What was found.

    Attributes:
        adopted: Ids of sandboxes that live on.
        slots: Numbers of their slots.
    """

    adopted: list[str] = field(default_factory=list)
    slots: set[int] = field(default_factory=set)
    unfinished: list[tuple[Sandbox, State, EndReason, str]] = field(default_factory=list)


async def adopt_living(services: Services, lifecycle: Lifecycle) -> Reconciliation:
    """First half, before slots are made: take back every sandbox that still runs."""
    found = Reconciliation()
    for record in await services.journal.live():
        box = Sandbox(record)
        lifecycle.boxes[box.sandbox_id] = box
        if record.state is State.RUNNING and _take_back(services, box):
            found.adopted.append(box.sandbox_id)
            assert record.slot is not None
            found.slots.add(record.slot)
            lifecycle.watch(box)
        else:
            found.unfinished.append((box, *_verdict(services, record)))
    return found


def _take_back(services: Services, box: Sandbox) -> bool:
    """Whether exactly the journalled process lives in the sandbox's own group; opens what the
    daemon holds of a running sandbox."""
    identity = box.identity
    if identity is None or box.record.slot is None:
        return False
    if identity.boot_id != services.boot_id:
        return False
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    # Checked after opening: from here on the descriptor means this process for ever.
    lives = process.is_alive(identity, services.boot_id)
    if not lives or not services.cgroups.contains(box.sandbox_id, identity.pid):
        os.close(pidfd)
        return False
    try:
        netns_fd = os.open(f"/proc/{identity.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(pidfd)
        return False
    box.pidfd = pidfd
    number = box.record.slot
    box.slot = Slot(number, services.slots.address_of(number), netns_fd, None)
    return True


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


async def remove_dead(services: Services, lifecycle: Lifecycle, found: Reconciliation) -> None:
    """Second half: what is dead or half-made, and what nobody owns, goes."""
    await asyncio.gather(*(lifecycle.finish_interrupted(*item) for item in found.unfinished))
    strangers = (
        services.cgroups.known()
        | set(services.runtime.known())
        | set(services.pool.subvolumes())
        | {entry.name for entry in services.paths.bundles.iterdir()}
    ) - lifecycle.boxes.keys()
    for sandbox_id in sorted(strangers):
        log.warning("removing what no sandbox owns", sandbox_id=sandbox_id)
        await lifecycle.remove_stranger(placeholder(sandbox_id))

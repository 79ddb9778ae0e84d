# SPDX-License-Identifier: AGPL-3.0-only
"""One sandbox in the daemon's memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opendsec_server.contract.errors import OpendsecError
from opendsec_server.contract.node import SandboxSpec, SandboxStatus, SandboxUsage
from opendsec_server.contract.states import TERMINAL, EndReason, State

from .journal import Meter, Record
from .network.slots import Slot
from .process import ProcessIdentity


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A pause, resume or snapshot under way.

    Attributes:
        kind: Which; a second call of the same kind joins it.
        task: Its work. Its result is the operation's.
    """

    kind: str
    task: asyncio.Task[Any]


@dataclass(slots=True, eq=False)
class Sandbox:
    """What the hooks and the life cycle know of a sandbox while it is not ended.

    Attributes:
        record: What the journal holds (or will hold with the next transition).
        layers: Mounted read-only layers, the topmost first.
        slot: Its network slot; None before and after.
        pidfd: Of its first process; None before and after.
        exit_code: How that process ended, if we could learn it; negative: minus the signal.
        abort_reason: Set while starting: stop starting and end with this reason.
        aborted: Fires with ``abort_reason``.
        start_task: Brings it up, or takes it down again; None once it runs.
        start_error: Why it did not come up.
        operation: A pause, resume or snapshot under way.
        restore_from: While it is being set up: directory with the memory to continue.
        agent_token: Control token that the agent in that memory holds; None: none yet.
        start_in_memory: The memory that it continues has its start command running.
        asleep: Its agent has ended its streams, and waits to be told that it runs on.
        end_task: Takes it down.
    """

    record: Record
    layers: list[Path] = field(default_factory=list)
    slot: Slot | None = None
    pidfd: int | None = None
    exit_code: int | None = None
    abort_reason: EndReason | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    start_task: asyncio.Task[None] | None = None
    start_error: OpendsecError | None = None
    operation: Operation | None = None
    restore_from: Path | None = None
    agent_token: str | None = None
    start_in_memory: bool = False
    asleep: bool = False
    end_task: asyncio.Task[None] | None = None

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self.record.spec

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self.record.spec.sandbox_id

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self.record.state

    @property
    def identity(self) -> ProcessIdentity | None:
        """Its first process, once started."""
        r = self.record
        if r.pid is None or r.pid_ticks is None or r.boot_id is None:
            return None
        return ProcessIdentity(r.pid, r.pid_ticks, r.boot_id)


def status_of(record: Record) -> SandboxStatus:
    """What the node says of a sandbox."""
    return SandboxStatus(
        sandbox_id=record.spec.sandbox_id,
        project_id=record.spec.project_id,
        template_id=record.spec.template_id,
        backend=record.spec.backend,
        state=record.state,
        created_at=record.spec.created_at,
        started_at=record.started_at,
        end_at=record.end_at,
        ended_at=record.ended_at,
        reason=record.reason,
        message=record.message,
        pause_mode=record.pause_mode if record.state is State.PAUSED else None,
        accelerator=record.accelerator,
        vmm=record.vmm,
        seq=record.seq,
        usage=usage_of(record.meter) if record.state in TERMINAL else None,
    )


def usage_of(meter: Meter | None) -> SandboxUsage | None:
    """A meter as the contract shows it."""
    if meter is None:
        return None
    return SandboxUsage(
        cpu_seconds=round(meter.cpu_us / 1e6, 6),
        memory_mb_seconds=round(meter.memory_mb_seconds, 3),
        disk_bytes=meter.disk_bytes,
        egress_bytes=meter.egress_bytes,
        ingress_bytes=meter.ingress_bytes,
        at=meter.at,
    )


def placeholder(sandbox_id: str) -> Sandbox:
    """Stands for things found on the machine that no journal row owns, to tear them down."""
    spec = SandboxSpec(
        sandbox_id=sandbox_id,
        project_id="",
        template_id="",
        image="",
        cpu=1.0,
        memory_mb=1,
        disk_mb=1,
        created_at=0.0,
        end_at=0.0,
        access_token="",
        traffic_token="",
        control_token="",
    )
    return Sandbox(Record(spec=spec, state=State.STOPPING, end_at=0.0))

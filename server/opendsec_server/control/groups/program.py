# SPDX-License-Identifier: AGPL-3.0-only
"""The program of a service, and its health."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.actions import KeptOutput, KeptProgram, ProgramOrder
from opendsec_server.contract.errors import (
    AgentUnresponsive,
    Conflict,
    GroupServiceFailed,
    GroupUnhealthy,
    ImageNotFound,
    InvalidRequest,
    NodeUnavailable,
    OpendsecError,
    SandboxNotFound,
    StateConflict,
    UserError,
)
from opendsec_server.contract.images import ImageConfig
from opendsec_server.contract.node import NodeClient
from opendsec_server.control.ledger import fault_of
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store

from .model import HealthCheck, ServiceSpec

OUTPUT_BYTES = 256 * 1_024
"""Kept of each output of a service's program: the first half and the last half."""
EVIDENCE_BYTES = 2_048
"""Of an output that an error shows: its end."""
ASK_WAIT_S = 20.0
RETRY_S = 1.0
PATIENCE_S = 60.0
"""How long a guest agent or node that does not answer is asked, before that ends the group."""
EAGER_S = 1.0
"""How often a check is made at least, until its failures count."""
ENDED_WAIT_S = 5.0
"""How long the record of a sandbox that has gone may take to say why."""


def tag_of(group_id: str) -> str:
    """Under which the guest agent knows the program of a service."""
    return f"opendsec-group:{group_id}"


async def argv_of(node: NodeClient, service: ServiceSpec, record: SandboxRecord) -> tuple[str, ...]:
    """What a service runs. Empty: nothing of its own.

    Raises:
        InvalidRequest: the image has no program, and none was given.
    """
    if service.image is None:
        return (*(service.entrypoint or ()), *(service.command or ()))
    config = ImageConfig()
    if record.image is not None:
        # Removed since: what was given may be enough.
        with contextlib.suppress(ImageNotFound):
            config = (await node.images.get(record.image)).config
    if service.entrypoint is not None:
        argv = (*service.entrypoint, *(service.command or ()))
    else:
        argv = (*config.entrypoint, *(config.cmd if service.command is None else service.command))
    if not argv:
        raise InvalidRequest(
            f"the image `{service.image}` has neither ENTRYPOINT nor CMD, and no command is given"
        )
    return argv


async def start(
    node: NodeClient, sandbox_id: str, group_id: str, argv: tuple[str, ...], service: ServiceSpec
) -> None:
    """Start the program of a service, once, whoever calls how often.

    Raises:
        GroupServiceFailed: it cannot be started: no such program, user or directory.
        OpendsecError: it is not known whether it runs.
    """
    order = ProgramOrder(
        argv=argv,
        user=service.user,
        workdir=service.workdir,
        timeout_s=float(limits.TIMEOUT_S_MAX),
        output_bytes=OUTPUT_BYTES,
    )
    over_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            await node.start_kept(sandbox_id, tag_of(group_id), order)
            return
        except (SandboxNotFound, StateConflict):
            raise
        except Conflict:
            # Begun by an earlier call: its tag starts it once.
            return
        except (AgentUnresponsive, NodeUnavailable):
            if time.monotonic() >= over_at:
                raise
        except UserError as exc:
            raise GroupServiceFailed(
                f"its program cannot be started: {exc.message}", details={"argv": list(argv)[:8]}
            ) from exc
        await asyncio.sleep(RETRY_S)


async def end_of(node: NodeClient, sandbox_id: str, group_id: str) -> KeptProgram:
    """The end of a service's program, when it comes.

    Raises:
        SandboxNotFound, StateConflict: its sandbox does not run any more.
        NodeUnavailable, AgentUnresponsive: nobody answered for long.
    """
    heard_at = time.monotonic()
    while True:
        try:
            program = await node.kept(sandbox_id, tag_of(group_id), wait_s=ASK_WAIT_S)
            heard_at = time.monotonic()
            if program.state not in ("starting", "running"):
                return program
        except (AgentUnresponsive, NodeUnavailable):
            if time.monotonic() - heard_at > PATIENCE_S:
                raise
        # Also where an answer does not wait.
        await asyncio.sleep(RETRY_S if time.monotonic() - heard_at > EAGER_S else 0.05)


def failure_of(program: KeptProgram) -> GroupServiceFailed:
    """The error of a program that ended while it should not have, or not so."""
    how = how_it_ended(program)
    return GroupServiceFailed(
        f"its program {how}",
        details={
            "exit_code": program.exit_code,
            "signal": program.signal,
            "stdout": text_of(program.stdout)[-EVIDENCE_BYTES:],
            "stderr": text_of(program.stderr)[-EVIDENCE_BYTES:],
        },
    )


def how_it_ended(program: KeptProgram) -> str:
    """In words."""
    if program.signal is not None:
        return f"was killed by signal {program.signal}"
    if program.exit_code is not None:
        return f"ended with exit code {program.exit_code}"
    return "is gone; how it ended is not known"


def text_of(output: KeptOutput) -> str:
    """What is kept of an output, with what is missing named."""
    head, tail = (part.decode(errors="replace") for part in (output.head, output.tail))
    if output.cut_bytes <= 0:
        return (output.head + output.tail).decode(errors="replace")
    return f"{head}\n… {output.cut_bytes} bytes are not kept …\n{tail}"


class Probe(msgspec.Struct, kw_only=True, frozen=True):
    """One run of a health check."""

    healthy: bool
    why: str
    output: str


async def until_healthy(
    node: NodeClient,
    sandbox_id: str,
    service: ServiceSpec,
    check: HealthCheck,
    began_at: float,
    note: Callable[[str], Awaitable[None]],
) -> None:
    """Run a health check until it is well.

    Args:
        node: Where.
        sandbox_id: In which sandbox.
        service: Whose.
        check: What to run.
        began_at: When its sandbox started (Unix seconds).
        note: Told of each failure.

    Raises:
        GroupUnhealthy: it failed ``retries`` times in a row.
        SandboxNotFound, StateConflict: the sandbox does not run any more.
    """
    # A failure before a whole interval is over would be counted sooner than docker counts it.
    counts_from = began_at + max(check.start_period_s, check.interval_s)
    failures = 0
    while True:
        probe = await _probe(node, sandbox_id, service, check)
        if probe.healthy:
            return
        await note(f"{probe.why}: {probe.output}" if probe.output else probe.why)
        now = time.time()
        if now >= counts_from:
            failures += 1
            if failures >= check.retries:
                raise GroupUnhealthy(
                    f"its health check failed {failures} times, the last time because it "
                    f"{probe.why}",
                    details={
                        "test": list(check.test)[:8],
                        "failures": failures,
                        "output": probe.output,
                    },
                )
            await asyncio.sleep(check.interval_s)
        else:
            await asyncio.sleep(min(check.interval_s, EAGER_S, max(counts_from - now, 0.05)))


async def _probe(
    node: NodeClient, sandbox_id: str, service: ServiceSpec, check: HealthCheck
) -> Probe:
    output = bytearray()
    why = "gave no end"
    healthy = False
    try:
        async for event in node.exec(
            sandbox_id,
            check.test,
            user=service.user,
            workdir=service.workdir,
            timeout_s=check.timeout_s,
        ):
            if event.kind != "end":
                output += event.data
                del output[:-EVIDENCE_BYTES]
            elif event.timed_out:
                why = f"took longer than {check.timeout_s:g} s"
            elif event.exit_code is None:
                why = f"was killed by signal {event.signal}"
            else:
                healthy, why = event.exit_code == 0, f"exited with {event.exit_code}"
    except (SandboxNotFound, StateConflict):
        raise
    except (UserError, AgentUnresponsive, NodeUnavailable) as exc:
        why = f"could not be run ({exc.message})"
    # A NUL is no text to PostgreSQL.
    text = (
        bytes(output).replace(b"\0", "\N{REPLACEMENT CHARACTER}".encode()).decode(errors="replace")
    )
    return Probe(healthy=healthy, why=why, output=text.strip())


async def why_gone(store: Store, sandbox_id: str) -> OpendsecError:
    """The error of a sandbox that does not run any more while its group is being started."""
    over_at = time.monotonic() + ENDED_WAIT_S
    record = await get_sandbox(store, sandbox_id)
    while record is not None and not record.terminal and time.monotonic() < over_at:
        await asyncio.sleep(0.1)
        record = await get_sandbox(store, sandbox_id)
    reason = None if record is None else record.end_reason
    said = "its sandbox does not run any more"
    if reason is not None:
        said += f" ({reason})"
    if record is not None and record.message:
        said += f": {record.message}"
    error = GroupServiceFailed(said, details={"end_reason": reason})
    error.fault = (record.fault if record is not None else None) or fault_of(reason) or "user"
    return error

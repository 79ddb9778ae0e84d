# SPDX-License-Identifier: AGPL-3.0-only
"""Whose fault it was, with the evidence. Pure.

``user``: what ran, or what was asked for. ``capacity``: there was no room. ``platform``: ours. An
action that did what it was asked for has no fault.
"""

from __future__ import annotations

import signal as signals

import msgspec

from opendsec_server.contract.actions import KeptProgram
from opendsec_server.contract.errors import (
    AgentUnresponsive,
    Fault,
    ImageDamaged,
    ImageNotFound,
    NodeFull,
    NodeUnavailable,
    OpendsecError,
    RegistryDenied,
    RegistryLimited,
    RegistryUnavailable,
    SandboxEnded,
    SandboxLost,
    StartTimeout,
    StoreUnavailable,
)
from opendsec_server.contract.states import EndReason
from opendsec_server.store.records import SandboxRecord

from .params import ActionParams

_KILLED = int(signals.SIGKILL)
_SHELL_KILLED = 128 + _KILLED

_OURS: frozenset[EndReason] = frozenset(
    {
        EndReason.LOST,
        EndReason.KERNEL_PANIC,
        EndReason.VMM_FAILED,
        EndReason.START_FAILED,
        EndReason.START_TIMEOUT,
        EndReason.NODE_UNAVAILABLE,
    }
)
_WORDS: tuple[tuple[type[OpendsecError], str], ...] = (
    (StartTimeout, "start_timeout"),
    (ImageNotFound, "image_pull"),
    (ImageDamaged, "image_pull"),
    (RegistryDenied, "image_pull"),
    (RegistryLimited, "image_pull"),
    (RegistryUnavailable, "image_pull"),
    (NodeFull, "no_room"),
    (NodeUnavailable, "node_unavailable"),
    (AgentUnresponsive, "agent_unresponsive"),
    (StoreUnavailable, "store_unavailable"),
    (SandboxEnded, "sandbox_ended"),
    (SandboxLost, "sandbox_lost"),
)


class Verdict(msgspec.Struct, kw_only=True, frozen=True):
    """Why, in one word, whose fault, and the figures that show it."""

    cause: str
    fault: Fault | None
    evidence: dict[str, object] = {}


def of_program(params: ActionParams, program: KeptProgram, oom_before: int) -> Verdict:
    """Of a program that has ended."""
    kills = max(program.oom_kills, program.oom_total - oom_before, 0)
    shown: dict[str, object] = {"oom_kills": kills} if kills else {}
    if program.timed_out:
        return Verdict(
            cause="time_out",
            fault="user",
            evidence={**shown, "of": "command", "limit_s": params.timeout_s},
        )
    if program.signal is not None:
        shown["signal"] = program.signal
        shown["signal_name"] = _name(program.signal)
    if program.exit_code:
        shown["exit_code"] = program.exit_code
    if kills and (program.signal == _KILLED or program.exit_code == _SHELL_KILLED):
        return Verdict(cause="oom_kill", fault="user", evidence=shown)
    if program.signal is not None:
        return Verdict(cause="signal", fault="user", evidence=shown)
    if program.exit_code:
        return Verdict(cause="exit_code", fault="user", evidence=shown)
    return Verdict(cause="ok", fault=None, evidence=shown)


def of_error(error: OpendsecError) -> Verdict:
    """Of an action that could not be done."""
    cause = next((word for kind, word in _WORDS if isinstance(error, kind)), error.code)
    return Verdict(
        cause=cause,
        fault=error.fault,
        evidence={"code": error.code, "message": error.message, **error.details},
    )


def end_of(record: SandboxRecord) -> OpendsecError:
    """What the end of a sandbox means for whoever wants to use it: it tells ours from others'."""
    reason = record.end_reason
    words = f"sandbox `{record.sandbox_id}` has ended"
    if reason is not None:
        words += f": {reason}"
    if record.message:
        words += f" ({record.message})"
    details: dict[str, object] = {"end_reason": reason, "ended_at": record.ended_at}
    if reason in _OURS or (reason is None and record.fault == "platform"):
        return SandboxLost(words, details=details)
    return SandboxEnded(words, details=details)


def _name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"SIG{number}"

# SPDX-License-Identifier: AGPL-3.0-only
"""From what a worker sent to what came of a call.

The front's head is ours and says how the call's process ended. The result's bytes come from the
caller's own code and may be anything: they can say no more than that the function returned or
raised something.
"""

from __future__ import annotations

import base64
import binascii
import os
import signal
from pathlib import PurePosixPath
from typing import Any

import msgspec

from opendsec_server.contract.errors import (
    FunctionCancelled,
    FunctionCrashed,
    FunctionDiskFull,
    FunctionOutOfMemory,
    FunctionRaised,
    FunctionResultInvalid,
    FunctionResultTooLarge,
    FunctionTimeout,
    Internal,
    OpendsecError,
)

from .model import FILES_BYTES_MAX, FILES_MAX, RESULT_BYTES_MAX, Limits, Outcome

BROKEN_STATUS = 70
"""The worker's own part of the call's process failed before or after the caller's code."""
TEXT_CHARS_MAX = 16_000
DEPTH_SPARE = 300


class Report(msgspec.Struct, kw_only=True, frozen=True):
    """The front's head of a call that is over."""

    done: str
    status: int | None = None
    oom: bool = False
    cpu_s: float = 0.0
    peak_kb: int = 0
    seconds: float = 0.0
    result: int = 0
    result_lost: int = 0
    stdout: int = 0
    stdout_lost: int = 0
    stderr: int = 0
    stderr_lost: int = 0


class _Raised(msgspec.Struct):
    type: str = "Exception"
    message: str = ""
    traceback: str = ""


NULL = msgspec.Raw(b"null")


class _Said(msgspec.Struct):
    # Looked at for its form alone: as objects it could take a hundred times the memory.
    value: msgspec.Raw = NULL
    files: dict[str, str] = {}
    raised: _Raised | None = None
    memory: bool = False
    disk: bool = False
    unencodable: str | None = None
    too_large: bool = False


_said = msgspec.json.Decoder(_Said)
_raw = msgspec.json.Decoder(msgspec.Raw)


def outcome_of(report: Report, body: bytes, limits: Limits, worker: str) -> Outcome:
    """What came of a call."""
    end = report.result + report.stdout
    value, files, error = _judge(report, body[: report.result], limits)
    return Outcome(
        value=value,
        files=files,
        error=error,
        stdout=body[report.result : end].decode(errors="replace"),
        stderr=body[end : end + report.stderr].decode(errors="replace"),
        stdout_lost_bytes=report.stdout_lost,
        stderr_lost_bytes=report.stderr_lost,
        seconds=report.seconds,
        cpu_seconds=report.cpu_s,
        peak_memory_mb=report.peak_kb / 1024,
        worker=worker,
    )


def _judge(
    report: Report, text: bytes, limits: Limits
) -> tuple[msgspec.Raw | None, dict[str, str], OpendsecError | None]:
    status = 0 if report.status is None else os.waitstatus_to_exitcode(report.status)
    if report.done == "timeout":
        return None, {}, FunctionTimeout(
            f"the call was killed after {limits.timeout_s:g} s",
            details={"limit": "timeout_s", "timeout_s": limits.timeout_s},
        )  # fmt: skip
    if report.done == "result_too_large" or report.result_lost:
        return None, {}, _too_large()
    if report.done == "cancelled":
        return None, {}, FunctionCancelled("the call was given up while it ran")
    if status != 0 or not text:
        return None, {}, _ended_badly(report, status, limits)
    try:
        said = _read(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None, {}, FunctionResultInvalid("what the call sent is no result")
    if said.raised is not None:
        return None, {}, _raised(said.raised, said, limits)
    if said.too_large:
        return None, {}, _too_large()
    if said.unencodable is not None:
        return None, {}, FunctionResultInvalid(
            f"the result is no plain data: {said.unencodable[:500]}"
        )  # fmt: skip
    if not _proper(said.files):
        return None, {}, FunctionResultInvalid("the files that the call sent are none")
    return said.value, said.files, None


def _read(text: bytes) -> _Said:
    """What the call sent. A value that passes here can stand in a line of JSON among others.

    Raises:
        msgspec.DecodeError, ValueError, RecursionError: it cannot.
    """
    if not text.isascii() or b"\n" in text or b"\r" in text:
        # JSON may have such between its parts; in a line of an answer it would begin another one.
        raise ValueError("the worker writes one line of ASCII")
    said = _said.decode(text)
    value = bytes(said.value)
    if value.count(b"[") + value.count(b"{") > DEPTH_SPARE:
        # Readers that stand deeper in calls than this must come through as well.
        _raw.decode(b"[" * DEPTH_SPARE + value + b"]" * DEPTH_SPARE)
    return said


def _too_large() -> FunctionResultTooLarge:
    return FunctionResultTooLarge(
        f"result and files are larger than {RESULT_BYTES_MAX} bytes as JSON, or {FILES_BYTES_MAX} "
        f"bytes or {FILES_MAX} files",
        details={"result_bytes_max": RESULT_BYTES_MAX, "files_bytes_max": FILES_BYTES_MAX},
    )


def _ended_badly(report: Report, status: int, limits: Limits) -> OpendsecError:
    evidence: dict[str, Any] = {
        "exit_code": status if status >= 0 else None,
        "signal": _signal_name(-status) if status < 0 else None,
        "oom_kill": report.oom,
        "peak_memory_mb": round(report.peak_kb / 1024, 1),
    }
    if report.oom and status < 0:
        return FunctionOutOfMemory(
            "the kernel killed the call: the worker's memory was used up", details=evidence
        )
    if status == BROKEN_STATUS:
        if limits.memory_mb is not None:
            return FunctionOutOfMemory(
                f"the call had no memory left to answer, of {limits.memory_mb} MiB",
                details={**evidence, "limit": "memory_mb"},
            )
        return FunctionCrashed("the call's process broke before its end", details=evidence)
    if status < 0:
        return FunctionCrashed(
            f"the call's process was ended by {evidence['signal']}", details=evidence
        )
    return FunctionCrashed(
        f"the call's process left with status {status} and without a result", details=evidence
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _raised(raised: _Raised, said: _Said, limits: Limits) -> OpendsecError:
    details = {
        "type": raised.type[:200],
        "message": raised.message[:TEXT_CHARS_MAX],
        "traceback": raised.traceback[-TEXT_CHARS_MAX:],
    }
    text = f"{details['type']}: {details['message'][:1_000]}"
    if said.memory:
        return FunctionOutOfMemory(
            text,
            details={**details, "limit": "memory_mb", "memory_mb": limits.memory_mb},
        )
    if said.disk:
        return FunctionDiskFull(text, details=details)
    return FunctionRaised(text, details=details)


def _proper(files: dict[str, str]) -> bool:
    """Whether these are files with relative names that lead nowhere else."""
    if len(files) > FILES_MAX:
        return False
    for name, text in files.items():
        path = PurePosixPath(name)
        if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
            return False
        try:
            base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            return False
    return True


def defect(exc: Exception) -> Outcome:
    """What callers are told of a defect of ours."""
    return Outcome(error=Internal(f"the server has a defect: {type(exc).__name__}"))

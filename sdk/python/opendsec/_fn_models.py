# SPDX-License-Identifier: Apache-2.0
"""What function calls take and give."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from . import _answers
from ._errors import FunctionResultInvalid, OpendsecError
from ._fn_pack import Pack
from ._fn_values import decode


class FunctionPool(msgspec.Struct, kw_only=True, frozen=True):
    """A pool of workers, and what it does now.

    Attributes:
        python: Version of its workers'. Empty: none has started yet.
        calls_finished: Since the server started.
        last_error: Why the last worker could not be made.
    """

    name: str
    template: str = ""
    backend: str | None = None
    cpu: float = 0.0
    memory_mb: int = 0
    disk_mb: int = 0
    env: dict[str, str] = {}
    internet: bool = True
    modules: list[str] = []
    preload: list[str] = []
    workers_min: int = 0
    workers_max: int = 0
    idle_s: float = 0.0
    calls_max: int = 0
    workers_idle: int = 0
    workers_busy: int = 0
    workers_starting: int = 0
    calls_waiting: int = 0
    calls_finished: int = 0
    python: str = ""
    last_error: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How a function is called.

    Attributes:
        pool: Of workers. ``default`` is always there.
        timeout_s: After so long, from its start in a worker, the call is killed.
        memory_mb: What each process of the call may take, beside what the pool has imported.
            None: what the worker has.
        processes: And threads, at a time.
        output_bytes: How much of stdout and of stderr is kept, each.
        env: Environment variables.
        collect: Files to hand back: patterns relative to the call's own directory.
        result: ``data``: numbers, text, bytes, lists, tuples, sets, dicts. ``pickle``: anything;
            reading it runs what the worker sent, so only for code that you trust.
        pack: How the function is sent; see the documentation. ``auto``: as source, else pickled.
    """

    pool: str = "default"
    timeout_s: float = 60.0
    memory_mb: int | None = None
    processes: int = 256
    output_bytes: int = 256 * 1024
    env: dict[str, str] = field(default_factory=dict)
    collect: tuple[str, ...] = ()
    result: Literal["data", "pickle"] = "data"
    pack: Pack = "auto"

    def body(self) -> dict[str, Any]:
        """The fields of a request."""
        return {
            "pool": self.pool,
            "timeout_s": self.timeout_s,
            "memory_mb": self.memory_mb,
            "processes": self.processes,
            "output_bytes": self.output_bytes,
            "env": self.env,
            "collect": list(self.collect),
            "result": self.result,
        }


class CallLine(msgspec.Struct):
    """A call's outcome as the server sends it."""

    index: int = 0
    outcome: str = "ok"
    # Read apart from its line: it comes from the call's own code, which must harm no other call.
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: dict[str, Any] | None = None
    files: dict[str, str] = {}
    stdout: str = ""
    stderr: str = ""
    stdout_lost_bytes: int = 0
    stderr_lost_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0
    worker: str | None = None


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """What came of a call.

    Attributes:
        index: Of its item in a map.
        value: What the function returned.
        error: What it came to instead. ``fault`` says whose: ``user`` is the function's own.
        files: Those asked for by ``collect``.
        stdout_lost_bytes: Output beyond ``output_bytes``, which was not kept.
        seconds: In the worker, without the wait for one.
        cpu_seconds: Of all its processes that it waited for.
        peak_memory_mb: Of its first process.
        worker: Sandbox that it ran in.
    """

    index: int = 0
    value: Any = None
    error: OpendsecError | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    stdout: str = ""
    stderr: str = ""
    stdout_lost_bytes: int = 0
    stderr_lost_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0
    worker: str | None = None

    def get(self) -> Any:
        """The value.

        Raises:
            OpendsecError: what the call came to instead; ``details`` has its output.
        """
        if self.error is not None:
            raise self.error
        return self.value


def _plain(text: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise FunctionResultInvalid(f"The call's value cannot be read: {exc!r:.300}") from exc


def result_of(line: CallLine, index: int, *, unpickle: bool) -> CallResult:
    """The outcome in the caller's terms. What makes no sense is an error of the call."""
    error, value = None, None
    files: dict[str, bytes] = {}
    if line.error is not None:
        error = _answers.from_native(line.error)
        error.details.setdefault("stdout", line.stdout)
        error.details.setdefault("stderr", line.stderr)
    else:
        try:
            value = decode(_plain(line.value), unpickle=unpickle)
            files = {
                name: base64.b64decode(text, validate=True) for name, text in line.files.items()
            }
        except FunctionResultInvalid as exc:
            error = exc
        except (binascii.Error, ValueError) as exc:
            error = FunctionResultInvalid(f"The call's files cannot be read: {exc}")
    return CallResult(
        index=index,
        value=value,
        error=error,
        files=files,
        stdout=line.stdout,
        stderr=line.stderr,
        stdout_lost_bytes=line.stdout_lost_bytes,
        stderr_lost_bytes=line.stderr_lost_bytes,
        seconds=line.seconds,
        cpu_seconds=line.cpu_seconds,
        peak_memory_mb=line.peak_memory_mb,
        worker=line.worker,
    )

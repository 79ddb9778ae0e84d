# SPDX-License-Identifier: AGPL-3.0-only
"""Pools, calls and what comes of them. Every limit of function calls is here."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from opendsec_server.contract.errors import OpendsecError
from opendsec_server.store.functions import PoolSpec

CALL_TIMEOUT_S_DEFAULT = 60.0
CALL_TIMEOUT_S_MIN = 0.05
CALL_TIMEOUT_S_MAX = 3_600.0
CALL_MEMORY_MB_MIN = 16
CALL_PROCESSES_DEFAULT = 256
CALL_PROCESSES_MAX = 2_048
OUTPUT_BYTES_DEFAULT = 256 * 1024
"""Kept of stdout and of stderr, each."""
OUTPUT_BYTES_MAX = 4 * 1024 * 1024
RESULT_BYTES_MAX = 8 * 1024 * 1024
"""Of a call's value and files together, as JSON."""
FILES_BYTES_MAX = RESULT_BYTES_MAX * 3 // 4 - 256 * 1024
"""Of the files that a call hands back, in all; in base64 they fit the result."""
FILES_MAX = 1_000
PATTERNS_MAX = 64
CODE_BYTES_MAX = 4 * 1024 * 1024
REQUEST_BYTES_MAX = 16 * 1024 * 1024
MAP_ITEMS_MAX = 10_000
"""In one request; the SDK sends as many requests as it needs."""
QUEUED_CALLS_MAX = 50_000
QUEUED_BYTES_MAX = 256 * 1024 * 1024
"""Both of one project; the bytes are those of the code too."""
UNREAD_BYTES_MAX = 32 * 1024 * 1024
"""Of one request: outcomes that its reader has not taken. Above it none of its calls begins."""
POOLS_MAX = 100
"""Of one project."""
POOL_WORKERS_MAX = 256
POOL_WORKERS_DEFAULT = 4
POOL_IDLE_S_DEFAULT = 120.0
POOL_IDLE_S_MAX = 24 * 3_600.0
POOL_CALLS_DEFAULT = 10_000
"""After so many calls a worker is replaced by a new one."""
POOL_MODULES_BYTES_MAX = 1024 * 1024
POOL_PRELOAD_MAX = 64
POOL_NAME_CHARS_MAX = 64
DEFAULT_POOL = "default"
DEFAULT_MEMORY_MB = 512
DEFAULT_CPU = 1.0
DEFAULT_DISK_MB = 512

ResultKind = Literal["data", "pickle"]

DEFAULT_SPEC = PoolSpec()
"""Of the pool ``default``, which is there without being made."""


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """What one call may take."""

    timeout_s: float = CALL_TIMEOUT_S_DEFAULT
    memory_mb: int | None = None
    """Of each of its processes, beside what the modules imported in advance hold. None: what the
    worker has."""
    processes: int = CALL_PROCESSES_DEFAULT
    output_bytes: int = OUTPUT_BYTES_DEFAULT


class Code(msgspec.Struct, kw_only=True, frozen=True):
    """What is called, as the worker's zygote reads it. Many calls share one."""

    text: bytes
    digest: str

    @classmethod
    def of(cls, value: dict[str, Any]) -> Code:
        """From plain values."""
        text = msgspec.json.encode(value)
        return cls(text=text, digest=hashlib.sha256(text).hexdigest())


class Outcome(msgspec.Struct, kw_only=True, frozen=True):
    """What came of a call."""

    value: msgspec.Raw | None = None
    """As the worker encodes values: JSON, with marked objects for what JSON lacks."""
    error: OpendsecError | None = None
    files: dict[str, str] = {}
    """By name, in base64."""
    stdout: str = ""
    stderr: str = ""
    stdout_lost_bytes: int = 0
    stderr_lost_bytes: int = 0
    seconds: float = 0.0
    """From its start in the worker to its end; without the wait for a worker."""
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0
    """Of its first process, with what was imported in advance."""
    worker: str | None = None
    """Sandbox that it ran in."""

    @property
    def size_bytes(self) -> int:
        """What it takes of the memory, about."""
        value = 0 if self.value is None else len(bytes(self.value))
        return value + len(self.stdout) + len(self.stderr) + sum(map(len, self.files.values()))

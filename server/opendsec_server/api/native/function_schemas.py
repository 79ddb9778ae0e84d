# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of function calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from opendsec_server.contract import limits
from opendsec_server.contract.node import Backend
from opendsec_server.control.functions import model

from .schemas import StringMap, Time

PoolName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=model.POOL_NAME_CHARS_MAX,
        description="Letters, digits and `._-`.",
        examples=["graders"],
    ),
]
Files = Annotated[
    StringMap,
    Meta(
        max_length=model.FILES_MAX,
        description="Name relative to the call's directory → content in base64.",
        examples=[{"data.txt": "aGVsbG8K"}],
    ),
]
Encoded = Annotated[
    Any,
    Meta(
        description='JSON. What JSON lacks is an object with `~`: `{"~": "bytes", "v": base64}`, '
        '`{"~": "tuple" or "set" or "frozenset", "v": [...]}`, `{"~": "int", "v": hex}`, '
        '`{"~": "float", "v": text}`, `{"~": "dict", "v": [[key, value], ...]}`, '
        '`{"~": "pickle", "v": base64}`.'
    ),
]


class PutPool(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a pool's workers are. What is left out is the default."""

    template: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=limits.NAME_CHARS_MAX,
            description="Needs `python3` (3.8 or later), no more.",
        ),
    ] = "base"
    backend: Backend | None = None
    cpu: Annotated[float, Meta(ge=limits.CPU_MIN, le=limits.CPU_MAX)] = 1.0
    memory_mb: Annotated[int, Meta(ge=limits.MEMORY_MB_MIN, le=limits.MEMORY_MB_MAX)] = 512
    disk_mb: Annotated[int, Meta(ge=limits.DISK_MB_MIN, le=limits.DISK_MB_MAX)] = 512
    env: StringMap = {}
    internet: Annotated[bool, Meta(description="Whether calls reach the internet.")] = True
    modules: Annotated[
        StringMap,
        Meta(description="Name → source of modules that calls can import beside the template's."),
    ] = {}
    preload: Annotated[
        list[str],
        Meta(
            max_length=model.POOL_PRELOAD_MAX,
            description="Modules that a worker imports once, before its first call.",
            examples=[["json", "numpy"]],
        ),
    ] = []
    workers_min: Annotated[
        int, Meta(ge=0, le=model.POOL_WORKERS_MAX, description="Kept ready without calls.")
    ] = 0
    workers_max: Annotated[int, Meta(ge=1, le=model.POOL_WORKERS_MAX)] = model.POOL_WORKERS_DEFAULT
    idle_s: Annotated[
        float,
        Meta(
            ge=0,
            le=model.POOL_IDLE_S_MAX,
            description="A worker above `workers_min` with nothing to do for so long is ended.",
        ),
    ] = model.POOL_IDLE_S_DEFAULT
    calls_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="A worker is replaced after so many calls.")
    ] = model.POOL_CALLS_DEFAULT


class FunctionPool(Struct, kw_only=True, frozen=True):
    """A pool and what it does now."""

    name: str
    template: str
    backend: str | None
    cpu: float
    memory_mb: int
    disk_mb: int
    env: StringMap
    internet: bool
    modules: Annotated[list[str], Meta(description="Names only.")]
    preload: list[str]
    workers_min: int
    workers_max: int
    idle_s: float
    calls_max: int
    created_at: Time
    workers_idle: int
    workers_busy: int
    workers_starting: int
    calls_waiting: int
    calls_finished: Annotated[int, Meta(description="Since the server started.")]
    python: Annotated[str, Meta(description="Of its workers. Empty: none has started yet.")]
    last_error: Annotated[
        dict[str, Any] | None, Meta(description="Why the last worker could not be made.")
    ]


class PoolList(Struct, kw_only=True, frozen=True):
    """Function pools."""

    pools: list[FunctionPool]


class SourceCode(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is called: Python text, or a pickled function."""

    source: Annotated[
        str | None,
        Meta(
            description="Run as a program. Without `entry` the call's value is that of the "
            "variable `result`.",
            examples=["def add(a, b):\n    return a + b\n"],
        ),
    ] = None
    entry: Annotated[
        str | None, Meta(description="Function in `source` to call.", examples=["add"])
    ] = None
    values: Annotated[
        dict[str, Any], Meta(description="Variables that are set before `source` is run (encoded).")
    ] = {}
    pickle: Annotated[
        str | None,
        Meta(
            description="Instead of `source`: a function pickled by cloudpickle, in base64. Needs "
            "a client of the same minor version of Python, and cloudpickle in the worker."
        ),
    ] = None
    python: Annotated[
        str | None,
        Meta(
            description="Version of Python that pickled the function; others refuse it.",
            examples=["3.11"],
        ),
    ] = None


class CallItem(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is different in each call of a map."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    pickled: Annotated[
        str | None, Meta(description="With `pickle`: the pickled pair (args, kwargs), in base64.")
    ] = None
    files: Files = {}
    env: StringMap = {}


class _Shared(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    code: SourceCode
    pool: PoolName = model.DEFAULT_POOL
    env: StringMap = {}
    collect: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=1_024)]],
        Meta(
            max_length=model.PATTERNS_MAX,
            description="Files to hand back: patterns relative to the call's directory.",
            examples=[["out/*.json"]],
        ),
    ] = []
    result: Annotated[
        model.ResultKind,
        Meta(description="`pickle`: any value, but whoever reads it runs what the worker sent."),
    ] = "data"
    timeout_s: Annotated[float, Meta(ge=model.CALL_TIMEOUT_S_MIN, le=model.CALL_TIMEOUT_S_MAX)] = (
        model.CALL_TIMEOUT_S_DEFAULT
    )
    memory_mb: Annotated[
        Annotated[int, Meta(ge=model.CALL_MEMORY_MB_MIN, le=limits.MEMORY_MB_MAX)] | None,
        Meta(
            description="Of each process of the call, beside what preloaded modules hold. Null: "
            "what the worker has.",
        ),
    ] = None
    processes: Annotated[
        int, Meta(ge=1, le=model.CALL_PROCESSES_MAX, description="And threads, at a time.")
    ] = model.CALL_PROCESSES_DEFAULT
    output_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=model.OUTPUT_BYTES_MAX,
            description="How much of stdout and of stderr is kept, each.",
        ),
    ] = model.OUTPUT_BYTES_DEFAULT


class RunCall(_Shared, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One call."""

    item: CallItem = CallItem()


class MapCalls(_Shared, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Many calls of the same code."""

    items: Annotated[list[CallItem], Meta(min_length=1, max_length=model.MAP_ITEMS_MAX)]


class CallResult(Struct, kw_only=True, frozen=True):
    """What came of a call."""

    outcome: Literal["ok", "error"]
    value: Encoded = None
    error: Annotated[
        dict[str, Any] | None,
        Meta(
            description="As errors everywhere: `code`, `fault`, `retryable` and so on. Codes of "
            "fault `user` begin with `function_`; `details` has type and traceback of an exception."
        ),
    ] = None
    files: Files = {}
    stdout: str = ""
    stderr: str = ""
    stdout_lost_bytes: int = 0
    stderr_lost_bytes: int = 0
    seconds: Annotated[float, Meta(description="In the worker, without the wait for one.")] = 0.0
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0
    worker: Annotated[str | None, Meta(description="Sandbox that it ran in.")] = None
    index: Annotated[int, Meta(description="Of the item in its map.")] = 0

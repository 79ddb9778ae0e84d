# SPDX-License-Identifier: Apache-2.0
"""OpenDsec: isolated sandboxes for code you do not trust.

::

    from opendsec import Sandbox

    with Sandbox.create() as sandbox:
        print(sandbox.exec("python3 -c 'print(6 * 7)'").stdout)

``AsyncClient``, ``AsyncSandbox`` and their parts are for ``asyncio``; ``Client``, ``Sandbox`` and
theirs have the same methods without ``await``. Everything raised on purpose is an
``OpendsecError``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from ._async._account import AsyncApiKeys
    from ._async._client import AsyncClient
    from ._async._files import AsyncFiles, AsyncFileStream, AsyncWatch
    from ._async._images import AsyncImages
    from ._async._process import AsyncProcess, AsyncPty
    from ._async._rollout import AsyncRollout
    from ._async._sandbox import AsyncSandbox
    from ._async._snapshots import AsyncSnapshots
    from ._async._templates import AsyncTemplates
    from ._errors import (
        AgentUnresponsive,
        AlreadyExists,
        AlreadyPaused,
        ArtifactsRefused,
        BadResponse,
        BuildFailed,
        BuildNotFound,
        CapacityError,
        CommandFailed,
        CommandTimeout,
        Conflict,
        ConnectionFailed,
        DiskFull,
        FileNotFound,
        Forbidden,
        FunctionCancelled,
        FunctionCrashed,
        FunctionDiskFull,
        FunctionFailed,
        FunctionOutOfMemory,
        FunctionPoolNotFound,
        FunctionPoolUnusable,
        FunctionQueueFull,
        FunctionRaised,
        FunctionResultInvalid,
        FunctionResultTooLarge,
        FunctionTimeout,
        FunctionWorkerLost,
        IdempotencyInProgress,
        IdempotencyMismatch,
        IdempotencyOutcomeUnknown,
        ImageDamaged,
        ImageInUse,
        ImageNotFound,
        Internal,
        InvalidRequest,
        MethodNotAllowed,
        NodeFull,
        NodeUnavailable,
        NotConfigured,
        NotFound,
        NotSupported,
        OpendsecError,
        PayloadTooLarge,
        PlatformError,
        PortNotOpen,
        ProcessNotFound,
        ProgramNotExecutable,
        ProgramNotFound,
        QuotaExceeded,
        RegistryDenied,
        RegistryLimited,
        RegistryUnavailable,
        ResumeFailed,
        SandboxNotFound,
        SandboxPaused,
        SandboxStartFailed,
        SnapshotDamaged,
        SnapshotFailed,
        SnapshotIncompatible,
        SnapshotNotFound,
        StartTimeout,
        StateConflict,
        StoreUnavailable,
        TemplateNotFound,
        Unauthenticated,
        UserError,
        WaitTimeout,
    )
    from ._models import (
        ApiKey,
        BackendInfo,
        Build,
        BuildError,
        BuildLogEntry,
        BuildStep,
        Capabilities,
        CommandResult,
        FileInfo,
        ImageConfig,
        ImageInfo,
        ImagePull,
        MetricSample,
        NetworkPolicy,
        OutputEvent,
        PauseReport,
        ProcessInfo,
        Project,
        PruneReport,
        ReadyCheck,
        RegistryAuth,
        SandboxInfo,
        ServerInfo,
        Snapshot,
        TemplateDetail,
        TemplateInfo,
        TemplateTag,
        Transition,
        VmDisk,
        VmOptions,
        WatchEvent,
    )
    from ._sync._account import ApiKeys
    from ._sync._client import Client
    from ._sync._files import Files, FileStream, Watch
    from ._sync._images import Images
    from ._rollout_models import RolloutOutcome, Verifier
    from ._sync._process import Process, Pty
    from ._sync._rollout import Rollout
    from ._sync._sandbox import Sandbox
    from ._sync._snapshots import Snapshots
    from ._sync._templates import Templates

__all__ = [
    "AgentUnresponsive",
    "AlreadyExists",
    "AlreadyPaused",
    "ApiKey",
    "ApiKeys",
    "ArtifactsRefused",
    "AsyncApiKeys",
    "AsyncClient",
    "AsyncFileStream",
    "AsyncFiles",
    "AsyncImages",
    "AsyncProcess",
    "AsyncPty",
    "AsyncRollout",
    "AsyncSandbox",
    "AsyncSnapshots",
    "AsyncTemplates",
    "AsyncWatch",
    "BackendInfo",
    "BadResponse",
    "Build",
    "BuildError",
    "BuildFailed",
    "BuildLogEntry",
    "BuildNotFound",
    "BuildStep",
    "Capabilities",
    "CapacityError",
    "Client",
    "CommandFailed",
    "CommandResult",
    "CommandTimeout",
    "Conflict",
    "ConnectionFailed",
    "DiskFull",
    "FileInfo",
    "FileNotFound",
    "FileStream",
    "Files",
    "Forbidden",
    "FunctionCancelled",
    "FunctionCrashed",
    "FunctionDiskFull",
    "FunctionFailed",
    "FunctionOutOfMemory",
    "FunctionPoolNotFound",
    "FunctionPoolUnusable",
    "FunctionQueueFull",
    "FunctionRaised",
    "FunctionResultInvalid",
    "FunctionResultTooLarge",
    "FunctionTimeout",
    "FunctionWorkerLost",
    "IdempotencyInProgress",
    "IdempotencyMismatch",
    "IdempotencyOutcomeUnknown",
    "ImageConfig",
    "ImageDamaged",
    "ImageInUse",
    "ImageInfo",
    "ImageNotFound",
    "ImagePull",
    "Images",
    "Internal",
    "InvalidRequest",
    "MethodNotAllowed",
    "MetricSample",
    "NetworkPolicy",
    "NodeFull",
    "NodeUnavailable",
    "NotConfigured",
    "NotFound",
    "NotSupported",
    "OpendsecError",
    "OutputEvent",
    "PauseReport",
    "PayloadTooLarge",
    "PlatformError",
    "PortNotOpen",
    "Process",
    "ProcessInfo",
    "ProcessNotFound",
    "ProgramNotExecutable",
    "ProgramNotFound",
    "Project",
    "PruneReport",
    "Pty",
    "QuotaExceeded",
    "ReadyCheck",
    "RegistryAuth",
    "RegistryDenied",
    "RegistryLimited",
    "RegistryUnavailable",
    "ResumeFailed",
    "Rollout",
    "RolloutOutcome",
    "Sandbox",
    "SandboxInfo",
    "SandboxNotFound",
    "SandboxPaused",
    "SandboxStartFailed",
    "ServerInfo",
    "Snapshot",
    "SnapshotDamaged",
    "SnapshotFailed",
    "SnapshotIncompatible",
    "SnapshotNotFound",
    "Snapshots",
    "StartTimeout",
    "StateConflict",
    "StoreUnavailable",
    "TemplateDetail",
    "TemplateInfo",
    "TemplateNotFound",
    "TemplateTag",
    "Templates",
    "Transition",
    "Unauthenticated",
    "UserError",
    "Verifier",
    "VmDisk",
    "VmOptions",
    "WaitTimeout",
    "Watch",
    "WatchEvent",
    "__version__",
]

# Loaded at first use: the command line must start fast, and few programs need both halves.
_HOMES = {
    "._async._account": ("AsyncApiKeys",),
    "._async._client": ("AsyncClient",),
    "._async._files": ("AsyncFiles", "AsyncFileStream", "AsyncWatch"),
    "._async._process": ("AsyncProcess", "AsyncPty"),
    "._async._rollout": ("AsyncRollout",),
    "._async._sandbox": ("AsyncSandbox",),
    "._async._images": ("AsyncImages",),
    "._async._snapshots": ("AsyncSnapshots",),
    "._async._templates": ("AsyncTemplates",),
    "._sync._account": ("ApiKeys",),
    "._sync._client": ("Client",),
    "._sync._files": ("Files", "FileStream", "Watch"),
    "._sync._process": ("Process", "Pty"),
    "._rollout_models": ("RolloutOutcome", "Verifier"),
    "._sync._rollout": ("Rollout",),
    "._sync._sandbox": ("Sandbox",),
    "._sync._images": ("Images",),
    "._sync._snapshots": ("Snapshots",),
    "._sync._templates": ("Templates",),
    "._models": (
        "ApiKey",
        "BackendInfo",
        "Build",
        "BuildError",
        "BuildLogEntry",
        "BuildStep",
        "Capabilities",
        "CommandResult",
        "FileInfo",
        "ImageConfig",
        "ImageInfo",
        "ImagePull",
        "MetricSample",
        "NetworkPolicy",
        "OutputEvent",
        "PauseReport",
        "ProcessInfo",
        "Project",
        "PruneReport",
        "ReadyCheck",
        "RegistryAuth",
        "SandboxInfo",
        "ServerInfo",
        "Snapshot",
        "TemplateDetail",
        "TemplateInfo",
        "TemplateTag",
        "Transition",
        "VmDisk",
        "VmOptions",
        "WatchEvent",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_HOME_OF.get(name, "._errors"), __name__)
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

# SPDX-License-Identifier: Apache-2.0
"""Every exception this package raises on purpose.

The upper half mirrors the codes of the server; classes marked *local* are decided here.

::

    OpendsecError
    ├── UserError            fault=user      the caller must change something
    │   ├── InvalidRequest
    │   │   ├── ProgramNotFound         local
    │   │   └── ProgramNotExecutable    local
    │   ├── Unauthenticated
    │   ├── Forbidden
    │   ├── NotFound
    │   │   ├── SandboxNotFound
    │   │   ├── TemplateNotFound
    │   │   ├── SnapshotNotFound
    │   │   ├── ImageNotFound
    │   │   ├── BuildNotFound
    │   │   ├── ActionNotFound
    │   │   ├── TrajectoryNotFound
    │   │   ├── FunctionPoolNotFound
    │   │   ├── TaskNotFound
    │   │   ├── TaskOperationNotFound
    │   │   ├── GroupNotFound
    │   │   ├── GroupServiceNotFound
    │   │   ├── FileNotFound            local
    │   │   └── ProcessNotFound         local
    │   ├── Conflict
    │   │   ├── IdempotencyMismatch
    │   │   ├── IdempotencyInProgress   (retryable)
    │   │   ├── IdempotencyOutcomeUnknown (retryable)
    │   │   ├── StateConflict
    │   │   │   ├── AlreadyPaused
    │   │   │   └── SandboxPaused       local
    │   │   ├── ActionMismatch
    │   │   ├── ActionInProgress        (retryable)
    │   │   ├── ImageInUse
    │   │   ├── TaskExists
    │   │   ├── TaskEnded
    │   │   ├── TaskPaused
    │   │   ├── TaskBudgetReached
    │   │   ├── GroupExists
    │   │   ├── GroupStateConflict
    │   │   └── AlreadyExists           local
    │   ├── SandboxEnded
    │   ├── RegistryDenied
    │   ├── BuildFailed
    │   ├── FunctionPoolUnusable
    │   ├── FunctionFailed
    │   │   ├── FunctionRaised
    │   │   ├── FunctionTimeout
    │   │   ├── FunctionOutOfMemory
    │   │   ├── FunctionDiskFull
    │   │   ├── FunctionCrashed
    │   │   ├── FunctionResultInvalid
    │   │   ├── FunctionResultTooLarge
    │   │   └── FunctionCancelled
    │   ├── GroupUnhealthy
    │   ├── GroupServiceFailed
    │   ├── MethodNotAllowed
    │   ├── PayloadTooLarge
    │   ├── NotSupported
    │   ├── NotConfigured               local
    │   ├── DiskFull                    local
    │   ├── PortNotOpen                 local
    │   ├── WaitTimeout                 local
    │   ├── ArtifactsRefused            local
    │   ├── CommandFailed               local
    │   └── CommandTimeout              local
    ├── CapacityError        fault=capacity  try later or elsewhere (retryable)
    │   ├── QuotaExceeded
    │   ├── FunctionQueueFull
    │   ├── TrajectoryFull
    │   ├── NodeFull
    │   └── RegistryLimited
    └── PlatformError        fault=platform  never the program's failure
        ├── Internal
        ├── ActionUnknown
        ├── SandboxLost
        ├── SandboxStartFailed          (retryable)
        ├── AgentUnresponsive           (retryable)
        ├── NodeUnavailable             (retryable)
        │   └── NodeClocksDiffer        (retryable)
        ├── RegistryUnavailable         (retryable)
        ├── ImageDamaged
        ├── StoreUnavailable            (retryable)
        ├── FunctionWorkerLost          (retryable)
        ├── StartTimeout                (retryable)
        ├── SnapshotFailed              (retryable)
        ├── SnapshotDamaged
        ├── SnapshotIncompatible
        ├── ResumeFailed                (retryable)
        ├── ConnectionFailed            local (retryable)
        └── BadResponse                 local
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._models import CommandResult

from ._error_base import (
    FAULTS,
    CapacityError,
    Conflict,
    Fault,
    NotFound,
    OpendsecError,
    PlatformError,
    UserError,
)
from ._work_errors import (
    ActionInProgress,
    ActionMismatch,
    ActionNotFound,
    ActionUnknown,
    ArtifactsRefused,
    BatchCancelled,
    BatchNotFound,
    BuildFailed,
    BuildNotFound,
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
    GroupExists,
    GroupNotFound,
    GroupServiceFailed,
    GroupServiceNotFound,
    GroupStateConflict,
    GroupUnhealthy,
    ImageInUse,
    RegistryDenied,
    RegistryLimited,
    RegistryUnavailable,
    TaskBudgetReached,
    TaskEnded,
    TaskExists,
    TaskNotFound,
    TaskOperationNotFound,
    TaskPaused,
    TrajectoryFull,
    TrajectoryNotFound,
)

__all__ = [
    "FAULTS",
    "ActionInProgress",
    "ActionMismatch",
    "ActionNotFound",
    "ActionUnknown",
    "ArtifactsRefused",
    "BatchCancelled",
    "BatchNotFound",
    "BuildFailed",
    "BuildNotFound",
    "CapacityError",
    "Conflict",
    "Fault",
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
    "GroupExists",
    "GroupNotFound",
    "GroupServiceFailed",
    "GroupServiceNotFound",
    "GroupStateConflict",
    "GroupUnhealthy",
    "ImageInUse",
    "NotFound",
    "OpendsecError",
    "PlatformError",
    "RegistryDenied",
    "RegistryLimited",
    "RegistryUnavailable",
    "TaskBudgetReached",
    "TaskEnded",
    "TaskExists",
    "TaskNotFound",
    "TaskOperationNotFound",
    "TaskPaused",
    "TrajectoryFull",
    "TrajectoryNotFound",
    "UserError",
]
"""Of other modules, and found here like all others."""

# --- user -------------------------------------------------------------------


class InvalidRequest(UserError):
    """A field is missing, malformed or out of range."""


class ProgramNotFound(InvalidRequest):
    """The program to run does not exist in the sandbox, or its script's interpreter does not."""

    code = "program_not_found"
    default_remediation = (
        "Check the name. Without a slash it is looked for in the PATH of the sandbox; a script "
        "also needs the interpreter that its first line names."
    )


class ProgramNotExecutable(InvalidRequest):
    """The program to run exists, but the sandbox's system refuses to run it."""

    code = "program_not_executable"
    default_remediation = (
        "Make it executable for the user (chmod +x), and check that it is built for this machine."
    )


class Unauthenticated(UserError):
    """No API key or access token, or one that is not known."""

    code = "unauthenticated"
    default_remediation = (
        "Pass api_key= or set OPENDSEC_API_KEY. "
        "`sudo opendsec env` prints the key of a local server."
    )


class Forbidden(UserError):
    """The key is valid but has no right to this object."""

    code = "forbidden"
    default_remediation = "Use a key of the project that owns the object."


class SandboxNotFound(NotFound):
    """No such sandbox: unknown, another project's, or ended.

    Also raised when a sandbox ends under a running call. Then ``details["end_reason"]`` says why,
    if the server still knows, and ``fault`` follows the server's record.
    """

    code = "sandbox_not_found"
    default_remediation = (
        "Check the id, or list sandboxes. An ended sandbox cannot be used again: create a new one."
    )


class TemplateNotFound(NotFound):
    """No such template for this caller."""

    code = "template_not_found"
    default_remediation = "List templates and use one of their names."


class SnapshotNotFound(NotFound):
    """No such snapshot for this caller."""

    code = "snapshot_not_found"
    default_remediation = "List snapshots and use one of their ids or names."


class FileNotFound(NotFound):
    """No such file or directory in the sandbox."""

    code = "file_not_found"
    default_remediation = "Check the path; a relative path starts at the user's home."


class ProcessNotFound(NotFound):
    """No such process in the sandbox; an ended one is remembered for 30 seconds."""

    code = "process_not_found"
    default_remediation = "List the sandbox's processes."


class IdempotencyMismatch(Conflict):
    """The idempotency key was used before with other parameters."""

    code = "idempotency_request_mismatch"
    default_remediation = "Use a new idempotency key for a request with other parameters."


class IdempotencyInProgress(Conflict):
    """The first request with this idempotency key is still running."""

    code = "idempotency_request_in_progress"
    retryable = True
    default_remediation = "Wait and repeat the same request with the same key."


class IdempotencyOutcomeUnknown(Conflict):
    """What became of the first request with this key cannot be found out at the moment."""

    code = "idempotency_outcome_unknown"
    retryable = True
    default_remediation = "Repeat the same request with the same key a little later."


class StateConflict(Conflict):
    """The sandbox is in a state that does not allow the operation."""

    code = "sandbox_state_conflict"


class AlreadyPaused(StateConflict):
    """A pause of a sandbox that is paused."""

    code = "already_paused"
    default_remediation = "Nothing is to be done. Resume it to use it."


class SandboxPaused(StateConflict):
    """The sandbox is paused, or was paused under a running call. Nothing of it is lost.

    Attributes:
        pid: The process whose stream ended, if its id was known. It goes on after a resume if the
            pause kept the memory (``details["paused_mode"]`` is ``full``): attach to it again.
        stdout: What the command had written until then, up to the output limit.
        stderr: The same for its error output.
    """

    code = "sandbox_paused"
    default_remediation = (
        "Resume it. If the pause kept its memory, its processes go on: attach to them by pid."
    )

    def __init__(
        self, message: str, *, details: Mapping[str, Any] | None = None, pid: int | None = None
    ) -> None:
        super().__init__(message, details=details)
        self.pid = pid
        self.stdout = ""
        self.stderr = ""


class AlreadyExists(Conflict):
    """The path exists already."""

    code = "already_exists"
    default_remediation = "Choose another path, or remove the present one first."


class ImageNotFound(NotFound):
    """No such image: not on the node, or the registry has none of that name and processor."""

    code = "image_not_found"
    default_remediation = "Check the reference, its tag and its registry; list the images here."


class SandboxEnded(UserError):
    """The sandbox has ended, as asked, as agreed (a time-out), or by what ran in it."""

    code = "sandbox_ended"
    default_remediation = (
        "Create a new sandbox; fast-forward it through the recorded actions to go on."
    )


class MethodNotAllowed(UserError):
    """The address exists, but not with this HTTP method: client and server do not match."""

    code = "method_not_allowed"
    default_remediation = "Use a client of the server's version."


class PayloadTooLarge(UserError):
    """The request body is above the server's limit."""

    code = "payload_too_large"
    default_remediation = "Send a smaller body. Upload file contents through the files API."


class NotSupported(UserError):
    """This server, or this template, does not offer the feature."""

    code = "not_supported"
    default_remediation = "See the status table in the documentation for what is supported."


class NotConfigured(UserError):
    """The client lacks a setting, or has one that makes no sense."""

    code = "not_configured"
    default_remediation = (
        "Set OPENDSEC_API_URL and OPENDSEC_API_KEY, or pass base_url= and api_key=."
    )


class DiskFull(UserError):
    """The sandbox's disk is full."""

    code = "disk_full"
    default_remediation = "Remove files, or create the sandbox with a larger disk_mb."


class PortNotOpen(UserError):
    """Nothing in the sandbox listens on the port."""

    code = "port_not_open"
    default_remediation = "Start the service first, and use wait_for_port()."


class WaitTimeout(UserError):
    """What was waited for did not happen in the given time."""

    code = "wait_timeout"
    default_remediation = "Wait longer, or find out why it does not happen."


class CommandFailed(UserError):
    """The command ended with another exit code than 0, and ``check=True`` was asked for.

    Attributes:
        result: Exit code and output.
    """

    code = "command_failed"
    default_remediation = "Read the command's output."

    def __init__(self, message: str, *, result: CommandResult) -> None:
        super().__init__(message)
        self.result = result


class CommandTimeout(UserError):
    """The command reached its ``timeout_s``; the sandbox killed it with all its children.

    Attributes:
        timeout_s: The limit it reached, in seconds.
        stdout: What it had written until then, up to the output limit.
        stderr: The same for its error output.
    """

    code = "command_timeout"
    default_remediation = "Give the command a larger timeout_s, or make it faster."

    def __init__(
        self, message: str, *, timeout_s: float, stdout: str = "", stderr: str = ""
    ) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s
        self.stdout = stdout
        self.stderr = stderr


# --- capacity ---------------------------------------------------------------


class QuotaExceeded(CapacityError):
    """A limit of the project is reached."""

    code = "quota_exceeded"
    default_remediation = "End sandboxes you no longer need, or ask for a higher quota."


class NodeFull(CapacityError):
    """The node has no free slot, memory or disk for another sandbox."""

    code = "node_full"
    default_remediation = "Try again when sandboxes have ended, or add a node."


# --- platform ---------------------------------------------------------------


class Internal(PlatformError):
    """A defect on the server's side."""


class SandboxStartFailed(PlatformError):
    """The sandbox could not be brought up; everything made for it was removed."""

    code = "sandbox_start_failed"
    retryable = True
    default_remediation = (
        "Retry with the same idempotency key. Run `opendsec doctor` if it repeats."
    )


class AgentUnresponsive(PlatformError):
    """The guest agent of a running sandbox does not answer."""

    code = "agent_unresponsive"
    retryable = True
    default_remediation = "Retry; if it repeats, kill the sandbox and create a new one."


class SandboxLost(PlatformError):
    """The sandbox ended by the platform's fault: its node, its virtual machine or its start."""

    code = "sandbox_lost"
    default_remediation = (
        "Create a new sandbox; fast-forward it through the recorded actions to go on. Do not "
        "score what it had done so far as a failure."
    )


class NodeUnavailable(PlatformError):
    """The node, or the control plane, cannot be reached or is shutting down."""

    code = "node_unavailable"
    retryable = True
    default_remediation = "Retry after a moment."


class NodeClocksDiffer(NodeUnavailable):
    """A node does not hear a gateway whose clock is too far from its own."""

    code = "node_clocks_differ"
    default_remediation = "Set the clocks of gateway and node, best by NTP; then retry."


class StoreUnavailable(PlatformError):
    """The control plane's database cannot be used; running sandboxes go on."""

    code = "store_unavailable"
    retryable = True
    default_remediation = "Retry after a moment. Running sandboxes are not affected."


class ImageDamaged(PlatformError):
    """What came from the registry is not what its digest says, or is no valid image."""

    code = "image_damaged"
    http_status = 502
    default_remediation = "Push the image anew, or pull it from another registry."


class StartTimeout(PlatformError):
    """The sandbox did not become ready within its start budget."""

    code = "start_timeout"
    retryable = True
    default_remediation = "Retry with the same idempotency key."


class SnapshotFailed(PlatformError):
    """A sandbox's state could not be saved. The sandbox itself goes on; nothing is left behind."""

    code = "snapshot_failed"
    retryable = True
    default_remediation = "Retry; if it repeats, look at the node's free disk and its log."


class SnapshotDamaged(PlatformError):
    """What was saved does not match its checksum or is cut short. It was not used."""

    code = "snapshot_damaged"
    default_remediation = (
        "Delete the snapshot and take it again. A paused sandbox can be resumed from its disk "
        "alone (reboot=True)."
    )


class SnapshotIncompatible(PlatformError):
    """Saved memory needs another VMM, CPU model, guest kernel or agent than the node has."""

    code = "snapshot_incompatible"
    default_remediation = (
        "Use a node that has what it needs, or start from its disk alone (reboot=True)."
    )


class ResumeFailed(PlatformError):
    """A paused sandbox did not come up again. It stays paused; nothing of it is lost."""

    code = "resume_failed"
    retryable = True
    default_remediation = "Retry; if it repeats, resume it from its disk alone (reboot=True)."


class ConnectionFailed(PlatformError):
    """No answer, or only a part of it, came over the network.

    Attributes:
        sandbox_alive: After a broken stream the sandbox is asked for its health. True: it answered,
            so only the connection failed and a process can be re-attached by its pid. None: it
            could not be asked. (A sandbox that is gone raises ``SandboxNotFound`` instead.)
        pid: The process whose stream broke, if its id was known.
        stdout: What the command had written until then, up to the output limit.
        stderr: The same for its error output.
    """

    code = "connection_failed"
    retryable = True
    default_remediation = (
        "Check the address and that the server runs (`opendsec doctor`), then try again."
    )

    def __init__(
        self,
        message: str,
        *,
        remediation: str | None = None,
        request_id: str | None = None,
        sandbox_alive: bool | None = None,
        pid: int | None = None,
    ) -> None:
        super().__init__(message, remediation=remediation, request_id=request_id)
        self.sandbox_alive = sandbox_alive
        self.pid = pid
        self.stdout = ""
        self.stderr = ""


class BadResponse(PlatformError):
    """The answer does not follow the protocol: a wrong address, a proxy, or another version."""

    code = "bad_response"
    default_remediation = "Check that the address is that of an OpenDsec server of this version."


def all_error_classes() -> list[type[OpendsecError]]:
    """Every class of the tree, parents before children."""
    found: list[type[OpendsecError]] = []
    todo: list[type[OpendsecError]] = [OpendsecError]
    while todo:
        cls = todo.pop(0)
        found.append(cls)
        todo.extend(cls.__subclasses__())
    return found

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
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from ._models import CommandResult

Fault = Literal["user", "platform", "capacity"]
FAULTS: tuple[Fault, ...] = ("user", "platform", "capacity")


class OpendsecError(Exception):
    """Base of every failure.

    Attributes:
        code: Stable word for programs, such as ``sandbox_not_found``.
        message: What happened, in one sentence.
        remediation: What the reader should do.
        retryable: Whether the same call may work later without a change.
        fault: Who has to act: ``user``, ``platform`` or ``capacity``. A grader must score only
            ``user`` failures as the program's own.
        request_id: The server's id of the request, for its log. None if no answer came.
        details: Further facts from the server.
        http_status: Status of the answer; None if no answer came.
        retry_after_s: When to try again, in seconds, if the server said so.
    """

    code: str = "internal"
    fault: Fault = "platform"
    retryable: bool = False
    default_remediation: ClassVar[str] = (
        "Look at the server's log for the request id; report it if it repeats."
    )

    def __init__(
        self,
        message: str,
        *,
        remediation: str | None = None,
        request_id: str | None = None,
        details: Mapping[str, Any] | None = None,
        http_status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remediation = remediation or self.default_remediation
        self.request_id = request_id
        self.details: dict[str, Any] = dict(details or {})
        self.http_status = http_status
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, Any]:
        """The error as plain JSON types, in the shape of the server's ``error`` object."""
        return {
            "code": self.code,
            "message": self.message,
            "remediation": self.remediation,
            "retryable": self.retryable,
            "fault": self.fault,
            "details": self.details,
            "request_id": self.request_id,
        }


# --- user -------------------------------------------------------------------


class UserError(OpendsecError):
    """The caller must change something before the call can work."""

    code = "invalid_request"
    fault: Fault = "user"
    default_remediation = "Correct the request and send it again."


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


class NotFound(UserError):
    """The named object does not exist, or is not the caller's."""

    code = "not_found"
    default_remediation = "Check the name; list what exists."


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


class ActionNotFound(NotFound):
    """The sandbox's log has no action of this id."""

    code = "action_not_found"
    default_remediation = "List the sandbox's actions."


class TrajectoryNotFound(NotFound):
    """No action of the project has this rollout id."""

    code = "trajectory_not_found"
    default_remediation = "List trajectories and use one of their rollout ids."


class ProcessNotFound(NotFound):
    """No such process in the sandbox; an ended one is remembered for 30 seconds."""

    code = "process_not_found"
    default_remediation = "List the sandbox's processes."


class Conflict(UserError):
    """The request contradicts the object's present state."""

    code = "conflict"
    default_remediation = "Read the object's state and decide again."


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


class ActionMismatch(Conflict):
    """The action id was used before in this sandbox, for something else."""

    code = "action_mismatch"
    default_remediation = "Use a new action id for another action."


class ActionInProgress(Conflict):
    """Another action of the sandbox must end first: snapshots stand at a known place only."""

    code = "action_in_progress"
    retryable = True
    default_remediation = "Wait until the other action has ended, and send this one again."


class ImageInUse(Conflict):
    """Sandboxes, snapshots or templates stand on the image."""

    code = "image_in_use"
    default_remediation = "End or delete what uses it first."


class SandboxEnded(UserError):
    """The sandbox has ended, as asked, as agreed (a time-out), or by what ran in it."""

    code = "sandbox_ended"
    default_remediation = (
        "Create a new sandbox; fast-forward it through the recorded actions to go on."
    )


class RegistryDenied(UserError):
    """The registry wants credentials, or refuses those it got."""

    code = "registry_denied"
    http_status = 403
    default_remediation = "Give credentials that may pull the image, and check its name."


class BuildNotFound(NotFound):
    """No such build of a template for this caller."""

    code = "build_not_found"
    default_remediation = "Check the template and build ids; list the template's builds."


class BuildFailed(UserError):
    """A step of a template build failed by what the step itself did."""

    code = "build_failed"
    http_status = 422
    default_remediation = "Read the log of the failed step, mend the step and build again."


class FunctionPoolNotFound(NotFound):
    """The project has no function pool of that name."""

    code = "function_pool_not_found"
    default_remediation = "List the pools, or make it first. The pool `default` is always there."


class FunctionPoolUnusable(UserError):
    """Workers of the pool cannot serve: no `python3`, or an import in advance fails."""

    code = "function_pool_unusable"
    default_remediation = (
        "Use a template that has Python 3.8 or later (`python3`), and mend the pool's "
        "imports."
    )


class FunctionFailed(UserError):
    """The call ended by what its own code did. Base of what calls can come to."""

    code = "function_failed"
    default_remediation = "Mend the function; its output and traceback are in the answer."


class FunctionRaised(FunctionFailed):
    """The function raised an exception."""

    code = "function_raised"
    default_remediation = "Read the traceback and mend the function."


class FunctionTimeout(FunctionFailed):
    """The call took longer than its time-out and was killed."""

    code = "function_timeout"
    default_remediation = "Give it more time, or less to do."


class FunctionOutOfMemory(FunctionFailed):
    """The call wanted more memory than it may have."""

    code = "function_out_of_memory"
    default_remediation = "Raise the call's memory limit or the pool's memory, or use less."


class FunctionDiskFull(FunctionFailed):
    """The call filled its worker's disk."""

    code = "function_disk_full"
    default_remediation = "Write less, or give the pool a larger disk."


class FunctionCrashed(FunctionFailed):
    """The call's process ended without a result: by a signal, or by leaving."""

    code = "function_crashed"
    default_remediation = (
        "Look at the exit status or signal in the details; return from the function."
    )


class FunctionResultInvalid(FunctionFailed):
    """What the function returned is no plain data, or what the call sent is no result."""

    code = "function_result_invalid"
    default_remediation = (
        "Return plain data (numbers, text, bytes, lists, dicts), or ask for pickled results."
    )


class FunctionResultTooLarge(FunctionFailed):
    """The call's result and files are larger than a call may hand back."""

    code = "function_result_too_large"
    default_remediation = "Hand back less, or use a sandbox and its files."


class FunctionCancelled(FunctionFailed):
    """The call was given up: its caller went away, or its pool was deleted."""

    code = "function_cancelled"
    default_remediation = "Call again."


class BatchNotFound(NotFound):
    """No such batch for this caller."""

    code = "batch_not_found"
    default_remediation = "Check the batch id; list the batches. Old ones are removed."


class BatchCancelled(Conflict):
    """The batch was cancelled before this item began."""

    code = "batch_cancelled"
    default_remediation = "Nothing was made for this item. Ask for it in another batch."


class TaskNotFound(NotFound):
    """No such task for this caller."""

    code = "task_not_found"
    default_remediation = "Check the task id; list the tasks. A task is made by its first use."


class TaskOperationNotFound(NotFound):
    """No such pause, resume or kill of this task."""

    code = "task_operation_not_found"
    default_remediation = "List the task's operations. Old ones are removed."


class TaskExists(Conflict):
    """A task of this name exists, with other limits."""

    code = "task_exists"
    default_remediation = "Change its limits instead, or use another id."


class TaskEnded(Conflict):
    """The task has ended: by a kill, at its deadline, or with its budget."""

    code = "task_ended"
    default_remediation = "Use another task id, or reopen the task."


class TaskPaused(Conflict):
    """The task is paused: nothing is started in it."""

    code = "task_paused"
    default_remediation = "Resume the task first."


class TaskBudgetReached(Conflict):
    """As many sandboxes were made in the task as its budget allows."""

    code = "task_budget_reached"
    default_remediation = "Give the task a larger budget, or use another task id."


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


class ArtifactsRefused(UserError):
    """What an agent left cannot be taken into a verifier's sandbox. The agent's own failure."""

    code = "artifacts_refused"
    default_remediation = "Look at what the agent made of the paths that the verifier takes."


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


class CapacityError(OpendsecError):
    """Nothing is broken; there is no room now."""

    code = "capacity"
    fault: Fault = "capacity"
    retryable = True
    default_remediation = "Try again later, or add capacity."


class QuotaExceeded(CapacityError):
    """A limit of the project is reached."""

    code = "quota_exceeded"
    default_remediation = "End sandboxes you no longer need, or ask for a higher quota."


class RegistryLimited(CapacityError):
    """The registry answers that too much was asked of it (429)."""

    code = "registry_limited"
    default_remediation = "Wait as long as retry_after_s says, log in, or use a mirror."


class FunctionQueueFull(CapacityError):
    """As many calls of the project wait as may."""

    code = "function_queue_full"
    default_remediation = "Wait for answers before sending more calls."


class TrajectoryFull(CapacityError):
    """The sandbox's log holds as many actions, or as much of their output, as may be."""

    code = "trajectory_full"
    retryable = False
    default_remediation = (
        "Run commands directly, keep less output, or go on in a new sandbox made from a snapshot."
    )


class NodeFull(CapacityError):
    """The node has no free slot, memory or disk for another sandbox."""

    code = "node_full"
    default_remediation = "Try again when sandboxes have ended, or add a node."


# --- platform ---------------------------------------------------------------


class PlatformError(OpendsecError):
    """Not the caller's to mend. A grader must never score it as the program's failure."""


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


class ActionUnknown(PlatformError):
    """It is not known whether an action took effect, so that nothing may build on it."""

    code = "action_unknown"
    default_remediation = (
        "Resolve it: ask the sandbox again (`actions.resolve`), or state what became of it. "
        "Do not score it."
    )


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


class StoreUnavailable(PlatformError):
    """The control plane's database cannot be used; running sandboxes go on."""

    code = "store_unavailable"
    retryable = True
    default_remediation = "Retry after a moment. Running sandboxes are not affected."


class RegistryUnavailable(PlatformError):
    """The registry cannot be reached, fails, or is too slow."""

    code = "registry_unavailable"
    http_status = 502
    retryable = True
    default_remediation = "Check the registry's address and health; try again."


class ImageDamaged(PlatformError):
    """What came from the registry is not what its digest says, or is no valid image."""

    code = "image_damaged"
    http_status = 502
    default_remediation = "Push the image anew, or pull it from another registry."


class FunctionWorkerLost(PlatformError):
    """The worker ended while it made the call. What the call did until then is not known."""

    code = "function_worker_lost"
    retryable = True
    default_remediation = "Call again; workers are replaced by themselves."


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

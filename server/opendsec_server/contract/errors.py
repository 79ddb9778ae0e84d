# SPDX-License-Identifier: AGPL-3.0-only
"""The one tree of errors.

::

    OpendsecError
    ├── UserError            fault=user      the caller must change something
    │   ├── InvalidRequest            400
    │   ├── Unauthenticated           401
    │   ├── Forbidden                 403
    │   ├── NotFound                  404
    │   │   ├── SandboxNotFound       404
    │   │   └── TemplateNotFound      404
    │   ├── Conflict                  409
    │   │   ├── IdempotencyMismatch   409
    │   │   ├── IdempotencyInProgress 409  (retryable)
    │   │   ├── IdempotencyOutcomeUnknown 422  (retryable)
    │   │   └── StateConflict         409
    │   ├── FunctionPoolUnusable      422
    │   ├── FunctionFailed            422  (FunctionRaised, …Timeout, …OutOfMemory and others)
    │   ├── MethodNotAllowed          405
    │   ├── PayloadTooLarge           413
    │   └── NotSupported              501
    ├── CapacityError        fault=capacity  try later or elsewhere
    │   ├── QuotaExceeded             429
    │   ├── FunctionQueueFull         429  (retryable)
    │   └── NodeFull                  503  (retryable)
    └── PlatformError        fault=platform  ours; never the model's failure
        ├── SandboxStartFailed        500  (retryable)
        ├── AgentUnresponsive         502  (retryable)
        ├── NodeUnavailable           503  (retryable)
        ├── StoreUnavailable          503  (retryable)
        ├── FunctionWorkerLost        502  (retryable)
        ├── StartTimeout              504  (retryable)
        └── Internal                  500

Every error carries ``code``, ``message``, ``remediation``, ``retryable`` and ``fault``,
so that a caller can tell "the command failed" from "the platform failed".
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Fault = Literal["user", "platform", "capacity"]


class OpendsecError(Exception):
    """Base of every failure that leaves the server.

    Args:
        message: What happened, in one sentence, without secrets.
        remediation: What the reader should do. Defaults to the class's own text.
        details: JSON-serialisable extra facts (ids, limits, figures).
        retry_after_s: When to try again, in seconds, if the server knows.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    fault: Fault = "platform"
    """Of the class; of one failure it may be another's, as its evidence says."""
    retryable: bool = False
    """As ``fault``."""
    default_remediation: ClassVar[str] = (
        "Look at the server's log for the request id; report it if it repeats."
    )

    def __init__(
        self,
        message: str,
        *,
        remediation: str | None = None,
        details: dict[str, Any] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remediation = remediation or self.default_remediation
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, Any]:
        """The body's ``error`` object of the native API."""
        return {
            "code": self.code,
            "message": self.message,
            "remediation": self.remediation,
            "retryable": self.retryable,
            "fault": self.fault,
            "details": self.details,
        }


# --- user -------------------------------------------------------------------


class UserError(OpendsecError):
    """The caller must change something before the call can work."""

    code = "invalid_request"
    http_status = 400
    fault: Fault = "user"
    default_remediation = "Correct the request and send it again."


class InvalidRequest(UserError):
    """A field is missing, malformed or out of range."""


class Unauthenticated(UserError):
    """No API key, or one that is not known."""

    code = "unauthenticated"
    http_status = 401
    default_remediation = (
        "Send a valid key in X-API-Key. `sudo opendsec env` prints the key of a local server."
    )


class Forbidden(UserError):
    """The key is valid but has no right to this object."""

    code = "forbidden"
    http_status = 403
    default_remediation = "Use a key of the project that owns the object."


class NotFound(UserError):
    """The named object does not exist, or is not the caller's."""

    code = "not_found"
    http_status = 404
    default_remediation = "Check the name; list what exists."


class SandboxNotFound(NotFound):
    """No such sandbox for this caller: unknown, foreign, or ended."""

    code = "sandbox_not_found"
    default_remediation = (
        "Check the id, or list sandboxes. An ended sandbox cannot be used again: create a new one."
    )


class FileNotFound(NotFound):
    """The sandbox has no file of that path."""

    code = "file_not_found"
    default_remediation = "Check the path; list its directory."


class ActionNotFound(NotFound):
    """The sandbox's trajectory has no action of this id."""

    code = "action_not_found"
    default_remediation = "List the sandbox's actions."


class TrajectoryNotFound(NotFound):
    """No action of the caller's has this rollout id."""

    code = "trajectory_not_found"
    default_remediation = "List trajectories and use one of their rollout ids."


class TemplateNotFound(NotFound):
    """No such template for this caller."""

    code = "template_not_found"
    default_remediation = "List templates and use one of their names."


class Conflict(UserError):
    """The request contradicts the object's present state."""

    code = "conflict"
    http_status = 409
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
    http_status = 422
    retryable = True
    default_remediation = "Repeat the same request with the same key a little later."


class ActionMismatch(Conflict):
    """The action id was used before in this sandbox, for something else."""

    code = "action_mismatch"
    default_remediation = "Use a new action id for another action."


class ActionInProgress(Conflict):
    """Another action of the sandbox must end first: a snapshot is taken of a known place only."""

    code = "action_in_progress"
    retryable = True
    default_remediation = "Wait until the other action has ended, and send this one again."


class SandboxEnded(UserError):
    """The sandbox has ended, as asked, as agreed (a time-out), or by what ran in it."""

    code = "sandbox_ended"
    http_status = 410
    default_remediation = (
        "Create a new sandbox; fast-forward it through the recorded actions to go on."
    )


class SnapshotNotFound(NotFound):
    """No such snapshot for this caller, or on this node."""

    code = "snapshot_not_found"
    default_remediation = "List snapshots and use one of their ids or names."


class ImageNotFound(NotFound):
    """No such image: not on the node, or the registry has none of that name and processor."""

    code = "image_not_found"
    default_remediation = "Check the reference, its tag and its registry; list the images here."


class ImageInUse(Conflict):
    """Sandboxes, snapshots or templates stand on the image."""

    code = "image_in_use"
    default_remediation = "End or delete what uses it first."


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
    http_status = 404
    default_remediation = "List the pools, or make it first. The pool `default` is always there."


class FunctionPoolUnusable(UserError):
    """Workers of the pool cannot serve: no `python3`, or an import in advance fails."""

    code = "function_pool_unusable"
    http_status = 422
    default_remediation = (
        "Use a template that has Python 3.8 or later (`python3`), and mend the pool's imports."
    )


class FunctionFailed(UserError):
    """The call ended by what its own code did. Base of what calls can come to."""

    code = "function_failed"
    http_status = 422
    default_remediation = "Mend the function; its output and traceback are in the answer."


class FunctionRaised(FunctionFailed):
    """The function raised an exception."""

    code = "function_raised"
    http_status = 422
    default_remediation = "Read the traceback and mend the function."


class FunctionTimeout(FunctionFailed):
    """The call took longer than its time-out and was killed."""

    code = "function_timeout"
    http_status = 422
    default_remediation = "Give it more time, or less to do."


class FunctionOutOfMemory(FunctionFailed):
    """The call wanted more memory than it may have."""

    code = "function_out_of_memory"
    http_status = 422
    default_remediation = "Raise the call's memory limit or the pool's memory, or use less."


class FunctionDiskFull(FunctionFailed):
    """The call filled its worker's disk."""

    code = "function_disk_full"
    http_status = 422
    default_remediation = "Write less, or give the pool a larger disk."


class FunctionCrashed(FunctionFailed):
    """The call's process ended without a result: by a signal, or by leaving."""

    code = "function_crashed"
    http_status = 422
    default_remediation = (
        "Look at the exit status or signal in the details; return from the function."
    )


class FunctionResultInvalid(FunctionFailed):
    """What the function returned is no plain data, or what the call sent is no result."""

    code = "function_result_invalid"
    http_status = 422
    default_remediation = (
        "Return plain data (numbers, text, bytes, lists, dicts), or ask for pickled results."
    )


class FunctionResultTooLarge(FunctionFailed):
    """The call's result and files are larger than a call may hand back."""

    code = "function_result_too_large"
    http_status = 422
    default_remediation = "Hand back less, or use a sandbox and its files."


class FunctionCancelled(FunctionFailed):
    """The call was given up: its caller went away, or its pool was deleted."""

    code = "function_cancelled"
    http_status = 422
    default_remediation = "Call again."


class MethodNotAllowed(UserError):
    """The path exists, but not with this method."""

    code = "method_not_allowed"
    http_status = 405
    default_remediation = "Use a method that the Allow header names."


class StateConflict(Conflict):
    """The sandbox is in a state that does not allow the operation."""

    code = "sandbox_state_conflict"


class AlreadyPaused(StateConflict):
    """A pause of a sandbox that is paused."""

    code = "already_paused"
    default_remediation = "Nothing is to be done. Resume it to use it."


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


class GroupNotFound(NotFound):
    """No such group for this caller."""

    code = "group_not_found"
    default_remediation = "Check the id or name; list the groups."


class GroupServiceNotFound(NotFound):
    """The group has no service of that name."""

    code = "group_service_not_found"
    default_remediation = "Look at the group; its services are named there."


class GroupExists(Conflict):
    """A group of this name has not ended yet."""

    code = "group_exists"
    default_remediation = "End it first, or use another name."


class GroupStateConflict(Conflict):
    """The group is in a state that does not allow the operation."""

    code = "group_state_conflict"


class GroupUnhealthy(UserError):
    """A service of the group did not become healthy. The whole group was ended."""

    code = "group_unhealthy"
    http_status = 422
    default_remediation = "Read the last output of its health check and its logs; mend the service."


class GroupServiceFailed(UserError):
    """A service of the group ended while the group was being started. All of it was ended."""

    code = "group_service_failed"
    http_status = 422
    default_remediation = "Read its output in the details; mend the service."


class PayloadTooLarge(UserError):
    """The request body is above the stated limit."""

    code = "payload_too_large"
    http_status = 413
    default_remediation = "Send a smaller body. Upload file contents through the files API."


class NotSupported(UserError):
    """This server does not offer the feature (yet)."""

    code = "not_supported"
    http_status = 501
    default_remediation = "See the status table in the documentation for what is supported."


# --- capacity ---------------------------------------------------------------


class CapacityError(OpendsecError):
    """Nothing is broken; there is no room now."""

    code = "capacity"
    http_status = 503
    fault: Fault = "capacity"
    retryable = True
    default_remediation = "Try again later, or add capacity."


class QuotaExceeded(CapacityError):
    """A limit of the project is reached."""

    code = "quota_exceeded"
    http_status = 429
    default_remediation = "End sandboxes you no longer need, or ask for a higher quota."


class TrajectoryFull(CapacityError):
    """The sandbox's trajectory holds as many actions, or as much of their output, as may be."""

    code = "trajectory_full"
    http_status = 429
    retryable = False
    default_remediation = (
        "Run commands directly, keep less output, or go on in a new sandbox made from a snapshot."
    )


class RegistryLimited(CapacityError):
    """The registry answers that too much was asked of it (429)."""

    code = "registry_limited"
    default_remediation = "Wait as long as retry_after_s says, log in, or use a mirror."


class FunctionQueueFull(CapacityError):
    """As many calls of the project wait as may."""

    code = "function_queue_full"
    http_status = 429
    default_remediation = "Wait for answers before sending more calls."


class NodeFull(CapacityError):
    """The node has no free slot, memory or disk for another sandbox."""

    code = "node_full"
    default_remediation = "Try again when sandboxes have ended, or add a node."


# --- platform ---------------------------------------------------------------


class PlatformError(OpendsecError):
    """Ours to mend. A grader must never score it as the model's failure."""


class Internal(PlatformError):
    """A defect."""


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
    http_status = 502
    retryable = True
    default_remediation = "Retry; if it repeats, kill the sandbox and create a new one."


class NodeUnavailable(PlatformError):
    """The node agent cannot be reached or is shutting down."""

    code = "node_unavailable"
    http_status = 503
    retryable = True
    default_remediation = "Retry after a moment."


class NodeClocksDiffer(NodeUnavailable):
    """A node does not hear a gateway whose clock is too far from its own."""

    code = "node_clocks_differ"
    default_remediation = "Set the clocks of gateway and node, best by NTP; then retry."


class ActionUnknown(PlatformError):
    """It is not known whether an action took effect, so that nothing may build on it."""

    code = "action_unknown"
    http_status = 409
    default_remediation = (
        "Resolve it: ask the sandbox again, or state what became of it, or choose what a "
        "fast-forward does with such actions. Do not score it."
    )


class SandboxLost(PlatformError):
    """The sandbox ended by our fault: its node, its virtual machine or its start failed."""

    code = "sandbox_lost"
    http_status = 410
    default_remediation = (
        "Create a new sandbox; fast-forward it through the recorded actions to go on. Do not "
        "score what it had done so far as a failure."
    )


class StoreUnavailable(PlatformError):
    """The control plane's database cannot be used; running sandboxes go on."""

    code = "store_unavailable"
    http_status = 503
    retryable = True
    default_remediation = "Retry after a moment. Running sandboxes are not affected."


class SnapshotFailed(PlatformError):
    """A sandbox's state could not be saved. The sandbox itself goes on; nothing is left behind."""

    code = "snapshot_failed"
    retryable = True
    default_remediation = "Retry; if it repeats, look at the node's free disk and its log."


class SnapshotDamaged(PlatformError):
    """What was saved does not match its checksum or is cut short. It was not used."""

    code = "snapshot_damaged"
    default_remediation = (
        "Delete the snapshot and take it again. "
        "A paused sandbox can be resumed from its disk alone."
    )


class SnapshotIncompatible(PlatformError):
    """Saved memory needs another VMM, CPU model, guest kernel or agent than this node has."""

    code = "snapshot_incompatible"
    http_status = 409
    default_remediation = "Use a node that has what it needs, or start from its disk alone."


class ResumeFailed(PlatformError):
    """A paused sandbox did not come up again. It stays paused; nothing of it is lost."""

    code = "resume_failed"
    retryable = True
    default_remediation = "Retry; if it repeats, resume it from its disk alone."


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
    http_status = 502
    retryable = True
    default_remediation = "Call again; workers are replaced by themselves."


class StartTimeout(PlatformError):
    """The sandbox did not become ready within its start budget."""

    code = "start_timeout"
    http_status = 504
    retryable = True
    default_remediation = "Retry with the same idempotency key."


def all_error_classes() -> list[type[OpendsecError]]:
    """Every concrete class of the tree, parents first. Used by docs and contract tests.

    Those of this module: a part's own refinement of one is not in the contract.
    """
    found: list[type[OpendsecError]] = []
    todo: list[type[OpendsecError]] = [OpendsecError]
    while todo:
        cls = todo.pop(0)
        found.append(cls)
        todo.extend(sub for sub in cls.__subclasses__() if sub.__module__ == __name__)
    return found

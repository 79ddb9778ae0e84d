# SPDX-License-Identifier: Apache-2.0
"""Exceptions of images, builds, batches, tasks, groups, functions and actions; see ``_errors``."""

from __future__ import annotations

from ._error_base import CapacityError, Conflict, NotFound, PlatformError, UserError


class ActionNotFound(NotFound):
    """The sandbox's log has no action of this id."""

    code = "action_not_found"
    default_remediation = "List the sandbox's actions."


class TrajectoryNotFound(NotFound):
    """No action of the project has this rollout id."""

    code = "trajectory_not_found"
    default_remediation = "List trajectories and use one of their rollout ids."


class ActionMismatch(Conflict):
    """The action id was used before in this sandbox, for something else."""

    code = "action_mismatch"
    default_remediation = "Use a new action id for another action."


class ActionInProgress(Conflict):
    """Another action of the sandbox must end first: snapshots stand at a known place only."""

    code = "action_in_progress"
    retryable = True
    default_remediation = "Wait until the other action has ended, and send this one again."


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
        "Use a template that has Python 3.8 or later (`python3`), and mend the pool's imports."
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


class ArtifactsRefused(UserError):
    """What an agent left cannot be taken into a verifier's sandbox. The agent's own failure."""

    code = "artifacts_refused"
    default_remediation = "Look at what the agent made of the paths that the verifier takes."


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


class ActionUnknown(PlatformError):
    """It is not known whether an action took effect, so that nothing may build on it."""

    code = "action_unknown"
    default_remediation = (
        "Resolve it: ask the sandbox again (`actions.resolve`), or state what became of it. "
        "Do not score it."
    )


class FunctionWorkerLost(PlatformError):
    """The worker ended while it made the call. What the call did until then is not known."""

    code = "function_worker_lost"
    retryable = True
    default_remediation = "Call again; workers are replaced by themselves."


class RegistryDenied(UserError):
    """The registry wants credentials, or refuses those it got."""

    code = "registry_denied"
    http_status = 403
    default_remediation = "Give credentials that may pull the image, and check its name."


class RegistryLimited(CapacityError):
    """The registry answers that too much was asked of it (429)."""

    code = "registry_limited"
    default_remediation = "Wait as long as retry_after_s says, log in, or use a mirror."


class RegistryUnavailable(PlatformError):
    """The registry cannot be reached, fails, or is too slow."""

    code = "registry_unavailable"
    http_status = 502
    retryable = True
    default_remediation = "Check the registry's address and health; try again."


class ImageInUse(Conflict):
    """Sandboxes, snapshots or templates stand on the image."""

    code = "image_in_use"
    default_remediation = "End or delete what uses it first."

# SPDX-License-Identifier: Apache-2.0
"""What every exception of this package has, and the main kinds of them; see ``_errors``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    pass

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


class UserError(OpendsecError):
    """The caller must change something before the call can work."""

    code = "invalid_request"
    fault: Fault = "user"
    default_remediation = "Correct the request and send it again."


class NotFound(UserError):
    """The named object does not exist, or is not the caller's."""

    code = "not_found"
    default_remediation = "Check the name; list what exists."


class Conflict(UserError):
    """The request contradicts the object's present state."""

    code = "conflict"
    default_remediation = "Read the object's state and decide again."


class CapacityError(OpendsecError):
    """Nothing is broken; there is no room now."""

    code = "capacity"
    fault: Fault = "capacity"
    retryable = True
    default_remediation = "Try again later, or add capacity."


class PlatformError(OpendsecError):
    """Not the caller's to mend. A grader must never score it as the program's failure."""

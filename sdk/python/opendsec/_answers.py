# SPDX-License-Identifier: Apache-2.0
"""From an error answer to a typed exception. Pure; no I/O.

Three shapes occur: the native API's ``{"error": {...}}``, the edge's ``{"code": 502, "message"}``
and the Connect protocol's ``{"code": "not_found", "message"}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from . import _errors as e

_BY_CODE: dict[str, type[e.OpendsecError]] = {}
for _cls in e.all_error_classes():
    # A parent comes first, so a code shared with subclasses (InvalidRequest) names the leaf.
    if not issubclass(
        _cls, (e.CommandFailed, e.CommandTimeout, e.ConnectionFailed, e.SandboxPaused)
    ):
        _BY_CODE[_cls.code] = _cls
_BY_CODE["invalid_request"] = e.InvalidRequest
_BY_CODE["internal"] = e.Internal
_BY_CODE["control_plane_unavailable"] = e.NodeUnavailable

# The edge's words for "your request went nowhere, and may go somewhere later".
_NOT_FORWARDED = frozenset(
    {
        "control_plane_unavailable",
        "sandbox_state_conflict",
        "node_full",
        "quota_exceeded",
        "resume_failed",
        "snapshot_failed",
    }
)

# How the agent says that it could not load a program, with the number of Linux's error.
_CANNOT_RUN = re.compile(r"cannot run '.*': .* \(os error (\d+)\)(?:; [^\n]*)?\Z", re.DOTALL)
_NO_SUCH_PROGRAM = frozenset({2, 20})  # ENOENT, ENOTDIR

_BY_STATUS: dict[int, type[e.OpendsecError]] = {
    400: e.InvalidRequest,
    401: e.Unauthenticated,
    403: e.Forbidden,
    404: e.NotFound,
    405: e.MethodNotAllowed,
    409: e.Conflict,
    413: e.PayloadTooLarge,
    429: e.QuotaExceeded,
    501: e.NotSupported,
    502: e.AgentUnresponsive,
    503: e.NodeUnavailable,
    504: e.NodeUnavailable,
    507: e.DiskFull,
}

_BY_CONNECT_CODE: dict[str, type[e.OpendsecError]] = {
    "invalid_argument": e.InvalidRequest,
    "failed_precondition": e.Conflict,
    "out_of_range": e.InvalidRequest,
    "unauthenticated": e.Unauthenticated,
    "permission_denied": e.Forbidden,
    "not_found": e.NotFound,
    "already_exists": e.AlreadyExists,
    "resource_exhausted": e.QuotaExceeded,
    "unimplemented": e.NotSupported,
    "unavailable": e.AgentUnresponsive,
    "deadline_exceeded": e.WaitTimeout,
    "canceled": e.ConnectionFailed,
    "aborted": e.Conflict,
    "internal": e.Internal,
    "unknown": e.Internal,
    "data_loss": e.Internal,
}


def from_http(status: int, headers: Mapping[str, str], body: bytes) -> e.OpendsecError:
    """The exception for an HTTP answer that is not a success."""
    request_id = headers.get("x-request-id")
    retry_after_s = _retry_after_s(headers.get("retry-after"))
    decoded = _decoded(body)
    native = decoded.get("error")
    if isinstance(native, dict):
        return _native(status, request_id, retry_after_s, native)
    message = str(decoded.get("message") or "") or _plain_text(body) or f"HTTP status {status}"
    code, error_code = decoded.get("code"), decoded.get("error_code")
    cls = _class_of(status, code, message)
    if isinstance(error_code, str):
        cls = _BY_CODE.get(error_code, cls)
    error = cls(
        message,
        request_id=request_id,
        http_status=status,
        retry_after_s=retry_after_s,
        details={k: v for k, v in decoded.items() if k not in ("code", "message")},
    )
    if error_code in _NOT_FORWARDED and retry_after_s is not None:
        # The edge could not learn where the sandbox is, or could not resume it.
        error.details["not_forwarded"] = True
        error.retryable = True
    return error


def from_native(body: Mapping[str, Any]) -> e.OpendsecError:
    """The exception for an ``error`` object inside a successful answer of the native API."""
    return _native(None, None, None, body)


def from_connect(code: str, message: str) -> e.OpendsecError:
    """The exception for the error in the end record of a stream."""
    if code == "unavailable" and "was not found" in message:
        return e.SandboxNotFound(message)
    cls = _BY_CONNECT_CODE.get(code, e.Internal)
    if cls is e.InvalidRequest and (found := _CANNOT_RUN.match(message)):
        missing = int(found[1]) in _NO_SUCH_PROGRAM
        return (e.ProgramNotFound if missing else e.ProgramNotExecutable)(message)
    if cls is e.ConnectionFailed:
        return e.ConnectionFailed(message or "The stream was cancelled.")
    return cls(message or code)


def _native(
    status: int | None,
    request_id: str | None,
    retry_after_s: float | None,
    body: Mapping[str, Any],
) -> e.OpendsecError:
    code = str(body.get("code") or "")
    details = body.get("details")
    cls = _BY_CODE.get(code) or _BY_STATUS.get(status or 0) or e.Internal
    error = cls(
        str(body.get("message") or code or f"HTTP status {status}"),
        remediation=str(body["remediation"]) if body.get("remediation") else None,
        request_id=str(body.get("request_id") or "") or request_id,
        details=details if isinstance(details, dict) else None,
        http_status=status,
        retry_after_s=retry_after_s,
    )
    # The server's word beats this version's table: it may be newer.
    if code:
        error.code = code
    if isinstance(body.get("retryable"), bool):
        error.retryable = body["retryable"]
    if body.get("fault") in e.FAULTS:
        error.fault = cast(e.Fault, body["fault"])
    return error


def _class_of(status: int, code: object, message: str) -> type[e.OpendsecError]:
    if isinstance(code, str) and code in _BY_CONNECT_CODE and code != "canceled":
        return _BY_CONNECT_CODE[code]
    if status == 502 and "was not found" in message:
        return e.SandboxNotFound
    if status == 502 and "port is not open" in message:
        return e.PortNotOpen
    return _BY_STATUS.get(status) or (e.Internal if status >= 500 else e.BadResponse)


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _plain_text(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace").strip()
    return "" if text.startswith("<") else text.split("\n", 1)[0]


def _retry_after_s(value: str | None) -> float | None:
    try:
        return float(value) if value else None
    except ValueError:
        return None

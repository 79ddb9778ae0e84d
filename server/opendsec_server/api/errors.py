# SPDX-License-Identifier: AGPL-3.0-only
"""Failures as answers, in the shape of the API that was called."""

from __future__ import annotations

import re
from typing import Any

import structlog
from litestar import Litestar, Response
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
)
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from opendsec_server.contract.errors import (
    AgentUnresponsive,
    IdempotencyInProgress,
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NodeFull,
    NodeUnavailable,
    NotFound,
    OpendsecError,
    PayloadTooLarge,
    SandboxStartFailed,
)
from opendsec_server.contract.limits import API_BODY_BYTES_MAX

from .http import ERROR_CODE_KEY, Request, answer, services_of
from .paths import is_native

log = structlog.get_logger(__name__)

RETRY_AFTER_S_DEFAULT = 1
MAY_HAVE_HAPPENED_KEY = "opendsec.may_have_happened"
"""Set in the scope of a request that must not be repeated blindly once it was begun."""

_OUTCOME_UNKNOWN = (NodeUnavailable, AgentUnresponsive, Internal)

_E2B_CODES: dict[type[OpendsecError], str] = {
    NodeFull: "sandbox_capacity_unavailable",
    SandboxStartFailed: "sandbox_create_failed",
    Internal: "internal_server_error",
    # The name that newer E2B clients document.
    IdempotencyInProgress: "idempotency_in_progress",
}
"""Where E2B has a name of its own for what our code says."""


def handle_error(request: Request, exc: Exception) -> Response[bytes]:
    """Answer any exception. Nothing leaves without code, message and fault."""
    error = _as_error(exc, request)
    services = services_of(request)
    request.scope[ERROR_CODE_KEY] = error.code  # type: ignore[literal-required]
    services.metrics.errors.labels(error.code, error.fault).inc()
    if isinstance(error, Internal):
        log.error("request failed", exc_info=exc)
    headers = {}
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(_allowed_methods(request.app, request.scope["path"]))
    if error.retryable or error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s or RETRY_AFTER_S_DEFAULT)
    if is_native(request.scope["path"]):
        body: dict[str, Any] = {
            "error": {**error.to_dict(), "request_id": request.scope.get("opendsec.request_id")}
        }
        return answer(body, error.http_status, headers)
    headers["Should-Retry"] = "true" if _may_repeat(request, error) else "false"
    return answer(error_body(error), error.http_status, headers)


def error_body(error: OpendsecError) -> dict[str, Any]:
    """An error in E2B's shape."""
    return {
        "code": error.http_status,
        "message": error.message,
        "error_code": _E2B_CODES.get(type(error), error.code),
    }


def _may_repeat(request: Request, error: OpendsecError) -> bool:
    if request.scope.get(MAY_HAVE_HAPPENED_KEY) and isinstance(error, _OUTCOME_UNKNOWN):
        return False
    return error.retryable


def _as_error(exc: Exception, request: Request) -> OpendsecError:
    if isinstance(exc, OpendsecError):
        return exc
    if isinstance(exc, NotFoundException):
        return NotFound("there is no such path", remediation="Check the path and the base URL.")
    if isinstance(exc, MethodNotAllowedException):
        return MethodNotAllowed("this path does not take this method")
    if isinstance(exc, HTTPException):
        if exc.status_code == PayloadTooLarge.http_status:
            most = _body_bytes_max(request)
            return PayloadTooLarge(
                f"the body is larger than {most} bytes", details={"max_bytes": most}
            )
        if exc.status_code < 500:
            return InvalidRequest(exc.detail or "the request is malformed")
    return Internal("the server has a defect; it is logged under the request id")


def _body_bytes_max(request: Request) -> int:
    handler = request.scope.get("route_handler")
    if isinstance(handler, HTTPRouteHandler):
        return handler.resolve_request_max_body_size() or API_BODY_BYTES_MAX
    return API_BODY_BYTES_MAX


def _allowed_methods(app: Litestar, path: str) -> list[str]:
    found: set[str] = set()
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        pattern = re.sub(r"\\\{[^/]*?\\\}", "[^/]+", re.escape(route.path_format))
        if re.fullmatch(pattern, path.rstrip("/") or "/"):
            found.update(route.methods)
    return sorted(found)

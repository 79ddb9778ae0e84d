# SPDX-License-Identifier: AGPL-3.0-only
"""Around every request: its id, its log line, its figures."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from opendsec_server.control.metrics import ControlMetrics

log = structlog.get_logger("opendsec_server.api")

_REQUEST_ID_RE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_QUIET = frozenset({"/healthz", "/readyz", "/metrics", "/health"})
"""Asked every few seconds by machines."""


class Observed:
    """ASGI wrapper. Also makes routing see the path as it was sent: an encoded ``/`` inside a
    template's name must not split it."""

    def __init__(self, app: ASGIApp, metrics: ControlMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        seen: dict[str, Any] = {"status": 499}  # nobody waited for the answer
        inner: dict[str, Any] = dict(scope)
        inner["path"] = scope["raw_path"].decode("latin-1").partition("?")[0]
        inner["opendsec.request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                headers = [*message["headers"], (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id, project=None):
            try:
                await self._app(inner, receive, send_with_id)  # type: ignore[arg-type]
            finally:
                self._note(inner, seen["status"], time.perf_counter() - started)

    def _note(self, scope: dict[str, Any], status: int, took_s: float) -> None:
        route = scope.get("path_template") or "unmatched"
        self._metrics.request_s.labels(scope["method"], route, str(status)).observe(took_s)
        write = log.debug if route in _QUIET else log.info
        write(
            "request",
            method=scope["method"],
            route=route,
            status=status,
            took_ms=round(took_s * 1e3, 2),
            **scope.get("path_params", {}),
        )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID_RE.fullmatch(value):
            return str(value.decode())
    return secrets.token_hex(16)

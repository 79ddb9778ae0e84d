# SPDX-License-Identifier: Apache-2.0
"""A scripted HTTP server on loopback: tests queue answers and look at what was asked."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SANDBOX_ID = "itest0000000000000001"


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes
    peer: object = None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """One scripted answer.

    ``raw`` is sent instead of a body with a length; then the connection is closed, so that a
    stream can be cut anywhere. ``drop`` closes without any answer.
    """

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    raw: list[bytes] | None = None
    drop: bool = False


Script = Answer | Callable[[Asked], Answer]


def frame(message: Any, flags: int = 0) -> bytes:
    """A frame of the Connect protocol."""
    payload = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(payload)) + payload


def end(error: dict[str, str] | None = None) -> bytes:
    """An end record."""
    return frame({} if error is None else {"error": error}, flags=2)


def sandbox(sandbox_id: str = SANDBOX_ID, **changes: Any) -> dict[str, Any]:
    """A sandbox as the API describes it."""
    record: dict[str, Any] = {
        "sandbox_id": sandbox_id,
        "project_id": "p1",
        "template_id": "base",
        "template": "base",
        "backend": "container",
        "state": "running",
        "cpu": 2.0,
        "memory_mb": 1024,
        "disk_mb": 10240,
        "metadata": {},
        "labels": [],
        "task_id": None,
        "created_at": "2026-12-01T10:00:00.000000Z",
        "started_at": "2026-12-01T10:00:00.100000Z",
        "end_at": "2026-12-01T10:05:00.000000Z",
        "ended_at": None,
        "end_reason": None,
        "message": None,
        "fault": None,
        "idle_timeout_s": None,
        "on_timeout": "kill",
        "network": {"internet": True},
        "access_token": "access",
        "traffic_token": "traffic",
        "domain": "localhost:7300",
        "envd_version": "0.9.1",
        "node_id": "test",
        "a_field_of_a_later_version": 1,
    }
    return {**record, **changes}


def error(code: str, **changes: Any) -> dict[str, Any]:
    """An error body of the native API."""
    body = {
        "code": code,
        "message": f"message of {code}",
        "remediation": f"remediation of {code}",
        "retryable": False,
        "fault": "user",
        "details": {},
        "request_id": "req-1",
    }
    return {"error": {**body, **changes}}


class FakeServer:
    """Answers ``method path`` from a queue; the last answer of a queue repeats."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self._scripts: dict[tuple[str, str], list[Script]] = {}
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def on(self, method: str, path: str, *scripts: Script) -> None:
        """Queue answers."""
        with self._lock:
            self._scripts[method, path] = list(scripts)

    def of(self, method: str, path: str) -> list[Asked]:
        """What was asked there."""
        return [a for a in self.asked if (a.method, a.path) == (method, path)]

    def answer(self, asked: Asked) -> Answer:
        with self._lock:
            self.asked.append(asked)
            queue = self._scripts.get((asked.method, asked.path))
            if not queue:
                return Answer(404, error("not_found", message=f"nothing at {asked.path}"))
            script = queue.pop(0) if len(queue) > 1 else queue[0]
        return script(asked) if callable(script) else script

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionResetError, BrokenPipeError):
            self.close_connection = True

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        asked = Asked(
            self.command,
            parts.path,
            parse_qs(parts.query),
            {name.lower(): value for name, value in self.headers.items()},
            self._body(),
            self.client_address,
        )
        answer = self.fake.answer(asked)
        if answer.drop:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.raw is not None:
            self._send_chunked(answer.raw)
            return
        body = answer.body
        if not isinstance(body, bytes):
            body = b"" if body is None else json.dumps(body).encode()
        if answer.status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_chunked(self, pieces: list[bytes]) -> None:
        """Chunked, without the last chunk unless a piece is empty: then the stream is complete."""
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.close_connection = pieces[-1:] != [b""]

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

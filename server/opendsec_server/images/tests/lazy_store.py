# SPDX-License-Identifier: AGPL-3.0-only
"""A web server with ranges for tests, which does what a store should not when it is told to."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_RANGE_RE = re.compile(r"bytes=(\d+)-(\d+)")


class LazyStore:
    """Serves a directory on loopback.

    Attributes:
        fault: None, or ``down``, ``error``, ``altered``, ``short``, ``no-ranges``: of data.
        bytes_per_s: rate of all answers together; 0: no limit.
        latency_s: Before each answer.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fault: str | None = None
        self.bytes_per_s = 0.0
        self.latency_s = 0.0
        self.ranges: list[tuple[str, int, int]] = []
        self.bytes_sent = 0
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._port = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        """Listen, where it listened before."""
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                store.answer(self)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def down(self) -> None:
        """Listen no more, and break off what is open."""
        if self._server is not None and self._thread is not None:
            self.fault = "down"
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        if self.fault == "down":
            to.close_connection = True
            return
        path = self.root / to.path.split("?")[0].lstrip("/")
        if not path.is_file():
            to.send_error(404)
            return
        is_data = path.suffix == ".erofs"
        match = _RANGE_RE.fullmatch(to.headers.get("Range", ""))
        if is_data and self.fault == "error":
            to.send_error(503)
            return
        size = path.stat().st_size
        if match is not None and self.fault != "no-ranges":
            first, last = int(match[1]), min(int(match[2]), size - 1)
            with path.open("rb") as file:
                file.seek(first)
                data = file.read(last + 1 - first)
            with self._lock:
                self.ranges.append((path.name, first, last))
        else:
            data = path.read_bytes()
        time.sleep(self.latency_s)
        if is_data and self.fault == "altered":
            data = bytes([data[0] ^ 1]) + data[1:]
        length = len(data)
        if is_data and self.fault == "short":
            data, to.close_connection = data[: length // 2], True
        to.send_response(206 if match is not None and self.fault != "no-ranges" else 200)
        to.send_header("Content-Length", str(length))
        if match is not None:
            to.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        to.end_headers()
        self._send(to, data)

    def _send(self, to: BaseHTTPRequestHandler, data: bytes) -> None:
        piece = 64 << 10
        try:
            for at in range(0, len(data), piece):
                part = data[at : at + piece]
                if self.bytes_per_s:
                    # One line for all: what one answer takes, another has not.
                    with self._lock:
                        time.sleep(len(part) / self.bytes_per_s)
                to.wfile.write(part)
                self.bytes_sent += len(part)
        except OSError:
            to.close_connection = True


@contextmanager
def lazy_store(root: Path) -> Iterator[LazyStore]:
    """One that listens."""
    store = LazyStore(root)
    store.up()
    try:
        yield store
    finally:
        store.down()

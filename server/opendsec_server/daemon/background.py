# SPDX-License-Identifier: AGPL-3.0-only
"""Start, stop and ask a server that runs in the background.

Where systemd runs, its units do this job; these commands serve every other machine, and tests.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from opendsec_server.config import Config

from .base_template import FAILED
from .process import read_identity, stop_process

START_TIMEOUT_S = 900.0
"""The first start builds the base template, which downloads packages."""
STOP_GRACE_S = 30.0
POLL_S = 0.2
LOG_TAIL_LINES = 15


class StartFailed(Exception):
    """The server ended or did not become ready. The message holds the end of its log."""


def log_file(config: Config) -> Path:
    """Where a background server writes its log."""
    return config.state_path / "opendsecd.log"


def start_in_background(config: Config, config_path: Path | None) -> None:
    """Start the server detached from this terminal and wait until it is ready.

    Raises:
        StartFailed: it ended, or was not ready within ``START_TIMEOUT_S``.
        ConfigError: the directories cannot be made.
    """
    from .serve import prepare_directories

    prepare_directories(config)
    running = read_identity(config.run_path / "opendsecd.pid")
    child: subprocess.Popen[bytes] | None = None
    if running is None:
        argv = [sys.executable, "-m", "opendsec_server.daemon.main", "serve"]
        if config_path is not None:
            argv += ["--config", str(config_path.resolve())]
        descriptor = os.open(log_file(config), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(descriptor)
    _wait_until_ready(config, child)


def _wait_until_ready(config: Config, child: subprocess.Popen[bytes] | None) -> None:
    started = time.monotonic()
    progress = _Progress(started)
    while time.monotonic() - started < START_TIMEOUT_S:
        if child is not None and child.poll() is not None:
            progress.end()
            raise StartFailed(f"the server ended at start:\n{_log_tail(config)}")
        found = read_status(config)
        if found["ready"]:
            progress.end()
            return
        if any(FAILED in reason for reason in found["reasons"]):
            progress.end()
            raise StartFailed("\n".join(found["reasons"]))
        progress.show(", ".join(found["reasons"]) or "starting")
        time.sleep(POLL_S)
    progress.end()
    raise StartFailed(f"not ready after {START_TIMEOUT_S:.0f} s:\n{_log_tail(config)}")


def stop_background(config: Config) -> bool:
    """Stop the server. Returns False if none runs."""
    running = read_identity(config.run_path / "opendsecd.pid")
    if running is None:
        return False
    stop_process(running, grace_s=STOP_GRACE_S)
    return True


def read_status(config: Config) -> dict[str, Any]:
    """Pid, readiness and, if not ready, the reasons, asked over the API socket."""
    running = read_identity(config.run_path / "opendsecd.pid")
    found: dict[str, Any] = {
        "pid": running.pid if running else None,
        "ready": False,
        "listen": config.listen,
        "reasons": ["the server does not run" if running is None else "starting"],
    }
    connection = _UnixConnection(str(config.api_socket))
    try:
        connection.request("GET", "/readyz", headers={"Host": "localhost"})
        answer = connection.getresponse()
        body = json.loads(answer.read())
        found["ready"] = answer.status == 200
        found["reasons"] = body.get("reasons", [])
    except (OSError, http.client.HTTPException, ValueError):
        pass
    finally:
        connection.close()
    return found


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=5.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _Progress:
    """One line that is rewritten on a terminal; a new line per change elsewhere."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._shown = ""
        self._terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._started
        if self._terminal:
            sys.stderr.write(f"\r\x1b[2K{text} ({elapsed_s:.0f} s)")
            sys.stderr.flush()
        elif text != self._shown:
            sys.stderr.write(f"[{elapsed_s:4.0f} s] {text}\n")
        self._shown = text

    def end(self) -> None:
        if self._terminal and self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def _log_tail(config: Config) -> str:
    try:
        lines = log_file(config).read_text(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join(lines[-LOG_TAIL_LINES:])

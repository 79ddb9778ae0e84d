# SPDX-License-Identifier: AGPL-3.0-only
"""Runs a real ``opendsecd`` for tests and benchmarks: own state, own names, own addresses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opendsec_server.config import Config, load_config
from opendsec_server.daemon.background import log_file
from opendsec_server.daemon.process import ProcessIdentity, read_identity

BIN = Path(sys.executable).parent
IMAGE_CACHE = Path(os.environ.get("OPENDSEC_IMAGE_CACHE", "/var/tmp/opendsec-test-images"))
START_TIMEOUT_S = 900


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """One running instance."""

    root: Path
    config_path: Path
    config: Config
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.config.listen}"

    @property
    def api_key(self) -> str:
        return self.config.api_key_file.read_text().strip()

    @property
    def client_environment(self) -> dict[str, str]:
        """What a user sets: the three variables, and nothing of ours."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("E2B_", "OPENDSEC_"))
        }
        return {
            **kept,
            "E2B_API_KEY": self.api_key,
            "E2B_API_URL": self.url,
            "E2B_SANDBOX_URL": self.url,
        }

    def opendsecd(
        self, *arguments: str, check: bool = True, extra_env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the server's command line on this instance."""
        return subprocess.run(
            [str(BIN / "opendsecd"), *arguments, "--config", str(self.config_path)],
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=check,
            env={**os.environ, **self.environment, **(extra_env or {})},
        )

    def start(self, extra_env: dict[str, str] | None = None) -> None:
        """Start in the background and wait until ready."""
        run = self.opendsecd("start", check=False, extra_env=extra_env)
        if run.returncode != 0:
            raise AssertionError(f"start failed:\n{run.stdout}{run.stderr}{self.log_tail()}")

    def stop(self) -> None:
        """Graceful stop; sandboxes go on."""
        self.opendsecd("stop")

    def daemon(self) -> ProcessIdentity | None:
        """The running daemon's identity."""
        return read_identity(self.config.run_path / "opendsecd.pid")

    def edge(self) -> ProcessIdentity | None:
        """The running edge's identity."""
        return read_identity(self.config.run_path / "edge.pid")

    def kill_daemon(self) -> None:
        """kill -9 of the daemon this harness started, and wait until it is gone."""
        _kill(self.daemon())

    def kill_edge(self) -> None:
        """kill -9 of the edge this harness started."""
        _kill(self.edge())

    def purge(self) -> None:
        """Remove everything of the instance, then its files."""
        self.opendsecd("purge", "--yes")
        shutil.rmtree(self.root, ignore_errors=True)

    def log_tail(self, lines: int = 40) -> str:
        """The end of the daemon's log."""
        try:
            return "\n".join(log_file(self.config).read_text().splitlines()[-lines:])
        except OSError:
            return "(no log)"

    def edge_log_tail(self, lines: int = 40) -> str:
        """The end of the edge's log: why streams ended that were not complete."""
        try:
            text = (self.config.run_path / "edge.log").read_text()
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:])

    def request(
        self,
        method: str,
        path: str,
        body: object | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 60,
    ) -> tuple[int, dict[str, str], bytes]:
        """One plain HTTP call with the API key. Never raises for a status."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data=data,
            method=method,
            headers={
                "X-API-Key": self.api_key,
                "Content-Type": "application/json",
                **(headers or {}),
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as exc:
            return exc.code, dict(exc.headers), exc.read()

    def request_json(
        self, method: str, path: str, body: object | None = None, *, timeout_s: float = 60
    ) -> tuple[int, Any]:
        """The same for answers that are JSON: status and value."""
        status, _headers, answer = self.request(method, path, body, timeout_s=timeout_s)
        return status, json.loads(answer)


def _kill(identity: ProcessIdentity | None) -> None:
    assert identity is not None, "not running"
    os.kill(identity.pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while time.monotonic() < until and Path(f"/proc/{identity.pid}").exists():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(identity.pid, os.WNOHANG)
        state = Path(f"/proc/{identity.pid}/stat")
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)


def _toml(value: object) -> str:
    """A value as TOML writes it: as JSON does, but for tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


def new_server(instance: str, network_cidr: str, **settings: object) -> Server:
    """An instance that is not started yet.

    Args:
        instance: Short unique prefix of kernel names.
        network_cidr: Addresses that no other instance uses.
        settings: More settings of the server.
    """
    root = Path(tempfile.mkdtemp(prefix=f"opendsec-{instance}-", dir="/var/tmp"))
    root.chmod(0o755)
    port = free_port()
    values: dict[str, object] = {
        "state_dir": str(root / "state"),
        "run_dir": str(root / "run"),
        "instance": instance,
        "listen": f"127.0.0.1:{port}",
        "domain": f"localhost:{port}",
        "network_cidr": network_cidr,
        "disk_pool_mb": 20_480,
        "log_format": "json",
        **settings,
    }
    config_path = root / "config.toml"
    config_path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
    IMAGE_CACHE.mkdir(parents=True, exist_ok=True)
    return Server(
        root=root,
        config_path=config_path,
        config=load_config(config_path, environ={}),
        environment={"OPENDSEC_IMAGE_CACHE": str(IMAGE_CACHE)},
    )

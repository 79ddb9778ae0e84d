# SPDX-License-Identifier: AGPL-3.0-only
"""The test's side of a real node: starts the driver process, talks to it, execs in sandboxes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import struct
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from opendsec_server.config import Config
from opendsec_server.contract.ids import new_sandbox_id
from opendsec_server.contract.node import NetworkPolicy, SandboxSpec

SERVER = Path(__file__).parents[3]
TIME_FACTOR = float(os.environ.get("OPENDSEC_TEST_TIME_FACTOR", "1"))
"""Emulated hosts get more time."""
CALL_TIMEOUT_S = 60.0 * TIME_FACTOR
WAIT_S = 20.0 * TIME_FACTOR


class CallError(Exception):
    """The node refused a call."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.code: str = error["code"]


class NodeProcess:
    """One driver process at a time on one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.config_error: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._next = 0

    async def start(self, **environment: str) -> None:
        """Start; ``config_error`` tells when the node refused to."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "opendsec_server.node.tests.driver",
            msgspec.json.encode(self.config).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **environment, "PYTHONPATH": str(SERVER)},
            limit=1 << 22,
        )
        assert process.stdout is not None
        first = await asyncio.wait_for(process.stdout.readline(), CALL_TIMEOUT_S)
        hello = json.loads(first) if first else {}
        self.config_error = hello.get("config_error")
        if "ready" in hello:
            self._reader = asyncio.create_task(self._read(process.stdout))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def _read(self, answers: asyncio.StreamReader) -> None:
        while line := await answers.readline():
            reply = json.loads(line)
            waiting = self._waiting.pop(reply["id"])
            if "error" in reply:
                waiting.set_exception(CallError(reply["error"]))
            else:
                waiting.set_result(reply["ok"])
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the node's process ended"))
        self._waiting.clear()

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """One call of ``NodeClient``.

        Raises:
            CallError: the node refused. ConnectionError: its process ended.
        """
        assert self._process is not None and self._process.stdin is not None
        self._next += 1
        waiting = self._waiting[self._next] = asyncio.get_running_loop().create_future()
        request = {"id": self._next, "call": name, "args": args, "kwargs": kwargs}
        self._process.stdin.write(json.dumps(msgspec.to_builtins(request)).encode() + b"\n")
        return await asyncio.wait_for(waiting, CALL_TIMEOUT_S)

    async def kill9(self) -> None:
        """End the process as a power cut would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self.wait()

    async def wait(self) -> None:
        """Wait for the process's end."""
        assert self._process is not None
        await asyncio.wait_for(self._process.wait(), CALL_TIMEOUT_S)
        if self._reader is not None:
            await self._reader

    async def finish(self, name: str) -> None:
        """``stop`` or ``purge``, and the process's end."""
        await self.call(name)
        await self.wait()

    @property
    def running(self) -> bool:
        """Whether the process still runs."""
        return self._process is not None and self._process.returncode is None

    # --- sandboxes ----------------------------------------------------------

    async def create(self, **changes: Any) -> SandboxSpec:
        """Create a sandbox with small defaults; returns its spec."""
        spec = small_spec(**changes)
        await self.call("create", spec)
        return spec

    async def state(self, sandbox_id: str) -> str:
        """Its state."""
        return str((await self.call("get", sandbox_id))["state"])

    async def wait_state(self, sandbox_id: str, state: str) -> dict[str, Any]:
        """Wait for a state, bounded; returns the status."""
        deadline = time.monotonic() + WAIT_S
        while True:
            status: dict[str, Any] = await self.call("get", sandbox_id)
            if status["state"] == state:
                return status
            assert time.monotonic() < deadline, f"still {status}"
            await asyncio.sleep(0.05)

    async def exec(
        self, spec: SandboxSpec, command: str, user: str = "user"
    ) -> tuple[int | None, str]:
        """Run a command in a sandbox through its guest agent: exit code and output."""
        route = await self.call("route", spec.sandbox_id)
        return await asyncio.to_thread(
            agent_exec, route["address"], spec.access_token, command, user
        )


def small_spec(**changes: Any) -> SandboxSpec:
    """A spec with small limits and random tokens."""
    now = time.time()
    values: dict[str, Any] = {
        "sandbox_id": new_sandbox_id("test"),
        "project_id": "p",
        "template_id": "base",
        "image": "base",
        "cpu": 1.0,
        "memory_mb": 256,
        "disk_mb": 128,
        "created_at": now,
        "end_at": now + 600,
        "access_token": secrets.token_hex(32),
        "traffic_token": secrets.token_hex(32),
        "control_token": secrets.token_hex(32),
        "network": NetworkPolicy(),
    }
    return SandboxSpec(**{**values, **changes})


def agent_exec(address: str, token: str, command: str, user: str) -> tuple[int | None, str]:
    """``process.Process/Start`` by hand (Connect, JSON frames)."""
    message = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}}).encode()
    request = urllib.request.Request(
        f"http://{address}:49983/process.Process/Start",
        data=b"\0" + struct.pack(">I", len(message)) + message,
        headers={
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "X-Access-Token": token,
            "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
        },
    )
    with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
        data = answer.read()
    output, code = b"", None
    while data:
        _flags, length = struct.unpack(">BI", data[:5])
        event = json.loads(data[5 : 5 + length] or b"{}").get("event", {})
        data = data[5 + length :]
        for part in event.get("data", {}).values():
            output += base64.b64decode(part)
        if "end" in event:
            code = event["end"].get("exitCode", 0)
    return code, output.decode(errors="replace")


def first_process(config: Config, sandbox_id: str) -> int:
    """The sandbox's PID 1 as the host numbers it."""
    base = Path("/sys/fs/cgroup")
    name = f"opendsec-{config.instance}/{sandbox_id}/cgroup.procs"
    for path in (base / name, base / "pids" / name):
        with contextlib.suppress(OSError):
            return min(map(int, path.read_text().split()))
    raise AssertionError("no process of the sandbox was found")

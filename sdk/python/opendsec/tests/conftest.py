# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a scripted server, both halves of the SDK, and the real guest agent."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from opendsec import _limits

from .fake_server import Answer, FakeServer, sandbox
from .kits import Kit, close, done

AGENT_START_S = 10.0


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine reaches a test, and no test waits for long."""
    for name in list(os.environ):
        if name.startswith(("E2B_", "OPENDSEC_")) and name != "OPENDSEC_AGENT":
            monkeypatch.delenv(name)
    monkeypatch.setenv("OPENDSEC_STATE_DIR", str(tmp_path / "no-server-here"))
    monkeypatch.setattr(_limits, "RETRY_BASE_S", 0.001)
    monkeypatch.setattr(_limits, "PROBE_PAUSES_S", (0.01, 0.02))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A scripted server."""
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture(params=["async", "sync"])
def kit(request: pytest.FixtureRequest) -> Kit:
    """Each half of the SDK in turn."""
    return Kit(request.param)


@pytest.fixture
async def client(kit: Kit, server: FakeServer) -> AsyncIterator[Any]:
    """A client of the scripted server."""
    client = kit.Client(base_url=server.url, api_key="e2b_test", retries_max=3)
    yield client
    await close(client)


@pytest.fixture
async def box(client: Any, server: FakeServer) -> Any:
    """A sandbox of the scripted server."""
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    return await done(client.create())


# --- the real guest agent ------------------------------------------------------


def agent_binary() -> Path | None:
    """The guest agent, if it was built."""
    if given := os.environ.get("OPENDSEC_AGENT"):
        return Path(given)
    root = Path(__file__).resolve().parents[4]
    for build in ("release", "debug"):
        found = root / "dataplane" / "target" / build / "opendsec-agent"
        if found.exists():
            return found
    on_path = shutil.which("opendsec-agent")
    return Path(on_path) if on_path else None


@dataclass
class Agent:
    """A running guest agent."""

    url: str
    token: str
    control_token: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def running_agent(directory: Path) -> Iterator[Agent]:
    """A guest agent as an ordinary process of this machine, on loopback."""
    binary = agent_binary()
    if binary is None:
        pytest.skip("no guest agent: build dataplane/agent or set OPENDSEC_AGENT")
    if os.geteuid() != 0:
        pytest.skip("the guest agent starts programs as other users, which needs root")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (directory / "log").open("wb")
    process = subprocess.Popen(
        [binary, "--listen", f"127.0.0.1:{port}"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
    )
    agent = Agent(f"http://127.0.0.1:{port}", secrets.token_hex(16), secrets.token_hex(16), process)
    try:
        _wait_until_healthy(agent.url, process)
        init = {
            "accessToken": agent.token,
            "controlToken": agent.control_token,
            "envVars": {"FROM_INIT": "yes"},
            "defaultUser": "root",
            "sandboxId": "itest0000000000000001",
        }
        reply = httpx2.post(f"{agent.url}/init", json=init, trust_env=False)
        assert reply.status_code == 204, reply.text
        yield agent
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """The guest agent all tests share."""
    with running_agent(tmp_path_factory.mktemp("agent")) as agent:
        yield agent


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + AGENT_START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the agent ended with {process.returncode}"
        try:
            httpx2.get(f"{url}/health", trust_env=False)
            return
        except httpx2.TransportError:
            time.sleep(0.05)
    raise AssertionError("the agent did not listen in time")


@pytest.fixture
async def live(kit: Kit, server: FakeServer, agent: Agent) -> AsyncIterator[Any]:
    """A sandbox whose control half is scripted and whose data half is the real agent."""
    record = sandbox(access_token=agent.token)
    server.on("POST", "/v1/sandboxes", Answer(201, record))
    server.on("GET", f"/v1/sandboxes/{record['sandbox_id']}", Answer(200, record))
    client = kit.Client(
        base_url=server.url, api_key="e2b_test", sandbox_url=agent.url, retries_max=0
    )
    yield await done(client.create())
    await close(client)

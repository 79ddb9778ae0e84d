# SPDX-License-Identifier: AGPL-3.0-only
"""Restart and kill -9 of the server and of the edge, while sandboxes run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from opendsec import Client, OpendsecError, Sandbox
from tests.harness import Server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(base_url=server.url, api_key=server.api_key) as client:
        yield client


def until(condition: Callable[[], bool], what: str, *, seconds: float = 20) -> None:
    """Wait for a condition, bounded."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(what)


def answers(sandbox: Sandbox) -> bool:
    try:
        return sandbox.exec("echo yes").stdout == "yes\n"
    except OpendsecError:
        return False


def test_a_restart_leaves_sandboxes_and_their_processes_alone(
    server: Server, client: Client
) -> None:
    sandbox = client.create()
    process = sandbox.spawn("sleep 600")
    server.stop()
    server.start()
    assert [one.pid for one in sandbox.processes()] == [process.pid]
    assert sandbox.info().state == "running"
    assert answers(sandbox)
    sandbox.kill()


def test_kill_9_of_the_server_does_not_cut_streams(server: Server, client: Client) -> None:
    sandbox = client.create()
    process = sandbox.spawn("for i in $(seq 30); do echo $i; sleep 0.1; done")
    server.kill_daemon()
    assert process.wait().stdout.split() == [str(i) for i in range(1, 31)]
    assert answers(sandbox), "a cached route must serve while the control plane is down"
    server.start()
    assert sandbox.info().state == "running"
    sandbox.kill()
    assert sandbox.info().state == "ended"


def test_kill_9_of_the_edge_is_an_error_not_a_result(server: Server, client: Client) -> None:
    sandbox = client.create()
    process = sandbox.spawn("echo before; sleep 8; echo after; exit 5")
    edge = server.edge()
    server.kill_edge()
    with pytest.raises(OpendsecError) as caught:
        process.wait()
    assert caught.value.fault == "platform"
    until(lambda: server.edge() not in (None, edge), "no new edge")
    until(lambda: answers(sandbox), "no traffic after the edge came back")
    again = sandbox.attach(process.pid)
    result = again.wait()
    assert result.exit_code == 5 and "after" in result.stdout
    sandbox.kill()


def test_a_time_out_that_passed_while_down_fires_at_start(server: Server, client: Client) -> None:
    sandbox = client.create(timeout_s=3)
    server.kill_daemon()
    time.sleep(3.5)
    server.start()
    until(lambda: sandbox.info().state == "ended", "not ended")
    assert sandbox.info().end_reason == "timeout"


def test_a_sandbox_that_died_while_down_is_reported(server: Server, client: Client) -> None:
    from bench.server import agent_pids

    sandbox = client.create()
    before = set(agent_pids(server))
    other = client.create()
    (mine,) = set(agent_pids(server)) - before
    server.kill_daemon()
    import os
    import signal

    os.kill(mine, signal.SIGKILL)
    server.start()
    until(lambda: other.info().state in ("ended", "failed"), "not noticed")
    assert other.info().end_reason in ("lost", "exited", "oom")
    assert answers(sandbox)
    sandbox.kill()


def test_the_same_key_after_a_crash_gives_the_same_sandbox(server: Server, client: Client) -> None:
    first = client.create(idempotency_key="survives-a-crash")
    server.kill_daemon()
    server.start()
    second = client.create(idempotency_key="survives-a-crash")
    assert second.sandbox_id == first.sandbox_id
    first.kill()

# SPDX-License-Identifier: AGPL-3.0-only
"""Tasks of real containers through the server's door: as one, over a kill -9, to their end."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from opendsec import Client, Sandbox, TaskBudgetReached, TaskEnded, TaskNotFound, TaskPaused
from tests.harness import BIN, Server
from tests.servers import running_server

COUNT = 8
BURN = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """One that may be killed."""
    with running_server("tsk", "10.223.0.0/16") as server:
        yield server


@pytest.fixture
def client(own_server: Server) -> Iterator[Client]:
    with Client(base_url=own_server.url, api_key=own_server.api_key) as client:
        yield client


def make(client: Client, task_id: str, count: int = COUNT) -> list[Sandbox]:
    def one(_number: int) -> Sandbox:
        return client.create(task_id=task_id, memory_mb=64, disk_mb=64, cpu=1, timeout_s=900)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(count)))


def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    over_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < over_at
        time.sleep(0.05)


def test_pause_resume_and_kill_as_one(client: Client, own_server: Server) -> None:
    with pytest.raises(TaskNotFound):
        client.tasks.get("rollout")
    boxes = make(client, "rollout")
    # Memory that a pause can give back.
    for box in boxes:
        box.exec("head -c 20000000 /dev/zero | tr '\\0' a > /tmp/filled")
    task = client.tasks.get("rollout")
    assert (task.sandboxes.by_state, task.sandboxes.by_backend) == (
        {"running": COUNT},
        {"container": COUNT},
    )
    assert task.usage.cpu_seconds > 0
    assert task.usage.egress_bytes > 0
    outcomes = list(paused := client.tasks.pause("rollout"))
    assert {one.sandbox_id for one in outcomes} == {box.sandbox_id for box in boxes}
    assert {one.outcome for one in outcomes} == {"done"}
    info = paused.info
    assert (info.asked, info.done, info.failed) == (COUNT, COUNT, 0)
    assert info.memory_freed_bytes == sum(one.memory_freed_bytes for one in outcomes)
    assert info.memory_freed_bytes > COUNT * 5_000_000
    with pytest.raises(TaskPaused):
        client.create(task_id="rollout")
    assert client.tasks.wait("rollout", "paused", timeout_s=5)
    # A pause brings what was written onto the disk, where it is counted.
    until(lambda: client.tasks.get("rollout").usage.disk_bytes > COUNT * 20_000_000)
    # An operation can be followed again, from its first outcome on.
    again = client.tasks.operation("rollout", info.operation_id)
    assert list(again) == outcomes
    assert client.tasks.resume("rollout").wait().done == COUNT
    assert boxes[0].exec("wc -c < /tmp/filled").stdout.strip() == "20000000"
    before = client.tasks.get("rollout").usage.cpu_seconds
    boxes[1].exec(BURN)
    assert client.tasks.get("rollout").usage.cpu_seconds > before
    assert client.tasks.kill("rollout").wait().done == COUNT
    task = client.tasks.get("rollout")
    assert (task.state, task.end_reason, task.sandboxes.live) == ("ended", "killed", 0)
    assert [(end.reason, end.count) for end in task.sandboxes.ended] == [("killed", COUNT)]
    assert task.usage.cpu_seconds > before  # what ended ones used counts on
    assert task.usage.disk_bytes == 0
    with pytest.raises(TaskEnded):
        client.create(task_id="rollout")


@pytest.mark.parametrize("kind", ["pause", "resume", "kill"])
def test_a_server_that_is_killed_half_way_goes_on(
    client: Client, own_server: Server, kind: str
) -> None:
    task_id = f"killed-{kind}"
    make(client, task_id)
    if kind == "resume":
        client.tasks.pause(task_id).wait()
    operation = getattr(client.tasks, kind)(task_id)
    seen = []
    for outcome in operation:
        seen.append(outcome)
        if len(seen) == 1:
            own_server.kill_daemon()
            own_server.start()
    assert [one.seq for one in seen] == list(range(1, COUNT + 1))
    assert len({one.sandbox_id for one in seen}) == COUNT
    assert {one.outcome for one in seen} <= {"done", "already", "gone"}
    assert (operation.info.done, operation.info.failed) == (COUNT, 0)
    wanted = {"pause": {"paused": COUNT}, "resume": {"running": COUNT}, "kill": {}}[kind]
    until(lambda: client.tasks.get(task_id).sandboxes.by_state == wanted)
    client.tasks.kill(task_id).wait()


def test_a_deadline_and_a_budget_end_a_task(client: Client) -> None:
    client.tasks.create("short", deadline=datetime.now(UTC) + timedelta(seconds=4))
    client.tasks.create("small", sandboxes_max=2, cpu_seconds_max=1)
    short, small = make(client, "short", 2), make(client, "small", 2)
    with pytest.raises(TaskBudgetReached):
        client.create(task_id="small")
    small[0].spawn(f"while true; do {BURN}; done")
    assert client.tasks.wait("short", timeout_s=30)
    assert client.tasks.wait("small", timeout_s=30)
    for task_id, reason in (("short", "task_deadline"), ("small", "task_budget")):
        task = client.tasks.get(task_id)
        assert (task.state, task.end_reason) == ("ended", reason)
        assert [(end.reason, end.fault, end.count) for end in task.sandboxes.ended] == [
            (reason, None, 2)
        ]
    assert client.info(short[0].sandbox_id).end_reason == "task_deadline"
    assert client.tasks.get("small").usage.cpu_seconds > 1
    # Reopened with a larger budget, it takes sandboxes again.
    client.tasks.set("small", sandboxes_max=3, cpu_seconds_max=None, reopen=True)
    make(client, "small", 1)
    client.tasks.kill("small").wait()


def test_command_line(client: Client, own_server: Server) -> None:
    def task(*arguments: str, code: int = 0) -> str:
        run = subprocess.run(
            [BIN / "opendsec", "task", *arguments],
            capture_output=True,
            text=True,
            env=own_server.client_environment,
            timeout=60,
        )
        assert run.returncode == code, run.stdout + run.stderr
        return run.stdout + run.stderr

    task("create", "from/cli", "--sandboxes", "3")
    make(client, "from/cli", 3)
    assert "budget    3 sandboxes" in task("show", "from/cli")
    assert "pause: 3 of 3 done, " in task("pause", "from/cli")
    assert "3 paused" in task("ls", "--state", "paused")
    assert "task resume TASK" in _refused(own_server, "from/cli")
    lines = [json.loads(line) for line in task("resume", "from/cli", "--json").splitlines()]
    assert [line.get("outcome") for line in lines] == ["done"] * 3 + [None]
    assert "not paused within 0 s" in task(
        "wait", "from/cli", "--until", "paused", "--timeout", "0", code=1
    )
    operation = task("kill", "from/cli", "--detach").strip()
    assert "kill: 3 of 3 done" in task("follow", "from/cli", operation)
    task("wait", "from/cli")
    assert "ended (killed)" in task("show", "from/cli")
    assert "open" in task("set", "from/cli", "--sandboxes", "none", "--reopen")
    assert "task_not_found" in task("show", "nothing", code=1)


def _refused(server: Server, task_id: str) -> str:
    run = subprocess.run(
        [BIN / "opendsec", "create", "--task", task_id],
        capture_output=True,
        text=True,
        env=server.client_environment,
        timeout=60,
    )
    assert run.returncode == 1
    return run.stderr

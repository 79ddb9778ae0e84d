# SPDX-License-Identifier: AGPL-3.0-only
"""A batch of microVMs, and pause and resume of all of them as one, with their memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from opendsec import Client, Sandbox
from tests.harness import Server
from tests.servers import running_server

COUNT = 4
TASK = "machines"
SMALL: dict[str, Any] = {
    "backend": "microvm",
    "memory_mb": 256,
    "cpu": 1,
    "disk_mb": 256,
    "timeout_s": 3_600,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_500)]


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """One that starts microVMs with QEMU, on a machine without KVM emulated."""
    with running_server("bvm", "10.236.0.0/16", vmm="qemu", default_backend="microvm") as server:
        yield server


@pytest.fixture
def client(own_server: Server) -> Iterator[Client]:
    with Client(base_url=own_server.url, api_key=own_server.api_key) as client:
        if "microvm" not in {one.name for one in client.server_info().backends}:
            pytest.skip("no QEMU here")
        yield client


def until(condition: Callable[[], bool], what: str, *, seconds: float = 120) -> None:
    """Wait for a condition, bounded."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(what)


def test_a_batch_of_machines_pauses_and_resumes_as_one(client: Client) -> None:
    batch = client.batches.create(COUNT, task_id=TASK, **SMALL)
    items = batch.all()
    assert [item.error for item in items] == [None] * COUNT
    boxes: list[Sandbox] = [item.unwrap() for item in items]
    assert client.tasks.get(TASK).sandboxes.by_backend == {"microvm": COUNT}
    # What only memory holds: a program that counts.
    script = "i=0; while true; do i=$((i+1)); echo $i > /dev/shm/count; sleep 0.2; done"
    programs = [box.spawn(script) for box in boxes]
    kernels = {box.exec("cat /proc/sys/kernel/random/boot_id").stdout for box in boxes}
    assert len(kernels) == COUNT, "each has a kernel of its own"

    def count(box: Sandbox) -> int:
        return int(box.exec("cat /dev/shm/count || echo 0").stdout)

    for box in boxes:
        until(lambda box=box: count(box) > 0, "nothing counts")  # type: ignore[misc]
    before = [count(box) for box in boxes]
    paused = client.tasks.pause(TASK, mode="full").wait()
    assert (paused.done, paused.failed) == (COUNT, 0)
    assert paused.memory_freed_bytes > 0
    assert client.tasks.get(TASK).sandboxes.by_state == {"paused": COUNT}
    resumed = client.tasks.resume(TASK).wait()
    assert (resumed.done, resumed.failed) == (COUNT, 0)
    for box, program, was in zip(boxes, programs, before, strict=True):
        assert program.pid in [process.pid for process in box.processes()]
        until(lambda box=box, was=was: count(box) > was, "it does not go on")  # type: ignore[misc]
    assert {box.exec("cat /proc/sys/kernel/random/boot_id").stdout for box in boxes} == kernels
    ended = client.tasks.kill(TASK).wait()
    assert (ended.done, ended.failed) == (COUNT, 0)
    until(lambda: not list(client.list(task_id=TASK)), "not ended")

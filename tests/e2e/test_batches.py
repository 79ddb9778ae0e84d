# SPDX-License-Identifier: AGPL-3.0-only
"""Batches with real containers: made once each, over a killed server and a killed client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from opendsec import AsyncClient, Client, Conflict, InvalidRequest
from tests.harness import BIN, Server

SMALL = {"memory_mb": 64, "cpu": 0.1, "disk_mb": 64, "timeout_s": 300}


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(base_url=server.url, api_key=server.api_key) as client:
        yield client


def live(client: Client, task: str) -> list[str]:
    return [record.sandbox_id for record in client.list(task_id=task)]


async def test_a_batch_as_it_comes(server: Server) -> None:
    items = [{"metadata": {"number": str(number)}} for number in range(12)]
    async with AsyncClient(base_url=server.url, api_key=server.api_key) as client:
        batch = await client.batches.create(items=items, **SMALL)  # type: ignore[arg-type]
        seen = {}
        async for item in batch:
            box = item.unwrap()
            seen[item.index] = box
            assert box.record.metadata == {"number": str(item.index)}
        assert sorted(seen) == list(range(12))
        assert (await seen[3].exec("echo here")).stdout == "here\n"
        ran = [one async for one in client.batches.exec("hostname", batch_id=batch.batch_id)]
        assert {(one.sandbox_id, one.result.stdout.strip()) for one in ran if one.result} == {
            (box.sandbox_id, box.sandbox_id) for box in seen.values()
        }
        assert all(one.ok for one in await batch.kill())
        assert (await seen[0].info()).end_reason == "killed"


def test_a_killed_server_goes_on_with_its_batch(server: Server, client: Client) -> None:
    batch = client.batches.create(
        40, task_id="killed-server", idempotency_key="killed-server", **SMALL
    )
    results = batch.results()
    first = next(results)
    server.kill_daemon()
    server.start()
    # The same iteration goes on: nothing comes twice, nothing is left out.
    items = [first, *results]
    assert sorted(item.index for item in items) == list(range(40))
    made = {item.sandbox.sandbox_id for item in items if item.sandbox is not None}
    assert len(made) == batch.info.made == 40
    assert set(live(client, "killed-server")) == made
    again = client.batches.create(
        40, task_id="killed-server", idempotency_key="killed-server", **SMALL
    )
    assert again.batch_id == batch.batch_id
    assert {i.sandbox.sandbox_id for i in again.all() if i.sandbox is not None} == made
    assert all(one.ok for one in batch.kill())
    assert live(client, "killed-server") == []


def test_a_killed_client_finds_what_was_made(server: Server, client: Client) -> None:
    command = [
        str(BIN / "opendsec"), "batch", "create", "30", "--task", "killed-client", "--memory", "64",
        "--cpu", "0.1", "--disk", "64", "--idempotency-key", "killed-client", "--json",
    ]  # fmt: skip
    environment = {**server.client_environment, "OPENDSEC_API_URL": server.url}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        first = json.loads(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
    again = subprocess.run(command, capture_output=True, env=environment, check=True, text=True)
    items = [json.loads(line) for line in again.stdout.splitlines()]
    made = {item["sandbox"]["sandbox_id"] for item in items}
    assert len(made) == 30 and first["sandbox"]["sandbox_id"] in made
    assert set(live(client, "killed-client")) == made
    kill = [str(BIN / "opendsec"), "batch", "kill", "--task", "killed-client"]
    ended = subprocess.run(kill, capture_output=True, env=environment, check=True, text=True)
    assert set(ended.stdout.split()) == made
    assert live(client, "killed-client") == []


def test_cancel_and_new_ends(client: Client) -> None:
    batch = client.batches.create(200, labels=["cancelled"], **SMALL)
    next(batch.results())
    batch.cancel()
    items = batch.all()
    made = [item for item in items if item.error is None]
    assert len(items) == 200 and 0 < len(made) < 200
    assert all(isinstance(item.error, Conflict) for item in items if item.error is not None)
    outcomes = list(client.batches.set_timeout(1, labels=["cancelled"]))
    assert len(outcomes) == len(made) and all(one.ok for one in outcomes)
    until = time.monotonic() + 20
    while list(client.list(labels=["cancelled"])) and time.monotonic() < until:
        time.sleep(0.2)
    assert not list(client.list(labels=["cancelled"]))


def test_commands_in_many_are_bounded(client: Client) -> None:
    batch = client.batches.create(3, **SMALL)
    batch.all()
    select = {"batch_id": batch.batch_id}
    ran = list(client.batches.exec("yes | head -c 300000; exit 7", output_bytes=1_000, **select))
    results = [one.result for one in ran]
    assert all(r and r.exit_code == 7 and len(r.stdout) == 1_000 and r.stdout_cut for r in results)
    ran = list(client.batches.exec("sleep 60", timeout_s=1, **select))
    assert all(one.result and one.result.timed_out and not one.ok for one in ran)
    with pytest.raises(InvalidRequest):
        list(client.batches.exec("true"))
    assert all(one.ok for one in batch.kill())

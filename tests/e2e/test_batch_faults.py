# SPDX-License-Identifier: AGPL-3.0-only
"""A batch of real containers while the database cannot be written."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opendsec import Client
from tests.harness import Server
from tests.servers import running_server

SMALL: dict[str, Any] = {"memory_mb": 64, "cpu": 0.1, "disk_mb": 64, "timeout_s": 900}
DOWN_S = 10
LOCK = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
db.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
db.execute("ROLLBACK")
"""


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """One whose database may be taken away."""
    with running_server("bfl", "10.235.0.0/16") as server:
        yield server


def until(condition: Callable[[], bool], what: str, *, seconds: float = 120) -> None:
    """Wait for a condition, bounded."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(what)


def on_the_machine(server: Server) -> set[str]:
    """Sandboxes of this instance that have a process, by their control groups."""
    found = set()
    place = f"opendsec-{server.config.instance}/"
    for group in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            text = group.read_text()
        except OSError:
            continue
        if place in text:
            found.add(text.split(place, 1)[1].split("/", 1)[0].split("\n", 1)[0])
    return found


@pytest.mark.timeout(400)
def test_a_database_that_is_away_for_10_s_in_the_middle(own_server: Server) -> None:
    asked = 40
    with Client(base_url=own_server.url, api_key=own_server.api_key) as client:
        batch = client.batches.create(asked, task_id="down", idempotency_key="down", **SMALL)
        results = batch.results()
        items = [next(results)]
        database = str(own_server.config.state_path / "store.db")
        command = [sys.executable, "-c", LOCK, database, str(DOWN_S)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lock:
            assert lock.stdout is not None
            assert lock.stdout.readline() == "held\n"
            # Those who ask now are told so, or wait: what is running answers all the same.
            first = items[0].unwrap()
            assert first.exec("echo on").stdout == "on\n"
            items += results
            assert lock.wait() == 0
        assert sorted(item.index for item in items) == list(range(asked))
        made = [item.sandbox.sandbox_id for item in items if item.sandbox is not None]
        errors = [item.error for item in items if item.error is not None]
        assert len(made) == len(set(made)) and len(made) + len(errors) == asked
        info = batch.info
        assert (info.made, info.failed) == (len(made), len(errors))
        assert all(error.fault != "user" for error in errors)
        # Waiting was all that it took.
        assert len(made) == asked
        until(
            lambda: {one.sandbox_id for one in client.list(task_id="down")} == set(made),
            "the records are not those that were told",
        )
        until(lambda: on_the_machine(own_server) == set(made), "orphans, or losses")
        again = client.batches.create(asked, task_id="down", idempotency_key="down", **SMALL)
        assert again.batch_id == batch.batch_id
        assert all(one.ok for one in batch.kill())
        until(lambda: not on_the_machine(own_server), "not ended")

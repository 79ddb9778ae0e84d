# SPDX-License-Identifier: AGPL-3.0-only
"""Simulated nodes for benchmarks, and sandboxes that run on them already."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.states import State
from opendsec_server.control.nodes import Fleet, NodeSource
from opendsec_server.control.nodes.http_client import HttpNode
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.sandboxes import row_of
from opendsec_server.store.store import Store
from opendsec_server.store.tables import SANDBOXES
from opendsec_server.store.tasks import enter
from tests.sim.serve import SECRET, node_id, tell

INSERT_AT_ONCE = 1_000
COME_UP_S = 60.0
LIVE_S = 86_400


@contextlib.contextmanager
def simulated_nodes(
    count: int, directory: Path, *, measured: bool, per_process: int | None = None
) -> Iterator[list[str]]:
    """Processes that serve nodes on Unix sockets; the nodes' addresses.

    Args:
        count: How many nodes.
        directory: Where the sockets are.
        measured: They take as long as real ones.
        per_process: Nodes that one process serves. None: all.
    """
    step = per_process or count
    firsts = range(0, count, step)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for first in firsts:
            command = [
                sys.executable, "-m", "tests.sim.serve",
                "--nodes", str(min(step, count - first)), "--first", str(first),
                "--directory", str(directory), *(["--measured"] if measured else []),
            ]  # fmt: skip
            processes.append(subprocess.Popen(command))
        until = time.monotonic() + COME_UP_S
        while not all((directory / f"ready-{first}").exists() for first in firsts):
            ended = any(process.poll() is not None for process in processes)
            if ended or time.monotonic() > until:
                raise RuntimeError("simulated nodes did not come up")
            time.sleep(0.05)
        yield addresses(count, directory)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def addresses(count: int, directory: Path) -> list[str]:
    """Of nodes that are served in a directory."""
    return [f"unix:{directory}/{node_id(n)}.sock" for n in range(count)]


def fleet_of(urls: Sequence[str]) -> Fleet:
    """A fleet over served nodes."""
    return Fleet([NodeSource(name=url, client=HttpNode(url, SECRET)) for url in urls])


async def fill(
    store: Store, urls: Sequence[str], project_id: str, count: int, *, task_id: str | None = None
) -> None:
    """Sandboxes that run already: on the nodes, in turn, and in the store."""
    now = time.time()
    names: dict[str, list[str]] = {node_id(n): [] for n in range(len(urls))}
    for number in range(count):
        node = node_id(number % len(urls))
        names[node].append(f"i{node}{random_chars(15)}")
    if task_id is not None:
        task = task_id
        await store.write(lambda connection: enter(connection, project_id, task, count, now=now))
    everyone = [(node, name) for node, its in names.items() for name in its]
    for start in range(0, count, INSERT_AT_ONCE):
        some = [
            _row(*one, project_id, task_id, now) for one in everyone[start : start + INSERT_AT_ONCE]
        ]

        def insert(connection: sa.Connection, some: list[dict[str, Any]] = some) -> None:
            connection.execute(sa.insert(SANDBOXES), some)

        await store.write(insert)
    for url, its in zip(urls, names.values(), strict=True):
        await tell(url, preload=its, project_id=project_id, template_id="t", end_at=now + LIVE_S)


def _row(node: str, name: str, project_id: str, task_id: str | None, now: float) -> dict[str, Any]:
    return row_of(
        SandboxRecord(
            sandbox_id=name,
            project_id=project_id,
            node_id=node,
            template_id="t",
            template="base",
            backend="container",
            state=State.RUNNING,
            cpu=1,
            memory_mb=512,
            disk_mb=512,
            env={},
            metadata={},
            labels=[],
            task_id=task_id,
            created_at=now,
            started_at=now,
            end_at=now + LIVE_S,
            node_seq=2,
        )
    )

# SPDX-License-Identifier: AGPL-3.0-only
"""Whole tasks over many nodes of which some are dead or slow: what can be done is, the rest is told
with its reason, and nothing of an ended task is left when the nodes are back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from opendsec_server.config import Config
from opendsec_server.contract.ids import node_id_of
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.params import CreateParams
from opendsec_server.control.tasks import work
from opendsec_server.store.task_operations import (
    OperationKind,
    OperationParams,
    TaskItem,
    TaskOperation,
)

from .conftest import Cluster, cluster_of, until

TASK = "t"
PARAMS = CreateParams(template="base", memory_mb=64, task_id=TASK)
COUNT = 100


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that are away are given up after a second, not after a third of a minute."""
    monkeypatch.setattr(work, "TRIES", 3)


async def operate(
    cluster: Cluster, kind: OperationKind
) -> tuple[TaskOperation, dict[str, TaskItem]]:
    caller = await cluster.caller()
    operation, _ = await cluster.services.tasks.operate(caller, TASK, kind, OperationParams())
    items: dict[str, TaskItem] = {}
    async with asyncio.timeout(40):
        async for now, more in cluster.services.tasks.follow(operation):
            operation = now
            for item in more:
                assert item.sandbox_id not in items
                items[item.sandbox_id] = item
    assert operation.asked == operation.done + operation.failed == len(items)
    return operation, items


async def test_dead_and_slow_nodes(config: Config, tmp_path: Path) -> None:
    async with cluster_of(config, tmp_path) as cluster:
        caller = await cluster.caller()
        creates = cluster.services.creates
        await asyncio.gather(*(creates.create(caller, PARAMS) for _ in range(COUNT)))
        dead, slow = cluster.nodes[:2]
        on_dead = {name for name, node in cluster.on_nodes().items() if node == dead.node_id}
        assert on_dead
        dead.faults.dead = True
        slow.faults.slow = 20.0
        paused, items = await operate(cluster, "pause")
        assert paused.asked == COUNT
        assert {name for name, item in items.items() if item.outcome == "error"} == on_dead
        for name in on_dead:
            error = msgspec.json.decode(items[name].error or "")
            assert error["fault"] == "platform" and error["retryable"], error
            assert node_id_of(name) == dead.node_id
        killed, items = await operate(cluster, "kill")
        assert (killed.done, killed.failed) == (COUNT - len(on_dead), len(on_dead))
        # The node comes back with what nobody could end: it is ended now, with the same reason.
        dead.faults.dead = False
        await until(lambda: all(member.up for member in cluster.services.fleet.members))
        await cluster.services.task_keeper.end_the_rest()

        async def nothing_left() -> bool:
            view = await cluster.services.tasks.get(caller, TASK)
            return all(count.state is State.ENDED for count in view.counts)

        await until(nothing_left)
        assert cluster.on_nodes() == {}
        view = await cluster.services.tasks.get(caller, TASK)
        assert sum(count.count for count in view.counts) == COUNT
        assert {count.reason for count in view.counts} == {EndReason.KILLED}

# SPDX-License-Identifier: AGPL-3.0-only
"""One node of ten dead, one slow, one full, one that lies about its load: what was asked for is
made or refused with a reason, nothing is there twice, and nothing is left without a record."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    IdempotencyOutcomeUnknown,
    NodeFull,
    NodeUnavailable,
    OpendsecError,
    SandboxNotFound,
)
from opendsec_server.contract.ids import node_id_of
from opendsec_server.contract.node import SandboxStatus
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.batches.params import BatchParams
from opendsec_server.control.creates import Created
from opendsec_server.control.nodes import NodeNotReached
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store import sandboxes
from opendsec_server.store.records import SandboxExtra

from .conftest import Cluster, cluster_of, fleet_of, until
from .simulated import SimNode

PARAMS = CreateParams(template="base", memory_mb=64, task_id="t")


async def create_all(cluster: Cluster, keys: list[str]) -> dict[str, Created | OpendsecError]:
    """Create one sandbox for each key; what became of each."""
    caller = await cluster.caller()

    async def one(key: str) -> Created | OpendsecError:
        try:
            return await cluster.services.creates.create(caller, PARAMS, key=key)
        except OpendsecError as exc:
            return exc

    return dict(zip(keys, await asyncio.gather(*map(one, keys)), strict=True))


async def live_records(cluster: Cluster) -> dict[str, str]:
    """Every live record, and its node."""
    found = {}
    for node in cluster.nodes:
        for record in await sandboxes.live_sandboxes(cluster.services.store, node.node_id):
            assert record.node_id == node_id_of(record.sandbox_id) == node.node_id
            found[record.sandbox_id] = record.node_id
    return found


async def check_nothing_twice_or_orphaned(
    cluster: Cluster, outcomes: dict[str, Created | OpendsecError]
) -> None:
    """After all is well again: one sandbox for each key, on the node that its record names."""
    made = {k: o.record.sandbox_id for k, o in outcomes.items() if isinstance(o, Created)}
    assert len(set(made.values())) == len(made)
    records = await live_records(cluster)
    assert set(made.values()) <= set(records)
    assert cluster.on_nodes() == records


async def all_up(cluster: Cluster) -> None:
    """Wait until the gateway reaches every node, and everything is compared once more."""
    await until(lambda: all(member.up for member in cluster.services.fleet.members))
    await cluster.services.watcher.reconcile()


async def test_four_bad_nodes_of_ten(config: Config, tmp_path: Path) -> None:
    async with cluster_of(config, tmp_path, sandboxes_max=60) as cluster:
        dead, slow, full, liar = cluster.nodes[:4]
        dead.faults.dead = True
        slow.faults.slow = 40.0
        full.faults.full = True
        liar.faults.lying = liar.faults.full = True
        keys = [f"key-{n}" for n in range(300)]
        outcomes = await create_all(cluster, keys)
        failures = {k: o for k, o in outcomes.items() if isinstance(o, OpendsecError)}
        assert len(outcomes) == len(keys)
        for failure in failures.values():
            assert failure.retryable and failure.fault in ("platform", "capacity"), failure
        # Only what was on its way to the node that died is not known.
        assert len(failures) < 80
        assert not full.live and not liar.live
        assert liar.refused + full.refused < 120
        per_node = Counter(cluster.on_nodes().values())
        healthy = [per_node[node.node_id] for node in cluster.nodes[4:]]
        assert min(healthy) > 10
        # The gateway knows by now, and new ones go elsewhere without delay.
        await until(lambda: not cluster.services.fleet.members[0].up)
        later = await create_all(cluster, [f"later-{n}" for n in range(30)])
        assert all(isinstance(outcome, Created) for outcome in later.values())

        dead.faults.dead = full.faults.full = liar.faults.full = liar.faults.lying = False
        await all_up(cluster)
        again = await create_all(cluster, keys)
        assert all(isinstance(outcome, Created) for outcome in again.values())
        for key, outcome in outcomes.items():
            if isinstance(outcome, Created):
                repeated = again[key]
                assert isinstance(repeated, Created)
                assert repeated.record.sandbox_id == outcome.record.sandbox_id
        await check_nothing_twice_or_orphaned(cluster, {**again, **later})
        assert len(cluster.on_nodes()) == len(keys) + len(later)


async def test_answers_that_are_lost_make_nothing_twice(config: Config, tmp_path: Path) -> None:
    """The node does all that it is asked, and every answer of it gets lost."""
    async with cluster_of(config, tmp_path, count=3) as cluster:
        cluster.nodes[0].faults.drop_answers = True
        keys = [f"key-{n}" for n in range(60)]
        outcomes = await create_all(cluster, keys)
        lost = [k for k, o in outcomes.items() if isinstance(o, NodeUnavailable)]
        assert lost
        early = await create_all(cluster, lost[:3])
        # Known only where the node's events have told of it.
        assert all(isinstance(o, Created | IdempotencyOutcomeUnknown) for o in early.values())
        cluster.nodes[0].faults.drop_answers = False
        await all_up(cluster)
        again = await create_all(cluster, keys)
        assert all(isinstance(outcome, Created) for outcome in again.values())
        assert sum(node.made for node in cluster.nodes) == len(keys)
        await check_nothing_twice_or_orphaned(cluster, again)


async def test_calls_to_a_dead_node_fail_with_a_retryable_platform_error_and_nothing_is_lost(
    config: Config, tmp_path: Path
) -> None:
    async with cluster_of(config, tmp_path, count=3) as cluster:
        caller = await cluster.caller()
        services = cluster.services
        made = await create_all(cluster, [f"key-{n}" for n in range(12)])
        names = [o.record.sandbox_id for o in made.values() if isinstance(o, Created)]
        victim = cluster.nodes[0]
        there = [name for name in names if node_id_of(name) == victim.node_id]
        elsewhere = next(name for name in names if name not in there)
        assert there
        victim.faults.dead = True
        member = services.fleet.members[0]
        await until(lambda: member.down)
        for work in (
            services.lifecycle.kill(caller, there[0]),
            services.lifecycle.connect(caller, there[0], None),
            services.routes.find(there[0], port=None, access_token=None, traffic_token=None),
            services.lifecycle.pause(caller, there[0], "full"),
        ):
            with pytest.raises(NodeNotReached) as refused:
                await work
            assert refused.value.retryable and refused.value.fault == "platform"
            assert refused.value.code == "node_unavailable"
        await services.watcher.reconcile()
        # Nothing is declared lost, others are not concerned, and creates go elsewhere.
        assert (await services.lifecycle.get(caller, there[0])).state is State.RUNNING
        assert (await services.lifecycle.connect(caller, elsewhere, None)).record
        after = await create_all(cluster, [f"after-{n}" for n in range(6)])
        assert all(isinstance(o, Created) for o in after.values())
        assert not await services.not_ready()
        victim.faults.dead = False
        await all_up(cluster)
        assert (await services.lifecycle.kill(caller, there[0]))[0].state is State.ENDED
        await check_nothing_twice_or_orphaned(cluster, after)


async def test_a_node_that_stays_away_is_given_up_and_ends_what_it_has_when_it_returns(
    config: Config, tmp_path: Path
) -> None:
    """Its caller makes another with the same key: there are never two that count."""
    config = msgspec.structs.replace(config, node_lost_after_s=0.5)
    async with cluster_of(config, tmp_path, count=2) as cluster:
        caller = await cluster.caller()
        services = cluster.services
        made = await create_all(cluster, [f"key-{n}" for n in range(10)])
        victim = cluster.nodes[0]
        there = [n for n, where in cluster.on_nodes().items() if where == victim.node_id]
        await services.lifecycle.pause(caller, there[0], "full")
        # One more is on its way when the node dies.
        victim.faults.drop_answers = True
        services.fleet.members[1].standing.draining = True
        unknown = await create_all(cluster, ["unknown"])
        assert isinstance(unknown["unknown"], NodeUnavailable)
        victim.faults.drop_answers = False
        victim.faults.dead = True
        await until(lambda: services.fleet.members[0].unreached_for() > 0.5)
        await until(lambda: services.fleet.members[0].down)
        await services.watcher.reconcile()
        records = {name: await services.lifecycle.get(caller, name) for name in there}
        assert records[there[0]].state is State.PAUSED  # it lies on the node's disk
        for name in there[1:]:
            assert records[name].end_reason is EndReason.LOST
            assert records[name].fault == "platform"
            assert victim.node_id in (records[name].message or "")
        second = await create_all(cluster, ["unknown"])
        assert isinstance(second["unknown"], Created)
        victim.faults.dead = False
        await all_up(cluster)
        assert there[0] in cluster.on_nodes()
        assert not set(there[1:]) & set(cluster.on_nodes())
        assert cluster.on_nodes() == await live_records(cluster)
        assert (await services.lifecycle.connect(caller, there[0], None)).resumed
        assert made


async def test_a_gateway_starts_while_nodes_are_away_and_finds_them_later(
    config: Config, tmp_path: Path
) -> None:
    async with cluster_of(config, tmp_path, count=2) as cluster:
        await create_all(cluster, [f"key-{n}" for n in range(8)])
        names = list(cluster.on_nodes())
        cluster.nodes[0].faults.dead = True
        await cluster.services.stop()
        second = cluster.services = await Services.start(config, fleet_of(cluster.urls))
        caller = await cluster.caller()
        gone = next(name for name in names if node_id_of(name) == cluster.nodes[0].node_id)
        with pytest.raises(NodeNotReached):
            await second.lifecycle.kill(caller, gone)
        assert (await second.lifecycle.get(caller, gone)).state is State.RUNNING
        made = await create_all(cluster, ["while-away"])
        assert isinstance(made["while-away"], Created)
        cluster.nodes[0].faults.dead = False
        await all_up(cluster)
        await second.lifecycle.kill(caller, gone)
        with pytest.raises(SandboxNotFound):
            await second.routes.find(
                "i" + "z" * 19, port=None, access_token=None, traffic_token=None
            )


async def test_labels_drains_and_full_clusters(config: Config, tmp_path: Path) -> None:
    async with cluster_of(config, tmp_path, count=3, sandboxes_max=5) as cluster:
        services, caller = cluster.services, await cluster.caller()
        fleet = services.fleet
        first = fleet.members[0]
        await fleet.mark(first, labels={"zone": "a"})
        zoned = msgspec.structs.replace(PARAMS, extra=SandboxExtra(node_labels={"zone": "a"}))
        made = await services.creates.create(caller, zoned)
        assert made.record.node_id == first.node_id
        await fleet.mark(first, draining=True)
        assert cluster.nodes[0].draining
        with pytest.raises(NodeFull, match="labels"):
            await services.creates.create(caller, zoned)
        # Ten more find place on the others, and the next is refused, whatever is tried.
        outcomes = await create_all(cluster, [f"key-{n}" for n in range(14)])
        assert sum(isinstance(o, Created) for o in outcomes.values()) == 10
        assert all(isinstance(o, Created | NodeFull) for o in outcomes.values())
        await fleet.mark(first, draining=False)
        more = await create_all(
            cluster, [k for k, o in outcomes.items() if isinstance(o, NodeFull)]
        )
        assert all(isinstance(o, Created) for o in more.values())
        await check_nothing_twice_or_orphaned(cluster, {**outcomes, **more})


async def test_a_batch_over_four_bad_nodes_of_ten(config: Config, tmp_path: Path) -> None:
    """Asked for is made or failed, item by item; the gateway is replaced half-way."""
    count = 400
    async with cluster_of(config, tmp_path, sandboxes_max=90) as cluster:
        dead, slow, full, liar = cluster.nodes[:4]
        slow.faults.slow = 20.0
        full.faults.full = True
        liar.faults.lying = liar.faults.full = True
        caller = await cluster.caller()
        asked = BatchParams.of(PARAMS, None, count=count, wait_s=60)
        batch = await cluster.services.batches.create(caller, asked, key="all")
        await until(lambda: sum(node.made for node in cluster.nodes) > 100)
        dead.faults.dead = True
        await cluster.services.stop()
        second = cluster.services = await Services.start(config, fleet_of(cluster.urls))
        caller = await cluster.caller()
        assert (await second.batches.create(caller, asked, key="all")).batch_id == batch.batch_id
        await asyncio.sleep(2)
        dead.faults.dead = full.faults.full = liar.faults.full = False
        seen: dict[int, str | None] = {}
        async with asyncio.timeout(50):
            async for news in second.batches.watch(caller, batch.batch_id):
                for item, _ in news.outcomes:
                    assert item.index not in seen
                    seen[item.index] = item.sandbox_id if item.error is None else None
        over = await second.batches.get(caller, batch.batch_id)
        assert over.made + over.failed == count == len(seen)
        await all_up(cluster)
        made = [name for name in seen.values() if name is not None]
        assert len(set(made)) == len(made) == over.made
        records = await live_records(cluster)
        assert cluster.on_nodes() == records
        assert set(made) <= set(records)
        # What failed for a lost answer may have been made: it is found, with a record, not lost.
        assert len(records) - len(made) <= over.failed < count // 4


async def test_two_gateways_on_one_store_leave_each_others_creates_alone(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get = SimNode.get

    async def counted(self: SimNode, sandbox_id: str) -> SandboxStatus:
        asked.append(sandbox_id)
        return await get(self, sandbox_id)

    monkeypatch.setattr(SimNode, "get", counted)
    config = msgspec.structs.replace(config, role="gateway")
    async with cluster_of(config, tmp_path, count=3) as cluster:
        first = cluster.services
        second = await Services.start(config, fleet_of(cluster.urls, seed=1))
        try:
            caller = await cluster.caller()

            async def create(number: int) -> Created:
                services = (first, second)[number % 2]
                if number % 10 == 0:
                    # A comparison in between finds creates of the other under way.
                    await (first, second)[1 - number % 2].watcher.reconcile()
                return await services.creates.create(caller, PARAMS, key=f"key-{number}")

            made = await asyncio.gather(*map(create, range(80)))
            names = {created.record.sandbox_id for created in made}
            assert len(names) == 80
            assert not asked, "starts of the other gateway are its business"
            records = [await second.lifecycle.get(caller, name) for name in names]
            assert {record.state for record in records} == {State.RUNNING}
            repeated = await asyncio.gather(
                *(second.creates.create(caller, PARAMS, key=f"key-{n}") for n in range(0, 80, 2))
            )
            assert all(created.replayed for created in repeated)
            # What one ends the other knows.
            ended = made[0].record.sandbox_id
            await first.lifecycle.kill(caller, ended)
            assert (await second.lifecycle.get(caller, ended)).state is State.ENDED
            await second.lifecycle.pause(caller, made[1].record.sandbox_id, "full")
            paused = made[1].record.sandbox_id
            assert (await first.lifecycle.connect(caller, paused, None)).resumed
            assert cluster.on_nodes() == await live_records(cluster)
        finally:
            await second.stop()

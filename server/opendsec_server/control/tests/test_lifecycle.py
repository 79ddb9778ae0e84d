# SPDX-License-Identifier: AGPL-3.0-only
"""What a caller can do with a sandbox, and how store and node are kept in step."""

from __future__ import annotations

import asyncio
import time

import pytest

from opendsec_server.config import Config
from opendsec_server.contract.errors import InvalidRequest, SandboxNotFound, StoreUnavailable
from opendsec_server.contract.node import NetworkPolicy
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store import accounts
from opendsec_server.store.records import ApiKey, Project, SandboxExtra, SandboxRecord

from .conftest import first_caller
from .fake_node import FakeNode
from .store_faults import broken_store


async def make(services: Services, caller: Caller, **fields: object) -> str:
    params = CreateParams(**fields)  # type: ignore[arg-type]
    return (await services.creates.create(caller, params)).record.sandbox_id


async def reached(
    services: Services, caller: Caller, sandbox_id: str, state: State
) -> SandboxRecord:
    """Wait until the record is in ``state``."""
    for _ in range(1_000):
        record = await services.lifecycle.get(caller, sandbox_id)
        if record.state is state:
            return record
        await asyncio.sleep(0.005)
    raise AssertionError(f"still {record.state}")


async def other_caller(services: Services) -> Caller:
    project = Project(project_id="other", name="other", sandboxes_max=10, created_at=0.0)
    key = ApiKey(
        key_id="other", project_id="other", name="", sha256="other", hint="", created_at=0.0
    )
    await accounts.insert_project(services.store, project, key)
    return Caller(project=project, key_id="other")


async def test_foreign_and_unknown_look_the_same(services: Services, caller: Caller) -> None:
    mine = await make(services, caller)
    foreign = await other_caller(services)
    lifecycle = services.lifecycle
    for name in (mine, "in0de" + "0" * 15, "", "x" * 9_999, "../../etc", "i" + "é" * 19):
        for call in (
            lifecycle.get(foreign, name),
            lifecycle.kill(foreign, name),
            lifecycle.connect(foreign, name, 10),
            lifecycle.set_timeout(foreign, name, 10),
            lifecycle.set_network(foreign, name, NetworkPolicy(), SandboxExtra()),
            lifecycle.metrics(foreign, name, 0.0, 1.0),
            lifecycle.transitions(foreign, name),
        ):
            with pytest.raises(SandboxNotFound) as caught:
                await call
            assert caught.value.message == f"there is no sandbox `{name[:64]}`"
    assert await lifecycle.latest_metrics(foreign, [mine, "x"], 0.0) == {}
    assert (await lifecycle.get(caller, mine)).state is State.RUNNING


async def test_kill_is_idempotent(services: Services, caller: Caller) -> None:
    name = await make(services, caller)
    first, second = await asyncio.gather(
        services.lifecycle.kill(caller, name), services.lifecycle.kill(caller, name)
    )
    assert first[0].end_reason is second[0].end_reason is EndReason.KILLED
    record, was_alive = await services.lifecycle.kill(caller, name)
    assert not was_alive
    assert record.fault is None


async def test_kill_of_what_the_node_lost(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    node.forget(name)
    record, _ = await services.lifecycle.kill(caller, name)
    assert (record.end_reason, record.fault) == (EndReason.LOST, "platform")


async def test_timeout_replaces_and_connect_extends(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller, timeout_s=100)
    lifecycle = services.lifecycle
    shorter = await lifecycle.set_timeout(caller, name, 10)
    assert shorter.end_at == pytest.approx(time.time() + 10, abs=5)
    assert (await lifecycle.connect(caller, name, 5)).record.end_at == shorter.end_at
    longer = (await lifecycle.connect(caller, name, 500)).record
    assert longer.end_at == pytest.approx(time.time() + 500, abs=5)
    assert node.statuses[name].end_at == longer.end_at
    assert (await lifecycle.get(caller, name)).end_at == longer.end_at
    with pytest.raises(InvalidRequest):
        await lifecycle.set_timeout(caller, name, 10**8)
    await lifecycle.set_timeout(caller, name, -5)
    ended = await reached(services, caller, name, State.ENDED)
    assert ended.end_reason is EndReason.TIMEOUT
    with pytest.raises(SandboxNotFound):
        await lifecycle.connect(caller, name, 5)


async def test_network_is_replaced(services: Services, node: FakeNode, caller: Caller) -> None:
    name = await make(services, caller)
    policy = NetworkPolicy(internet=False)
    await services.lifecycle.set_network(caller, name, policy, SandboxExtra())
    assert node.networks[name] == policy
    assert (await services.lifecycle.get(caller, name)).network == policy


async def test_end_on_the_node_is_recorded(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    node.end(name, EndReason.OOM, "init was killed at 64 MiB")
    record = await reached(services, caller, name, State.ENDED)
    assert (record.end_reason, record.fault) == (EndReason.OOM, "user")
    assert record.message == "init was killed at 64 MiB"


async def test_events_wait_for_the_store(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec_server.control.watch.RETRY_S", 0.01)
    name = await make(services, caller)
    with broken_store(services):
        node.end(name, EndReason.IDLE)
        await asyncio.sleep(0.05)
        with pytest.raises(StoreUnavailable):
            await services.lifecycle.get(caller, name)
        # What the edge asks needs no store.
        with pytest.raises(SandboxNotFound):
            await services.node.route(name)
    record = await reached(services, caller, name, State.ENDED)
    assert record.end_reason is EndReason.IDLE


async def test_broken_event_stream_is_opened_again(
    services: Services, node: FakeNode, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec_server.control.watch.RETRY_S", 0.01)
    name = await make(services, caller)
    for queue in node._listeners:
        queue.put_nowait(None)  # type: ignore[arg-type]
    for _ in range(200):
        await asyncio.sleep(0.005)
        if node._listeners:
            break
    node.end(name, EndReason.EXITED)
    await reached(services, caller, name, State.ENDED)


async def test_reconcile_finds_what_was_missed(config: Config, node: FakeNode) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    lost, ended, extended, kept = [await make(services, caller) for _ in range(4)]
    await services.stop()
    node.forget(lost)
    node.end(ended, EndReason.TIMEOUT)
    await node.set_end_at(extended, time.time() + 5_000)
    services = await Services.start(config, node)
    caller = await first_caller(services)
    get = services.lifecycle.get
    assert (await get(caller, lost)).end_reason is EndReason.LOST
    assert (await get(caller, ended)).end_reason is EndReason.TIMEOUT
    assert (await get(caller, extended)).end_at == node.statuses[extended].end_at
    assert (await get(caller, kept)).state is State.RUNNING
    await services.stop()


async def test_reconcile_of_a_store_that_knows_less(config: Config, node: FakeNode) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    unknown, ended = await make(services, caller), await make(services, caller)

    def forget(connection: object) -> None:
        connection.exec_driver_sql(  # type: ignore[attr-defined]
            "DELETE FROM sandboxes WHERE sandbox_id = ?", (unknown,)
        )
        connection.exec_driver_sql(  # type: ignore[attr-defined]
            "UPDATE sandboxes SET state = 'ended', ended_at = 1 WHERE sandbox_id = ?", (ended,)
        )

    await services.store.write(forget)
    await services.watcher.reconcile()
    adopted = await services.lifecycle.get(caller, unknown)
    assert (adopted.state, adopted.template) == (State.RUNNING, "base")
    assert node.statuses[ended].state is State.ENDED
    await services.stop()


async def test_sandbox_of_no_known_project_is_left_alone(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    name = await make(services, caller)
    spec = node.specs[name]
    import msgspec

    stranger = msgspec.structs.replace(spec, sandbox_id="in0de" + "9" * 15, project_id="gone")
    await node.create(stranger)
    await services.watcher.reconcile()
    assert node.statuses[stranger.sandbox_id].state is State.RUNNING
    with pytest.raises(SandboxNotFound):
        await services.lifecycle.get(caller, stranger.sandbox_id)

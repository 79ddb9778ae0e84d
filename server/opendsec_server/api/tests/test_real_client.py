# SPDX-License-Identifier: AGPL-3.0-only
"""The published ``e2b`` client against the API: control calls, sync and async.

Calls that reach into a sandbox need a node, and are tested elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from e2b import AsyncSandbox, AsyncTemplate, Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import (
    AuthenticationException,
    SandboxException,
    SandboxNotFoundException,
    ServiceBusyException,
)

from opendsec_server.contract.errors import NodeFull, NodeUnavailable
from opendsec_server.contract.states import EndReason

from .harness import Plane


@pytest.fixture
def options(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("E2B_API_URL", plane.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", plane.url)
    return {"api_key": plane.key}


async def test_async_client(plane: Plane, options: dict[str, Any]) -> None:
    sandbox = await AsyncSandbox.create(
        timeout=120, metadata={"a b": "c&d", "k": "v/=%"}, envs={"E": "1"}, **options
    )
    spec = plane.node.specs[sandbox.sandbox_id]
    assert spec.env == {"E": "1"}
    assert sandbox.get_host(3000) == f"3000-{sandbox.sandbox_id}.localhost:7300"

    info = await sandbox.get_info()
    assert (info.sandbox_id, info.name) == (sandbox.sandbox_id, "base")
    assert info.metadata == {"a b": "c&d", "k": "v/=%"}
    assert info.state is SandboxState.RUNNING

    others = [await AsyncSandbox.create(metadata={"k": "x"}, **options) for _ in range(3)]
    query = SandboxQuery(metadata={"a b": "c&d", "k": "v/=%"}, state=[SandboxState.RUNNING])
    found = AsyncSandbox.list(query=query, **options)
    assert [s.sandbox_id for s in await found.next_items()] == [sandbox.sandbox_id]
    assert not found.has_next

    pages = AsyncSandbox.list(limit=3, **options)
    seen = []
    while pages.has_next:
        seen.append([s.sandbox_id for s in await pages.next_items()])
    assert [len(page) for page in seen] == [3, 1]

    await sandbox.set_timeout(600)
    longer = (await sandbox.get_info()).end_at
    connected = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=5, **options)
    assert connected.sandbox_id == sandbox.sandbox_id
    assert (await connected.get_info()).end_at == longer
    assert await sandbox.get_metrics() == []

    assert await sandbox.kill() is True
    assert await AsyncSandbox.kill(sandbox.sandbox_id, **options) is False
    with pytest.raises(SandboxNotFoundException):
        await AsyncSandbox.connect(sandbox.sandbox_id, **options)
    await asyncio.gather(*(other.kill() for other in others))
    assert await AsyncTemplate.exists("base", **options) is True
    assert await AsyncTemplate.exists("no-such", **options) is False


async def test_sync_client(plane: Plane, options: dict[str, Any]) -> None:
    def use() -> None:
        sandbox = Sandbox.create(
            "base", timeout=60, allow_internet_access=False, metadata={"m": "1"}, **options
        )
        assert plane.node.specs[sandbox.sandbox_id].network.internet is False
        sandbox.update_network({"allow_out": ["203.0.113.1"], "deny_out": ["0.0.0.0/0"]})
        assert plane.node.networks[sandbox.sandbox_id].allow == ("203.0.113.1",)
        assert sandbox.get_info().state is SandboxState.RUNNING
        pages = Sandbox.list(query=SandboxQuery(metadata={"m": "1"}), **options)
        assert [s.sandbox_id for s in pages.next_items()] == [sandbox.sandbox_id]
        sandbox.connect(timeout=300)
        sandbox.set_timeout(0)
        assert plane.node.statuses[sandbox.sandbox_id].reason is EndReason.TIMEOUT
        with pytest.raises(SandboxException):
            Sandbox.create("no-such-template", **options)
        with pytest.raises(AuthenticationException):
            Sandbox.create(api_key="e2b_" + "0" * 40)

    await asyncio.to_thread(use)


async def test_async_state_family(plane: Plane, options: dict[str, Any]) -> None:
    sandbox = await AsyncSandbox.create(
        lifecycle={"on_timeout": {"action": "pause", "mode": "full"}, "auto_resume": True},
        **options,
    )
    info = await sandbox.get_info()
    assert info.lifecycle == {"on_timeout": "pause", "auto_resume": True}
    token = sandbox._envd_access_token
    assert await sandbox.pause() is True
    assert await sandbox.pause() is False
    assert (await sandbox.get_info()).state is SandboxState.PAUSED
    query = SandboxQuery(state=[SandboxState.PAUSED])
    found = await AsyncSandbox.list(query=query, **options).next_items()
    assert [s.sandbox_id for s in found] == [sandbox.sandbox_id]
    with pytest.raises(SandboxException, match="resume it first"):
        await sandbox.fork()
    same = await sandbox.connect(timeout=60)
    assert same.sandbox_id == sandbox.sandbox_id
    assert same._envd_access_token == token
    assert (await sandbox.get_info()).state is SandboxState.RUNNING

    children = await sandbox.fork(count=2, timeout=60)
    made = {child.sandbox_id for child in children if isinstance(child, AsyncSandbox)}
    assert len(made | {sandbox.sandbox_id}) == 3
    named = await sandbox.create_snapshot(name="warm:v1")
    unnamed = await sandbox.create_snapshot()
    assert named.snapshot_id.endswith("/warm:v1")
    listed = await AsyncSandbox.list_snapshots(**options).next_items()
    assert [s.snapshot_id for s in listed] == [unnamed.snapshot_id, named.snapshot_id]
    for snapshot in (named, unnamed):
        started = await AsyncSandbox.create(snapshot.snapshot_id, **options)
        assert plane.node.specs[started.sandbox_id].snapshot_id in plane.node.saved
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id, **options) is True
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id, **options) is False
    with pytest.raises(SandboxException):
        await AsyncSandbox.create(named.snapshot_id, **options)
    await sandbox.pause()
    assert await sandbox.kill() is True
    with pytest.raises(SandboxNotFoundException):
        await sandbox.pause()
    with pytest.raises(SandboxNotFoundException):
        await sandbox.create_snapshot()


async def test_sync_state_family(plane: Plane, options: dict[str, Any]) -> None:
    def use() -> None:
        sandbox = Sandbox.create(
            lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}}, **options
        )
        spec = plane.node.specs[sandbox.sandbox_id]
        assert (spec.on_timeout, spec.pause_mode) == ("pause", "filesystem")
        assert sandbox.pause(mode="filesystem") is True
        assert sandbox.connect(timeout=60, on_resume="reboot").sandbox_id == sandbox.sandbox_id
        (child,) = sandbox.fork()
        assert isinstance(child, Sandbox)
        taken = sandbox.create_snapshot(name="s")
        (again,) = Sandbox.list_snapshots(sandbox.sandbox_id, **options).next_items()
        assert again.snapshot_id == taken.snapshot_id
        assert Sandbox.create(taken.snapshot_id, **options).sandbox_id
        assert Sandbox.delete_snapshot(taken.snapshot_id, **options) is True

    await asyncio.to_thread(use)


async def test_what_comes_later_is_an_error(plane: Plane, options: dict[str, Any]) -> None:
    with pytest.raises(SandboxException, match="not supported yet"):
        await AsyncSandbox.create(network={"allow_out": ["example.com"]}, **options)
    assert plane.node.created == 0


async def test_client_repeats_only_what_is_safe(plane: Plane, options: dict[str, Any]) -> None:
    calls = 0
    create = plane.node.create

    async def failing(spec):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls < failures:
            raise error
        return await create(spec)

    plane.node.create = failing  # type: ignore[method-assign]
    error: Exception
    failures, error = 3, NodeFull("no slot", retry_after_s=0)
    await AsyncSandbox.create(**options)
    assert calls == 3
    calls, error = 0, NodeUnavailable("broken")
    with pytest.raises(ServiceBusyException):
        await AsyncSandbox.create(**options)
    assert calls == 1


async def test_idempotency_key(plane: Plane, options: dict[str, Any]) -> None:
    made = [await AsyncSandbox.create(idempotency_key="run-1", **options) for _ in range(2)]
    assert made[0].sandbox_id == made[1].sandbox_id
    with pytest.raises(SandboxException, match="other parameters"):
        await AsyncSandbox.create(timeout=7, idempotency_key="run-1", **options)

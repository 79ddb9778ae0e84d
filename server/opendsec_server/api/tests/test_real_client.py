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


async def test_what_comes_later_is_an_error(plane: Plane, options: dict[str, Any]) -> None:
    sandbox = await AsyncSandbox.create(**options)
    for call in (sandbox.pause, sandbox.create_snapshot):
        with pytest.raises(SandboxException, match="not supported yet"):
            await call()
    with pytest.raises(SandboxException, match="not supported yet"):
        await AsyncSandbox.create(lifecycle={"on_timeout": "pause"}, **options)
    with pytest.raises(SandboxException, match="not supported yet"):
        await AsyncSandbox.create(network={"allow_out": ["example.com"]}, **options)
    assert plane.node.created == 1


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

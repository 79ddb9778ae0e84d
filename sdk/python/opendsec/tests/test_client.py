# SPDX-License-Identifier: Apache-2.0
"""The control half against a scripted server."""

from __future__ import annotations

import gc
import os
import re
from typing import Any

import pytest

from opendsec import (
    BadResponse,
    ConnectionFailed,
    IdempotencyMismatch,
    InvalidRequest,
    NetworkPolicy,
    NodeFull,
    NotFound,
    SandboxNotFound,
    Unauthenticated,
)

from .fake_server import SANDBOX_ID, Answer, FakeServer, error, sandbox
from .kits import Kit, close, collect, done, within

ONE = f"/v1/sandboxes/{SANDBOX_ID}"


async def test_create_sends_what_was_given_and_nothing_else(
    client: Any, server: FakeServer
) -> None:
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    box = await done(
        client.create(
            "base",
            cpu=0.5,
            memory_mb=512,
            env={"A": "b"},
            labels=["x"],
            task_id="t",
            timeout_s=60,
            network=NetworkPolicy(internet=False, allow=("1.1.1.1",)),
        )
    )
    asked = server.of("POST", "/v1/sandboxes")[0]
    body = asked.json
    assert asked.headers["x-api-key"] == "e2b_test"
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,255}", asked.headers["idempotency-key"])
    assert body["network"]["internet"] is False
    assert body["network"]["allow"] == ["1.1.1.1"]
    del body["network"]
    assert body == {
        "template": "base",
        "cpu": 0.5,
        "memory_mb": 512,
        "env": {"A": "b"},
        "labels": ["x"],
        "task_id": "t",
        "timeout_s": 60,
        "on_timeout": "kill",
    }
    assert box.sandbox_id == SANDBOX_ID
    assert box.record.created_at.year == 2026
    assert box.record.created_at.utcoffset().total_seconds() == 0


async def test_create_is_repeated_with_the_same_key(client: Any, server: FakeServer) -> None:
    server.on(
        "POST",
        "/v1/sandboxes",
        Answer(drop=True),
        Answer(503, error("node_full", retryable=True, fault="capacity")),
        Answer(504, b"a proxy's words"),
        Answer(201, sandbox()),
    )
    await done(client.create())
    keys = {asked.headers["idempotency-key"] for asked in server.of("POST", "/v1/sandboxes")}
    assert len(server.of("POST", "/v1/sandboxes")) == 4
    assert len(keys) == 1


async def test_create_gives_up_after_its_tries(client: Any, server: FakeServer) -> None:
    full = Answer(503, error("node_full", retryable=True, fault="capacity"))
    server.on("POST", "/v1/sandboxes", full)
    with pytest.raises(NodeFull) as caught:
        await done(client.create())
    assert caught.value.fault == "capacity"
    assert caught.value.request_id == "req-1"
    assert len(server.of("POST", "/v1/sandboxes")) == 4


async def test_two_creates_have_two_keys(client: Any, server: FakeServer) -> None:
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    await done(client.create())
    await done(client.create())
    keys = {asked.headers["idempotency-key"] for asked in server.of("POST", "/v1/sandboxes")}
    assert len(keys) == 2


async def test_conflict_of_keys_is_typed_and_not_repeated(client: Any, server: FakeServer) -> None:
    server.on("POST", "/v1/sandboxes", Answer(409, error("idempotency_request_mismatch")))
    with pytest.raises(IdempotencyMismatch):
        await done(client.create(idempotency_key="mine"))
    assert len(server.of("POST", "/v1/sandboxes")) == 1


async def test_no_key_and_no_server(kit: Kit) -> None:
    async with within(kit.Client(base_url="http://127.0.0.1:9", retries_max=0)) as client:
        with pytest.raises(Unauthenticated):
            await done(client.templates())
    async with within(
        kit.Client(base_url="http://127.0.0.1:9", api_key="k", retries_max=1)
    ) as client:
        with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:9"):
            await done(client.templates())


async def test_list_pages_and_filters(client: Any, server: FakeServer) -> None:
    server.on(
        "GET",
        "/v1/sandboxes",
        Answer(200, {"sandboxes": [sandbox("i1"), sandbox("i2")], "next_cursor": "c"}),
        Answer(200, {"sandboxes": [sandbox("i3")], "next_cursor": None}),
    )
    found = await collect(
        client.list(task_id="t", labels=["a", "b"], metadata={"k": "v:w"}, states=["running"])
    )
    assert [record.sandbox_id for record in found] == ["i1", "i2", "i3"]
    first, second = server.of("GET", "/v1/sandboxes")
    assert first.query == {
        "state": ["running"],
        "task_id": ["t"],
        "label": ["a", "b"],
        "metadata": ["k:v:w"],
        "limit": ["100"],
    }
    assert second.query["cursor"] == ["c"]


async def test_list_stops_at_its_limit(client: Any, server: FakeServer) -> None:
    page = {"sandboxes": [sandbox("i1"), sandbox("i2")], "next_cursor": "c"}
    server.on("GET", "/v1/sandboxes", Answer(200, page))
    assert len(await collect(client.list(limit=2))) == 2
    assert server.of("GET", "/v1/sandboxes")[0].query["limit"] == ["2"]


async def test_reads_are_repeated(client: Any, server: FakeServer) -> None:
    server.on("GET", ONE, Answer(drop=True), Answer(503), Answer(200, sandbox(state="paused")))
    assert (await done(client.info(SANDBOX_ID))).state == "paused"


async def test_id_cannot_name_another_path(client: Any, server: FakeServer) -> None:
    with pytest.raises(InvalidRequest):
        await done(client.info(""))
    assert not server.asked
    with pytest.raises(NotFound):
        await done(client.kill("../templates"))
    assert server.asked[-1].path == "/v1/sandboxes/..%2Ftemplates"


async def test_life_of_a_sandbox(client: Any, server: FakeServer) -> None:
    server.on("POST", f"{ONE}/connect", Answer(200, sandbox()))
    server.on("POST", f"{ONE}/timeout", Answer(200, sandbox(end_at="2026-12-01T12:00:00Z")))
    server.on("PUT", f"{ONE}/network", Answer(200, sandbox()))
    server.on(
        "GET",
        f"{ONE}/metrics",
        Answer(200, {"samples": [{"at": "2026-12-01T10:00:00Z", "cpu_used_pct": 1.5}]}),
    )
    server.on(
        "GET",
        f"{ONE}/transitions",
        Answer(
            200, {"transitions": [{"from": None, "to": "pending", "at": "2026-12-01T10:00:00Z"}]}
        ),
    )
    server.on(
        "DELETE", ONE, Answer(200, sandbox(state="ended")), Answer(404, error("sandbox_not_found"))
    )
    server.on("GET", ONE, Answer(200, sandbox()))
    box = await done(client.connect(SANDBOX_ID))
    assert not server.of("POST", f"{ONE}/connect"), "looking at it must not prolong its life"
    await done(client.connect(SANDBOX_ID, timeout_s=59.5))
    assert server.of("POST", f"{ONE}/connect")[0].json == {"timeout_s": 60}
    assert (await done(box.set_timeout(60))).end_at.hour == 12
    assert server.of("POST", f"{ONE}/timeout")[0].json == {"timeout_s": 60}
    await done(box.set_network(NetworkPolicy(internet=False)))
    assert (await done(box.metrics()))[0].cpu_used_pct == 1.5
    transition = (await done(box.transitions()))[0]
    assert (transition.from_state, transition.to) == (None, "pending")
    assert box.url(8000) == f"http://8000-{SANDBOX_ID}.localhost:7300"
    with pytest.raises(InvalidRequest):
        box.url(0)
    assert await done(box.kill()) is True
    assert await done(box.kill()) is False


async def test_block_kills_at_its_end(client: Any, server: FakeServer) -> None:
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    server.on("DELETE", ONE, Answer(200, sandbox(state="ended")))
    async with within(await done(client.create())):
        assert not server.of("DELETE", ONE)
    assert len(server.of("DELETE", ONE)) == 1
    async with within(await done(client.create())) as box:
        box.kill_on_exit = False
    assert len(server.of("DELETE", ONE)) == 1


async def test_failure_in_the_block_is_not_hidden_by_that_of_the_kill(
    client: Any, server: FakeServer
) -> None:
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    server.on("DELETE", ONE, Answer(500, error("internal", fault="platform")))
    with pytest.raises(ValueError, match="mine"):
        async with within(await done(client.create())):
            raise ValueError("mine")


async def test_answer_of_something_else_is_typed(client: Any, server: FakeServer) -> None:
    server.on("GET", "/v1/templates", Answer(200, b"<html>a web page</html>"))
    with pytest.raises(BadResponse, match="cannot be read"):
        await done(client.templates())


async def test_gone_sandbox_has_one_error(client: Any, server: FakeServer) -> None:
    server.on("GET", ONE, Answer(404, error("sandbox_not_found")))
    with pytest.raises(SandboxNotFound) as caught:
        await done(client.info(SANDBOX_ID))
    assert caught.value.code == "sandbox_not_found"


async def test_connect_to_an_ended_sandbox_says_why(client: Any, server: FakeServer) -> None:
    ended = sandbox(state="ended", end_reason="lost", fault="platform")
    server.on("GET", ONE, Answer(200, ended))
    with pytest.raises(SandboxNotFound, match="lost") as caught:
        await done(client.connect(SANDBOX_ID))
    assert caught.value.fault == "platform"


async def test_two_hundred_sandboxes_leave_no_descriptors(kit: Kit, server: FakeServer) -> None:
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    server.on("DELETE", ONE, Answer(200, sandbox(state="ended")))

    async def one() -> None:
        box = await done(kit.Sandbox.create(base_url=server.url, api_key="e2b_test"))
        async with within(box):
            pass

    await one()
    gc.collect()
    before = _sockets()
    for _ in range(200):
        await one()
    gc.collect()
    # The other ends belong to the scripted server's threads, which may lag behind.
    assert _sockets() <= before + 10


async def test_shared_client_closes_everything(kit: Kit, server: FakeServer) -> None:
    server.on("POST", "/v1/sandboxes", Answer(201, sandbox()))
    client = kit.Client(base_url=server.url, api_key="e2b_test")
    for _ in range(200):
        await done(client.create())
    await close(client)
    gc.collect()
    assert _sockets() <= 20


def _sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            continue
    return count

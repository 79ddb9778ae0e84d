# SPDX-License-Identifier: AGPL-3.0-only
"""The native API."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import datetime

import httpx
import pytest

from opendsec_server.contract.errors import NodeFull
from opendsec_server.contract.states import EndReason
from opendsec_server.control.tests.store_faults import broken_store

from .harness import Plane

TIME_RE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


async def make(http: httpx.AsyncClient, **body: object) -> dict[str, object]:
    made = await http.post("/v1/sandboxes", json=body)
    assert made.status_code == 201, made.text
    return dict(made.json())


async def test_life_of_a_sandbox(http: httpx.AsyncClient, plane: Plane) -> None:
    made = await make(
        http,
        cpu=1,
        memory_mb=256,
        disk_mb=512,
        env={"A": "b"},
        metadata={"run": "1"},
        labels=["x"],
        task_id="t",
        timeout_s=60,
        idle_timeout_s=30,
        network={"internet": False, "allow": ["203.0.113.0/24"], "https_ports": [8443]},
    )
    name = made["sandbox_id"]
    assert made["state"] == "running"
    assert (made["cpu"], made["memory_mb"], made["disk_mb"]) == (1, 256, 512)
    assert made["env"] == {"A": "b"}
    assert made["domain"] == "localhost:7300"
    assert made["envd_version"] == "0.9.1"
    assert made["access_token"] == plane.services.mint.access(str(name))
    for field in ("created_at", "started_at", "end_at"):
        assert TIME_RE.fullmatch(str(made[field]))
        datetime.fromisoformat(str(made[field]))
    assert made["network"]["https_ports"] == [8443]  # type: ignore[index]
    assert (await http.get(f"/v1/sandboxes/{name}")).json() == made

    (listed,) = (await http.get("/v1/sandboxes")).json()["sandboxes"]
    assert not {"env", "access_token", "traffic_token"} & set(listed)

    longer = await http.post(f"/v1/sandboxes/{name}/timeout", json={"timeout_s": 600})
    connected = await http.post(f"/v1/sandboxes/{name}/connect")
    assert connected.json()["end_at"] == longer.json()["end_at"]
    assert connected.json()["traffic_token"]

    changed = await http.put(f"/v1/sandboxes/{name}/network", json={"deny": ["1.1.1.1"]})
    assert changed.json()["network"]["internet"] is True
    assert plane.node.networks[str(name)].deny == ("1.1.1.1",)

    plane.node.sample(str(name), time.time())
    (sample,) = (await http.get(f"/v1/sandboxes/{name}/metrics")).json()["samples"]
    assert sample["cpu_used_pct"] == 12.5

    ended = await http.delete(f"/v1/sandboxes/{name}")
    assert (ended.json()["state"], ended.json()["end_reason"]) == ("ended", "killed")
    assert "access_token" not in ended.json()
    assert (await http.delete(f"/v1/sandboxes/{name}")).json() == ended.json()
    kept = (await http.get(f"/v1/sandboxes/{name}/transitions")).json()["transitions"]
    assert [t["to"] for t in kept] == ["starting", "running", "ended"]
    assert (await http.post(f"/v1/sandboxes/{name}/connect")).status_code == 404


async def test_list_filters_and_pages(http: httpx.AsyncClient) -> None:
    names = [
        (await make(http, metadata={"n": str(n)}, labels=[f"l{n}"], task_id="t"))["sandbox_id"]
        for n in range(5)
    ]
    await http.delete(f"/v1/sandboxes/{names[0]}")

    async def listed(**query: object) -> list[object]:
        found = await http.get("/v1/sandboxes", params=query)  # type: ignore[arg-type]
        assert found.status_code == 200, found.text
        return [sandbox["sandbox_id"] for sandbox in found.json()["sandboxes"]]

    assert await listed() == names[:0:-1]
    assert await listed(state="all") == names[::-1]
    assert await listed(state="ended") == names[:1]
    assert await listed(metadata="n:3") == [names[3]]
    assert await listed(metadata=["n:3", "n:4"]) == []
    assert await listed(label="l2", task_id="t", template="base") == [names[2]]
    assert await listed(template="unknown") == []

    seen: list[object] = []
    cursor: str | None = ""
    while cursor is not None:
        params = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = (await http.get("/v1/sandboxes", params=params)).json()
        seen += [sandbox["sandbox_id"] for sandbox in page["sandboxes"]]
        cursor = page["next_cursor"]
    assert seen == names[:0:-1]


async def test_idempotency_over_http(http: httpx.AsyncClient, plane: Plane) -> None:
    headers = {"Idempotency-Key": "Run.17:a_b"}
    plane.node.gate = asyncio.Event()
    calls = [
        asyncio.create_task(http.post("/v1/sandboxes", json={}, headers=headers)) for _ in range(3)
    ]
    await plane.node.admitted.wait()
    plane.node.gate.set()
    answers = await asyncio.gather(*calls)
    assert [a.status_code for a in answers] == [201] * 3
    assert len({a.json()["sandbox_id"] for a in answers}) == 1
    replays = sorted(a.headers.get("Idempotent-Replay", "") for a in answers)
    assert replays == ["", "true", "true"]
    other = await http.post("/v1/sandboxes", json={"cpu": 1}, headers=headers)
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_request_mismatch"
    for bad in ("a b", "x" * 256, "a/b"):
        refused = await http.post("/v1/sandboxes", json={}, headers={"Idempotency-Key": bad})
        assert refused.status_code == 400


async def test_errors_say_everything(http: httpx.AsyncClient, plane: Plane) -> None:
    plane.node.fail_with = NodeFull("no free slot")
    full = await http.post("/v1/sandboxes", json={}, headers={"X-Request-Id": "my-id"})
    assert full.status_code == 503
    assert full.headers["X-Request-Id"] == "my-id"
    assert full.headers["Retry-After"] == "1"
    error = full.json()["error"]
    assert error["code"] == "node_full"
    assert (error["fault"], error["retryable"], error["request_id"]) == ("capacity", True, "my-id")
    assert error["message"] == "no free slot"
    assert error["remediation"]


async def test_account(http: httpx.AsyncClient, plane: Plane) -> None:
    info = (await http.get("/v1/info")).json()
    assert info["backends"] == info["node"]["backends"]
    assert [backend["name"] for backend in info["backends"]] == ["container"]
    assert info["backends"][0]["capabilities"]["memory_snapshot"] is False
    assert (info["default_backend"], info["features"]["pause"]) == ("container", True)
    (template,) = (await http.get("/v1/templates")).json()["templates"]
    assert (template["name"], template["public"]) == ("base", True)
    project = (await http.get("/v1/project")).json()
    made = await http.post("/v1/api-keys", json={"name": "ci"})
    assert made.status_code == 201
    assert re.fullmatch("e2b_[0-9a-f]{40}", made.json()["key"])
    bearer = {"Authorization": f"Bearer {made.json()['key']}"}
    async with httpx.AsyncClient(base_url=plane.url, headers=bearer) as second:
        assert (await second.get("/v1/project")).json() == project
        assert (await http.delete(f"/v1/api-keys/{made.json()['key_id']}")).status_code == 204
        assert (await second.get("/v1/project")).status_code == 401
    keys = (await http.get("/v1/api-keys")).json()["api_keys"]
    assert [key["name"] for key in keys] == ["first"]
    assert (await http.delete(f"/v1/api-keys/{keys[0]['key_id']}")).status_code == 409
    assert (await http.delete("/v1/api-keys/none")).status_code == 404


async def test_operations(http: httpx.AsyncClient, plane: Plane) -> None:
    async with httpx.AsyncClient(base_url=plane.url) as anyone:
        assert (await anyone.get("/healthz")).json() == {"status": "ok"}
        assert (await anyone.get("/readyz")).json() == {"ready": True, "reasons": []}
        await make(http)
        figures = await anyone.get("/metrics")
        assert 'opendsec_sandboxes{backend="container",state="running"} 1.0' in figures.text
        assert 'route="/v1/sandboxes",status="201"' in figures.text
        forwarded = {"X-Forwarded-For": "127.0.0.1, 198.51.100.7"}
        assert (await anyone.get("/metrics", headers=forwarded)).status_code == 401
        assert (await http.get("/metrics", headers=forwarded)).status_code == 200
        local = {"X-Forwarded-For": "127.0.0.1"}
        assert (await anyone.get("/metrics", headers=local)).status_code == 200
        with broken_store(plane.services):
            down = await anyone.get("/readyz")
            assert down.status_code == 503
            assert down.json()["reasons"][0].startswith("store: ")
            assert (await anyone.get("/healthz")).status_code == 200


async def test_store_down(http: httpx.AsyncClient, plane: Plane) -> None:
    name = (await make(http))["sandbox_id"]
    with broken_store(plane.services):
        refused = await http.post("/v1/sandboxes", json={})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "store_unavailable"
        assert refused.json()["error"]["retryable"] is True
        e2b = await http.post("/v2/sandboxes", json={"templateID": "base"})
        assert (e2b.status_code, e2b.headers["Should-Retry"]) == (503, "true")
        plane.node.end(str(name), EndReason.TIMEOUT)
    assert plane.node.created == 1


async def test_no_secret_in_logs(
    http: httpx.AsyncClient, plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    made = await make(http, env={"TOKEN": "hidden-env-value"})
    await http.get("/v1/nope", headers={"Authorization": "Bearer e2b_wrong"})
    await http.get("/v1/project", headers={"X-API-Key": "e2b_" + "1" * 40})
    await http.post("/v1/api-keys", json={"name": "x"})
    written = "".join(capsys.readouterr())
    assert "sandbox created" in written
    for secret in (plane.key, str(made["access_token"]), "hidden-env-value", "1" * 40):
        assert secret not in written

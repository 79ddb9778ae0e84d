# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's API: exact codes and shapes, checked against its own specification."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import yaml
from openapi_schema_validator import OAS30Validator

from opendsec_server.contract.errors import Internal, NodeUnavailable, SandboxStartFailed
from opendsec_server.contract.states import EndReason

from .harness import Plane

SPEC_FILE = Path(__file__).parents[4] / "tests/specs/e2b-openapi.yml"
ERROR = "Error"


@cache
def spec() -> dict[str, Any]:
    return dict(yaml.safe_load(SPEC_FILE.read_text()))


def check(name: str, value: object, *, many: bool = False) -> None:
    """Validate against a schema of the specification."""
    schema: dict[str, Any] = {"$ref": f"#/components/schemas/{name}"}
    if many:
        schema = {"type": "array", "items": schema}
    OAS30Validator(schema | {"components": spec()["components"]}).validate(value)


def check_error(answer: httpx.Response, status: int, code: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    check(ERROR, answer.json())
    assert answer.json()["code"] == status
    if code is not None:
        assert answer.json()["error_code"] == code


async def make(http: httpx.AsyncClient, **body: object) -> str:
    made = await http.post("/v2/sandboxes", json={"templateID": "base", **body})
    assert made.status_code == 201, made.text
    check("Sandbox", made.json())
    return str(made.json()["sandboxID"])


async def seconds_left(http: httpx.AsyncClient, name: str) -> float:
    detail = (await http.get(f"/sandboxes/{name}")).json()
    return datetime.fromisoformat(detail["endAt"]).timestamp() - time.time()


@pytest.mark.parametrize(("path", "default_s"), [("/v2/sandboxes", 300), ("/sandboxes", 15)])
async def test_create(http: httpx.AsyncClient, plane: Plane, path: str, default_s: int) -> None:
    made = await http.post(path, json={"templateID": "base", "newerField": {"x": 1}})
    assert made.status_code == 201
    check("Sandbox", made.json())
    shown = made.json()
    assert shown["envdVersion"] == "0.9.1"
    assert shown["clientID"]
    assert shown["domain"] == "localhost:7300"
    assert shown["envdAccessToken"] != shown["trafficAccessToken"]
    left = await seconds_left(http, shown["sandboxID"])
    assert default_s - 5 < left <= default_s
    detail = (await http.get(f"/sandboxes/{shown['sandboxID']}")).json()
    check("SandboxDetail", detail)
    assert detail["envdAccessToken"] == shown["envdAccessToken"]
    assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    assert detail["allowInternetAccess"] is None


async def test_create_with_everything(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make(
        http,
        timeout=60,
        metadata={"a": "b"},
        envVars={"E": "1"},
        secure=True,
        autoPause=False,
        autoResume={"enabled": False},
        allow_internet_access=False,
        mcp={"server": {"x": 1}},
        iam={"tokens": {}},
        volumeMounts=[],
        network={
            "allowOut": ["203.0.113.7"],
            "denyOut": ["0.0.0.0/0"],
            "allowPublicTraffic": False,
            "maskRequestHost": "localhost:${PORT}",
            "httpsPorts": [8443],
            "rules": {},
            "egressProxy": None,
            "dnsServers": [],
        },
    )
    spec_on_node = plane.node.specs[name]
    assert spec_on_node.env == {"E": "1"}
    policy = spec_on_node.network
    assert (policy.internet, policy.allow_public_traffic) == (False, False)
    assert (policy.allow, policy.deny) == (("203.0.113.7",), ("0.0.0.0/0",))
    detail = (await http.get(f"/sandboxes/{name}")).json()
    check("SandboxDetail", detail)
    assert detail["allowInternetAccess"] is False
    assert detail["metadata"] == {"a": "b"}
    assert detail["network"] == {
        "allowOut": ["203.0.113.7"],
        "denyOut": ["0.0.0.0/0"],
        "allowPublicTraffic": False,
        "maskRequestHost": "localhost:${PORT}",
        "httpsPorts": [8443],
    }


CREATES_REFUSED: list[tuple[dict[str, object], int]] = [
    ({"autoPauseMemory": False}, 400),
    ({"autoPauseMemory": False, "autoPause": False}, 400),
    ({"autoPauseMemory": False, "autoPause": True, "autoResume": {"enabled": True}}, 400),
    ({"volumeMounts": [{"name": "v", "path": "/v"}]}, 501),
    ({"iam": {"tokens": {"t": {"audience": "a", "tokenType": "jwt"}}}}, 501),
    ({"network": {"rules": {"x.com": []}}}, 501),
    ({"network": {"egressProxy": {"address": "h:1"}}}, 501),
    ({"network": {"dnsServers": ["1.1.1.1"]}}, 501),
    ({"network": {"allowOut": ["*.example.com"], "denyOut": ["0.0.0.0/0"]}}, 501),
    ({"network": {"denyOut": ["example.com"]}}, 400),
    ({"network": {"denyOut": ["1.2.3.4.5"]}}, 400),
    ({"timeout": 10**7}, 400),
    ({"timeout": -1}, 400),
    ({"timeout": 10**40}, 400),
    ({"timeout": "5"}, 400),
    ({"templateID": "unknown"}, 404),
    ({"templateID": "Not A Name"}, 400),
    ({"templateID": None}, 400),
    ({"metadata": {"a": 1}}, 400),
    ({"envVars": {"": "x"}}, 400),
]


async def test_create_refused(
    http: httpx.AsyncClient, plane: Plane, subtests: pytest.Subtests
) -> None:
    for body, status in CREATES_REFUSED:
        for path in ("/v2/sandboxes", "/sandboxes"):
            with subtests.test(path=path, body=body):
                refused = await http.post(path, json={"templateID": "base", **body})
                check_error(refused, status, "not_supported" if status == 501 else None)
                assert refused.headers["Should-Retry"] == "false"
    assert not plane.node.specs


async def test_private_traffic_needs_secure_in_v1(http: httpx.AsyncClient) -> None:
    body = {"templateID": "base", "network": {"allowPublicTraffic": False}}
    check_error(await http.post("/sandboxes", json=body), 400)
    assert (await http.post("/sandboxes", json=body | {"secure": True})).status_code == 201


async def test_chunked_body(http: httpx.AsyncClient) -> None:
    async def parts() -> Any:
        yield b'{"templateID":'
        yield b'"base"}'

    made = await http.post("/v2/sandboxes", content=parts())
    assert made.request.headers["Transfer-Encoding"] == "chunked"
    assert made.status_code == 201


async def test_idempotency(http: httpx.AsyncClient, plane: Plane) -> None:
    headers = {"Idempotency-Key": "abc-1"}
    body = {"templateID": "base"}
    plane.node.gate = asyncio.Event()
    first = asyncio.create_task(http.post("/v2/sandboxes", json=body, headers=headers))
    await plane.node.admitted.wait()
    waiting = await http.post("/v2/sandboxes", json=body, headers=headers)
    check_error(waiting, 409, "idempotency_in_progress")
    assert (waiting.headers["Should-Retry"], waiting.headers["Retry-After"]) == ("true", "1")
    plane.node.gate.set()
    made = await first
    again = await http.post("/v2/sandboxes", json=body, headers=headers)
    assert made.json() == again.json()
    assert again.status_code == 201
    other = await http.post("/v2/sandboxes", json=body | {"timeout": 1}, headers=headers)
    check_error(other, 409, "idempotency_request_mismatch")
    for bad in ("ABC", "a_b", "x" * 256):
        refused = await http.post("/v2/sandboxes", json=body, headers={"Idempotency-Key": bad})
        check_error(refused, 400)


@pytest.mark.parametrize(
    ("failure", "headers", "status", "retry"),
    [
        (SandboxStartFailed("x"), {}, 500, "true"),
        (NodeUnavailable("x"), {}, 503, "false"),
        (NodeUnavailable("x"), {"Idempotency-Key": "k"}, 503, "true"),
        (Internal("x"), {"Idempotency-Key": "k"}, 500, "false"),
        (RuntimeError("x"), {}, 500, "false"),
    ],
)
async def test_only_safe_creates_are_repeated(
    http: httpx.AsyncClient,
    plane: Plane,
    failure: Exception,
    headers: dict[str, str],
    status: int,
    retry: str,
) -> None:
    plane.node.fail_with = failure
    failed = await http.post("/v2/sandboxes", json={"templateID": "base"}, headers=headers)
    check_error(failed, status)
    assert failed.headers["Should-Retry"] == retry


async def test_kill_twice(http: httpx.AsyncClient) -> None:
    name = await make(http)
    assert (await http.delete(f"/sandboxes/{name}")).status_code == 204
    check_error(await http.delete(f"/sandboxes/{name}"), 404, "sandbox_not_found")
    check_error(await http.get(f"/sandboxes/{name}"), 404)


async def test_timeout_and_connect(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make(http, timeout=100)
    assert (await http.post(f"/sandboxes/{name}/timeout", json={"timeout": 20})).status_code == 204
    assert await seconds_left(http, name) <= 20
    for path, body in (
        (f"/v2/sandboxes/{name}/connect", {"timeout": 1}),
        (f"/sandboxes/{name}/connect", {"timeout": 1}),
    ):
        connected = await http.post(path, json=body)
        assert connected.status_code == 200
        check("Sandbox", connected.json())
    assert await seconds_left(http, name) > 10
    assert (await http.post(f"/v2/sandboxes/{name}/connect", json={})).status_code == 200
    assert await seconds_left(http, name) > 290
    refreshed = await http.post(f"/sandboxes/{name}/refreshes", json={"duration": 3600})
    assert refreshed.status_code == 204
    assert await seconds_left(http, name) > 3_500
    check_error(await http.post(f"/sandboxes/{name}/refreshes", json={"duration": 3601}), 400)
    check_error(await http.post(f"/sandboxes/{name}/connect", json={}), 400)
    assert (await http.post(f"/sandboxes/{name}/timeout", json={"timeout": 0})).status_code == 204
    assert plane.node.statuses[name].reason is EndReason.TIMEOUT
    check_error(await http.post(f"/sandboxes/{name}/timeout", json={"timeout": 5}), 404)
    check_error(await http.post(f"/v2/sandboxes/{name}/connect", json={}), 404)


async def test_list(http: httpx.AsyncClient) -> None:
    names = [await make(http, metadata={"a b": "c&d", "n": str(n)}) for n in range(5)]
    await http.delete(f"/sandboxes/{names[0]}")
    page = await http.get("/v2/sandboxes", params={"limit": 3})
    check("ListedSandbox", page.json(), many=True)
    assert [s["sandboxID"] for s in page.json()] == names[:1:-1]
    assert page.headers["x-total-running"] == "4"
    token = page.headers["x-next-token"]
    rest = await http.get("/v2/sandboxes", params={"limit": 3, "nextToken": token})
    assert [s["sandboxID"] for s in rest.json()] == [names[1]]
    assert "x-next-token" not in rest.headers
    check_error(await http.get("/v2/sandboxes", params={"nextToken": token, "order": "asc"}), 400)
    oldest = await http.get("/v2/sandboxes", params={"order": "asc"})
    assert [s["sandboxID"] for s in oldest.json()] == names[1:]

    pairs = "&".join(f"{quote(k)}={quote(v)}" for k, v in {"a%20b": "c%26d", "n": "2"}.items())
    found = await http.get(f"/v2/sandboxes?metadata={quote(pairs, safe='')}")
    assert [s["sandboxID"] for s in found.json()] == [names[2]]
    for states, count in (("running", 4), ("paused", 0), ("running,paused", 4)):
        assert len((await http.get(f"/v2/sandboxes?state={states}")).json()) == count
        assert len((await http.get(f"/v2/sandboxes?state={quote(states)}")).json()) == count
    assert (await http.get("/v2/sandboxes?template=unknown")).json() == []
    assert len((await http.get("/v2/sandboxes?template=base")).json()) == 4
    future = {"startedAfter": "2999-01-01T00:00:00+00:00"}
    assert (await http.get("/v2/sandboxes", params=future)).json() == []
    v1 = await http.get("/sandboxes")
    check("ListedSandbox", v1.json(), many=True)
    assert [s["sandboxID"] for s in v1.json()] == names[:0:-1]
    for bad in (
        "limit=0", "limit=101", "limit=x", "state=ended", "order=up", "template=base:v1",
        "nextToken=%00", "nextToken=bm9uZQ", "startedAfter=yesterday", "metadata=novalue",
    ):  # fmt: skip
        check_error(await http.get(f"/v2/sandboxes?{bad}"), 400)


async def test_network(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make(http, network={"allowPublicTraffic": False, "denyOut": ["1.1.1.1"]})
    path = f"/sandboxes/{name}/network"
    assert (await http.put(path, json={"allowOut": ["8.8.8.8/32"]})).status_code == 204
    policy = plane.node.networks[name]
    assert (policy.allow, policy.deny) == (("8.8.8.8/32",), ())
    assert policy.allow_public_traffic is False, "an update is about egress only"
    assert (await http.put(path, json={"allow_internet_access": False})).status_code == 204
    assert plane.node.networks[name].internet is False
    assert (await http.get(f"/sandboxes/{name}")).json()["allowInternetAccess"] is False
    check_error(await http.put(path, json={"rules": {"a.com": []}}), 501)
    check_error(await http.put(path, json={"denyOut": ["nonsense"]}), 400)


async def test_metrics(http: httpx.AsyncClient, plane: Plane) -> None:
    name, quiet = await make(http), await make(http)
    now = time.time()
    for age in (1, 10, 1_000):
        plane.node.sample(name, now - age)
    plane.node.samples[name].sort(key=lambda sample: sample.at)
    shown = (await http.get(f"/sandboxes/{name}/metrics")).json()
    check("SandboxMetric", shown, many=True)
    assert [m["timestampUnix"] for m in shown] == [int(now - 10), int(now - 1)]
    span = {"start": int(now - 2_000), "end": int(now - 500)}
    older = await http.get(f"/sandboxes/{name}/metrics", params=span)
    assert len(older.json()) == 1
    bulk = await http.get(f"/sandboxes/metrics?sandbox_ids={name},{quiet},iunknown")
    check("SandboxesWithMetrics", bulk.json())
    assert list(bulk.json()["sandboxes"]) == [name]
    check_error(await http.get("/sandboxes/metrics"), 400)
    check_error(
        await http.get("/sandboxes/metrics?sandbox_ids=" + ",".join(map(str, range(101)))), 400
    )
    check_error(await http.get(f"/sandboxes/{name}/metrics?start=nan"), 400)
    check_error(await http.get("/sandboxes/iunknown/metrics"), 404)


async def test_logs(http: httpx.AsyncClient) -> None:
    name = await make(http)
    await http.delete(f"/sandboxes/{name}")
    logs = (await http.get(f"/sandboxes/{name}/logs")).json()
    check("SandboxLogs", logs)
    lines = [json.loads(entry["line"]) for entry in logs["logs"]]
    assert [line["message"] for line in lines] == [
        "sandbox starting",
        "sandbox running",
        "sandbox ended: killed",
    ]
    assert all(line["level"] and line["logger"] for line in lines)
    v2 = await http.get(f"/v2/sandboxes/{name}/logs?direction=backward&limit=1")
    check("SandboxLogsV2Response", v2.json())
    assert v2.json()["logs"][0]["message"] == "sandbox ended: killed"
    found = await http.get(f"/v2/sandboxes/{name}/logs?search=running&level=info")
    assert len(found.json()["logs"]) == 1
    assert (await http.get(f"/v2/sandboxes/{name}/logs?level=error")).json()["logs"] == []
    check_error(await http.get("/sandboxes/iunknown/logs"), 404)
    check_error(await http.get(f"/v2/sandboxes/{name}/logs?level=loud"), 400)


async def test_templates(http: httpx.AsyncClient) -> None:
    await make(http)
    for path in ("/templates", "/v2/templates"):
        listed = (await http.get(path)).json()
        check("Template", listed, many=True)
        assert [t["names"] for t in listed] == [["base"]]
        assert listed[0]["spawnCount"] == 1
    alias = await http.get("/templates/aliases/base")
    check("TemplateAliasResponse", alias.json())
    assert (await http.get("/templates/aliases/base%3Adefault")).status_code == 200
    check_error(await http.get("/templates/aliases/team%2Fbase"), 404)
    check_error(await http.get("/templates/aliases/none"), 404)


COMES_LATER = [
    ("POST", "/templates"),
    ("POST", "/templates/base"),
    ("POST", "/templates/x/builds/y"),
    ("GET", "/templates/base/tags/groups"),
    ("POST", "/volumes"),
    ("GET", "/volumes"),
    ("DELETE", "/volumes/x"),
    ("GET", "/secrets"),
    ("DELETE", "/secrets/x"),
]


async def test_what_comes_later(http: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    for method, path in COMES_LATER:
        with subtests.test(method=method, path=path):
            refused = await http.request(method, path, json={})
            check_error(refused, 501, "not_supported")
            assert refused.headers["Should-Retry"] == "false"


async def test_keys(plane: Plane) -> None:
    async with httpx.AsyncClient(base_url=plane.url) as anyone:
        assert (await anyone.get("/health")).status_code == 204
        for headers in ({}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer x"}):
            refused = await anyone.get("/v2/sandboxes", headers=headers)
            check_error(refused, 401, "unauthenticated")
        bearer = {"Authorization": f"Bearer {plane.key}"}
        assert (await anyone.get("/v2/sandboxes", headers=bearer)).status_code == 200

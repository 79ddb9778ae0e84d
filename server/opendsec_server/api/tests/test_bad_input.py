# SPDX-License-Identifier: AGPL-3.0-only
"""Bad input on both APIs: a typed answer in the API's own shape, never a 500."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from opendsec_server.contract.limits import API_BODY_BYTES_MAX

from .harness import Plane, running_plane

CREATES = ["/v1/sandboxes", "/v2/sandboxes", "/sandboxes"]
DEEP = 100_000


def check_shape(answer: httpx.Response, path: str) -> None:
    """The error is typed, in the shape of the API that was called."""
    body = answer.json()
    if path.startswith("/v1"):
        error = body["error"]
        assert {"code", "message", "remediation", "retryable", "fault", "details"} <= set(error)
        assert error["request_id"] == answer.headers["X-Request-Id"]
    else:
        assert body["code"] == answer.status_code
        assert body["message"]
        assert answer.headers["Should-Retry"] in ("true", "false")


BODIES_REFUSED: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b'{"template":"\xff"}',
    b'{"templateID":"\xff"}',
    b'{"metadata":{"a":"\\ud800"},"templateID":"base"}',
    b'{"cpu":NaN,"timeout":NaN,"templateID":"base"}',
    b'{"cpu":1e999,"timeout":1e999,"templateID":"base"}',
    b'{"timeout_s":1e400,"timeout":1e400,"templateID":"base"}',
    b'{"timeout_s":-1,"timeout":-1,"templateID":"base"}',
    b'{"metadata":{"a":"\\u0000"},"templateID":"base"}',
    b'{"metadata":{"a":["x"]},"templateID":"base"}',
    b'{"template":"\\u0000","templateID":"\\u0000"}',
    b'{"network":{"deny":[1],"denyOut":[1]},"templateID":"base"}',
    b'{"network":' + b"[" * DEEP + b"]" * DEEP + b',"templateID":"base"}',
    b'{"mcp":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b',"templateID":"base"}',
    b"[" * DEEP,
    json.dumps({"metadata": {"k" * 10_000: "v"}, "templateID": "base"}).encode(),
    json.dumps({"metadata": {"k": "v" * 10_000}, "templateID": "base"}).encode(),
]


@pytest.mark.parametrize("path", CREATES)
async def test_bodies(
    http: httpx.AsyncClient, plane: Plane, path: str, subtests: pytest.Subtests
) -> None:
    for body in BODIES_REFUSED:
        with subtests.test(body=body[:60]):
            answer = await http.post(path, content=body)
            assert answer.status_code == 400, answer.text
            check_shape(answer, path)
    assert not plane.node.specs


@pytest.mark.parametrize("path", CREATES)
async def test_declared_too_large(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, content=b" " * (API_BODY_BYTES_MAX + 1))
    assert answer.status_code == 413
    check_shape(answer, path)


@pytest.mark.parametrize("path", CREATES)
async def test_endless_body_is_cut_off(plane: Plane, path: str) -> None:
    """200 MB in chunks, of which the server takes no more than its limit."""
    url = urlsplit(plane.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {plane.key}\r\n"
    writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    sent = 0
    while sent < 200 * 1024 * 1024 and not answer.done():
        writer.write(chunk)
        try:
            await writer.drain()
        except ConnectionError:
            break
        sent += 0x10000
        await asyncio.sleep(0)
    assert b" 413 " in (await answer).split(b"\r\n")[0]
    assert sent < 100 * 1024 * 1024
    writer.close()


async def test_ids(http: httpx.AsyncClient, subtests: pytest.Subtests) -> None:
    names = ["%00", "%ff", "..%2f..%2fetc", "i" + "a" * 19, "x" * 5_000, "%F0%9F%92%A9", "%", "%zz"]
    for name in names:
        for method, path in (
            ("GET", f"/v1/sandboxes/{name}"),
            ("DELETE", f"/v1/sandboxes/{name}"),
            ("GET", f"/sandboxes/{name}"),
            ("DELETE", f"/sandboxes/{name}"),
            ("GET", f"/sandboxes/{name}/logs"),
            ("GET", f"/v1/sandboxes/{name}/metrics"),
        ):
            with subtests.test(method=method, path=path[:60]):
                answer = await http.request(method, path)
                assert answer.status_code == 404, answer.text
                check_shape(answer, path)


async def test_unknown_paths(http: httpx.AsyncClient) -> None:
    for path in ("/v1", "/v1/", "/v1/none", "/none", "/", "/v1/sandboxes/a/b/c"):
        answer = await http.get(path)
        assert answer.status_code == 404
        check_shape(answer, path)


async def test_methods(http: httpx.AsyncClient) -> None:
    for method, path, allowed in (
        ("PUT", "/v1/sandboxes", "GET, OPTIONS, POST"),
        ("PATCH", "/sandboxes/x", "DELETE, GET, OPTIONS"),
        ("DELETE", "/v2/sandboxes", "GET, OPTIONS, POST"),
        ("TRACE", "/v1/info", "GET, OPTIONS"),
    ):
        answer = await http.request(method, path)
        assert answer.status_code == 405
        assert answer.headers["Allow"] == allowed
        check_shape(answer, path)


async def test_odd_request_ids_are_replaced(http: httpx.AsyncClient) -> None:
    for value in ("bad id", "x" * 1_000, "<script>"):
        answer = await http.get("/v1/info", headers={"X-Request-Id": value})
        assert len(answer.headers["X-Request-Id"]) == 32


async def test_queries(http: httpx.AsyncClient) -> None:
    for path in ("/v1/sandboxes", "/v2/sandboxes"):
        for query in ("limit=-1", "limit=99999999999999999999", "limit=1.5", "limit=%00"):
            answer = await http.get(f"{path}?{query}")
            assert answer.status_code == 400
            check_shape(answer, path)
        many = "&".join(f"a{n}=1" for n in range(2_000))
        assert (await http.get(f"{path}?{many}")).status_code == 400
        assert (await http.get(f"{path}?x=%ff%00")).status_code == 200
    assert (await http.get("/v1/sandboxes?metadata=nocolon")).status_code == 400
    assert (await http.get("/v1/sandboxes?cursor=%%%")).status_code == 400
    assert (await http.get("/v1/sandboxes?task_id=%00&label=%ff")).status_code == 200


# --- the OpenAPI document, and random requests made from it ----------------------------------


async def test_document_is_valid(plane: Plane) -> None:
    async with httpx.AsyncClient(base_url=plane.url) as anyone:
        document = (await anyone.get("/v1/openapi.json")).json()
    validate(document)
    assert document["openapi"] == "3.1.0"
    operations = [op for path in document["paths"].values() for op in path.values()]
    assert len({op["operationId"] for op in operations}) == len(operations) > 90
    for operation in operations:
        assert operation["summary"]
        assert "401" in operation["responses"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = [
    *("template", "cpu", "memory_mb", "disk_mb", "env", "metadata", "labels", "task_id"),
    *("timeout_s", "idle_timeout_s", "on_timeout", "backend", "network", "internet", "allow"),
    *("deny", "name", "templateID", "timeout", "autoPause", "autoResume", "envVars", "mcp"),
    *("mode", "reboot", "count", "pause_mode", "auto_resume", "memory", "autoPauseMemory"),
]
VALUES = JSON | st.sampled_from(
    [
        *("base", "container", "kill", "full", "filesystem", "pause", "n:v2", 1, 300, True, False),
        *({"a": "b"}, ["x"], {"deny": ["1.1.1.1"]}, {"x": 1}),
    ]
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5) | JSON
SEGMENTS = st.sampled_from(["LIVE", "LIVE", "i" + "a" * 19, "base"]) | st.text(
    min_size=1, max_size=9
)
QUERIES = st.dictionaries(
    st.sampled_from(
        [
            *("state", "task_id", "label", "metadata", "template", "limit", "cursor", "start"),
            *("end", "nextToken", "name", "sandbox_id", "sandboxID"),
        ]
    ),
    st.sampled_from(["running", "1", "0", "k:v", "k=v", "base"]) | st.text(max_size=8),
    max_size=3,
)


class Fuzzed:
    """One plane for all examples, on a loop of its own."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self.runner = asyncio.Runner()

    async def start(self) -> None:
        self._context = running_plane(self._state_dir)
        self.plane = await self._context.__aenter__()
        self.http = httpx.AsyncClient(base_url=self.plane.url, headers=self.plane.headers)
        self.document = (await self.http.get("/v1/openapi.json")).json()
        self.operations = [
            (method.upper(), path, operation)
            for path, methods in self.document["paths"].items()
            for method, operation in methods.items()
            if "api-keys" not in path or method == "get"
        ]
        made = await self.http.post("/v1/sandboxes", json={"timeout_s": 3_000})
        self.live = {"sandbox_id": made.json()["sandbox_id"]}
        # What else there is to meet, by the name of its path parameter.
        path = f"/v1/sandboxes/{self.live['sandbox_id']}/snapshots"
        saved = await self.http.post(path, json={"name": "saved", "mode": "filesystem"})
        self.live["snapshot_id"] = saved.json()["id"]
        task = await self.http.post("/v1/tasks", json={"task_id": "errand"})
        self.live["task_id"] = task.json()["task_id"]

    async def stop(self) -> None:
        await self.http.aclose()
        await self._context.__aexit__(None, None, None)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    world = Fuzzed(tmp_path_factory.mktemp("fuzz"))
    with world.runner as runner:
        runner.run(world.start())
        yield world
        runner.run(world.stop())


@given(data=st.data())
@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_native_api_answers_as_documented(fuzzed: Fuzzed, data: st.DataObject) -> None:
    method, path, operation = data.draw(st.sampled_from(fuzzed.operations))
    wanted = re.findall(r"\{(\w+)\}", path)
    given_names = {
        part: data.draw(SEGMENTS).replace("LIVE", fuzzed.live.get(part, "base")) for part in wanted
    }
    # Clients take these out of a path before they send it.
    assume(not {".", ".."} & set(given_names.values()))
    concrete = path.format_map({part: quote(name, safe="") for part, name in given_names.items()})
    content = msgspec.json.encode(data.draw(BODIES)) if "requestBody" in operation else None
    answer = fuzzed.runner.run(
        fuzzed.http.request(method, concrete, params=data.draw(QUERIES), content=content)
    )
    assert answer.status_code < 500 or answer.status_code == 501, answer.text
    documented = operation["responses"].get(str(answer.status_code))
    assert documented is not None, f"{answer.status_code} is not documented: {answer.text}"
    # Of answers of many lines only what went before their head is documented as one body.
    if answer.content and "ndjson" not in answer.headers["content-type"]:
        schema = documented["content"]["application/json"]["schema"]
        OAS31Validator(schema | {"components": fuzzed.document["components"]}).validate(
            answer.json()
        )
    if answer.status_code >= 400:
        assert answer.json()["error"]["code"] in documented["description"]


E2B_CALLS = [
    ("POST", "/v2/sandboxes"),
    ("POST", "/sandboxes"),
    ("GET", "/v2/sandboxes"),
    ("GET", "/sandboxes"),
    ("GET", "/sandboxes/metrics"),
    ("GET", "/sandboxes/{id}"),
    ("POST", "/sandboxes/{id}/timeout"),
    ("POST", "/sandboxes/{id}/refreshes"),
    ("POST", "/v2/sandboxes/{id}/connect"),
    ("PUT", "/sandboxes/{id}/network"),
    ("GET", "/sandboxes/{id}/logs"),
    ("GET", "/v2/sandboxes/{id}/logs"),
    ("GET", "/templates/aliases/{id}"),
    ("DELETE", "/templates/{id}"),
    ("POST", "/sandboxes/{id}/pause"),
    ("POST", "/sandboxes/{id}/resume"),
    ("POST", "/sandboxes/{id}/connect"),
    ("POST", "/sandboxes/{id}/fork"),
    ("POST", "/sandboxes/{id}/snapshots"),
    ("GET", "/snapshots"),
    ("POST", "/v3/templates"),
    ("POST", "/v2/templates"),
    ("GET", "/v2/templates"),
    ("GET", "/templates/{id}"),
    ("PATCH", "/v2/templates/{id}"),
    ("GET", "/templates/{id}/files/{id}"),
    ("PUT", "/templates/{id}/files/{id}/content"),
    ("POST", "/v2/templates/{id}/builds/{id}"),
    ("GET", "/templates/{id}/builds/{id}/status"),
    ("GET", "/templates/{id}/builds/{id}/logs"),
    ("POST", "/templates/tags"),
    ("DELETE", "/templates/tags"),
    ("GET", "/templates/{id}/tags"),
]


@given(call=st.sampled_from(E2B_CALLS), name=SEGMENTS, body=BODIES, query=QUERIES)
@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_e2b_api_never_breaks(
    fuzzed: Fuzzed, call: tuple[str, str], name: str, body: object, query: dict[str, str]
) -> None:
    method, path = call
    path = path.replace("{id}", quote(name.replace("LIVE", fuzzed.live["sandbox_id"]), safe=""))
    content = None if method == "GET" else msgspec.json.encode(body)
    answer = fuzzed.runner.run(fuzzed.http.request(method, path, params=query, content=content))
    assert answer.status_code < 500 or answer.status_code == 501, answer.text
    if answer.status_code >= 400:
        check_shape(answer, path)

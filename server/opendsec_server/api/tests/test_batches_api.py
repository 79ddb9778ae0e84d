# SPDX-License-Identifier: AGPL-3.0-only
"""Batches and bulk operations over the native API: lines, errors, two projects."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from opendsec_server.contract.states import TERMINAL
from opendsec_server.control.tests.test_batches import limit
from opendsec_server.store.accounts import insert_project
from opendsec_server.store.records import ApiKey, Project

from .harness import Plane


def lines(answer: httpx.Response, status: int = 200) -> list[dict[str, Any]]:
    """The lines of an answer but signs of life."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [line for line in map(json.loads, answer.text.splitlines()) if line]


async def make(http: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    return lines(await http.post("/v1/batches", json=body), 201)


async def other(plane: Plane) -> httpx.AsyncClient:
    """A client of another project."""
    import hashlib

    key = "e2b_" + "a" * 40
    project = Project(project_id="p" + "0" * 15, name="other", sandboxes_max=100, created_at=1.0)
    digest = hashlib.sha256(key.encode()).hexdigest()
    api_key = ApiKey(
        key_id="k" + "0" * 15, project_id=project.project_id, name="o", sha256=digest,
        hint="e2b…", created_at=1.0,
    )  # fmt: skip
    await insert_project(plane.services.store, project, api_key)
    return httpx.AsyncClient(base_url=plane.url, headers={"X-API-Key": key})


async def test_a_batch_from_its_call_to_its_end(http: httpx.AsyncClient, plane: Plane) -> None:
    body = {
        "sandbox": {"memory_mb": 128, "env": {"A": "1", "B": "1"}, "labels": ["x"]},
        "items": [{}, {"env": {"A": "2"}, "memory_mb": 64}, {"template": "nothing"}],
    }
    first, *items, last = await make(http, body)
    batch = first["batch"]
    assert batch["asked"] == 3 and batch["state"] in ("running", "done")
    assert sorted(item["index"] for item in items) == [0, 1, 2]
    assert [item["seq"] for item in items] == [1, 2, 3]
    by_index = {item["index"]: item for item in items}
    assert by_index[2]["error"]["code"] == "template_not_found"
    assert by_index[0]["sandbox"]["state"] == "running" and by_index[0]["sandbox"]["access_token"]
    spec = plane.node.specs[by_index[1]["sandbox"]["sandbox_id"]]
    assert (spec.memory_mb, spec.env) == (64, {"A": "2", "B": "1"})
    assert last == {"done": {"asked": 3, "made": 2, "failed": 1}}

    name = batch["batch_id"]
    shown = (await http.get(f"/v1/batches/{name}")).json()
    assert (shown["state"], shown["made"], shown["failed"]) == ("done", 2, 1)
    assert (shown["starting"], shown["waiting"]) == (0, 0) and shown["finished_at"]
    assert shown["failures"] == [{"code": "template_not_found", "fault": "user", "count": 1}]
    _, *rest, end = lines(await http.get(f"/v1/batches/{name}/results?after=1"))
    assert [item["index"] for item in rest] == [item["index"] for item in items[1:]]
    assert end == last
    page = (await http.get("/v1/batches?limit=1")).json()
    assert [one["batch_id"] for one in page["batches"]] == [name]


async def test_the_key_finds_it_again(http: httpx.AsyncClient, plane: Plane) -> None:
    headers = {"Idempotency-Key": "k1"}
    body = {"count": 20}
    plane.node.gate = asyncio.Event()
    asked = await http.post("/v1/batches?follow=false", json=body, headers=headers)
    assert asked.status_code == 201 and asked.json()["state"] == "running"
    # A reader that goes away stops nothing.
    async with http.stream("POST", "/v1/batches", json=body, headers=headers) as answer:
        assert answer.status_code == 201
    plane.node.gate.set()
    first, *items, last = lines(await http.post("/v1/batches", json=body, headers=headers), 201)
    assert first["batch"]["batch_id"] == asked.json()["batch_id"]
    assert len(items) == plane.node.created == last["done"]["made"] == 20
    again = await http.post("/v1/batches", json={"count": 21}, headers=headers)
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "idempotency_request_mismatch"


async def test_the_quota_in_the_middle(http: httpx.AsyncClient, plane: Plane) -> None:
    await limit(plane.services, "sandboxes_max", 7)
    _, *items, last = await make(http, {"count": 20})
    assert last["done"] == {"asked": 20, "made": 7, "failed": 13}
    error = next(item["error"] for item in items if "error" in item)
    assert error["code"] == "quota_exceeded" and error["fault"] == "capacity"
    assert error["details"]["limit"] == 7 and error["details"]["project_id"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "count"),
        ({"count": 1, "items": [{}]}, "count"),
        ({"count": 0}, "count"),
        ({"count": 32_769}, "count"),
        ({"count": True}, "count"),
        ({"items": []}, "items"),
        ({"items": [{}, {"memory_mb": 1}]}, "items[1]: memory_mb"),
        ({"items": [{"colour": "red"}]}, "items[0]: there is no field `colour`"),
        ({"items": [{"env": {"A=": "b"}}]}, "items[0]: env"),
        ({"items": [3]}, "items[0]"),
        ({"count": 1, "wait_s": 0}, "wait_s"),
        ({"count": 1, "sandbox": {"labels": [""]}}, "labels"),
    ],
)
async def test_what_makes_no_sense(
    http: httpx.AsyncClient, body: dict[str, Any], word: str
) -> None:
    answer = await http.post("/v1/batches", json=body)
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]


async def test_a_body_may_be_larger_here_and_is_bounded(http: httpx.AsyncClient) -> None:
    own = {"metadata": {"words": "a" * 2_000}, "memory_mb": 1}
    answer = await http.post("/v1/batches", json={"items": [{}] + [own] * 3_000})
    assert answer.status_code == 400 and "items[1]: memory_mb" in answer.text
    answer = await http.post("/v1/batches", content=b" " * (33 << 20))
    assert answer.status_code == 413
    assert answer.json()["error"]["details"]["max_bytes"] == 32 << 20
    answer = await http.post("/v1/sandboxes/bulk/kill", content=b" " * (5 << 20))
    assert answer.json()["error"]["details"]["max_bytes"] == 4 << 20


async def test_cancel(http: httpx.AsyncClient, plane: Plane) -> None:
    plane.node.gate = asyncio.Event()
    asked = (await http.post("/v1/batches?follow=false", json={"count": 50})).json()
    await plane.node.admitted.wait()
    cancelled = await http.post(f"/v1/batches/{asked['batch_id']}/cancel")
    assert cancelled.json()["state"] == "cancelling"
    plane.node.gate.set()
    _, *items, last = lines(await http.get(f"/v1/batches/{asked['batch_id']}/results"))
    assert last["done"]["made"] + last["done"]["failed"] == 50 == len(items)
    assert {i["error"]["code"] for i in items if "error" in i} == {"batch_cancelled"}


async def test_others_see_nothing(http: httpx.AsyncClient, plane: Plane) -> None:
    first, *items, _ = await make(http, {"count": 2, "sandbox": {"task_id": "t"}})
    name = first["batch"]["batch_id"]
    async with await other(plane) as stranger:
        for method, path in (
            ("GET", f"/v1/batches/{name}"),
            ("GET", f"/v1/batches/{name}/results"),
            ("POST", f"/v1/batches/{name}/cancel"),
        ):
            answer = await stranger.request(method, path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "batch_not_found"
        assert (await stranger.get("/v1/batches")).json()["batches"] == []
        for select in ({"batch_id": name}, {"task_id": "t"}):
            answer = await stranger.post("/v1/sandboxes/bulk/kill", json={"select": select})
            assert lines(answer) == [{"done": {"selected": 0, "ok": 0, "failed": 0}}]
        ids = [item["sandbox"]["sandbox_id"] for item in items]
        answer = await stranger.post("/v1/sandboxes/bulk/kill", json={"select": {"ids": ids}})
        *errors, _ = lines(answer)
        assert {one["error"]["code"] for one in errors} == {"sandbox_not_found"}
    assert not [s for s in plane.node.statuses.values() if s.state in TERMINAL]


async def test_bulk_exec(http: httpx.AsyncClient) -> None:
    first, *_ = await make(http, {"count": 5, "sandbox": {"labels": ["x", "y"]}})
    select = {"labels": ["x"], "batch_id": first["batch"]["batch_id"]}
    body = {"select": select, "command": "echo hello && warn aua && exit 3", "output_bytes": 3}
    *ran, last = lines(await http.post("/v1/sandboxes/bulk/exec", json=body))
    assert last == {"done": {"selected": 5, "ok": 5, "failed": 0}}
    result = ran[0]["result"]
    assert (result["exit_code"], result["stdout"], result["stderr"]) == (3, "hel", "aua")
    assert (result["stdout_cut"], result["stderr_cut"]) == (True, True)
    body = {"select": select, "command": "die 9"}
    *ran, _ = lines(await http.post("/v1/sandboxes/bulk/exec", json=body))
    assert {(one["result"]["exit_code"], one["result"]["signal"]) for one in ran} == {(137, 9)}


async def test_bulk_timeout_and_kill(http: httpx.AsyncClient, plane: Plane) -> None:
    _, *items, _ = await make(http, {"count": 4, "sandbox": {"task_id": "t"}})
    ids = [item["sandbox"]["sandbox_id"] for item in items]
    body: dict[str, Any] = {"select": {"task_id": "t"}, "timeout_s": 1_000}
    *told, last = lines(await http.post("/v1/sandboxes/bulk/timeout", json=body))
    assert last["done"]["ok"] == 4 and all(one["end_at"] for one in told)
    gone = (await http.delete(f"/v1/sandboxes/{ids[0]}")).json()["sandbox_id"]
    body = {"select": {"ids": [*ids, ids[1], "nonsense"]}}
    *told, last = lines(await http.post("/v1/sandboxes/bulk/kill", json=body))
    assert last == {"done": {"selected": 5, "ok": 4, "failed": 1}}
    assert {one["sandbox_id"] for one in told} == {*ids, "nonsense"} and gone in ids
    assert all(s.state in TERMINAL for s in plane.node.statuses.values())
    shown = (await http.get(f"/v1/sandboxes/{ids[1]}")).json()
    assert (shown["state"], shown["end_reason"]) == ("ended", "killed")
    *told, last = lines(
        await http.post("/v1/sandboxes/bulk/timeout", json={**body, "timeout_s": 60})
    )
    assert last["done"]["failed"] == 5
    assert {one["error"]["code"] for one in told} == {"sandbox_not_found"}


@pytest.mark.parametrize(
    "select",
    [{}, {"ids": []}, {"labels": []}, {"ids": ["a"], "task_id": "t"}, {"task_id": ""}, 3,
     {"labels": ["\0"]}, {"batch_id": ""}],
)  # fmt: skip
async def test_selections_that_make_no_sense(http: httpx.AsyncClient, select: Any) -> None:
    """Above all: nothing selects everything by mistake."""
    for path, more in (("kill", {}), ("timeout", {"timeout_s": 5}), ("exec", {"command": "true"})):
        answer = await http.post(f"/v1/sandboxes/bulk/{path}", json={"select": select, **more})
        assert answer.status_code == 400, answer.text

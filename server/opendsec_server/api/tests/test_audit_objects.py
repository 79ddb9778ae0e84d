# SPDX-License-Identifier: AGPL-3.0-only
"""The audit log names what a call was about, also of calls about many things at once."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest

from opendsec_server.api.http import AUDIT_NAME_CHARS_MAX, AUDIT_NAMES_MAX

from .test_iam import SMALL, ok, project


def digest_of(names: list[str]) -> str:
    return hashlib.sha256("".join(f"{name}\n" for name in names).encode()).hexdigest()


async def last(http: httpx.AsyncClient, **wanted: str) -> Any:
    return (await ok(http.get("/v1/audit", params=wanted)))["entries"][-1]


async def make(http: httpx.AsyncClient, **fields: Any) -> str:
    name: str = (await ok(http.post("/v1/sandboxes", json={**SMALL, **fields}), 201))["sandbox_id"]
    return name


@pytest.mark.parametrize("what", ["kill", "timeout", "exec"])
async def test_bulk_calls_name_their_sandboxes(http: httpx.AsyncClient, what: str) -> None:
    names = [await make(http, labels=["a"]) for _ in range(3)]
    own: dict[str, dict[str, Any]] = {
        "kill": {}, "timeout": {"timeout_s": 100}, "exec": {"command": "true"}
    }  # fmt: skip
    body = {"select": {"labels": ["a"]}, **own[what]}
    path = f"/v1/sandboxes/bulk/{what}"
    assert (await http.post(path, json=body)).status_code == 200
    entry = await last(http, object=names[1])
    assert entry["action"] == f"POST {path}" and entry["outcome"] == "ok"
    count, word, digest, *listed = entry["object"].split(" ")
    assert (count, word, sorted(listed)) == ("3", "sandboxes", sorted(names))
    assert digest == f"sha256:{digest_of(listed)}"


async def test_what_is_listed_is_bounded_and_the_digest_is_of_all(http: httpx.AsyncClient) -> None:
    name = await make(http)
    asked = [name, "x" * 64, *(f"i{number:019d}" for number in range(500))]
    body = {"select": {"ids": asked}}
    assert (await http.post("/v1/sandboxes/bulk/kill", json=body)).status_code == 200
    shown = (await last(http, object=name))["object"]
    assert shown.startswith(f"502 sandboxes sha256:{digest_of(asked)} {name} ")
    listed = shown.split(" ")[3:]
    assert len(listed) == AUDIT_NAMES_MAX
    assert max(map(len, listed)) <= AUDIT_NAME_CHARS_MAX
    assert (await ok(http.get("/v1/audit/verify")))["ok"]


async def test_a_part_of_a_name_finds_nothing(http: httpx.AsyncClient) -> None:
    name = await make(http)
    await ok(http.delete(f"/v1/sandboxes/{name}"))
    for part in (name[:-1], "%", "_", "s%"):
        assert (await ok(http.get("/v1/audit", params={"object": part})))["entries"] == []


async def test_what_was_made_of_a_sandbox_is_named(http: httpx.AsyncClient) -> None:
    name = await make(http)
    body = {"mode": "filesystem"}
    forked = await ok(http.post(f"/v1/sandboxes/{name}/fork", json={**body, "count": 2}), 201)
    children = [item["sandbox"]["sandbox_id"] for item in forked["items"]]
    shown = (await last(http, object=children[1]))["object"]
    assert shown == f"{name} 2 sandboxes sha256:{digest_of(children)} {' '.join(children)}"
    saved = await ok(http.post(f"/v1/sandboxes/{name}/snapshots", json=body), 201)
    assert (await last(http, object=saved["id"]))["object"].startswith(f"{name} ")
    action = {"action_id": "step-1", "kind": "exec", "argv": ["true"]}
    await ok(http.post(f"/v1/sandboxes/{name}/actions", json=action))
    assert (await last(http, object="step-1"))["object"] == f"{name} step-1"


async def test_another_project_finds_none_of_it(http: httpx.AsyncClient) -> None:
    name = await make(http)
    await http.post("/v1/sandboxes/bulk/kill", json={"select": {"ids": [name]}})
    other = (await project(http, "other"))["project_id"]
    headers = {"X-Project-Id": other}
    key = await ok(http.post("/v1/api-keys", json={"name": "k"}, headers=headers), 201)
    answer = http.get("/v1/audit", params={"object": name}, headers={"X-API-Key": key["key"]})
    assert (await ok(answer))["entries"] == []

# SPDX-License-Identifier: AGPL-3.0-only
"""Whoever makes, enters or ends sandboxes by way of something else needs the right to do that."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from .test_iam import SMALL, ok, refused, token

WRITES, ENTERS = "sandboxes:write", "sandboxes:connect"
ROUTES = [
    # Method, path, body, right, and the second one.
    ("POST", "/v1/batches", {"sandbox": {}, "count": 1}, "batches:write", WRITES),
    ("POST", "/v1/batches/b/cancel", None, "batches:write", WRITES),
    ("GET", "/v1/batches/b/results", None, "batches:read", "sandboxes:read"),
    ("PUT", "/v1/functions/pools/p", {}, "functions:write", WRITES),
    ("DELETE", "/v1/functions/pools/p", None, "functions:write", WRITES),
    ("POST", "/v1/functions/run", {}, "functions:write", WRITES),
    ("POST", "/v1/functions/map", {}, "functions:write", WRITES),
    ("POST", "/v1/tasks", {"task_id": "t"}, "tasks:write", WRITES),
    ("PATCH", "/v1/tasks/t", {"deadline_at": None}, "tasks:write", WRITES),
    ("POST", "/v1/tasks/t/pause", None, "tasks:write", WRITES),
    ("POST", "/v1/tasks/t/resume", None, "tasks:write", WRITES),
    ("POST", "/v1/tasks/t/kill", None, "tasks:write", WRITES),
    ("POST", "/v1/sandboxes/{id}/fork", None, "snapshots:write", WRITES),
    ("POST", "/v1/sandboxes/{id}/snapshots", {}, "snapshots:write", WRITES),
    ("POST", "/sandboxes/{id}/fork", {}, "snapshots:write", WRITES),
    ("POST", "/sandboxes/{id}/snapshots", {}, "snapshots:write", WRITES),
    ("POST", "/v1/sandboxes/{id}/pack", {"name": "n"}, "images:write", ENTERS),
    ("POST", "/v1/sandboxes/{id}/fast-forward", {"source": "i"}, "trajectories:write", ENTERS),
    *(
        ("POST", "/v1/sandboxes/{id}/actions", action, "trajectories:write", right)
        for action, right in (
            ({"action_id": "a", "kind": "exec", "argv": ["true"]}, ENTERS),
            ({"action_id": "a", "kind": "read_file", "path": "/x"}, ENTERS),
            ({"action_id": "a", "kind": "write_file", "path": "/x", "content": ""}, ENTERS),
            ({"action_id": "a", "kind": "snapshot"}, "snapshots:write"),
        )
    ),
]


@pytest.mark.parametrize(("method", "path", "body", "right", "second"), ROUTES)
async def test_both_are_needed(
    http: httpx.AsyncClient, method: str, path: str, body: Any, right: str, second: str
) -> None:
    sandbox = await ok(http.post("/v1/sandboxes", json=SMALL), 201)
    path = path.format(id=sandbox["sandbox_id"])
    for held, missing in ((right, second), (second, right)):
        headers, _ = await token(http, rights=[held])
        answer = await http.request(method, path, json=body, headers=headers)
        error = answer.json().get("error")
        assert answer.status_code == 403, answer.text
        # E2B's answers have another form.
        assert missing in (answer.json()["message"] if error is None else error["message"])
        if error is not None:
            assert error["details"]["right"] == missing
    headers, _ = await token(http, rights=[right, second])
    answer = await http.request(method, path, json=body, headers=headers)
    assert answer.status_code != 403, answer.text


async def test_the_document_names_all_rights(http: httpx.AsyncClient) -> None:
    paths = (await ok(http.get("/v1/openapi.json")))["paths"]
    kill = paths["/v1/tasks/{task_id}/kill"]["post"]
    assert kill["security"][0] == {"ApiKey": ["tasks:write", "sandboxes:write"]}
    assert paths["/v1/caller"]["get"]["security"][0] == {"ApiKey": []}


@pytest.mark.parametrize("role", ["owner", "admin", "developer", "agent"])
async def test_roles_that_work_go_on_working(http: httpx.AsyncClient, role: str) -> None:
    roles = (await ok(http.get("/v1/roles")))["roles"]
    headers, _ = await token(http, rights=roles[role])
    for method, path, body, right, _ in ROUTES:
        if right == "images:write" and role == "agent":
            continue
        answer = await http.request(method, path.format(id="i"), json=body, headers=headers)
        assert answer.status_code != 403, (path, answer.text)


async def test_a_token_for_one_sandbox_works_in_it(http: httpx.AsyncClient) -> None:
    sandbox = await ok(http.post("/v1/sandboxes", json=SMALL), 201)
    name = sandbox["sandbox_id"]
    rights = ["sandboxes:connect", "trajectories:*"]
    headers, _ = await token(http, sandbox_id=name, rights=rights)
    action = {"action_id": "a", "kind": "exec", "argv": ["true"]}
    await ok(http.post(f"/v1/sandboxes/{name}/actions", json=action, headers=headers))
    snapshot = {"action_id": "b", "kind": "snapshot"}
    await refused(
        http.post(f"/v1/sandboxes/{name}/actions", json=snapshot, headers=headers), "forbidden", 403
    )

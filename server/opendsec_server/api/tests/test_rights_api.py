# SPDX-License-Identifier: AGPL-3.0-only
"""Whoever makes, enters or ends sandboxes by way of something else needs the right to do that."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from .test_iam import SMALL, ok, project, refused, token

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
    ("POST", "/v1/groups", {}, "groups:write", WRITES),
    ("POST", "/v1/groups/g/kill", None, "groups:write", WRITES),
    ("POST", "/v1/groups/g/pause", None, "groups:write", WRITES),
    ("POST", "/v1/groups/g/resume", None, "groups:write", WRITES),
    ("GET", "/v1/groups/g/services/s/logs", None, "groups:read", "sandboxes:read"),
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
FOREIGN = [
    *(
        (method, f"{prefix}/sandboxes/{{sandbox}}{rest}")
        for prefix, method, rest in (
            ("/v1", "GET", ""),
            ("/v1", "DELETE", ""),
            ("/v1", "GET", "/transitions"),
            ("/v1", "GET", "/metrics"),
            ("/v1", "GET", "/console"),
            ("/v1", "GET", "/actions"),
            ("/v1", "GET", "/actions/a"),
            ("/v1", "GET", "/trajectory"),
            ("/v1", "POST", "/pause"),
            ("/v1", "POST", "/resume"),
            ("/v1", "POST", "/connect"),
            ("/v1", "POST", "/fork"),
            ("/v1", "POST", "/snapshots"),
            ("/v1", "POST", "/pack"),
            ("", "GET", ""),
            ("", "DELETE", ""),
            ("", "POST", "/pause"),
            ("", "POST", "/resume"),
            ("", "POST", "/fork"),
            ("", "POST", "/snapshots"),
            ("/v2", "POST", "/connect"),
        )
    ),
    ("GET", "/v1/snapshots/{snapshot}"),
    ("DELETE", "/v1/snapshots/{snapshot}"),
    ("DELETE", "/templates/{snapshot}"),
    ("GET", "/v1/batches/{batch}"),
    ("GET", "/v1/batches/{batch}/results"),
    ("POST", "/v1/batches/{batch}/cancel"),
    ("GET", "/v1/builds/{build}"),
    ("GET", "/v1/builds/{build}/logs"),
    ("POST", "/v1/builds/{build}/cancel"),
    ("GET", "/v1/templates/{template}"),
    ("DELETE", "/v1/templates/{template}"),
    ("GET", "/templates/{template}"),
    ("GET", "/templates/{template}/tags"),
    ("DELETE", "/templates/{template}"),
    ("GET", "/templates/aliases/{template}"),
    ("GET", "/templates/aliases/{alias}"),
    ("GET", "/templates/aliases/{snapshot}"),
    ("GET", "/templates/{template}/builds/{build}/status"),
    ("GET", "/templates/{template}/builds/{build}/logs"),
    ("GET", "/v1/tasks/{task}"),
    ("POST", "/v1/tasks/{task}/kill"),
    ("GET", "/v1/tasks/{task}/operations"),
    ("GET", "/v1/functions/pools/{pool}"),
    ("DELETE", "/v1/functions/pools/{pool}"),
    ("DELETE", "/v1/tokens/{token}"),
    ("GET", "/v1/projects/{project}"),
    ("DELETE", "/v1/projects/{project}"),
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


async def test_tokens_of_sandboxes_are_for_those_who_may_enter(http: httpx.AsyncClient) -> None:
    name = (await ok(http.post("/v1/sandboxes", json=SMALL), 201))["sandbox_id"]
    native, e2b = f"/v1/sandboxes/{name}", f"/sandboxes/{name}"
    for rights, seen in (
        (["sandboxes:read", WRITES], False),
        (["sandboxes:read", WRITES, ENTERS], True),
    ):
        for scope in ({}, {"sandbox_id": name}):
            headers, _ = await token(http, rights=rights, **scope)
            shown = [
                await ok(http.get(native, headers=headers)),
                await ok(http.get(e2b, headers=headers)),
            ]
            await ok(http.post(f"{native}/pause", json={"mode": "filesystem"}, headers=headers))
            shown.append(await ok(http.post(f"{native}/resume", json={}, headers=headers)))
            found = ["access_token" in one or "envdAccessToken" in one for one in shown]
            assert found == [seen] * 3, shown
            answer = await http.post(f"{e2b}/resume", json={}, headers=headers)
            assert answer.status_code == (409 if seen else 403), answer.text


async def test_what_is_of_all_projects_is_the_operators(http: httpx.AsyncClient) -> None:
    other = (await project(http, "other"))["project_id"]
    theirs = {"X-Project-Id": other}
    outside = {"X-Forwarded-For": "203.0.113.7"}
    assert (await http.get("/metrics", headers=outside)).status_code == 200
    assert (await http.get("/metrics", headers={**outside, **theirs})).status_code == 403
    name = (await ok(http.post("/v1/sandboxes", json=SMALL), 201))["sandbox_id"]
    narrow, _ = await token(http, sandbox_id=name)
    assert (await http.get("/metrics", headers={**outside, **narrow})).status_code == 403
    for headers, hidden in ((None, False), (theirs, True)):
        node = (await ok(http.get("/v1/info", headers=headers)))["node"]
        assert (node["hostname"] == "" and node["sandboxes"] == 0) == hidden


async def test_what_others_have_is_answered_like_nothing(http: httpx.AsyncClient) -> None:
    """To the letter, but for the name that was asked for."""
    mine = (await project(http, "mine"))["project_id"]
    own, theirs = {"X-Project-Id": mine}, {"X-Project-Id": (await project(http, "b"))["project_id"]}
    sandbox = (await ok(http.post("/v1/sandboxes", json=SMALL, headers=own), 201))["sandbox_id"]
    saved = await ok(
        http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={"mode": "filesystem"}, headers=own),
        201,
    )
    batch = {"sandbox": SMALL, "count": 1}
    made = await http.post("/v1/batches?follow=false", json=batch, headers=own)
    body = {"name": "secret"}
    build = await ok(http.post("/v1/builds", json=body, headers=own), 201)
    task = {"task_id": "t-1"}
    assert (await http.post("/v1/tasks", json=task, headers=own)).status_code == 201
    await ok(http.put("/v1/functions/pools/pool-1", json={}, headers=own))
    _, token_id = await token(http, headers=own)
    known = {
        "sandbox": sandbox,
        "snapshot": saved["id"],
        "batch": made.json()["batch_id"],
        "build": build["build_id"],
        "template": build["template_id"],
        "alias": f"{mine}%2Fsecret",
        "task": "t-1",
        "pool": "pool-1",
        "token": token_id,
        "project": mine,
    }
    unknown = {
        name: value[:-1] + ("0" if value[-1] != "0" else "1") for name, value in known.items()
    }
    for method, path in FOREIGN:
        answers = []
        for names in (known, unknown):
            answer = await http.request(method, path.format(**names), headers=theirs)
            told = answer.json()
            told = told.get("error", told)
            text = told["message"].replace("%2F", "/")
            for value in names.values():
                text = text.replace(value.replace("%2F", "/"), "X")
            answers.append((answer.status_code, told.get("code"), text))
        assert answers[0] == answers[1], (method, path)
        assert answers[0][0] == 404, (method, path, answers)


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

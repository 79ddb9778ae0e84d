# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/tasks``: exact codes, shapes, lines, and what another project sees of it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from .harness import Plane
from .test_images_api import second_project
from .test_native import TIME_RE
from .test_native import make as make_native

TASK = "train/7 ü"
PATH = f"/v1/tasks/{quote(TASK, safe='')}"


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [line for text in answer.text.splitlines() if (line := json.loads(text))]


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_task_from_its_first_use_to_its_end(http: httpx.AsyncClient) -> None:
    assert code_of(await http.get(PATH)) == (404, "task_not_found")
    names = {(await make_native(http, task_id=TASK))["sandbox_id"] for _ in range(3)}
    task = (await http.get(PATH)).json()
    assert TIME_RE.fullmatch(task.pop("created_at")) and TIME_RE.fullmatch(task.pop("used_at"))
    assert task == {
        "task_id": TASK,
        "state": "open",
        "deadline_at": None,
        "sandboxes_max": None,
        "cpu_seconds_max": None,
        "made": 3,
        "ended_at": None,
        "end_reason": None,
        "sandboxes": {
            "live": 3,
            "by_state": {"running": 3},
            "by_backend": {"container": 3},
            "ended": [],
        },
        "usage": {
            "cpu_seconds": 0,
            "memory_mb_seconds": 0,
            "disk_bytes": 0,
            "egress_bytes": 0,
            "ingress_bytes": 0,
        },
        "operation": None,
    }
    first, *middle, last = lines_of(await http.post(f"{PATH}/pause", json={"mode": "filesystem"}))
    assert (first["operation"]["kind"], first["operation"]["asked"]) == ("pause", 3)
    outcomes = {line["sandbox_id"]: line["outcome"] for line in middle if "sandbox_id" in line}
    assert outcomes == dict.fromkeys(names, "done")
    assert (last["done"]["done"], last["done"]["failed"]) == (3, 0)
    assert last["done"]["memory_freed_bytes"] > 0
    body = {"task_id": TASK}
    assert code_of(await http.post("/v1/sandboxes", json=body)) == (409, "task_paused")
    # Without a stream: the operation, to be looked at and followed.
    answer = await http.post(f"{PATH}/resume", params={"stream": "false"})
    assert answer.status_code == 202
    operation = f"{PATH}/operations/{answer.json()['operation_id']}"
    lines = lines_of(await http.get(f"{operation}/outcomes"))
    assert sorted(line["seq"] for line in lines if "seq" in line) == [1, 2, 3]
    rest = lines_of(await http.get(f"{operation}/outcomes", params={"after": 2}))
    assert [line["seq"] for line in rest if "seq" in line] == [3]
    assert (await http.get(operation)).json()["finished_at"] is not None
    # The same key: the same operation, with all that it did.
    headers = {"Idempotency-Key": "once"}
    for _ in range(2):
        *lines, last = lines_of(await http.post(f"{PATH}/kill", headers=headers))
        assert {line["sandbox_id"] for line in lines if "sandbox_id" in line} == names
        assert last["done"]["asked"] == 3
    answer = await http.post(f"{PATH}/pause", headers=headers)
    assert code_of(answer) == (409, "idempotency_request_mismatch")
    assert code_of(await http.post(f"{PATH}/pause")) == (409, "task_ended")
    assert code_of(await http.post("/v1/sandboxes", json=body)) == (409, "task_ended")
    task = (await http.get(PATH)).json()
    assert (task["state"], task["end_reason"]) == ("ended", "killed")
    assert task["sandboxes"]["ended"] == [{"reason": "killed", "fault": None, "count": 3}]
    assert task["operation"]["kind"] == "kill"
    kinds = [one["kind"] for one in (await http.get(f"{PATH}/operations")).json()["operations"]]
    assert kinds == ["kill", "resume", "pause"]
    waited = lines_of(await http.get(f"{PATH}/wait"))
    assert waited[-1]["done"]["reached"] is True


async def test_limits(http: httpx.AsyncClient) -> None:
    wanted = {"task_id": TASK, "sandboxes_max": 1, "deadline_at": "2099-01-01T00:00:00Z"}
    answer = await http.post("/v1/tasks", json=wanted)
    assert answer.status_code == 201
    assert answer.json()["deadline_at"] == "2099-01-01T00:00:00.000000Z"
    assert (await http.post("/v1/tasks", json=wanted)).status_code == 200
    assert code_of(await http.post("/v1/tasks", json={"task_id": TASK})) == (409, "task_exists")
    await make_native(http, task_id=TASK)
    answer = await http.post("/v1/sandboxes", json={"task_id": TASK})
    assert code_of(answer) == (409, "task_budget_reached")
    assert answer.json()["error"]["fault"] == "user"
    assert answer.json()["error"]["details"] == {"task_id": TASK, "limit": 1, "made": 1}
    changed = (await http.patch(PATH, json={"sandboxes_max": None})).json()
    assert (changed["sandboxes_max"], changed["deadline_at"]) == (
        None,
        "2099-01-01T00:00:00.000000Z",
    )
    await make_native(http, task_id=TASK)
    changed = (await http.patch(PATH, json={"deadline_at": None, "cpu_seconds_max": 9})).json()
    assert (changed["deadline_at"], changed["cpu_seconds_max"]) == (None, 9)
    lines_of(await http.post(f"{PATH}/kill"))
    assert code_of(await http.patch(PATH, json={"sandboxes_max": 5})) == (409, "conflict")
    changed = (await http.patch(PATH, json={"reopen": True})).json()
    assert (changed["state"], changed["end_reason"]) == ("open", None)
    await make_native(http, task_id=TASK)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/tasks", {}),
        ("POST", "/v1/tasks", {"task_id": ""}),
        ("POST", "/v1/tasks", {"task_id": "a\0b"}),
        ("POST", "/v1/tasks", {"task_id": "a" * 257}),
        ("POST", "/v1/tasks", {"task_id": "a", "deadline_at": "soon"}),
        ("POST", "/v1/tasks", {"task_id": "a", "deadline_at": "2001-01-01T00:00:00Z"}),
        ("POST", "/v1/tasks", {"task_id": "a", "deadline_at": "9999-12-31T23:59:59-23:59"}),
        ("POST", "/v1/tasks", {"task_id": "a", "sandboxes_max": 0}),
        ("POST", "/v1/tasks", {"task_id": "a", "cpu_seconds_max": -1}),
        ("POST", "/v1/tasks", {"task_id": "a", "budget": 1}),
        ("GET", "/v1/tasks?limit=0", None),
        ("GET", "/v1/tasks?state=lost", None),
        ("GET", "/v1/tasks?cursor=nonsense!", None),
        ("GET", "/v1/tasks?cursor=W10", None),
        ("POST", f"{PATH}/pause?stream=maybe", None),
        ("POST", f"{PATH}/pause", {"mode": "half"}),
        ("POST", f"{PATH}/resume", {"timeout_s": 0}),
        ("GET", f"{PATH}/wait?until=doomsday", None),
        ("GET", f"{PATH}/wait?timeout_s=-1", None),
    ],
)
async def test_bad_input(
    http: httpx.AsyncClient, method: str, path: str, body: dict[str, object] | None
) -> None:
    answer = await http.request(method, path, json=body)
    assert code_of(answer) == (400, "invalid_request")
    assert answer.json()["error"]["fault"] == "user"


async def test_pages(http: httpx.AsyncClient) -> None:
    names = [f"{'ü' * 200}{number}" for number in range(5)]
    for name in names:
        await http.post("/v1/tasks", json={"task_id": name})
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await http.get("/v1/tasks", params={"limit": 2, "cursor": cursor})).json()
        seen += [task["task_id"] for task in page["tasks"]]
        cursor = page["next_cursor"]
    assert seen == names[::-1]
    assert (await http.get("/v1/tasks", params={"state": "ended"})).json()["tasks"] == []


async def test_another_project_sees_nothing_of_it(http: httpx.AsyncClient, plane: Plane) -> None:
    await make_native(http, task_id=TASK)
    operation = lines_of(await http.post(f"{PATH}/pause", json={"mode": "filesystem"}))[0][
        "operation"
    ]["operation_id"]
    _, headers = await second_project(plane)
    async with httpx.AsyncClient(base_url=plane.url, headers=headers) as other:
        assert (await other.get("/v1/tasks")).json()["tasks"] == []
        for method, path in (
            ("GET", PATH),
            ("PATCH", PATH),
            ("POST", f"{PATH}/pause"),
            ("POST", f"{PATH}/resume"),
            ("POST", f"{PATH}/kill"),
            ("GET", f"{PATH}/operations"),
            ("GET", f"{PATH}/wait"),
        ):
            answer = await other.request(method, path, json={} if method == "PATCH" else None)
            assert code_of(answer) == (404, "task_not_found")
        for path in (f"{PATH}/operations/{operation}", f"{PATH}/operations/{operation}/outcomes"):
            assert code_of(await other.get(path)) == (404, "task_operation_not_found")
        # A task of the same name is the other project's own.
        await make_native(other, task_id=TASK)
        assert (await other.get(PATH)).json()["state"] == "open"
        lines_of(await other.post(f"{PATH}/kill"))
    assert (await http.get(PATH)).json()["sandboxes"]["by_state"] == {"paused": 1}

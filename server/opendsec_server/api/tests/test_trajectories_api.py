# SPDX-License-Identifier: AGPL-3.0-only
"""Actions and trajectories over HTTP: exact codes, shapes, lines, and what others see of them."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx

from opendsec_server.contract.states import EndReason

from .harness import Plane
from .test_images_api import second_project
from .test_native import make


def run(action_id: str, command: str, **more: object) -> dict[str, Any]:
    return {"action_id": action_id, "kind": "exec", "argv": ["sh", "-c", command], **more}


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [line for text in answer.text.splitlines() if (line := json.loads(text))]


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_an_action_is_done_once_and_shown_whole(http: httpx.AsyncClient) -> None:
    box = str((await make(http, task_id="job"))["sandbox_id"])
    path = f"/v1/sandboxes/{box}/actions"
    asked = run("a", "echo hello && exit 2", rollout_id="r/1", step=4)
    first = await http.post(path, json=asked)
    assert first.status_code == 200 and "idempotent-replay" not in first.headers
    shown = first.json()
    assert shown["recorded_at"] <= shown["ended_at"]
    for name in ("recorded_at", "ended_at"):
        del shown[name]
    empty = {"head": "", "tail": "", "bytes": 0, "cut_bytes": 0, "encoding": "utf-8"}
    assert shown == {
        "sandbox_id": box,
        "action_id": "a",
        "seq": 1,
        "kind": "exec",
        "state": "done",
        "task_id": "job",
        "rollout_id": "r/1",
        "step": 4,
        "once": False,
        "attempt": 1,
        "asked": {"argv": asked["argv"], "timeout_s": 60.0, "output_bytes": 65536},
        "result": {
            "exit_code": 2,
            "stdout": {**empty, "head": "hello\n", "bytes": 6},
            "stderr": empty,
        },
        "error": None,
        "fault": "user",
        "cause": "exit_code",
        "evidence": {"exit_code": 2},
        "origin": None,
        "replayed": False,
        "resolved_by": None,
    }
    again = await http.post(path, json=asked)
    assert again.headers["idempotent-replay"] == "true" and again.json() == first.json()
    assert (await http.get(f"{path}/a")).json() == first.json()
    assert code_of(await http.post(path, json=run("a", "echo"))) == (409, "action_mismatch")
    assert code_of(await http.get(f"{path}/b")) == (404, "action_not_found")
    assert code_of(await http.post(f"{path}/a/resolve", json={"state": "not_run"})) == (
        409,
        "sandbox_state_conflict",
    )
    content = base64.b64encode(b"text").decode()
    written = {"action_id": "w", "kind": "write_file", "path": "/f", "content": content}
    assert "content" not in (await http.post(path, json=written)).json()["asked"]
    page = (await http.get(path, params={"limit": 1})).json()
    assert [a["action_id"] for a in page["actions"]] == ["a"] and page["next_after"] == 1
    rest = (await http.get(path, params={"after": 1})).json()
    assert [a["action_id"] for a in rest["actions"]] == ["w"] and rest["next_after"] is None
    # Exports hold everything, also after the end.
    await http.delete(f"/v1/sandboxes/{box}")
    *actions, last = lines_of(await http.get(f"/v1/sandboxes/{box}/trajectory"))
    assert last == {"done": {"actions": 2}}
    assert actions[1]["asked"]["content"] == content
    rollout, last = lines_of(await http.get("/v1/trajectories/r%2F1"))
    assert (rollout["action_id"], last) == ("a", {"done": {"actions": 1}})
    (listed,) = (await http.get("/v1/trajectories", params={"task_id": "job"})).json()[
        "trajectories"
    ]
    assert (listed["rollout_id"], listed["actions"], listed["last_step"]) == ("r/1", 1, 4)
    assert code_of(await http.get("/v1/trajectories/other")) == (404, "trajectory_not_found")


async def test_whose_fault_it_was(http: httpx.AsyncClient, plane: Plane) -> None:
    box = str((await make(http, task_id="job"))["sandbox_id"])
    path = f"/v1/sandboxes/{box}/actions"
    await http.post(path, json=run("a", "exit 1"))
    await http.post(path, json=run("b", "echo"))
    plane.node.end(box, EndReason.LOST, "the host was restarted")
    await plane.services.watcher.reconcile()
    answer = await http.post(path, json=run("c", "echo"))
    assert code_of(answer) == (410, "sandbox_lost")
    assert answer.json()["error"]["fault"] == "platform"
    assert answer.json()["error"]["details"]["end_reason"] == "lost"
    # What was recorded is told all the same.
    assert (await http.post(path, json=run("a", "exit 1"))).json()["state"] == "done"
    outcomes = (await http.get("/v1/tasks/job/outcomes")).json()
    assert outcomes["sandboxes"]["platform"] == 1
    assert (outcomes["actions"]["user"], outcomes["actions"]["none"]) == (1, 1)
    assert outcomes["actions"]["by_cause"][0]["count"] == 1


async def test_fast_forward_by_lines(http: httpx.AsyncClient, plane: Plane) -> None:
    box = str((await make(http))["sandbox_id"])
    path = f"/v1/sandboxes/{box}/actions"
    await http.post(path, json=run("a", "append /n 1"))
    snapshot = (await http.post(path, json={"action_id": "s", "kind": "snapshot"})).json()[
        "result"
    ]["snapshot_id"]
    await http.post(path, json=run("b", "append /n 2", step=1))
    new = str((await make(http, template=snapshot))["sandbox_id"])
    forward = f"/v1/sandboxes/{new}/fast-forward"
    *steps, last = lines_of(await http.post(forward, json={"source": box}))
    assert [(s["action_id"], s["how"]) for s in steps] == [
        ("a", "copied"),
        ("s", "copied"),
        ("b", "ran"),
    ]
    assert last == {"done": {"copied": 2, "ran": 1, "skipped": 0, "diverged": 0}}
    assert plane.node.contents[new].disk["/n"] == "12"
    shown = (await http.get(f"/v1/sandboxes/{new}/actions/b")).json()
    assert (shown["origin"], shown["replayed"]) == (box, True)
    for body in ({"source": box, "through": "x"}, {"source": box, "holds": "x"}, {"source": new}):
        assert code_of(await http.post(forward, json=body)) == (400, "invalid_request")


BAD: list[dict[str, Any]] = [
    {},
    {"action_id": "a"},
    {"action_id": "a b", "kind": "exec", "argv": ["x"]},
    {"action_id": "a", "kind": "fly"},
    {"action_id": "a", "kind": "exec"},
    {"action_id": "a", "kind": "exec", "argv": ["x\0"]},
    {"action_id": "a", "kind": "exec", "argv": ["x"], "wait_s": 1e9},
    {"action_id": "a", "kind": "exec", "argv": ["x"], "timeout_s": 0},
    {"action_id": "a", "kind": "exec", "argv": ["x"], "more": 1},
    {"action_id": "a", "kind": "write_file", "path": "/f", "content": "%"},
    {"action_id": "a", "kind": "read_file", "path": ""},
]


async def test_bad_bodies(http: httpx.AsyncClient) -> None:
    box = str((await make(http))["sandbox_id"])
    for body in BAD:
        answer = await http.post(f"/v1/sandboxes/{box}/actions", json=body)
        assert code_of(answer) == (400, "invalid_request"), answer.text
    assert (await http.get(f"/v1/sandboxes/{box}/actions")).json()["actions"] == []


async def test_other_projects_see_nothing(http: httpx.AsyncClient, plane: Plane) -> None:
    box = str((await make(http, task_id="job"))["sandbox_id"])
    await http.post(f"/v1/sandboxes/{box}/actions", json=run("a", "echo", rollout_id="r"))
    _, headers = await second_project(plane)
    async with httpx.AsyncClient(base_url=plane.url, headers=headers) as other:
        own = str((await make(other))["sandbox_id"])
        for method, path, body in (
            ("POST", f"/v1/sandboxes/{box}/actions", run("a", "echo")),
            ("GET", f"/v1/sandboxes/{box}/actions", None),
            ("GET", f"/v1/sandboxes/{box}/actions/a", None),
            ("POST", f"/v1/sandboxes/{box}/actions/a/resolve", {}),
            ("GET", f"/v1/sandboxes/{box}/trajectory", None),
            ("POST", f"/v1/sandboxes/{own}/fast-forward", {"source": box}),
        ):
            answer = await other.request(method, path, json=body)
            assert code_of(answer) == (404, "sandbox_not_found"), path
        assert code_of(await other.get("/v1/trajectories/r")) == (404, "trajectory_not_found")
        assert (await other.get("/v1/trajectories")).json()["trajectories"] == []
        assert (await other.get("/v1/tasks/job/outcomes")).json()["actions"]["total"] == 0

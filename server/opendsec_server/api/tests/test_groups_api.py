# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/groups``: exact codes, shapes, lines, rights, and what another project sees of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from opendsec_server.api.protocol import E2B_KEY_RE, NATIVE_KEY_RE
from opendsec_server.store.groups import member_key

from .harness import Plane
from .test_images_api import second_project
from .test_native import TIME_RE

BODY: dict[str, Any] = {
    "name": "shop",
    "services": {
        "web": {"command": "block", "depends_on": {"db": "started"}},
        "db": {"command": ["sh", "-c", "block"], "aliases": ["cache"]},
    },
    "labels": ["l"],
}
PATH = "/v1/groups/shop"


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [line for text in answer.text.splitlines() if (line := json.loads(text))]


async def test_a_group_from_its_begin_to_its_end(http: httpx.AsyncClient, plane: Plane) -> None:
    headers = {"Idempotency-Key": "once"}
    made = await http.post("/v1/groups", json=BODY, headers=headers)
    assert made.status_code == 202
    group = made.json()
    assert (group["name"], group["state"], group["labels"]) == ("shop", "starting", ["l"])
    *lines, last = lines_of(await http.get(f"{PATH}/wait"))
    assert last == {"done": {"reached": True}}
    assert lines[-1]["group"]["state"] == "running"
    same = await http.post("/v1/groups", json=BODY, headers=headers)
    assert (same.status_code, same.json()["group_id"]) == (202, group["group_id"])
    other = await http.post("/v1/groups", json={**BODY, "timeout_s": 9}, headers=headers)
    assert code_of(other) == (409, "idempotency_request_mismatch")
    assert code_of(await http.post("/v1/groups", json=BODY)) == (409, "group_exists")
    shown = (await http.get(PATH)).json()
    assert TIME_RE.fullmatch(shown["created_at"]) and TIME_RE.fullmatch(shown["ready_at"])
    web, db = shown["services"]
    assert web.pop("sandbox_id") in plane.node.specs and db["sandbox_id"] in plane.node.specs
    assert web == {
        "name": "web",
        "state": "started",
        "message": None,
        "sandbox_state": "running",
        "end_reason": None,
        "program": {"state": "running", "exit_code": None, "signal": None},
        "depends_on": {"db": "started"},
    }
    logs = await http.get(f"{PATH}/services/db/logs")
    assert logs.status_code == 200 and logs.json()["program"]["state"] == "running"
    assert code_of(await http.get(f"{PATH}/services/no/logs")) == (404, "group_service_not_found")
    listed = (await http.get("/v1/groups", params={"state": "running"})).json()
    assert [one["group_id"] for one in listed["groups"]] == [group["group_id"]]
    killed = await http.post(f"{PATH}/kill")
    assert killed.status_code == 202 and killed.json()["state"] in ("ending", "ended")
    *lines, last = lines_of(await http.get(f"/v1/groups/{group['group_id']}/wait?until=ended"))
    assert last == {"done": {"reached": True}}
    ended = lines[-1]["group"]
    assert (ended["state"], ended["end_reason"], ended["error"]) == ("ended", "killed", None)
    assert {one["sandbox_state"] for one in ended["services"]} == {"ended"}
    assert code_of(await http.post(f"{PATH}/pause")) == (409, "group_state_conflict")
    assert code_of(await http.get(f"{PATH}/services/db/logs"))[0] in (404, 409)


async def test_pages(http: httpx.AsyncClient) -> None:
    for number in range(3):
        body = {"name": f"g{number}", "services": {"a": {}}}
        assert (await http.post("/v1/groups", json=body)).status_code == 202
    first = (await http.get("/v1/groups", params={"limit": 2})).json()
    rest = (
        await http.get("/v1/groups", params={"limit": 2, "cursor": first["next_cursor"]})
    ).json()
    names = [one["name"] for page in (first, rest) for one in page["groups"]]
    assert names == ["g2", "g1", "g0"] and rest["next_cursor"] is None
    for bad in ({"cursor": "!"}, {"state": "odd"}, {"limit": "0"}):
        assert code_of(await http.get("/v1/groups", params=bad)) == (400, "invalid_request")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"services": {}},
        {"services": {"Bad Name": {}}},
        {"services": {"a": {"depends_on": {"a": "started"}}}},
        {"services": {"a": {"depends_on": {"b": "started"}}}},
        {"services": {"a": {"depends_on": {"b": "odd"}}, "b": {}}},
        {"services": {"a": {"unknown": 1}}},
        {"services": {"a": {"cpu": 0}}},
        {"services": {"a": {"healthcheck": {"test": []}}}},
        {"services": {"a": {"healthcheck": {"test": "x", "interval_s": 0}}}},
        {"services": {"a": {"network": {"allow": ["nonsense/x"]}}}},
        {"services": {f"a{number}": {} for number in range(65)}},
        {"services": {"a": {}}, "timeout_s": 0},
        {"services": {"a": {"command": 7}}},
    ],
)
async def test_bad_bodies_make_nothing(
    http: httpx.AsyncClient, plane: Plane, body: dict[str, Any]
) -> None:
    assert code_of(await http.post("/v1/groups", json=body)) == (400, "invalid_request")
    assert (await http.get("/v1/groups")).json()["groups"] == []
    assert plane.node.specs == {}


async def test_other_projects_and_weaker_keys(http: httpx.AsyncClient, plane: Plane) -> None:
    await http.post("/v1/groups", json=BODY)
    lines_of(await http.get(f"{PATH}/wait"))
    _, headers = await second_project(plane)
    async with httpx.AsyncClient(base_url=plane.url, headers=headers) as other:
        assert (await other.get("/v1/groups")).json()["groups"] == []
        for method, path in (
            ("GET", PATH),
            ("GET", f"{PATH}/wait"),
            ("GET", f"{PATH}/services/db/logs"),
            ("POST", f"{PATH}/kill"),
            ("POST", f"{PATH}/pause"),
            ("POST", f"{PATH}/resume"),
        ):
            assert code_of(await other.request(method, path)) == (404, "group_not_found")
        # The name is free there.
        assert (await other.post("/v1/groups", json=BODY)).status_code == 202
    token = await http.post("/v1/tokens", json={"rights": ["groups:read"], "ttl_s": 60})
    assert token.status_code == 201, token.text
    headers = {"X-API-Key": token.json()["token"]}
    async with httpx.AsyncClient(base_url=plane.url, headers=headers) as reader:
        assert (await reader.get(PATH)).status_code == 200
        for path in ("/v1/groups", f"{PATH}/kill", f"{PATH}/pause"):
            assert code_of(await reader.post(path, json=BODY)) == (403, "forbidden")
    assert (await http.get(PATH)).json()["state"] == "running"


async def test_no_caller_can_spell_the_key_of_a_member() -> None:
    for allowed in (NATIVE_KEY_RE, E2B_KEY_RE):
        assert allowed.fullmatch(member_key("g", "db")) is None

# SPDX-License-Identifier: AGPL-3.0-only
"""Projects, principals, tokens and the audit log, through the API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from opendsec_server.contract.errors import StoreUnavailable
from opendsec_server.store import audit
from opendsec_server.store.audit import FIRST_HASH, AuditEntry, first_fault
from opendsec_server.store.tables import AUDIT, PROJECT_USE

from .harness import Plane, running_plane

SMALL = {"cpu": 0.5, "memory_mb": 64, "disk_mb": 64}


async def ok(answer: Any, status: int = 200) -> Any:
    answer = await answer
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


async def refused(answer: Any, code: str, status: int) -> dict[str, Any]:
    answer = await answer
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == code, error
    return error


async def project(
    http: httpx.AsyncClient, name: str, parent: str | None = None, **quota: Any
) -> Any:
    body = {"name": name, "parent_id": parent, "quota": quota}
    return await ok(http.post("/v1/projects", json=body), 201)


async def key_in(http: httpx.AsyncClient, project_id: str) -> dict[str, str]:
    made = await ok(
        http.post("/v1/api-keys", json={"name": "k"}, headers={"X-Project-Id": project_id}), 201
    )
    return {"X-API-Key": made["key"]}


async def principal(
    http: httpx.AsyncClient,
    project_id: str,
    *,
    kind: str = "person",
    name: str = "ada",
    **grant: Any,
) -> tuple[str, dict[str, str]]:
    made = await ok(http.post("/v1/principals", json={"kind": kind, "name": name}), 201)
    name = made["principal_id"]
    await ok(http.put(f"/v1/principals/{name}/grants/{project_id}", json=grant))
    key = await ok(http.post(f"/v1/principals/{name}/api-keys", json={"name": "k"}), 201)
    assert key["principal_id"] == name
    return name, {"X-API-Key": key["key"]}


async def token(http: httpx.AsyncClient, headers: dict[str, str] | None = None, **body: Any) -> Any:
    made = await ok(http.post("/v1/tokens", json=body, headers=headers), 201)
    return {"X-API-Key": made["token"]}, made["token_id"]


async def written(http: httpx.AsyncClient, count: int) -> list[Any]:
    """The audit log when it has so many entries."""
    for _ in range(1_000):
        entries: list[Any] = (await ok(http.get("/v1/audit")))["entries"]
        if len(entries) >= count:
            return entries
        await asyncio.sleep(0.01)
    raise AssertionError(f"{len(entries)} entries: {entries}")


async def test_projects_nest_and_never_exceed_those_above(http: httpx.AsyncClient) -> None:
    team = await project(http, "team", sandboxes=3, cpu=2)
    deep = await project(http, "deep", team["project_id"], sandboxes=2)
    beside = await project(http, "beside", team["project_id"])
    error = await refused(
        http.post(
            "/v1/projects",
            json={"name": "more", "parent_id": team["project_id"], "quota": {"sandboxes": 2}},
        ),
        "conflict",
        409,
    )
    assert error["details"] == {
        "dimension": "sandboxes",
        "limit": 3,
        "handed_on": 4,
        "project_id": team["project_id"],
        "project": "team",
    }
    deep_key = await key_in(http, deep["project_id"])
    beside_key = await key_in(http, beside["project_id"])
    made = [
        await ok(http.post("/v1/sandboxes", json=SMALL, headers=deep_key), 201) for _ in range(2)
    ]
    error = await refused(
        http.post("/v1/sandboxes", json=SMALL, headers=deep_key), "quota_exceeded", 429
    )
    assert error["details"]["project"] == "deep"
    assert (error["details"]["limit"], error["details"]["use"]) == (2, 2)
    await ok(http.post("/v1/sandboxes", json=SMALL, headers=beside_key), 201)
    error = await refused(
        http.post("/v1/sandboxes", json=SMALL, headers=beside_key), "quota_exceeded", 429
    )
    assert "project `team`" in error["message"] and "has 3 sandboxes" in error["message"]
    state = await ok(http.get(f"/v1/projects/{team['project_id']}"))
    assert state["use"]["sandboxes"] == 3 and state["use"]["cpu"] == 1.5
    assert state["handed_on"]["sandboxes"] == 2
    # None sees what is another's, not even from above by default.
    assert (await ok(http.get("/v1/sandboxes", headers=beside_key)))["sandboxes"] != []
    one = made[0]["sandbox_id"]
    await refused(http.get(f"/v1/sandboxes/{one}", headers=beside_key), "sandbox_not_found", 404)
    await refused(http.get(f"/v1/sandboxes/{one}"), "sandbox_not_found", 404)
    above = {"X-Project-Id": deep["project_id"]}
    await ok(http.get(f"/v1/sandboxes/{one}", headers=above))
    await refused(http.get("/v1/sandboxes", headers={**beside_key, **above}), "forbidden", 403)
    await ok(http.delete(f"/v1/sandboxes/{one}", headers=deep_key))
    await ok(http.post("/v1/sandboxes", json=SMALL, headers=beside_key), 201)
    # The other dimension: 3 of them take 1.5 of 2 processors.
    await ok(http.patch(f"/v1/projects/{team['project_id']}", json={"quota": {"sandboxes": None}}))
    big = {**SMALL, "cpu": 1}
    error = await refused(
        http.post("/v1/sandboxes", json=big, headers=beside_key), "quota_exceeded", 429
    )
    assert error["details"]["dimension"] == "cpu" and error["details"]["limit"] == 2
    assert error["details"]["use"] == 1.5 and error["details"]["wanted"] == 1
    # A project does not lift its own limits, and closes only when nothing is left.
    team_key = await key_in(http, team["project_id"])
    await refused(
        http.patch(
            f"/v1/projects/{team['project_id']}", json={"quota": {"cpu": 9}}, headers=team_key
        ),
        "forbidden",
        403,
    )
    await refused(http.delete(f"/v1/projects/{deep['project_id']}"), "conflict", 409)
    await ok(http.delete(f"/v1/sandboxes/{made[1]['sandbox_id']}", headers=deep_key))
    await ok(http.delete(f"/v1/projects/{deep['project_id']}"), 204)
    await refused(http.get("/v1/sandboxes", headers=deep_key), "forbidden", 403)
    names = [
        one["name"] for one in (await ok(http.get("/v1/projects", headers=team_key)))["projects"]
    ]
    assert names == ["team", "beside"]


async def test_limits_are_checked(http: httpx.AsyncClient) -> None:
    for quota in ({"sandboxes": -1}, {"cpu": 1e30}, {"creates_per_s": 0}, {"sandboxes": True}):
        await refused(
            http.post("/v1/projects", json={"name": "x", "quota": quota}), "invalid_request", 400
        )
    for body in ({"name": ""}, {"name": "a\0b"}, {"name": "x", "quota": {"sandbox": 1}}):
        await refused(http.post("/v1/projects", json=body), "invalid_request", 400)
    await refused(
        http.post("/v1/projects", json={"name": "x", "parent_id": "nope"}), "not_found", 404
    )
    first = await project(http, "x")
    await refused(http.post("/v1/projects", json={"name": "x"}), "conflict", 409)
    at = first["project_id"]
    for depth in range(62):
        at = (await project(http, f"d{depth}", at))["project_id"]
    await refused(http.post("/v1/projects", json={"name": "y", "parent_id": at}), "conflict", 409)
    assert len((await ok(http.get("/v1/projects")))["projects"]) == 64


async def test_creates_per_second(http: httpx.AsyncClient) -> None:
    slow = await project(http, "slow", creates_per_s=0.01)
    key = await key_in(http, slow["project_id"])
    await ok(http.post("/v1/sandboxes", json=SMALL, headers=key), 201)
    error = await refused(
        http.post("/v1/sandboxes", json=SMALL, headers=key), "quota_exceeded", 429
    )
    assert error["details"]["dimension"] == "creates_per_s"
    assert error["details"]["project"] == "slow"


async def test_roles_bound_what_principals_do(http: httpx.AsyncClient) -> None:
    me = await ok(http.get("/v1/caller"))
    assert me["rights"] == ["*"] and me["operator"]
    home = me["project_id"]
    sandbox = (await ok(http.post("/v1/sandboxes", json=SMALL), 201))["sandbox_id"]
    viewer_id, viewer = await principal(http, home, role="viewer")
    shown = await ok(http.get(f"/v1/sandboxes/{sandbox}", headers=viewer))
    assert "access_token" not in shown and "traffic_token" not in shown
    assert "access_token" in await ok(http.get(f"/v1/sandboxes/{sandbox}"))
    error = await refused(http.post("/v1/sandboxes", json=SMALL, headers=viewer), "forbidden", 403)
    assert error["details"] == {"right": "sandboxes:write", "project_id": home}
    for call in (
        http.delete(f"/v1/sandboxes/{sandbox}", headers=viewer),
        http.post(f"/v1/sandboxes/{sandbox}/connect", json={}, headers=viewer),
        http.get("/v1/audit", headers=viewer),
        http.post("/v1/api-keys", json={"name": "x"}, headers=viewer),
        http.get("/v1/api-keys", headers=viewer),
        http.post("/v1/tokens", headers=viewer),
        http.post("/v1/projects", json={"name": "x"}, headers=viewer),
    ):
        await refused(call, "forbidden", 403)
    e2b = await http.post("/sandboxes", json={"templateID": "base"}, headers=viewer)
    assert e2b.status_code == 403 and "sandboxes:write" in e2b.json()["message"]
    detail = await http.get(f"/sandboxes/{sandbox}", headers=viewer)
    assert detail.status_code == 200 and "envdAccessToken" not in detail.json()
    # An admin hands on what it has, and no more.
    _, admin = await principal(http, home, name="bob", role="admin")
    made = await ok(
        http.post("/v1/principals", json={"kind": "agent", "name": "a"}, headers=admin), 201
    )
    agent = made["principal_id"]
    path = f"/v1/principals/{agent}/grants/{home}"
    for grant in ({"role": "owner"}, {"rights": ["*"]}, {"rights": ["secrets:write"]}):
        await refused(http.put(path, json=grant, headers=admin), "forbidden", 403)
    for grant in ({}, {"role": "king"}, {"rights": ["Sandboxes"]}):
        await refused(http.put(path, json=grant, headers=admin), "invalid_request", 400)
    await ok(http.put(path, json={"role": "agent"}, headers=admin))
    # Nor does it take over one that has more.
    owner_id, owner = await principal(http, home, name="eve", role="owner")
    await refused(
        http.post(f"/v1/principals/{owner_id}/api-keys", json={"name": "x"}, headers=admin),
        "forbidden",
        403,
    )
    await refused(http.delete(f"/v1/principals/{owner_id}", headers=admin), "forbidden", 403)
    await refused(
        http.put(
            f"/v1/principals/{owner_id}/grants/{home}", json={"role": "viewer"}, headers=admin
        ),
        "forbidden",
        403,
    )
    made_key = await ok(http.post("/v1/api-keys", json={"name": "x"}, headers=admin), 201)
    as_admin = {"X-API-Key": made_key["key"]}
    assert "*" not in (await ok(http.get("/v1/caller", headers=as_admin)))["rights"]
    # Switched off, on, and gone.
    await ok(http.patch(f"/v1/principals/{viewer_id}", json={"disabled": True}), 204)
    await refused(http.get("/v1/sandboxes", headers=viewer), "unauthenticated", 401)
    await ok(http.patch(f"/v1/principals/{viewer_id}", json={"disabled": False}), 204)
    await ok(http.get("/v1/sandboxes", headers=viewer))
    await ok(http.delete(f"/v1/principals/{viewer_id}/grants/{home}"), 204)
    await refused(http.get("/v1/sandboxes", headers=viewer), "forbidden", 403)
    await ok(http.delete(f"/v1/principals/{owner_id}"), 204)
    await refused(http.get("/v1/sandboxes", headers=owner), "unauthenticated", 401)
    # A grant holds below, not above or beside.
    below = await project(http, "below")
    beside = await project(http, "beside")
    _, there = await principal(http, below["project_id"], name="joe", role="developer")
    assert (await ok(http.get("/v1/caller", headers=there)))["project"] == "below"
    for other in (home, beside["project_id"], "nope"):
        await refused(
            http.get("/v1/sandboxes", headers={**there, "X-Project-Id": other}), "forbidden", 403
        )
    await refused(
        http.get("/v1/sandboxes", headers={"X-Project-Id": home, "X-Team-Id": "other"}),
        "invalid_request",
        400,
    )


async def test_tokens_are_a_part_for_a_while(http: httpx.AsyncClient) -> None:
    part, part_id = await token(http, rights=["sandboxes:read", "tokens:*"], ttl_s=600)
    assert part["X-API-Key"].startswith("e2b_")
    await ok(http.get("/v1/sandboxes", headers=part))
    await refused(http.post("/v1/sandboxes", json=SMALL, headers=part), "forbidden", 403)
    await refused(
        http.post("/v1/tokens", json={"rights": ["sandboxes:write"]}, headers=part),
        "forbidden",
        403,
    )
    child, _ = await token(http, part, ttl_s=86_400)
    state = await ok(http.get("/v1/caller", headers=child))
    assert state["expires_at"] == (await ok(http.get("/v1/caller", headers=part)))["expires_at"]
    bad: list[dict[str, Any]] = [{"ttl_s": 0}, {"ttl_s": 10**9}, {"rights": []}, {"name": ""}]
    for body in (*bad, {"rights": ["x"]}):
        await refused(http.post("/v1/tokens", json=body), "invalid_request", 400)
    await refused(http.post("/v1/tokens", json={"projects": ["nope"]}), "not_found", 404)
    # Keys would outlive it.
    whole, _ = await token(http)
    await refused(http.post("/v1/api-keys", json={"name": "x"}, headers=whole), "forbidden", 403)
    # Revoked with what it made.
    await ok(http.delete(f"/v1/tokens/{part_id}"), 204)
    for gone in (part, child):
        await refused(http.get("/v1/sandboxes", headers=gone), "unauthenticated", 401)
    await refused(http.delete(f"/v1/tokens/{part_id}"), "not_found", 404)
    # It ends by itself, also where it was just seen.
    short, short_id = await token(http, ttl_s=1)
    await ok(http.get("/v1/sandboxes", headers=short))
    await asyncio.sleep(1.1)
    await refused(http.get("/v1/sandboxes", headers=short), "unauthenticated", 401)
    listed = (await ok(http.get("/v1/tokens")))["tokens"]
    assert short_id not in [one["token_id"] for one in listed]
    # It is worth no more than its maker.
    home = (await ok(http.get("/v1/caller")))["project_id"]
    name, key = await principal(http, home, role="developer")
    made, _ = await token(http, key)
    await ok(http.post("/v1/sandboxes", json=SMALL, headers=made), 201)
    await ok(http.put(f"/v1/principals/{name}/grants/{home}", json={"role": "viewer"}))
    await refused(http.post("/v1/sandboxes", json=SMALL, headers=made), "forbidden", 403)
    await ok(http.delete(f"/v1/principals/{name}"), 204)
    await refused(http.get("/v1/sandboxes", headers=made), "unauthenticated", 401)
    # In some projects only.
    one, other = await project(http, "one"), await project(http, "other")
    there, _ = await token(http, projects=[one["project_id"]])
    assert (await ok(http.get("/v1/caller", headers=there)))["project"] == "one"
    for elsewhere in (other["project_id"], home):
        await refused(
            http.get("/v1/sandboxes", headers={**there, "X-Project-Id": elsewhere}),
            "forbidden",
            403,
        )


async def test_a_token_for_one_sandbox_reaches_only_that(http: httpx.AsyncClient) -> None:
    mine, other = [
        (await ok(http.post("/v1/sandboxes", json=SMALL), 201))["sandbox_id"] for _ in range(2)
    ]
    it, _ = await token(http, sandbox_id=mine)
    entered = await ok(http.get(f"/v1/sandboxes/{mine}", headers=it))
    assert entered["access_token"]
    assert (await ok(http.get("/v1/caller", headers=it)))["sandbox_id"] == mine
    e2b = await http.post(f"/sandboxes/{mine}/connect", json={"timeout": 60}, headers=it)
    assert e2b.status_code == 200 and e2b.json()["envdAccessToken"]
    for call in (
        http.get(f"/v1/sandboxes/{other}", headers=it),
        http.get(f"/sandboxes/{other}", headers=it),
        http.get("/v1/sandboxes", headers=it),
        http.post("/v1/sandboxes", json=SMALL, headers=it),
        http.delete(f"/v1/sandboxes/{mine}", headers=it),
        http.post(f"/v1/sandboxes/{mine}/fork", json={"count": 1}, headers=it),
        http.post("/v1/tokens", json={}, headers=it),
        http.post("/v1/sandboxes/bulk/kill", json={"sandbox_ids": [mine]}, headers=it),
        http.post(f"/v1/sandboxes/{mine}/snapshots", json={}, headers=it),
        http.get("/v1/sandboxes/" + mine.replace("i", "%69", 1) + "x", headers=it),
        http.get("/v1/info", headers=it),
        http.get("/v1/projects", headers=it),
    ):
        answer = await call
        assert answer.status_code == 403, answer.text
    seen, _ = await token(http, sandbox_id=mine, rights=["sandboxes:read"])
    assert "access_token" not in await ok(http.get(f"/v1/sandboxes/{mine}", headers=seen))
    await refused(
        http.post("/v1/tokens", json={"sandbox_id": mine, "rights": ["snapshots:write"]}),
        "forbidden",
        403,
    )
    await refused(http.post("/v1/tokens", json={"sandbox_id": "inope"}), "sandbox_not_found", 404)


async def test_e2b_teams(http: httpx.AsyncClient, plane: Plane) -> None:
    made = await project(http, "team")
    teams = await ok(http.get("/teams", headers={"Authorization": f"Bearer {plane.key}"}))
    assert [(one["name"], one["isDefault"]) for one in teams] == [
        ("default", True),
        ("team", False),
    ]
    assert teams[1]["apiKey"] == plane.key
    chosen = {"X-Team-Id": made["project_id"]}
    created = await ok(http.post("/v2/sandboxes", json={"templateID": "base"}, headers=chosen), 201)
    assert await ok(http.get("/v2/sandboxes")) == []
    listed = await ok(http.get("/v2/sandboxes", headers=chosen))
    assert [one["sandboxID"] for one in listed] == [created["sandboxID"]]


async def test_audit_names_who_did_what_and_shows_tampering(
    http: httpx.AsyncClient, plane: Plane, state_dir: Path
) -> None:
    home = (await ok(http.get("/v1/caller")))["project_id"]
    made = (await ok(http.post("/v1/sandboxes", json=SMALL), 201))["sandbox_id"]
    viewer_id, viewer = await principal(http, home, role="viewer")
    await refused(http.delete(f"/v1/sandboxes/{made}", headers=viewer), "forbidden", 403)
    await http.get("/v1/sandboxes", headers={"X-API-Key": "e2b_" + "0" * 40})
    await ok(http.delete(f"/v1/sandboxes/{made}"))
    entries = (await ok(http.get("/v1/audit")))["entries"]
    about = [
        (one["action"].split()[0], one["outcome"], one["actor_kind"])
        for one in (await ok(http.get("/v1/audit", params={"object": made})))["entries"]
    ]
    assert about == [
        ("POST", "ok", "key"),
        ("DELETE", "forbidden", "principal"),
        ("DELETE", "ok", "key"),
    ]
    assert [one["outcome"] for one in entries].count("unauthenticated") == 1
    by = await ok(http.get("/v1/audit", params={"actor": viewer_id}))
    assert [one["project_id"] for one in by["entries"]] == [home]
    page = await ok(http.get("/v1/audit", params={"limit": 2}))
    assert len(page["entries"]) == 2 and page["next_after"] == 2
    # A project sees its own and those below it, and does not check the whole.
    below = await project(http, "below")
    key = await key_in(http, below["project_id"])
    await ok(http.post("/v1/tokens", headers=key), 201)
    seen = (await ok(http.get("/v1/audit", headers=key)))["entries"]
    assert {one["project_id"] for one in seen} == {below["project_id"]}
    await refused(http.get("/v1/audit/verify", headers=key), "forbidden", 403)
    # An export can be followed without the server.
    text = (await http.get("/v1/audit/export")).text
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[-1] == {"done": {"entries": len(lines) - 1}}
    exported = [AuditEntry(**line) for line in lines[:-1]]
    assert first_fault(exported, seq=0, digest=FIRST_HASH, secret=None) is None
    verdict = await ok(http.get("/v1/audit/verify"))
    assert verdict["ok"] and verdict["entries"] == len(exported)
    assert (verdict["head_seq"], verdict["head_hash"]) == (exported[-1].seq, exported[-1].hash)

    async def tampered(statement: Any) -> str:
        async with running_plane(state_dir) as again:
            kept = await again.services.store.read(
                lambda c: [dict(row) for row in c.execute(sa.select(AUDIT)).mappings()]
            )
            await again.services.store.write(lambda c: c.execute(statement))
            async with httpx.AsyncClient(base_url=again.url, headers=again.headers) as client:
                found = await ok(client.get("/v1/audit/verify"))
            assert not found["ok"]

            def restore(connection: sa.Connection) -> None:
                connection.execute(sa.delete(AUDIT))
                connection.execute(sa.insert(AUDIT), kept)

            await again.services.store.write(restore)
            return str(found["fault"])

    assert "entry 2 was changed" in await tampered(
        sa.update(AUDIT).where(AUDIT.c.seq == 2).values(outcome="ok", actor_id="someone")
    )
    assert "entry 2 is missing" in await tampered(sa.delete(AUDIT).where(AUDIT.c.seq == 2))
    last = exported[-1].seq
    assert "are missing" in await tampered(sa.delete(AUDIT).where(AUDIT.c.seq == last))
    assert "not written by" in await tampered(
        sa.update(AUDIT).where(AUDIT.c.seq == 1).values(mac="0" * 64)
    )


@pytest.mark.parametrize("bad", ["e2b_" + "f" * 64, "e2b_" + "f" * 50, "e2b_é", "x" * 5000])
async def test_what_is_no_token_is_refused(http: httpx.AsyncClient, bad: str) -> None:
    headers = {"X-API-Key": bad.encode()}
    answer = await http.get("/v1/caller", headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert bad[4:] not in answer.text


async def test_use_is_counted_through_every_change(http: httpx.AsyncClient, plane: Plane) -> None:
    made = [(await ok(http.post("/v1/sandboxes", json=SMALL), 201))["sandbox_id"] for _ in range(3)]
    await ok(http.post(f"/v1/sandboxes/{made[0]}/pause"))
    await ok(http.delete(f"/v1/sandboxes/{made[1]}"))

    async def use() -> tuple[int, ...]:
        query = sa.select(
            PROJECT_USE.c.sandboxes,
            PROJECT_USE.c.cpu_milli,
            PROJECT_USE.c.memory_mb,
            PROJECT_USE.c.disk_mb,
        )
        return await plane.services.store.read(lambda c: tuple(c.execute(query).one()))

    assert await use() == (1, 500, 64, 128)
    await ok(http.post(f"/v1/sandboxes/{made[0]}/resume", json={}))
    assert await use() == (2, 1_000, 128, 128)
    for one in made:
        await http.delete(f"/v1/sandboxes/{one}")
    assert await use() == (0, 0, 0, 0)


async def test_the_limit_that_holds_is_shown(http: httpx.AsyncClient) -> None:
    team = await project(http, "team", sandboxes=7)
    below = await project(http, "below", team["project_id"])
    chosen = {"X-Project-Id": below["project_id"]}
    assert (await ok(http.get("/v1/project", headers=chosen)))["sandboxes_max"] == 7


async def test_the_log_waits_for_the_store_and_calls_do_not(
    http: httpx.AsyncClient, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (await ok(http.post("/v1/sandboxes", json=SMALL), 201))["sandbox_id"]
    real = audit.append
    down = True

    async def append(*args: Any) -> Any:
        if down:
            raise StoreUnavailable("the disk is full")
        return await real(*args)

    monkeypatch.setattr(audit, "append", append)
    monkeypatch.setattr("opendsec_server.control.audit.ANSWER_WAITS_S", 0.05)
    monkeypatch.setattr("opendsec_server.control.audit.RETRY_S", 0.01)
    monkeypatch.setattr("opendsec_server.control.audit.WAITING_MAX", 3)
    for timeout_s in (60, 61, 62, 63, 64):
        body = {"timeout_s": timeout_s}
        await ok(http.post(f"/v1/sandboxes/{made}/timeout", json=body))
    down = False
    # The create, the three that waited, and what was not kept.
    await written(http, 5)
    await ok(http.delete(f"/v1/sandboxes/{made}"))
    entries = await written(http, 6)
    about = [(one["action"], one["object"]) for one in entries if one["status"] != 201]
    assert about.count(("POST /v1/sandboxes/{sandbox_id}/timeout", made)) == 3
    assert ("audit: calls not written one by one", "2") in about
    assert (await ok(http.get("/v1/audit/verify")))["ok"]


async def test_a_log_that_was_cut_shows_after_more_was_written(
    http: httpx.AsyncClient, plane: Plane
) -> None:
    for name in ("one", "two", "three"):
        await project(http, name)
    assert (await ok(http.get("/v1/audit/verify")))["ok"]

    def cut(connection: sa.Connection) -> None:
        connection.execute(sa.delete(AUDIT).where(AUDIT.c.seq > 1))

    await plane.services.store.write(cut)
    for name in ("four", "five", "six"):
        await project(http, name)
    verdict = await ok(http.get("/v1/audit/verify"))
    assert not verdict["ok"] and "not the one that was written" in verdict["fault"]


async def test_keys_of_the_project_fall_to_who_may_do_everything(http: httpx.AsyncClient) -> None:
    whose = await ok(http.get("/v1/project"))
    _, keeper = await principal(http, whose["project_id"], name="keeper", rights=["keys:*"])
    root = next(
        one
        for one in (await ok(http.get("/v1/api-keys")))["api_keys"]
        if one.get("principal_id") is None
    )
    await refused(http.delete(f"/v1/api-keys/{root['key_id']}", headers=keeper), "forbidden", 403)
    # The keeper's key is there too, but nobody could do everything any more.
    await refused(http.delete(f"/v1/api-keys/{root['key_id']}"), "conflict", 409)


async def test_rights_elsewhere_do_not_keep_a_principal_on(http: httpx.AsyncClient) -> None:
    team, beside = await project(http, "team"), await project(http, "beside")
    owner = await key_in(http, team["project_id"])
    body = {"kind": "person", "name": "u"}
    made = await ok(http.post("/v1/principals", json=body, headers=owner), 201)
    path = f"/v1/principals/{made['principal_id']}"
    for where in (team, beside):
        grant = f"{path}/grants/{where['project_id']}"
        await ok(http.put(grant, json={"role": "viewer"}))
    await ok(http.patch(path, json={"disabled": True}, headers=owner), 204)
    # To give rights back that are not its own is another thing.
    again = {"disabled": False}
    await refused(http.patch(path, json=again, headers=owner), "forbidden", 403)
    await ok(http.delete(path, headers=owner), 204)


async def test_a_token_grants_nothing(http: httpx.AsyncClient) -> None:
    team = await project(http, "team")
    person, _ = await principal(http, team["project_id"], role="viewer")
    part, _ = await token(http, rights=["principals:*", "sandboxes:read"])
    grant = f"/v1/principals/{person}/grants/{team['project_id']}"
    body = {"rights": ["sandboxes:read"]}
    await refused(http.put(grant, json=body, headers=part), "forbidden", 403)

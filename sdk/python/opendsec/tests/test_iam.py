# SPDX-License-Identifier: Apache-2.0
"""Projects, principals, tokens and the audit log, of both halves, with a scripted server."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from opendsec import (
    AuditEntry,
    Conflict,
    Forbidden,
    InvalidRequest,
    OpendsecError,
    ProjectUse,
    Quota,
    TokenInfo,
    _settings,
    verify_audit,
)

from .fake_server import Answer, FakeServer, error
from .kits import Kit, close, collect, done

PROJECT = {
    "project_id": "p2",
    "name": "team",
    "parent_id": "p1",
    "depth": 1,
    "created_at": "2026-12-01T10:00:00Z",
    "closed_at": None,
    "quota": {"sandboxes": 5, "cpu": None},
    "use": {"sandboxes": 2, "cpu": 0.5},
    "handed_on": {"sandboxes": 3},
}


def entries(count: int) -> list[dict[str, Any]]:
    """A chain as the server makes it."""
    made, digest = [], "0" * 64
    for seq in range(1, count + 1):
        said: dict[str, Any] = {
            "seq": seq,
            "at": 1e9 + seq / 7,
            "request_id": f"r{seq}",
            "actor_kind": "key",
            "actor_id": "k",
            "credential_id": "k",
            "project_id": None,
            "action": "POST /v1/sandboxes",
            "object": "ü",
            "outcome": "ok",
            "status": 201,
            "address": None,
        }
        text = msgspec.json.encode(list(said.values()))
        digest = hashlib.sha256(digest.encode() + b"\n" + text).hexdigest()
        made.append({**said, "hash": digest, "mac": "m"})
    return made


async def test_a_client_acts_in_a_project(kit: Kit, server: FakeServer) -> None:
    server.on("GET", "/v1/projects", Answer(200, {"projects": [PROJECT]}))
    client = kit.Client(base_url=server.url, api_key="e2b_test", project_id="p2")
    (found,) = await done(client.projects.list(closed=True))
    await close(client)
    assert found.quota == Quota(sandboxes=5)
    assert found.use == ProjectUse(sandboxes=2, cpu=0.5)
    asked = server.of("GET", "/v1/projects")[0]
    assert asked.headers["x-project-id"] == "p2"
    assert asked.query == {"closed": ["true"]}
    env = {"E2B_API_URL": "http://h", "E2B_TEAM_ID": "p3"}
    assert _settings.resolve(environ=env).project_id == "p3"
    assert _settings.resolve(environ={**env, "OPENDSEC_PROJECT_ID": "p4"}).project_id == "p4"
    assert _settings.resolve(environ=env, project_id="p5").project_id == "p5"
    elsewhere = {"OPENDSEC_API_URL": "http://ours", **env}
    assert _settings.resolve(environ=elsewhere).project_id is None
    assert _settings.resolve(environ={}).project_id is None


async def test_projects(client: Any, server: FakeServer) -> None:
    server.on("POST", "/v1/projects", Answer(201, PROJECT), Answer(409, error("conflict")))
    made = await done(client.projects.create("team", quota=Quota(sandboxes=5)))
    assert made.project_id == "p2"
    sent = server.of("POST", "/v1/projects")[0]
    assert "x-project-id" not in sent.headers
    assert sent.json["quota"]["sandboxes"] == 5
    assert sent.json["quota"]["cpu"] is None
    with pytest.raises(Conflict):
        await done(client.projects.create("team"))
    server.on("POST", "/v1/projects", Answer(drop=True))
    with pytest.raises(OpendsecError):
        await done(client.projects.create("other"))
    assert len(server.of("POST", "/v1/projects")) == 3, "a second try would make a second one"
    server.on("PATCH", "/v1/projects/p2", Answer(200, PROJECT))
    await done(client.projects.change("p2", limits={"cpu": 2.5, "gpu": None}))
    changed = server.of("PATCH", "/v1/projects/p2")[0].json
    assert changed == {"name": None, "quota": {"cpu": 2.5, "gpu": None}}
    server.on("DELETE", "/v1/projects/p%2F2", Answer(204))
    await done(client.projects.close("p/2"))
    with pytest.raises(InvalidRequest):
        await done(client.projects.get(""))


async def test_principals_and_tokens(client: Any, server: FakeServer) -> None:
    principal = {"principal_id": "u1", "name": "ada", "kind": "person", "project_id": "p1"}
    server.on("POST", "/v1/principals", Answer(201, principal))
    assert (await done(client.principals.create("ada", kind="person"))).principal_id == "u1"
    grant = {"principal_id": "u1", "project_id": "p2", "role": "viewer", "rights": ["a:b"]}
    server.on("PUT", "/v1/principals/u1/grants/p2", Answer(200, grant))
    made = await done(client.principals.grant("u1", "p2", role="viewer", rights=["a:b"]))
    assert (made.role, made.rights) == ("viewer", ("a:b",))
    server.on("GET", "/v1/principals/u1", Answer(200, {**principal, "grants": [grant]}))
    assert (await done(client.principals.get("u1"))).grants[0].project_id == "p2"
    server.on("DELETE", "/v1/principals/u1", Answer(204), Answer(404, error("not_found")))
    assert await done(client.principals.delete("u1")) is True
    assert await done(client.principals.delete("u1")) is False
    server.on("PATCH", "/v1/principals/u1", Answer(204))
    await done(client.principals.set_disabled("u1", True))
    token = {"token_id": "t1", "token": "e2b_secret", "rights": ["sandboxes:read"]}
    server.on("POST", "/v1/tokens", Answer(201, token), Answer(403, error("forbidden")))
    given = await done(client.tokens.create(sandbox_id="i1", ttl_s=9))
    assert given.token == "e2b_secret"
    assert "e2b_secret" not in repr(given)
    assert server.of("POST", "/v1/tokens")[0].json["sandbox_id"] == "i1"
    with pytest.raises(Forbidden):
        await done(client.tokens.create(rights=("*",)))
    server.on("GET", "/v1/tokens", Answer(200, {"tokens": [{"token_id": "t1"}]}))
    assert await done(client.tokens.list()) == [TokenInfo(token_id="t1")]


async def test_the_log_is_read_to_its_end_and_checked(client: Any, server: FakeServer) -> None:
    lines = [*entries(4), {"done": {"entries": 4}}]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    server.on("GET", "/v1/audit/export", Answer(raw=[text[:500], text[500:]]))
    found = await collect(client.audit.entries(object="i1", since=5.5))
    asked = server.of("GET", "/v1/audit/export")[0].query
    assert asked == {"object": ["i1"], "since": ["5.5"], "after": ["0"]}
    verdict = verify_audit(found)
    assert (verdict.ok, verdict.entries, verdict.head_hash) == (True, 4, found[-1].hash)
    server.on("GET", "/v1/audit/verify", Answer(200, {"ok": False, "fault": "entry 2"}))
    assert (await done(client.audit.verify())).fault == "entry 2"


def test_what_was_changed_shows() -> None:
    chain = [msgspec.convert(entry, AuditEntry) for entry in entries(5)]
    assert verify_audit(chain).ok
    assert verify_audit([]).entries == 0
    changed = msgspec.structs.replace(chain[2], outcome="forbidden")
    assert verify_audit([*chain[:2], changed, *chain[3:]]).fault == (
        "entry 3 was changed, or one before it"
    )
    assert verify_audit([*chain[:2], *chain[3:]]).fault == "entry 3 is missing"
    assert verify_audit(chain[1:]).fault == "entry 1 is missing"
    assert verify_audit([chain[0], chain[0]]).fault == "entry 2 is missing"

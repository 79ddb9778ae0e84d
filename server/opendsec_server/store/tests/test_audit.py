# SPDX-License-Identifier: AGPL-3.0-only
"""The audit log's chain, and what a credential is worth, in each database."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
import sqlalchemy as sa

from opendsec_server.contract.errors import Conflict
from opendsec_server.store import accounts, audit, principals, projects
from opendsec_server.store.audit import FIRST_HASH, AuditFilter, Call, first_fault
from opendsec_server.store.principals import Grant, Principal, Token
from opendsec_server.store.store import Store
from opendsec_server.store.tables import AUDIT

from .test_queries import DATABASES, empty, key_of, store
from .test_quotas import child

__all__ = ["DATABASES", "empty", "store"]

SECRET = b"s" * 32


def call_of(number: int, **fields: object) -> Call:
    values: dict[str, object] = {
        "at": 1e9 + number / 3,
        "request_id": f"r{number}",
        "actor_kind": "key",
        "actor_id": "k1",
        "credential_id": "k1",
        "project_id": "p",
        "action": "POST /v1/sandboxes",
        "object": None,
        "outcome": "ok",
        "status": 201,
        "address": "127.0.0.1",
        **fields,
    }
    return msgspec.convert(values, Call)


async def test_entries_are_one_chain_whoever_writes(store: Store) -> None:
    await asyncio.gather(
        *(audit.append(store, [call_of(10 * n + i) for i in range(3)], SECRET) for n in range(8))
    )
    found = await audit.list_entries(store, AuditFilter(project_id=None, limit=100))
    assert [entry.seq for entry in found] == list(range(1, 25))
    assert first_fault(found, seq=0, digest=FIRST_HASH, secret=SECRET) is None
    assert first_fault(found[5:], seq=5, digest=found[4].hash, secret=SECRET) is None
    assert await audit.head(store) == (24, found[-1].hash)
    other = first_fault(found, seq=0, digest=FIRST_HASH, secret=b"x" * 32)
    assert other == "entry 1 was not written by this installation"
    for name, value in (("at", 5.0), ("actor_id", "k2"), ("object", "i1"), ("status", 200)):
        changed = [*found[:3], msgspec.structs.replace(found[3], **{name: value}), *found[4:]]
        fault = first_fault(changed, seq=0, digest=FIRST_HASH, secret=SECRET)
        assert fault == "entry 4 was changed, or one before it"
    swapped = [found[1], found[0], *found[2:]]
    assert first_fault(swapped, seq=0, digest=FIRST_HASH, secret=SECRET) == "entry 1 is missing"


async def test_filters(store: Store) -> None:
    await child(store, "a")
    await child(store, "b", "a")
    calls = [
        call_of(1, project_id="a", object="i1"),
        call_of(2, project_id="b", outcome="forbidden", actor_id="u1"),
        call_of(3, project_id=None, actor_kind="none", actor_id=None),
        call_of(4),
    ]
    await audit.append(store, calls, SECRET)

    async def seqs(**wanted: object) -> list[int]:
        values = {"project_id": None, "limit": 10, **wanted}
        found = await audit.list_entries(store, AuditFilter(**values))  # type: ignore[arg-type]
        return [entry.seq for entry in found]

    assert await seqs() == [1, 2, 3, 4]
    assert await seqs(project_id="a") == [1, 2]
    assert await seqs(project_id="p") == [1, 2, 4]
    assert await seqs(object="i1") == [1]
    assert await seqs(actor_id="u1", outcome="forbidden") == [2]
    assert await seqs(since=calls[1].at, until=calls[3].at) == [2, 3]
    assert await seqs(after=2, limit=1) == [3]
    await store.write(lambda c: c.execute(sa.delete(AUDIT)))


async def test_credentials(store: Store) -> None:
    now = time.time()
    await child(store, "a")
    await child(store, "b", "a")
    ada = Principal(principal_id="u", project_id="p", kind="person", name="ada", created_at=now)
    await principals.insert_principal(store, ada)
    with pytest.raises(Conflict):
        await principals.insert_principal(store, msgspec.structs.replace(ada, principal_id="v"))
    key = msgspec.structs.replace(key_of("ku"), principal_id="u", project_id="a")
    await accounts.insert_key(store, key)
    grant = Grant(
        principal_id="u",
        project_id="a",
        role="viewer",
        rights=["tasks:write"],
        granted_by="k1",
        created_at=now,
    )
    await principals.put_grant(store, grant)
    await principals.put_grant(store, msgspec.structs.replace(grant, role="agent"))
    token = Token(
        token_id="t",
        sha256="t",
        project_id="a",
        name="t",
        principal_id="u",
        key_id="ku",
        parent_id=None,
        rights=["sandboxes:read"],
        projects=["a"],
        sandbox_id=None,
        created_at=now,
        expires_at=now + 60,
    )
    await principals.insert_token(store, token)
    below = msgspec.structs.replace(token, token_id="t2", sha256="t2", parent_id="t")
    await principals.insert_token(store, below)
    found = await principals.find_credential(store, "t", "b", now=now)
    assert found is not None and found.project is not None
    assert found.token == token
    assert found.line == {"p", "a", "b"}
    assert [one.role for one in found.grants] == ["agent"]
    assert found.grants[0].rights == ["tasks:write"]
    above = await principals.find_credential(store, "ku", "p", now=now)
    assert above is not None and above.grants == ()
    nowhere = await principals.find_credential(store, "ku", "nope", now=now)
    assert nowhere is not None and nowhere.project is None
    assert await principals.find_credential(store, "t", None, now=now + 61) is None
    assert await principals.find_credential(store, "x", None, now=now) is None
    await principals.set_disabled(store, "u", now)
    off = await principals.find_credential(store, "t2", None, now=now)
    assert off is not None and off.disabled
    assert len(await principals.tokens_of(store, "a", now=now, limit=10)) == 2
    assert sorted(await principals.delete_token(store, "a", "t")) == ["t", "t2"]
    assert await principals.delete_token(store, "a", "t") == []
    await principals.insert_token(store, token)
    await principals.delete_principal(store, "u")
    for gone in ("t", "ku"):
        assert await principals.find_credential(store, gone, None, now=now) is None
    tree = await projects.tree_below(store, "a", closed=False, now=now)
    assert [state.project.project_id for state in tree] == ["a", "b"]

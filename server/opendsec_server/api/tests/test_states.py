# SPDX-License-Identifier: AGPL-3.0-only
"""Pause, resume, fork and snapshots over both APIs: exact codes, shapes, headers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import httpx
import msgspec
import pytest
import pytest_asyncio

from opendsec_server.contract.errors import (
    NodeFull,
    NodeUnavailable,
    OpendsecError,
    ResumeFailed,
    SnapshotDamaged,
    SnapshotFailed,
    SnapshotIncompatible,
    StateConflict,
)
from opendsec_server.contract.states import State
from opendsec_server.control.tests.fake_node import FakeNode

from .harness import Plane, running_plane
from .test_e2b import check, check_error
from .test_e2b import make as make_e2b
from .test_native import TIME_RE
from .test_native import make as make_native


@pytest_asyncio.fixture
async def plane(state_dir: Path) -> AsyncIterator[Plane]:
    async with running_plane(state_dir, FakeNode(microvm="tcg")) as running:
        yield running


async def make_vm(http: httpx.AsyncClient) -> str:
    return str((await make_native(http, backend="microvm"))["sandbox_id"])


# --- native ---------------------------------------------------------------------


async def test_native_pause_and_resume(http: httpx.AsyncClient, plane: Plane) -> None:
    made = await make_native(
        http, timeout_s=60, on_timeout="pause", pause_mode="filesystem", backend="microvm"
    )
    name = made["sandbox_id"]
    assert (made["backend"], made["accelerator"], made["vmm"]) == ("microvm", "tcg", "qemu 7.2")
    assert (made["on_timeout"], made["pause_mode"], made["auto_resume"]) == (
        "pause",
        "filesystem",
        False,
    )
    assert (made["paused_mode"], made["snapshot_id"], made["timeout_s"]) == (None, None, 60)
    paused = await http.post(f"/v1/sandboxes/{name}/pause")
    assert paused.status_code == 200
    shown = paused.json()
    assert (shown["state"], shown["paused_mode"], shown["end_at"]) == ("paused", "full", None)
    assert shown["pause"] == {
        "took_s": 0.1,
        "memory_before_bytes": 1 << 28,
        "memory_freed_bytes": 1 << 27,
        "stored_bytes": 1 << 20,
    }
    again = await http.post(f"/v1/sandboxes/{name}/pause", json={"mode": "full"})
    assert again.status_code == 409
    error = again.json()["error"]
    assert (error["code"], error["fault"], error["retryable"]) == ("already_paused", "user", False)
    assert error["remediation"]
    for method, path, body in (
        ("POST", "timeout", {"timeout_s": 5}),
        ("PUT", "network", {}),
    ):
        refused = await http.request(method, f"/v1/sandboxes/{name}/{path}", json=body)
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "sandbox_state_conflict"
    (listed,) = (await http.get("/v1/sandboxes?state=paused")).json()["sandboxes"]
    assert (listed["sandbox_id"], listed["end_at"]) == (name, None)
    resumed = await http.post(f"/v1/sandboxes/{name}/resume", json={"timeout_s": 500})
    assert resumed.status_code == 200
    assert (resumed.json()["state"], resumed.json()["paused_mode"]) == ("running", None)
    assert resumed.json()["access_token"] == made["access_token"], "it is stable over pauses"
    same = await http.post(f"/v1/sandboxes/{name}/resume")
    assert same.json()["end_at"] == resumed.json()["end_at"], "never shortened"
    await http.post(f"/v1/sandboxes/{name}/pause", json={"mode": "filesystem"})
    rebooted = await http.post(f"/v1/sandboxes/{name}/resume", json={"reboot": True})
    assert rebooted.json()["state"] == "running"
    await http.post(f"/v1/sandboxes/{name}/pause")
    assert (await http.post(f"/v1/sandboxes/{name}/connect")).json()["state"] == "running"


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (NodeFull("x"), 503),
        (ResumeFailed("x"), 500),
        (SnapshotDamaged("x"), 500),
        (SnapshotIncompatible("x"), 409),
        (NodeUnavailable("x"), 503),
    ],
)
async def test_native_resume_fails(
    http: httpx.AsyncClient, plane: Plane, failure: OpendsecError, status: int
) -> None:
    name = (await make_native(http))["sandbox_id"]
    await http.post(f"/v1/sandboxes/{name}/pause")
    plane.node.fail["resume"] = failure
    refused = await http.post(f"/v1/sandboxes/{name}/resume")
    assert refused.status_code == status
    error = refused.json()["error"]
    assert error["code"] == failure.code
    assert error["fault"] in ("platform", "capacity")
    assert (await http.get(f"/v1/sandboxes/{name}")).json()["state"] == "paused"


async def test_native_fork(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make_vm(http)
    headers = {"Idempotency-Key": "fork-1"}
    body = {"count": 3, "timeout_s": 60, "metadata": {"a": "b"}, "labels": ["x"]}
    plane.node.fail_children = {1: NodeFull("no slot")}
    forked = await http.post(f"/v1/sandboxes/{name}/fork", json=body, headers=headers)
    assert forked.status_code == 201
    items = forked.json()["items"]
    assert [list(item) for item in items] == [["sandbox"], ["error"], ["sandbox"]]
    child = items[0]["sandbox"]
    assert (child["metadata"], child["labels"], child["state"]) == ({"a": "b"}, ["x"], "running")
    assert child["access_token"] == plane.services.mint.access(child["sandbox_id"])
    assert items[1]["error"]["code"] == "node_full"
    assert items[1]["error"]["remediation"]
    again = await http.post(f"/v1/sandboxes/{name}/fork", json=body, headers=headers)
    assert again.headers["Idempotent-Replay"] == "true"
    replayed = again.json()["items"]
    assert replayed[0]["sandbox"] == child
    assert replayed[1]["error"]["message"] == "no slot"
    other = await http.post(f"/v1/sandboxes/{name}/fork", json={}, headers=headers)
    assert other.json()["error"]["code"] == "idempotency_request_mismatch"
    for bad in ({"count": 0}, {"count": 101}, {"count": "2"}, {"mode": "x"}, {"timeout_s": 0}):
        refused = await http.post(f"/v1/sandboxes/{name}/fork", json=bad)
        assert refused.status_code == 400
    assert (await http.post("/v1/sandboxes/iunknown/fork")).status_code == 404


async def test_native_memory_of_containers(http: httpx.AsyncClient) -> None:
    name = (await make_native(http, backend="container"))["sandbox_id"]
    for action in ("fork", "snapshots"):
        refused = await http.post(f"/v1/sandboxes/{name}/{action}")
        assert refused.status_code == 501
        error = refused.json()["error"]
        assert error["code"] == "not_supported"
        assert "filesystem" in error["remediation"]
        disk = await http.post(f"/v1/sandboxes/{name}/{action}", json={"mode": "filesystem"})
        assert disk.status_code == 201


async def test_native_snapshots(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make_vm(http)
    headers = {"Idempotency-Key": "snap"}
    body = {"name": "warm:v1"}
    taken = await http.post(f"/v1/sandboxes/{name}/snapshots", json=body, headers=headers)
    assert taken.status_code == 201
    shown = taken.json()
    assert TIME_RE.fullmatch(shown.pop("created_at"))
    snapshot_id = shown.pop("id")
    assert shown.pop("template_id")
    assert shown == {
        "project_id": plane.services.iam._cache.popitem()[1].caller.project_id,
        "name": "warm:v1",
        "names": ["warm:v1"],
        "source_id": name,
        "backend": "microvm",
        "mode": "full",
        "template": "base",
        "cpu": 2.0,
        "memory_mb": 1024,
        "disk_mb": 10240,
        "disk_bytes": 4096,
        "memory_bytes": 1 << 20,
        "versions": {"vmm": "qemu 7.2"},
    }
    again = await http.post(f"/v1/sandboxes/{name}/snapshots", json=body, headers=headers)
    assert again.headers["Idempotent-Replay"] == "true"
    assert again.json()["id"] == snapshot_id
    second = (await http.post(f"/v1/sandboxes/{name}/snapshots")).json()
    for reference in (snapshot_id, "warm:v1", quote("warm:v1", safe="")):
        assert (await http.get(f"/v1/snapshots/{reference}")).json() == taken.json()
    page = (await http.get("/v1/snapshots?limit=1")).json()
    assert [s["id"] for s in page["snapshots"]] == [second["id"]]
    rest = (await http.get(f"/v1/snapshots?limit=1&cursor={page['next_cursor']}")).json()
    assert [s["id"] for s in rest["snapshots"]] == [snapshot_id]
    assert rest["next_cursor"] is None
    for query, count in (
        (f"sandbox_id={name}", 2),
        ("sandbox_id=other", 0),
        ("name=warm", 1),
        ("name=warm:v2", 0),
        (f"name={second['id']}", 1),
        ("name=other/warm", 0),
    ):
        found = (await http.get(f"/v1/snapshots?{query}")).json()["snapshots"]
        assert len(found) == count, query
    for bad in ("limit=0", "cursor=x", "name=A B"):
        assert (await http.get(f"/v1/snapshots?{bad}")).status_code == 400
    child = await make_native(http, template="warm:v1")
    assert (child["snapshot_id"], child["backend"]) == (snapshot_id, "microvm")
    (listed,) = (await http.get("/v1/sandboxes?template=warm:v1")).json()["sandboxes"]
    assert listed["sandbox_id"] == child["sandbox_id"]
    for path in ("base", "Bad Name"):
        wrong = await http.post(f"/v1/sandboxes/{name}/snapshots", json={"name": path})
        assert wrong.status_code == (409 if path == "base" else 400)
    assert (await http.delete("/v1/snapshots/warm:v1")).status_code == 204
    gone = await http.delete("/v1/snapshots/warm:v1")
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "snapshot_not_found"
    assert (await http.get(f"/v1/snapshots/{snapshot_id}")).status_code == 404
    assert (await http.post("/v1/sandboxes", json={"template": "warm:v1"})).status_code == 404
    assert (await http.get(f"/v1/sandboxes/{child['sandbox_id']}")).json()["state"] == "running"


async def test_native_failures_of_saving(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make_vm(http)
    for failure, status in (
        (SnapshotFailed("disk full"), 500),
        (NodeFull("disk full"), 503),
        (StateConflict("ending"), 409),
    ):
        plane.node.fail["snapshot"] = failure
        for action in ("fork", "snapshots"):
            refused = await http.post(f"/v1/sandboxes/{name}/{action}")
            assert refused.status_code == status
            assert refused.json()["error"]["code"] == failure.code
    assert (await http.get(f"/v1/sandboxes/{name}")).json()["state"] == "running"


# --- E2B ------------------------------------------------------------------------


async def test_e2b_lifecycle_is_echoed(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make_e2b(http, autoPause=True, autoResume={"enabled": True})
    detail = (await http.get(f"/sandboxes/{name}")).json()
    assert detail["lifecycle"] == {"autoResume": True, "onTimeout": "pause"}
    assert "pauseMode" not in detail
    disk = await make_e2b(http, autoPause=True, autoPauseMemory=False)
    assert plane.node.specs[disk].pause_mode == "filesystem"
    # The end of its time: what was asked for happens at once.
    assert (await http.post(f"/sandboxes/{disk}/timeout", json={"timeout": 0})).status_code == 204
    await plane.node.settled()
    await plane.services.watcher.reconcile()
    detail = (await http.get(f"/sandboxes/{disk}")).json()
    check("SandboxDetail", detail)
    assert (detail["state"], detail["pauseMode"]) == ("paused", "filesystem")


async def test_e2b_pause_connect_resume(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make_e2b(http)
    token = (await http.get(f"/sandboxes/{name}")).json()["envdAccessToken"]
    for body in ({}, {"memory": True, "requireHealthyGuest": True}, {"memory": False}):
        paused = await http.post(f"/sandboxes/{name}/pause", json=body)
        assert (paused.status_code, paused.content) == (204, b"")
        again = await http.post(f"/sandboxes/{name}/pause", json=body)
        check_error(again, 409, "already_paused")
        assert again.json()["message"] == (
            f"Error pausing sandbox - sandbox '{name}' is already paused"
        )
        detail = (await http.get(f"/sandboxes/{name}")).json()
        check("SandboxDetail", detail)
        wanted = "filesystem" if body.get("memory") is False else "full"
        assert (detail["state"], detail["pauseMode"]) == ("paused", wanted)
        for state, count in (("paused", 1), ("running", 0), ("running,paused", 1)):
            listed = await http.get(f"/v2/sandboxes?state={state}")
            check("ListedSandbox", listed.json(), many=True)
            assert len(listed.json()) == count
            assert listed.headers["x-total-running"] == "0"
        assert (await http.get("/sandboxes")).json() == [], "v1 lists what runs"
        check_error(await http.post(f"/sandboxes/{name}/timeout", json={"timeout": 5}), 404)
        check_error(await http.post(f"/sandboxes/{name}/refreshes", json={}), 404)
        check_error(await http.put(f"/sandboxes/{name}/network", json={}), 409)
        assert (await http.get(f"/sandboxes/{name}/metrics")).status_code == 200
        connected = await http.post(f"/v2/sandboxes/{name}/connect", json={})
        assert connected.status_code == 201
        check("Sandbox", connected.json())
        assert connected.json()["envdAccessToken"] == token
        assert (await http.post(f"/v2/sandboxes/{name}/connect", json={})).status_code == 200
    await http.post(f"/sandboxes/{name}/pause")
    v1 = await http.post(f"/sandboxes/{name}/connect", json={"timeout": 9, "memory": False})
    assert v1.status_code == 201
    await http.post(f"/sandboxes/{name}/pause")
    resumed = await http.post(f"/sandboxes/{name}/resume", json={"timeout": 30})
    assert resumed.status_code == 201
    check("Sandbox", resumed.json())
    check_error(await http.post(f"/sandboxes/{name}/resume", json={}), 409)
    check_error(await http.post(f"/sandboxes/{name}/resume", json={"timeout": -1}), 400)
    await http.post(f"/sandboxes/{name}/pause")
    assert (await http.delete(f"/sandboxes/{name}")).status_code == 204
    for action in ("pause", "resume", "fork", "snapshots", "connect"):
        gone = await http.post(f"/sandboxes/{name}/{action}", json={"timeout": 5})
        check_error(gone, 404, "sandbox_not_found")


async def test_e2b_what_is_ending_is_gone(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make_e2b(http)
    status = plane.node.statuses[name]
    plane.node.statuses[name] = msgspec.structs.replace(status, state=State.STOPPING)
    for action in ("pause", "resume", "fork", "snapshots", "connect"):
        gone = await http.post(f"/sandboxes/{name}/{action}", json={"timeout": 5})
        check_error(gone, 404, "sandbox_not_found")


async def test_e2b_fork(http: httpx.AsyncClient, plane: Plane) -> None:
    container, vm = await make_e2b(http), await make_vm(http)
    for name, mode in ((container, "filesystem"), (vm, None)):
        forked = await http.post(f"/sandboxes/{name}/fork", json={"count": 2, "timeout": 60})
        assert forked.status_code == 201
        assert forked.headers.get("X-Opendsec-Fork-Mode") == mode
        check("SandboxForkResult", forked.json(), many=True)
        ids = [result["sandbox"]["sandboxID"] for result in forked.json()]
        assert len({*ids, name}) == 3
        assert {plane.node.specs[made].snapshot_id for made in ids}
    plane.node.fail_children = {5: NodeFull("no slot")}
    (single,) = (await http.post(f"/sandboxes/{vm}/fork")).json()
    assert "sandbox" in single
    (failed,) = (await http.post(f"/sandboxes/{vm}/fork", json={})).json()
    check("SandboxForkResult", failed)
    assert failed["error"] == {
        "code": 503,
        "message": "no slot",
        "error_code": "sandbox_capacity_unavailable",
    }
    for bad in ({"count": 0}, {"count": 101}, {"timeout": -1}, {"count": "x"}):
        check_error(await http.post(f"/sandboxes/{vm}/fork", json=bad), 400)
    await http.post(f"/sandboxes/{vm}/pause")
    paused = await http.post(f"/sandboxes/{vm}/fork")
    check_error(paused, 409, "sandbox_state_conflict")
    assert paused.json()["message"] == (
        f"Sandbox '{vm}' is paused and cannot be forked; resume it first"
    )


async def test_e2b_forks_are_not_repeated_blindly(http: httpx.AsyncClient, plane: Plane) -> None:
    name = await make_e2b(http)
    plane.node.lose_answer["snapshot"] = NodeUnavailable("gone")
    for action in ("fork", "snapshots"):
        lost = await http.post(f"/sandboxes/{name}/{action}", json={})
        check_error(lost, 503)
        assert lost.headers["Should-Retry"] == "false"


async def test_e2b_snapshots(http: httpx.AsyncClient, plane: Plane) -> None:
    container, vm = await make_e2b(http), await make_vm(http)
    named = await http.post(f"/sandboxes/{vm}/snapshots", json={"name": "warm:v1"})
    assert named.status_code == 201
    assert "X-Opendsec-Snapshot-Mode" not in named.headers
    check("SnapshotInfo", named.json())
    scope, _, rest = named.json()["snapshotID"].partition("/")
    assert (rest, named.json()["names"]) == ("warm:v1", [f"{scope}/warm"])
    unnamed = await http.post(f"/sandboxes/{container}/snapshots", json={})
    assert unnamed.headers["X-Opendsec-Snapshot-Mode"] == "filesystem"
    assert unnamed.json()["names"] == []
    assert unnamed.json()["snapshotID"].endswith(":default")
    disk = await http.post(f"/sandboxes/{vm}/snapshots", json={"memory": False})
    assert "X-Opendsec-Snapshot-Mode" not in disk.headers, "as it was asked for"
    assert [s.mode for s in plane.node.saved.values()] == ["full", "filesystem", "filesystem"]
    check_error(await http.post(f"/sandboxes/{vm}/snapshots", json={"name": "A B"}), 400)
    check_error(await http.post(f"/sandboxes/{vm}/snapshots", json={"name": "x/y"}), 400)

    first = await http.get("/snapshots?limit=2")
    check("SnapshotInfo", first.json(), many=True)
    assert first.json() == [disk.json(), unnamed.json()]
    token = first.headers["X-Next-Token"]
    second = await http.get(f"/snapshots?limit=2&nextToken={token}")
    assert second.json() == [named.json()]
    assert "X-Next-Token" not in second.headers
    for query, count in ((f"sandboxID={vm}", 2), ("name=warm", 1), (f"name={scope}/warm:v1", 1)):
        assert len((await http.get(f"/snapshots?{query}")).json()) == count
    check_error(await http.get("/snapshots?limit=1000"), 400)

    for shown in (named.json(), unnamed.json()):
        made = await make_e2b(http, templateID=shown["snapshotID"])
        source = plane.node.saved[str(plane.node.specs[made].snapshot_id)].source_id
        assert source in (vm, container)
    detail = (await http.get(f"/sandboxes/{made}")).json()
    assert detail["templateID"] == unnamed.json()["snapshotID"].partition(":")[0]
    alias = await http.get("/templates/aliases/" + quote(named.json()["snapshotID"], safe=""))
    check("TemplateAliasResponse", alias.json())
    assert alias.json()["public"] is False

    for shown in (named.json(), unnamed.json()):
        path = "/templates/" + quote(shown["snapshotID"], safe="")
        assert (await http.delete(path)).status_code == 204
        check_error(await http.delete(path), 404, "snapshot_not_found")
    check_error(await http.delete("/templates/nope"), 404)
    check_error(await http.delete("/templates/A%20B"), 404)
    check_error(await http.delete("/templates/base"), 403, "forbidden")
    body = {"templateID": named.json()["snapshotID"]}
    check_error(await http.post("/v2/sandboxes", json=body), 404, "template_not_found")


async def test_e2b_forks_of_containers_can_be_refused(state_dir: Path) -> None:
    async with running_plane(state_dir) as plane:
        services = plane.services
        services.config = msgspec.structs.replace(services.config, e2b_fork_of_containers="refuse")
        async with httpx.AsyncClient(base_url=plane.url, headers=plane.headers) as http:
            name = await make_e2b(http)
            for action in ("fork", "snapshots"):
                refused = await http.post(f"/sandboxes/{name}/{action}", json={})
                check_error(refused, 501, "not_supported")
            disk = await http.post(f"/sandboxes/{name}/snapshots", json={"memory": False})
            assert disk.status_code == 201
            assert (await http.post(f"/sandboxes/{name}/pause")).status_code == 204


async def test_every_route_asks_who_it_is(plane: Plane, http: httpx.AsyncClient) -> None:
    name = await make_e2b(http)
    calls = [
        (method, path)
        for method, path in (
            ("POST", "/v1/sandboxes/{id}/pause"), ("POST", "/v1/sandboxes/{id}/resume"),
            ("POST", "/v1/sandboxes/{id}/fork"), ("POST", "/v1/sandboxes/{id}/snapshots"),
            ("GET", "/v1/snapshots"), ("GET", "/v1/snapshots/x"), ("DELETE", "/v1/snapshots/x"),
            ("POST", "/sandboxes/{id}/pause"), ("POST", "/sandboxes/{id}/resume"),
            ("POST", "/sandboxes/{id}/fork"), ("POST", "/sandboxes/{id}/snapshots"),
            ("GET", "/snapshots"), ("DELETE", "/templates/x"),
        )
    ]  # fmt: skip
    async with httpx.AsyncClient(base_url=plane.url) as anyone:
        for method, path in calls:
            refused = await anyone.request(method, path.replace("{id}", name))
            assert refused.status_code == 401, path
    assert plane.node.calls == []

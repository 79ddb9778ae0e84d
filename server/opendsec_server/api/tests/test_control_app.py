# SPDX-License-Identifier: AGPL-3.0-only
"""What the edge asks on the control socket."""

from __future__ import annotations

import asyncio
import json

import httpx

from opendsec_server.api.control_app import build_control_app
from opendsec_server.contract.signatures import file_signature
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.tests.store_faults import broken_store

from .harness import Plane, serving


async def test_routes_and_invalidations(plane: Plane, http: httpx.AsyncClient) -> None:
    made = (await http.post("/v1/sandboxes", json={})).json()
    name = made["sandbox_id"]
    async with (
        serving(build_control_app(plane.services)) as url,
        httpx.AsyncClient(base_url=url, timeout=5) as edge,
        edge.stream("GET", "/invalidations") as stream,
    ):
        assert stream.headers["Content-Type"].startswith("application/x-ndjson")
        lines = stream.aiter_lines()
        assert json.loads(await anext(lines)) == {"event": "hello"}

        found = (await edge.get(f"/routes/{name}")).json()
        assert found == {
            "sandbox_id": name,
            "state": "running",
            "address": "10.201.0.5",
            "agent_port": 49983,
            "control_token": plane.services.mint.control(name),
            "traffic_token": made["traffic_token"],
            "allow_public_traffic": True,
            "mask_request_host": None,
            "https_ports": [],
        }
        with broken_store(plane.services):
            assert (await edge.get(f"/routes/{name}")).status_code == 200
        for unknown in ("iunknown", "i" + "a" * 19, "%00", "..%2f"):
            missing = await edge.get(f"/routes/{unknown}")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "sandbox_not_found"

        query = {"path": "/a", "operation": "read"}
        signature = file_signature("/a", "read", "", made["access_token"], None)
        signed = await edge.get("/routes/by-signature", params=query | {"signature": signature})
        assert signed.json()["sandbox_id"] == name
        wrong = await edge.get("/routes/by-signature", params=query | {"signature": "x"})
        assert wrong.status_code == 404
        assert (await edge.get("/routes/by-signature", params=query)).status_code == 400

        await http.post(f"/v1/sandboxes/{name}/pause")
        paused = await edge.get(f"/routes/{name}?port=80")
        assert paused.status_code == 409
        assert paused.json()["error"]["code"] == "sandbox_state_conflict"
        assert paused.json()["error"]["details"] == {"state": "paused"}
        async with asyncio.timeout(5):
            assert json.loads(await anext(lines)) == {"event": "invalidate", "sandbox_id": name}
        await http.post(f"/v1/sandboxes/{name}/resume")
        assert (await edge.get(f"/routes/{name}")).status_code == 200
        async with asyncio.timeout(5):
            assert json.loads(await anext(lines)) == {"event": "invalidate", "sandbox_id": name}
        assert (await edge.get(f"/routes/{name}?port=x")).status_code == 400
        await asyncio.sleep(0.05)

        plane.node.end(name, EndReason.TIMEOUT)
        async with asyncio.timeout(5):
            assert json.loads(await anext(lines)) == {"event": "invalidate", "sandbox_id": name}
        assert (await edge.get(f"/routes/{name}")).status_code == 404
        plane.services.invalidations.close()
        async with asyncio.timeout(5):
            rest = {line async for line in lines if "ping" not in line}
            assert rest <= {f'{{"event":"invalidate","sandbox_id":"{name}"}}'}


async def test_control_paths_are_not_public(http: httpx.AsyncClient) -> None:
    for path in ("/routes/x", "/routes/by-signature", "/invalidations"):
        assert (await http.get(path)).status_code == 404


async def test_traffic_wakes(plane: Plane, http: httpx.AsyncClient) -> None:
    body = {"auto_resume": True, "network": {"allow_public_traffic": False}}
    made = (await http.post("/v1/sandboxes", json=body)).json()
    name, access, traffic = made["sandbox_id"], made["access_token"], made["traffic_token"]
    async with (
        serving(build_control_app(plane.services)) as url,
        httpx.AsyncClient(base_url=url, timeout=5) as edge,
    ):
        await http.post(f"/v1/sandboxes/{name}/pause")
        for port, headers, status, code in (
            (49983, {}, 401, "unauthenticated"),
            (49983, {"X-Opendsec-Access-Token": traffic}, 401, "unauthenticated"),
            (8000, {}, 403, "forbidden"),
            (8000, {"X-Opendsec-Traffic-Token": access}, 403, "forbidden"),
        ):
            refused = await edge.get(f"/routes/{name}?port={port}", headers=headers)
            assert refused.status_code == status
            assert refused.json()["error"]["code"] == code
        assert plane.node.statuses[name].state is State.PAUSED
        for port, headers in (
            (49983, {"X-Opendsec-Access-Token": access}),
            (8000, {"X-Opendsec-Traffic-Token": traffic}),
        ):
            found = await edge.get(f"/routes/{name}?port={port}", headers=headers)
            assert found.json()["sandbox_id"] == name
            await http.post(f"/v1/sandboxes/{name}/pause")
        signed = {
            "path": "/a",
            "operation": "write",
            "username": "user",
            "signature": file_signature("/a", "write", "user", access, None),
        }
        found = await edge.get("/routes/by-signature", params=signed)
        assert found.json()["sandbox_id"] == name
        await http.post(f"/v1/sandboxes/{name}/pause", json={"mode": "filesystem"})
        asleep = await edge.get(
            f"/routes/{name}?port=49983", headers={"X-Opendsec-Access-Token": access}
        )
        assert asleep.status_code == 409

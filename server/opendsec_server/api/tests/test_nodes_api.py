# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/nodes``, and what creates ask of nodes."""

from __future__ import annotations

import httpx
import pytest

from opendsec_server.control.tests.fake_node import NODE_ID

from .harness import Plane
from .test_images_api import second_project


async def test_operators_list_label_and_drain_nodes(http: httpx.AsyncClient, plane: Plane) -> None:
    listed = (await http.get("/v1/nodes")).json()["nodes"]
    assert [(n["node_id"], n["name"], n["health"]) for n in listed] == [(NODE_ID, "local", "up")]
    marked = await http.request("PATCH", f"/v1/nodes/{NODE_ID}", json={"labels": {"zone": "a"}})
    assert marked.status_code == 200
    assert plane.node.labels == {"zone": "a"}
    body = {"template": "base", "node_labels": {"zone": "a"}}
    assert (await http.post("/v1/sandboxes", json=body)).status_code == 201
    body["node_labels"] = {"zone": "b"}
    refused = await http.post("/v1/sandboxes", json=body)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "node_full"
    assert refused.json()["error"]["details"] == {"labels": {"zone": "b"}}
    drained = await http.request("PATCH", "/v1/nodes/local", json={"draining": True})
    assert drained.json()["draining"] is True and drained.json()["labels"] == {"zone": "a"}
    assert (await http.post("/v1/sandboxes", json={})).json()["error"]["code"] == "node_full"
    await http.request("PATCH", "/v1/nodes/local", json={"draining": False})
    assert (await http.post("/v1/sandboxes", json={})).status_code == 201
    assert plane.node.created == 2


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"draining": "maybe"}, 400),
        ({"labels": ["zone"]}, 400),
        ({"labels": {"zone": 5}}, 400),
        ({"unknown": 1}, 400),
        ([], 400),
    ],
)
async def test_bad_marks_change_nothing(
    http: httpx.AsyncClient, plane: Plane, body: object, status: int
) -> None:
    answer = await http.request("PATCH", f"/v1/nodes/{NODE_ID}", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == "invalid_request"
    assert (plane.node.labels, plane.node.draining) == ({}, False)


async def test_nodes_that_are_there_are_not_forgotten_and_unknown_ones_are_not_found(
    http: httpx.AsyncClient,
) -> None:
    assert (await http.post(f"/v1/nodes/{NODE_ID}/forget")).status_code == 409
    for name in ("nope", "%00", "..%2Finfo"):
        assert (await http.get(f"/v1/nodes/{name}")).status_code == 404
        assert (await http.post(f"/v1/nodes/{name}/forget")).status_code == 404


async def test_other_projects_do_not_see_them(http: httpx.AsyncClient, plane: Plane) -> None:
    _, headers = await second_project(plane)
    for method, path, body in (
        ("GET", "/v1/nodes", None),
        ("GET", f"/v1/nodes/{NODE_ID}", None),
        ("GET", "/v1/nodes/nope", None),
        ("PATCH", f"/v1/nodes/{NODE_ID}", {"draining": True}),
        ("POST", f"/v1/nodes/{NODE_ID}/forget", None),
    ):
        answer = await http.request(method, path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert not plane.node.draining


async def test_how_many_nodes_are_up_is_measured(http: httpx.AsyncClient) -> None:
    assert 'opendsec_nodes{health="up"} 1.0' in (await http.get("/metrics")).text

# SPDX-License-Identifier: AGPL-3.0-only
"""Full virtual machines in the API: what a create may ask for, and who may look at a console."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from opendsec_server.api.control_app import build_control_app
from opendsec_server.contract.node import VmDisk, VmOptions
from opendsec_server.control.templates import TemplateDefinition

from .harness import Plane, serving

USER_DATA = "#cloud-config\nruncmd: [[touch, /a]]\n"


async def test_options_reach_the_node(plane: Plane, http: httpx.AsyncClient) -> None:
    await plane.services.templates.register(TemplateDefinition(name="debian", image="debian"))
    body = {
        "template": "debian",
        "vm": {
            "firmware": "uefi",
            "disks": [{"size_mb": 10}, {"image": "data"}],
            "user_data": USER_DATA,
            "devices": ["0000:65:00.0"],
        },
    }
    made = await http.post("/v1/sandboxes", json=body)
    assert made.status_code == 201, made.text
    spec = plane.node.specs[made.json()["sandbox_id"]]
    assert spec.vm == VmOptions(
        firmware="uefi",
        disks=(VmDisk(size_mb=10), VmDisk(image="data")),
        user_data=USER_DATA,
        devices=("0000:65:00.0",),
    )


@pytest.mark.parametrize(
    ("vm", "field"),
    [
        ({"firmware": "floppy"}, "firmware"),
        ({"disks": [{}]}, "size_mb"),
        ({"disks": [{"size_mb": 1}] * 9}, "disks"),
        ({"disks": [{"size_mb": 0}]}, "size_mb"),
        ({"user_data": "hello"}, "user_data"),
        ({"user_data": "#!/bin/sh\n" + "ü" * 40_000}, "user_data"),
        ({"user_data": "#!/bin/sh\0"}, "user_data"),
        ({"devices": ["65:00.0"]}, "devices"),
        ({"unknown": 1}, "unknown"),
    ],
)
async def test_what_makes_no_sense(http: httpx.AsyncClient, vm: dict[str, Any], field: str) -> None:
    answer = await http.post("/v1/sandboxes", json={"vm": vm})
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


async def test_a_console_needs_the_sandboxs_token(plane: Plane, http: httpx.AsyncClient) -> None:
    made = (await http.post("/v1/sandboxes", json={})).json()
    path = f"/consoles/{made['sandbox_id']}"
    right = {"X-Opendsec-Access-Token": made["access_token"]}
    async with (
        serving(build_control_app(plane.services)) as url,
        httpx.AsyncClient(base_url=url, timeout=5) as edge,
    ):
        for headers in ({}, {"X-Opendsec-Access-Token": "wrong"}):
            refused = await edge.get(path, params={"kind": "vnc"}, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "unauthenticated"
        # Containers have none.
        none = await edge.get(path, params={"kind": "vnc"}, headers=right)
        assert none.json()["error"]["code"] == "not_supported"
        assert (await edge.get(path, params={"kind": "x"}, headers=right)).status_code == 400
    read = await http.get(f"/v1/sandboxes/{made['sandbox_id']}/console")
    assert read.status_code == 501

# SPDX-License-Identifier: AGPL-3.0-only
"""Images through the native API: who sees, pulls and removes what."""

from __future__ import annotations

import time
from urllib.parse import quote

import httpx
import pytest

from opendsec_server.contract.errors import RegistryLimited
from opendsec_server.contract.images import ImageConfig, RegistryAuth
from opendsec_server.control.iam.service import new_key
from opendsec_server.control.image_names import own_name
from opendsec_server.store import accounts
from opendsec_server.store.records import Project

from .harness import Plane


async def second_project(plane: Plane) -> tuple[str, dict[str, str]]:
    """A project beside the installation's first one; headers with its key."""
    project = Project(
        project_id="psecondproject00", name="second", sandboxes_max=10, created_at=time.time() + 1
    )
    key, secret = new_key(project.project_id, "k")
    await accounts.insert_project(plane.services.store, project, key)
    return project.project_id, {"X-API-Key": secret}


async def test_pull_look_push_remove(http: httpx.AsyncClient, plane: Plane) -> None:
    pulled = await http.post("/v1/images/pull", json={"reference": "alpine"})
    assert pulled.status_code == 200, pulled.text
    digest = pulled.json()["digest"]
    assert pulled.json()["names"] == ["docker.io/library/alpine:latest"]
    assert pulled.json()["config"]["env"] == {"A": "1"}
    assert (await http.get("/v1/images/alpine")).json() == pulled.json()
    listed = (await http.get("/v1/images")).json()["images"]
    assert digest in {image["digest"] for image in listed}
    pushed = await http.post(
        f"/v1/images/{quote(digest, safe='')}/push", json={"reference": "127.0.0.1:5000/x:1"}
    )
    assert pushed.status_code == 200
    assert plane.node.images.pushed == {"127.0.0.1:5000/x:1": digest}
    assert (await http.delete("/v1/images/alpine")).status_code == 204
    gone = await http.get("/v1/images/alpine")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "image_not_found")
    assert (await http.get("/v1/image-pulls")).json() == {"pulls": []}


async def test_errors_of_registries(http: httpx.AsyncClient, plane: Plane) -> None:
    missing = await http.post("/v1/images/pull", json={"reference": "nothing:1"})
    assert (missing.status_code, missing.json()["error"]["fault"]) == (404, "user")
    plane.node.images.offered["private"] = (
        {}, ImageConfig(), RegistryAuth(username="u", password="right-one"),
    )  # fmt: skip
    login = {"username": "u", "password": "wrong-one"}
    denied = await http.post(
        "/v1/images/pull", json={"reference": "private", "registry_auth": login}
    )
    assert (denied.status_code, denied.json()["error"]["code"]) == (403, "registry_denied")
    assert "wrong-one" not in denied.text
    login["password"] = "right-one"
    pulled = await http.post(
        "/v1/images/pull", json={"reference": "private", "registry_auth": login}
    )
    assert pulled.status_code == 200
    plane.node.images.fail_pull = RegistryLimited("too much", retry_after_s=42)
    limited = await http.post("/v1/images/pull", json={"reference": "alpine"})
    assert (limited.status_code, limited.headers["Retry-After"]) == (503, "42")


@pytest.mark.parametrize("reference", ["packed:x/y:1", "sha256:" + "0" * 64, ""])
async def test_what_cannot_be_pulled(http: httpx.AsyncClient, reference: str) -> None:
    answer = await http.post("/v1/images/pull", json={"reference": reference})
    assert answer.status_code == 400, answer.text


async def test_projects_and_their_images(http: httpx.AsyncClient, plane: Plane) -> None:
    project, headers = await second_project(plane)
    images = plane.node.images
    own = images.add({"a": "own"}, names=(own_name(project, "mine"),))
    nameless = images.add({"a": "nameless"})
    await http.post("/v1/images/pull", json={"reference": "alpine"})

    async def seen(**options: object) -> dict[str, list[str]]:
        answer = await http.get("/v1/images", **options)  # type: ignore[arg-type]
        return {image["digest"]: image["names"] for image in answer.json()["images"]}

    second = await seen(headers=headers)
    assert second[own.digest] == ["mine:latest"]
    assert nameless.digest not in second
    assert ["docker.io/library/alpine:latest"] in second.values()
    first = await seen()
    assert first[own.digest] == []
    assert nameless.digest in first
    for name in (nameless.digest, f"packed:{project}/mine:latest"):
        hidden = await http.get(f"/v1/images/{quote(name, safe='')}", headers=headers)
        assert hidden.status_code == 404

    # What everybody uses, only the installation's project may remove.
    assert (await http.delete("/v1/images/alpine", headers=headers)).status_code == 403
    assert (await http.post("/v1/images/prune", headers=headers)).status_code == 403
    assert (await http.delete("/v1/images/mine", headers=headers)).status_code == 204
    assert (await http.delete("/v1/images/alpine")).status_code == 204
    pruned = await http.post("/v1/images/prune", json={"unused_for_s": 0})
    assert nameless.digest in pruned.json()["images"]

# SPDX-License-Identifier: AGPL-3.0-only
"""``/v1/templates`` and ``/v1/builds``."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tarfile
from typing import Any

import httpx

from opendsec_server.contract.images import ImageConfig

from .harness import Plane

JSON = dict[str, Any]


def context(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def send(http: httpx.AsyncClient, build_id: str, content: bytes) -> str:
    name = hashlib.sha256(content).hexdigest()
    where = (await http.get(f"/v1/builds/{build_id}/files/{name}")).json()
    async with httpx.AsyncClient() as anyone:
        assert (await anyone.put(where["url"], content=content)).status_code == 204
    return name


async def ask(http: httpx.AsyncClient, name: str = "mine", **more: object) -> str:
    asked = await http.post("/v1/builds", json={"name": name, **more})
    assert asked.status_code == 201, asked.text
    return str(asked.json()["build_id"])


async def follow(http: httpx.AsyncClient, build_id: str) -> tuple[list[JSON], JSON]:
    """The log until its end, and the build as the last line shows it."""
    async with http.stream("GET", f"/v1/builds/{build_id}/logs") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        entries = [json.loads(line) async for line in answer.aiter_lines() if line]
    return entries[:-1], entries[-1]["build"]


async def build(http: httpx.AsyncClient, name: str = "mine", **start: object) -> JSON:
    build_id = await ask(http, name)
    started = await http.post(f"/v1/builds/{build_id}/start", json=start)
    assert started.status_code == 202, started.text
    return (await follow(http, build_id))[1]


async def test_a_dockerfile_with_context_and_stages(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.node.images.offered["app"] = ({}, ImageConfig(user="app", env={"A": "1"}), None)
    build_id = await ask(http, "mine:v1", cpu=1.5, memory_mb=512)
    text = """FROM alpine AS unused
RUN exit 1
FROM app
ARG WHAT=x
COPY *.txt /t/
RUN need /t/a.txt && env A && env WHAT && whoami
USER root
CMD ["serve"]
"""
    files = await send(http, build_id, context(**{"a.txt": "A", "b.py": "B"}))
    body = {
        "dockerfile": text, "context": files, "build_args": {"WHAT": "that"}, "start_image": True,
    }  # fmt: skip
    assert (await http.post(f"/v1/builds/{build_id}/start", json=body)).status_code == 202
    entries, done = await follow(http, build_id)
    assert done["state"] == "ready", done
    assert [e["message"] for e in entries if e["message"] in ("1", "that", "app")] == [
        "1", "that", "app",
    ]  # fmt: skip
    assert done["start_command"] == ["serve"]
    assert (done["default_user"], done["cpu"], done["memory_mb"]) == ("root", 1.5, 512)
    assert (await http.get(f"/v1/builds/{build_id}")).json() == done
    detail = (await http.get("/v1/templates/mine")).json()
    assert [t["tag"] for t in detail["tags"]] == ["v1"]
    assert [b["build_id"] for b in detail["newest_builds"]] == [build_id]
    made = await http.post("/v1/sandboxes", json={"template": "mine:v1"})
    assert made.status_code == 201
    assert plane.node.contents[made.json()["sandbox_id"]].disk["/t/a.txt"] == "A"


async def test_only_what_copies_a_changed_file_runs_again(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    text = "FROM alpine\nCOPY a /a\nRUN echo a\nCOPY b /b\nRUN echo b\n"
    for number, files in enumerate(({"a": "1", "b": "1"}, {"a": "1", "b": "2", "other": "x"})):
        build_id = await ask(http)
        name = await send(http, build_id, context(**files))
        await http.post(f"/v1/builds/{build_id}/start", json={"dockerfile": text, "context": name})
        entries, done = await follow(http, build_id)
        assert done["state"] == "ready", done
        cached = [e["message"] for e in entries if e["message"].endswith("(cached)")]
        assert len(cached) == (2 if number else 0)
    assert plane.node.commands == ["echo a", "echo b", "echo b"]


async def test_steps_tags_push_and_deletion(plane: Plane, http: httpx.AsyncClient) -> None:
    steps = [{"type": "ENV", "args": ["A", "1"]}, {"type": "RUN", "args": ["write /a 1"]}]
    done = await build(http, from_template="base", steps=steps)
    assert done["state"] == "ready"
    assigned = await http.post("/v1/templates/mine/tags", json={"tags": ["v1"]})
    assert assigned.json()["build_id"] == done["build_id"]
    assert (await http.delete("/v1/templates/mine/tags/v1")).status_code == 204
    assert (await http.delete("/v1/templates/mine/tags/v1")).status_code == 404
    assert (await http.delete("/v1/templates/mine/tags/default")).status_code == 400
    pushed = await http.post("/v1/templates/mine/push", json={"reference": "host:5000/a:1"})
    assert pushed.json() == {"digest": done["image"]}
    assert plane.node.images.pushed == {"host:5000/a:1": done["image"]}
    assert (await http.patch("/v1/templates/mine", json={"public": True})).status_code == 204
    listed = (await http.get("/v1/templates")).json()["templates"]
    assert [(t["name"], t["own"], t["public"], t["state"]) for t in listed] == [
        ("base", False, True, "ready"), ("mine", True, True, "ready"),
    ]  # fmt: skip
    assert (await http.delete("/v1/templates/base")).status_code == 403
    assert (await http.delete("/v1/templates/mine")).status_code == 204
    assert (await http.get("/v1/templates/mine")).status_code == 404
    assert (await http.get(f"/v1/builds/{done['build_id']}")).status_code == 404


async def test_a_failed_build_tells_all(http: httpx.AsyncClient) -> None:
    done = await build(http, dockerfile="FROM alpine\nRUN warn broken && exit 4")
    assert done["state"] == "error"
    assert (done["error"]["code"], done["error"]["step"]) == ("build_failed", "1")
    assert "exited with code 4" in done["error"]["message"]
    assert "broken" in done["error"]["message"]


async def test_cancel_ends_the_log_too(plane: Plane, http: httpx.AsyncClient) -> None:
    build_id = await ask(http)
    body = {"from_template": "base", "steps": [{"type": "RUN", "args": ["block"]}]}
    await http.post(f"/v1/builds/{build_id}/start", json=body)
    async with http.stream("GET", f"/v1/builds/{build_id}/logs") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        assert (await http.post(f"/v1/builds/{build_id}/cancel")).status_code == 204
        last = [line async for line in lines][-1]
    assert json.loads(last)["build"]["error"]["code"] == "build_cancelled"
    assert (await http.post(f"/v1/builds/{build_id}/cancel")).status_code == 409


async def test_starts_that_are_refused(http: httpx.AsyncClient) -> None:
    build_id = await ask(http)
    path = f"/v1/builds/{build_id}/start"
    for body in (
        {}, {"dockerfile": "FROM x", "from_image": "x"}, {"dockerfile": "RUN x"},
        {"dockerfile": "FROM x", "steps": [{"type": "RUN"}]}, {"from_image": "x", "nope": 1},
        {"from_image": "x", "start_command": "a", "start_image": True},
        {"dockerfile": "FROM x\nONBUILD RUN a"}, {"dockerfile": "FROM x\nCOPY a /a"},
    ):  # fmt: skip
        refused = await http.post(path, json=body)
        assert refused.status_code == 400, body
    refused = await http.post(path, json={"dockerfile": 'FROM x\n\nSHELL ["a"]'})
    assert refused.json()["error"]["details"]["line"] == 3
    assert (await http.get(f"/v1/builds/{build_id}")).json()["state"] == "waiting"
    for method, where in (
        ("GET", "/v1/builds/none"), ("GET", "/v1/builds/none/logs"),
        ("POST", "/v1/builds/none/cancel"), ("GET", f"/v1/builds/none/files/{'0' * 64}"),
        ("GET", "/v1/templates/none"), ("DELETE", "/v1/templates/none"),
    ):  # fmt: skip
        assert (await http.request(method, where)).status_code == 404, where
    assert (await http.get(f"/v1/builds/{build_id}/files/xyz")).status_code == 400


async def test_log_of_a_build_that_is_deleted_ends_whole(
    plane: Plane, http: httpx.AsyncClient
) -> None:
    plane.node.images.gate = asyncio.Event()
    build_id = await ask(http)
    start = {"from_image": "alpine"}
    assert (await http.post(f"/v1/builds/{build_id}/start", json=start)).status_code == 202
    async with http.stream("GET", f"/v1/builds/{build_id}/logs") as answer:
        lines = answer.aiter_lines()
        assert "FROM alpine" in await anext(lines)
        assert (await http.delete("/v1/templates/mine")).status_code == 204
        last = json.loads([line async for line in lines if line][-1])["build"]
    assert last["build_id"] == build_id
    assert (last["state"], last["error"]["code"]) == ("error", "build_cancelled")

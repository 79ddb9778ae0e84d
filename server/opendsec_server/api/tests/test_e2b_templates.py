# SPDX-License-Identifier: AGPL-3.0-only
"""E2B's calls on templates: exact status codes and shapes, and the published client on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from e2b import AsyncSandbox, AsyncTemplate, Template, wait_for_port
from e2b.exceptions import BuildException, RateLimitException, TemplateException

from opendsec_server.contract.images import ImageConfig, ReadyCheck, RegistryAuth

from .harness import Plane
from .test_e2b import check, check_error

pytestmark = pytest.mark.asyncio

HASH = "0" * 64


async def request_build(http: httpx.AsyncClient, **body: object) -> dict[str, Any]:
    answer = await http.post("/v3/templates", json=body)
    assert answer.status_code == 202, answer.text
    check("TemplateRequestResponseV3", answer.json())
    return dict(answer.json())


async def build(
    http: httpx.AsyncClient, start: dict[str, object], **body: object
) -> dict[str, Any]:
    asked = await request_build(http, **body)
    path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    started = await http.post("/v2" + path, json=start)
    assert started.status_code == 202, started.text
    async with asyncio.timeout(10):
        while True:
            answer = await http.get(path + "/status")
            assert answer.status_code == 200
            check("TemplateBuildInfo", answer.json())
            if answer.json()["status"] in ("ready", "error"):
                return dict(answer.json())
            await asyncio.sleep(0.01)


def steps(*commands: str) -> dict[str, object]:
    return {
        "fromTemplate": "base",
        "steps": [{"type": "RUN", "args": [command]} for command in commands],
    }


async def test_a_build_from_request_to_sandbox(plane: Plane, http: httpx.AsyncClient) -> None:
    done = await build(http, steps("write /a 1", "echo hello"), name="mine:v1", tags=["v2"])
    assert done["status"] == "ready"
    assert "hello" in done["logs"]
    assert {entry.get("step") for entry in done["logEntries"]} >= {"base", "1", "2"}
    made = await http.post("/v2/sandboxes", json={"templateID": "mine:v2"})
    assert made.status_code == 201
    assert plane.node.contents[made.json()["sandboxID"]].disk["/a"] == "1"

    project = (await http.get("/v1/project")).json()["project_id"]
    listed = (await http.get("/templates")).json()
    check("Template", listed, many=True)
    (mine,) = [t for t in listed if t["aliases"] == ["mine"]]
    assert mine["names"] == [f"{project}/mine"]
    assert (mine["buildStatus"], mine["buildID"]) == ("ready", done["buildID"])
    assert (mine["spawnCount"], mine["buildCount"]) == (1, 1)
    detail = await http.get("/templates/mine")
    check("TemplateWithBuilds", detail.json())
    assert [b["buildID"] for b in detail.json()["builds"]] == [done["buildID"]]
    tags = await http.get("/templates/mine/tags")
    check("TemplateTag", tags.json(), many=True)
    assert {t["tag"] for t in tags.json()} == {"v1", "v2"}
    for alias, status in (
        ("mine", 200),
        ("mine:v1", 200),
        ("mine:v9", 404),
        (f"{project}/mine", 200),
    ):
        answer = await http.get(f"/templates/aliases/{quote(alias, safe='')}")
        assert answer.status_code == status, alias


async def test_logs_are_read_from_an_offset_and_by_level(http: httpx.AsyncClient) -> None:
    many = "\n".join(f"echo {number}" for number in range(250))
    done = await build(http, steps(many, "warn careful"), name="mine")
    path = f"/templates/{done['templateID']}/builds/{done['buildID']}"
    seen: list[str] = []
    while True:
        page = (await http.get(f"{path}/status?logsOffset={len(seen)}")).json()["logEntries"]
        if not page:
            break
        assert len(page) <= 100
        seen += [entry["message"] for entry in page]
    assert [message for message in seen if message.isdigit()] == [str(n) for n in range(250)]
    assert seen[-1] == "the template is ready"
    loud = (await http.get(f"{path}/status?level=warn")).json()
    assert loud["logs"] == ["careful"]
    assert (await http.get(f"{path}/status?limit=0")).json()["logEntries"] == []
    newest = await http.get(f"{path}/logs?direction=backward&limit=1")
    check("TemplateBuildLogsResponse", newest.json())
    assert newest.json()["logs"][0]["message"] == "the template is ready"
    for query in ("limit=101", "logsOffset=-1", "level=loud", "limit=x"):
        check_error(await http.get(f"{path}/status?{query}"), 400)
    check_error(await http.get(f"{path}/logs?direction=up"), 400)


async def test_failed_build_names_step_command_and_output(http: httpx.AsyncClient) -> None:
    done = await build(http, steps("echo 1", "warn no such thing\nexit 3"), name="mine")
    assert done["status"] == "error"
    reason = done["reason"]
    assert reason["step"] == "2"
    assert "exited with code 3" in reason["message"]
    assert "no such thing" in [entry["message"] for entry in reason["logEntries"]]
    check_error(await http.post("/v2/sandboxes", json={"templateID": "mine"}), 404)
    unknown = await build(http, {"fromTemplate": "base", "steps": [{"type": "FLY"}]}, name="mine")
    assert (unknown["status"], unknown["reason"]["step"]) == ("error", "1")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"name": "a" * 300}, 400),
        ({"name": "a b"}, 400),
        ({"name": "other/a"}, 403),
        ({"name": "a", "tags": ["x y"]}, 400),
        ({"name": "a", "cpuCount": 3}, 400),
        ({"name": "a", "cpuCount": 34}, 400),
        ({"name": "a", "memoryMB": 513}, 400),
        ({"name": "a", "memoryMB": 64}, 400),
        ({"name": "a", "minFreeDiskMb": -1}, 400),
        ({"name": 5}, 400),
    ],
)
async def test_requests_that_are_refused(
    http: httpx.AsyncClient, body: dict[str, object], status: int
) -> None:
    check_error(await http.post("/v3/templates", json=body), status)


async def test_starts_that_are_refused(http: httpx.AsyncClient) -> None:
    asked = await request_build(http, name="mine", cpuCount=4, memoryMB=2048, minFreeDiskMb=20_000)
    path = f"/v2/templates/{asked['templateID']}/builds/{asked['buildID']}"
    for body in ({}, {"fromImage": "a", "fromTemplate": "b"}, {"fromImage": "a", "steps": [{}]}):
        check_error(await http.post(path, json=body), 400)
    aws = {"type": "aws", "awsAccessKeyId": "a", "awsSecretAccessKey": "b", "awsRegion": "c"}
    check_error(await http.post(path, json={"fromImage": "a", "fromImageRegistry": aws}), 501)
    nowhere = f"/v2/templates/{asked['templateID']}/builds/{'0' * 36}"
    check_error(await http.post(nowhere, json=steps()), 404, "build_not_found")
    check_error(await http.post(path.replace("mine", "x"), json={"steps": 3}), 400)
    assert (await http.post(path, json=steps())).status_code == 202
    check_error(await http.post(path, json=steps()), 409)
    detail = (await http.get("/templates/mine")).json()
    assert (detail["cpuCount"], detail["memoryMB"], detail["diskSizeMB"]) == (4, 2048, 20_000)


async def test_private_registries(plane: Plane, http: httpx.AsyncClient) -> None:
    plane.node.images.offered["private"] = (
        {}, ImageConfig(), RegistryAuth(username="u", password="p")
    )  # fmt: skip
    refused = await build(http, {"fromImage": "private"}, name="a")
    assert refused["reason"]["step"] == "base"
    login = {"type": "registry", "username": "u", "password": "p"}
    good = await build(http, {"fromImage": "private", "fromImageRegistry": login}, name="a")
    assert good["status"] == "ready"


async def test_files_are_sent_to_a_signed_address(plane: Plane, http: httpx.AsyncClient) -> None:
    await request_build(http, name="mine")
    answer = await http.get(f"/templates/mine/files/{HASH}")
    assert answer.status_code == 201
    check("TemplateBuildFileUpload", answer.json())
    assert answer.json()["present"] is False
    url = answer.json()["url"]
    assert url.startswith(plane.url)
    async with httpx.AsyncClient() as anyone:
        for wrong in (
            url.replace(HASH, "1" * 64), url[:-1], url.partition("?")[0],
            url.replace("expires=1", "expires=2"),
        ):  # fmt: skip
            assert (await anyone.put(wrong, content=b"x")).status_code == 401, wrong

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 100_000

        sent = await anyone.put(url, content=chunks(), headers={"X-Unknown": "1"})
        assert sent.status_code == 204, sent.text
        assert (await http.get(f"/templates/mine/files/{HASH}")).json()["present"] is True
        plane.services.builds.uploads.bytes_max = 1_000
        large = await anyone.put(url, content=b"x" * 2_000)
        assert large.status_code == 413
        check_error(large, 413, "payload_too_large")
    for name in ("abc", "..%2F..%2Fx", "A" * 64):
        check_error(await http.get(f"/templates/mine/files/{name}"), 400)
    check_error(await http.get(f"/templates/none/files/{HASH}"), 404)
    check_error(await http.get(f"/templates/base/files/{HASH}"), 403)


async def test_address_to_send_to_is_as_the_caller_came(http: httpx.AsyncClient) -> None:
    await request_build(http, name="mine")
    headers = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "api.example.com"}
    answer = await http.get(f"/templates/mine/files/{HASH}", headers=headers)
    parts = urlsplit(answer.json()["url"])
    assert (parts.scheme, parts.netloc) == ("https", "api.example.com")


async def test_tags_visibility_and_deletion(http: httpx.AsyncClient) -> None:
    done = await build(http, steps("echo 1"), name="mine")
    assigned = await http.post("/templates/tags", json={"target": "mine", "tags": ["a", "b"]})
    assert assigned.status_code == 201
    check("AssignedTemplateTags", assigned.json())
    assert assigned.json()["buildID"] == done["buildID"]
    remove = {"name": "mine", "tags": ["a"]}
    assert (await http.request("DELETE", "/templates/tags", json=remove)).status_code == 204
    assert {t["tag"] for t in (await http.get("/templates/mine/tags")).json()} == {"default", "b"}
    remove["tags"] = ["default"]
    check_error(await http.request("DELETE", "/templates/tags", json=remove), 400)
    check_error(await http.post("/templates/tags", json={"target": "mine", "tags": []}), 400)
    check_error(await http.post("/templates/tags", json={"target": "none", "tags": ["a"]}), 404)
    check_error(await http.get("/templates/none/tags"), 404)
    shown = await http.patch("/v2/templates/mine", json={"public": True})
    check("TemplateUpdateResponse", shown.json())
    assert (await http.get("/templates/mine")).json()["public"] is True
    assert (await http.patch("/templates/mine", json={"public": False})).status_code == 200
    assert (await http.delete("/templates/mine")).status_code == 204
    check_error(await http.delete("/templates/mine"), 404)
    check_error(await http.get("/templates/mine"), 404)


async def test_lists_are_paged(http: httpx.AsyncClient) -> None:
    for number in range(3):
        await request_build(http, name=f"t{number}")
        await request_build(http, name="t0")
    seen: list[str] = []
    token: str | None = ""
    while token is not None:
        answer = await http.get("/v2/templates", params={"limit": 2, "nextToken": token})
        check("Template", answer.json(), many=True)
        seen += [t["aliases"][0] for t in answer.json()]
        token = answer.headers.get("X-Next-Token")
    assert seen == ["t2", "t1", "t0", "base"]
    builds: list[str] = []
    token = ""
    while token is not None:
        answer = await http.get("/templates/t0", params={"limit": 3, "nextToken": token})
        builds += [b["buildID"] for b in answer.json()["builds"]]
        token = answer.headers.get("X-Next-Token")
    assert len(set(builds)) == len(builds) == 4
    check_error(await http.get("/v2/templates?nextToken=x"), 400)
    defaults = (await http.get("/default-templates")).json()
    assert [t["aliases"] for t in defaults] == [["base"]]


# --- the published client -----------------------------------------------------


@pytest.fixture
def options(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("E2B_API_URL", plane.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", plane.url)
    return {"api_key": plane.key}


async def test_async_client(plane: Plane, options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from the context")
    template = (
        AsyncTemplate(file_context_path=str(tmp_path))
        .from_template("base")
        .set_envs({"COLOUR": "green"})
        .set_workdir("/app")
        .copy("a.txt", "b.txt")
        .run_cmd("need /app/b.txt\nenv COLOUR\nwrite /c 1")
        .set_user("worker")
        .set_start_cmd("serve", wait_for_port(8000))
    )
    assert not await AsyncTemplate.exists("mine", **options)
    logs: list[str] = []
    info = await AsyncTemplate.build(
        template, "mine:v1", tags=["v2"], cpu_count=4, memory_mb=2048,
        on_build_logs=lambda entry: logs.append(entry.message), **options,
    )  # fmt: skip
    assert "green" in logs
    assert await AsyncTemplate.exists("mine", **options)
    sandbox = await AsyncSandbox.create("mine:v1", **options)
    spec = plane.node.specs[sandbox.sandbox_id]
    assert (spec.cpu, spec.memory_mb) == (4, 2048)
    assert plane.node.contents[sandbox.sandbox_id].disk["/app/b.txt"] == "from the context"
    assert spec.start is not None
    assert spec.start.ready == ReadyCheck(port=8000)

    count = len(plane.node.commands)
    again = await AsyncTemplate.build_in_background(template, "mine", **options)
    while (status := await AsyncTemplate.get_build_status(again, **options)).status != "ready":
        assert status.status != "error", status.reason
        await asyncio.sleep(0.02)
    assert len(plane.node.commands) == count
    tagged = await AsyncTemplate.assign_tags("mine:v1", ["stable", "blue"], **options)
    assert (tagged.build_id, set(tagged.tags)) == (info.build_id, {"stable", "blue"})
    await AsyncTemplate.remove_tags("mine", "blue", **options)
    tags = await AsyncTemplate.get_tags("mine", **options)
    assert {t.tag: t.build_id for t in tags} == {
        "v1": info.build_id, "v2": info.build_id, "stable": info.build_id,
        "default": again.build_id,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("start", "ready", "expected"),
    [
        ("serve", None, ReadyCheck(command="sleep 20")),
        ("serve", "", ReadyCheck(command="sleep 20")),
        ("serve", "true", ReadyCheck(command="true")),
        (None, None, None),
    ],
)
async def test_a_start_command_has_time_as_e2b_gives_it(
    plane: Plane,
    http: httpx.AsyncClient,
    start: str | None,
    ready: str | None,
    expected: ReadyCheck | None,
) -> None:
    asked = (await http.post("/v3/templates", json={"name": "mine"})).json()
    path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    body = {"fromTemplate": "base", "startCmd": start, "readyCmd": ready}
    assert (await http.post(f"/v2{path}", json=body)).status_code == 202
    while (status := (await http.get(f"{path}/status")).json())["status"] != "ready":
        assert status["status"] != "error", status
        await asyncio.sleep(0.02)
    made = (await http.post("/v2/sandboxes", json={"templateID": "mine"})).json()
    program = plane.node.specs[made["sandboxID"]].start
    assert (program.ready if program else None) == expected


async def test_failing_steps_raise_at_the_users_line(
    plane: Plane, options: dict[str, Any], tmp_path: Path
) -> None:
    failing = AsyncTemplate().from_template("base").run_cmd("echo 1").run_cmd("exit 5")
    with pytest.raises(BuildException, match="exited with code 5"):
        await AsyncTemplate.build(failing, "mine", **options)
    with pytest.raises(BuildException, match="no `nowhere`"):
        await AsyncTemplate.build(AsyncTemplate().from_image("nowhere"), "mine", **options)
    with pytest.raises(BuildException):
        await AsyncTemplate.build(failing, "a b", **options)
    with pytest.raises(TemplateException):
        await AsyncTemplate.assign_tags("none", ["a"], **options)
    plane.services.builds._config = plane.services.config.__class__(
        state_dir=plane.services.config.state_dir, project_builds_max=0
    )
    with pytest.raises(RateLimitException):
        await AsyncTemplate.build(failing, "mine", **options)


async def test_sync_client(plane: Plane, options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in ("a.py", "b.py", "c.txt"):
        (tmp_path / "src" / name).write_text(name)
    template = (
        Template(file_context_path=str(tmp_path))
        .from_image("alpine")
        .copy("src", "/all", mode=0o755)
        .copy("src/*.py", "/py/")
        .run_cmd(["need /all/c.txt", "whoami"])
        .set_ready_cmd("echo ready")
    )
    info = await asyncio.to_thread(Template.build, template, "mine", **options)
    made = await plane.services.builds.by_id(
        await plane.services.iam.authenticate(plane.key), info.build_id
    )
    disk = plane.node.images.disks[made.image or ""]
    assert disk["/all/a.py"] == "a.py"
    assert {path for path in disk if path.startswith("/py/")} == {"/py/a.py", "/py/b.py"}
    assert await asyncio.to_thread(Template.exists, "mine", **options)

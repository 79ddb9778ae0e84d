# SPDX-License-Identifier: Apache-2.0
"""Templates and their builds; a scripted server."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from opendsec import (
    BuildFailed,
    BuildStep,
    ConnectionFailed,
    InvalidRequest,
    RegistryUnavailable,
    TemplateNotFound,
)
from opendsec._context import pack_context

from .fake_server import Answer, Asked, FakeServer, error
from .kits import collect, done
from .test_cli import cli

BUILD = "/v1/builds/b1"
TEMPLATE = {"template_id": "t1", "name": "mine", "own": True, "state": "ready", "builds": 2}


def build(**changes: Any) -> dict[str, Any]:
    record = {
        "build_id": "b1", "template_id": "t1", "state": "ready", "tags": ["default"], "cpu": 2,
        "memory_mb": 1024, "disk_mb": 10240, "image": "sha256:aa", "default_user": "user",
        "default_workdir": None, "env": {}, "start_command": None, "error": None,
        "created_at": "2026-12-01T10:00:00Z", "started_at": None, "finished_at": None,
    }  # fmt: skip
    return {**record, **changes}


def entry(message: str, level: str = "info") -> dict[str, Any]:
    return {"at": "2026-12-01T10:00:00Z", "level": level, "message": message, "step": "1"}


def log(*lines: dict[str, Any]) -> Answer:
    """A log as it is followed; an empty line keeps it alive."""
    text = "\n\n".join(json.dumps(line) for line in lines) + "\n"
    return Answer(200, raw=[text.encode()])


@pytest.fixture
def ready(server: FakeServer) -> FakeServer:
    """A server on which builds succeed."""
    server.on("POST", "/v1/builds", Answer(201, build(state="waiting")))
    server.on("POST", f"{BUILD}/start", Answer(202))
    server.on("GET", BUILD, Answer(200, build()))
    server.on("GET", f"{BUILD}/logs", log(entry("one"), entry("two"), {"build": build()}))
    return server


def sends_files(server: FakeServer, *, present: bool = False) -> list[Asked]:
    """Let a server take any archive; what it got."""
    got: list[Asked] = []

    def take(sent: Asked) -> Answer:
        got.append(sent)
        return Answer(204)

    def where(asked: Asked) -> Answer:
        name = asked.path.rpartition("/")[2]
        server.on("PUT", f"/put/{name}", take)
        return Answer(200, {"present": present, "url": f"{server.url}/put/{name}?signature=s"})

    class Anything(dict[tuple[str, str], Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            return found or ([where] if key[1].startswith(f"{BUILD}/files/") else default)

    server._scripts = Anything(server._scripts)
    return got


async def test_build_of_a_dockerfile(client: Any, ready: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    got = sends_files(ready)
    seen: list[str] = []
    made = await done(
        client.templates.build(
            "mine:v1",
            dockerfile="FROM x",
            context=tmp_path,
            build_args={"A": "1"},
            tags=["v2"],
            username="u",
            password="p",
            on_log=lambda line: seen.append(line.message),
        )
    )
    assert made.state == "ready"
    assert seen == ["one", "two"]
    assert ready.of("POST", "/v1/builds")[0].json["tags"] == ["v2"]
    start = ready.of("POST", f"{BUILD}/start")[0].json
    assert start["dockerfile"] == "FROM x"
    assert start["build_args"] == {"A": "1"}
    assert start["registry_auth"] == {"username": "u", "password": "p"}
    (sent,) = got
    assert sent.path == f"/put/{start['context']}"
    assert "X-API-Key" not in sent.headers
    with tarfile.open(fileobj=io.BytesIO(sent.body)) as tar:
        assert tar.getnames() == ["a.txt"]


async def test_ready_made(client: Any, ready: FakeServer) -> None:
    made = await done(client.templates.make("python", force=True))
    assert made.state == "ready"
    (asked,) = ready.of("POST", "/v1/builds")
    assert asked.json["name"] == "python" and asked.json["memory_mb"] == 2048
    (started,) = ready.of("POST", f"{BUILD}/start")
    assert started.json["from_template"] == "base" and started.json["force"] is True
    assert "numpy" in started.json["steps"][0]["args"][0]
    with pytest.raises(TemplateNotFound, match="no ready-made"):
        await done(client.templates.make("cobol"))


async def test_files_that_are_there_are_not_sent(
    client: Any, ready: FakeServer, tmp_path: Path
) -> None:
    got = sends_files(ready, present=True)
    steps = [
        BuildStep(type="RUN", args=("true",), force=True),
        BuildStep(type="COPY", args=("a", "/a")),
    ]
    await done(client.templates.start_build("mine", from_image="x", steps=steps, context=tmp_path))
    assert got == []
    sent = ready.of("POST", f"{BUILD}/start")[0].json["steps"]
    assert [(s["type"], s["force"], s["files"] is None) for s in sent] == [
        ("RUN", True, True), ("COPY", False, False),
    ]  # fmt: skip


async def test_failures_are_typed(client: Any, ready: FakeServer) -> None:
    failed = {"code": "build_failed", "message": "exited with code 3", "step": "2"}
    ready.on("GET", BUILD, Answer(200, build(state="error", error=failed)))
    with pytest.raises(BuildFailed, match="code 3") as broken:
        await done(client.templates.build("mine", from_image="x"))
    assert broken.value.details["step"] == "2"
    failed = {"code": "registry_unavailable", "message": "no answer", "step": "base"}
    ready.on("GET", BUILD, Answer(200, build(state="error", error=failed)))
    with pytest.raises(RegistryUnavailable):
        await done(client.templates.wait("b1"))
    failed = {"code": "build_cancelled", "message": "cancelled"}
    ready.on("GET", BUILD, Answer(200, build(state="error", error=failed)))
    with pytest.raises(BuildFailed) as cancelled:
        await done(client.templates.wait("b1"))
    assert cancelled.value.code == "build_cancelled"


async def test_a_broken_log_goes_on_where_it_was(client: Any, ready: FakeServer) -> None:
    ready.on(
        "GET",
        f"{BUILD}/logs",
        log(entry("one")),
        Answer(drop=True),
        log(entry("two"), {"build": build()}),
    )
    assert [line.message for line in await collect(client.templates.logs("b1"))] == ["one", "two"]
    offsets = [asked.query["offset"] for asked in ready.of("GET", f"{BUILD}/logs")]
    assert offsets[0] == ["0"]
    assert offsets[-1] == ["1"]


async def test_a_log_that_never_comes_is_an_error(
    client: Any, ready: FakeServer, monkeypatch: pytest.MonkeyPatch, kit: Any
) -> None:
    module = f"opendsec._{kit.name}._templates"
    monkeypatch.setattr(f"{module}.FOLLOW_TRIES_MAX", 2)
    monkeypatch.setattr(f"{module}.FOLLOW_AGAIN_S", 0.01)
    ready.on("GET", f"{BUILD}/logs", Answer(drop=True))
    with pytest.raises(ConnectionFailed):
        await collect(client.templates.logs("b1"))


async def test_reading_and_changing(client: Any, server: FakeServer) -> None:
    server.on("GET", "/v1/templates", Answer(200, {"templates": [TEMPLATE]}))
    assert [t.name for t in await done(client.templates.list())] == ["mine"]
    assert [t.name for t in await done(client.templates())] == ["mine"]
    detail = {**TEMPLATE, "tags": [{"tag": "v1", "build_id": "b1"}], "newest_builds": [build()]}
    server.on("GET", "/v1/templates/mine%3Av1", Answer(200, detail))
    found = await done(client.templates.get("mine:v1"))
    assert (found.tags[0].tag, found.newest_builds[0].build_id) == ("v1", "b1")
    server.on("POST", "/v1/templates/mine/tags", Answer(201, build()))
    assert (await done(client.templates.assign_tags("mine", ["a"]))).build_id == "b1"
    server.on("DELETE", "/v1/templates/mine/tags/a", Answer(204), Answer(404, error("not_found")))
    assert await done(client.templates.remove_tag("mine", "a")) is True
    assert await done(client.templates.remove_tag("mine", "a")) is False
    server.on("PATCH", "/v1/templates/mine", Answer(204))
    await done(client.templates.set_public("mine", True))
    server.on("POST", "/v1/templates/mine/push", Answer(200, {"digest": "sha256:bb"}))
    assert await done(client.templates.push("mine", "host/x:1")) == "sha256:bb"
    missing = Answer(404, error("template_not_found"))
    server.on("DELETE", "/v1/templates/mine", Answer(204), missing)
    assert await done(client.templates.delete("mine")) is True
    assert await done(client.templates.delete("mine")) is False
    server.on("POST", f"{BUILD}/cancel", Answer(204))
    await done(client.templates.cancel_build("b1"))
    with pytest.raises(InvalidRequest):
        await done(client.templates.get(""))
    with pytest.raises(TemplateNotFound):
        server.on("GET", "/v1/templates/none", missing)
        await done(client.templates.get("none"))


# --- the context ----------------------------------------------------------------


def names(directory: Path) -> list[str]:
    packed = pack_context(directory)
    with packed.content, tarfile.open(fileobj=packed.content) as tar:
        found = tar.getnames()
    assert len(found) == packed.files
    return found


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ("", [".dockerignore", "a.md", "b.txt", "dir", "dir/a.md", "dir/sub", "dir/sub/c.txt"]),
        ("*.md", [".dockerignore", "b.txt", "dir", "dir/a.md", "dir/sub", "dir/sub/c.txt"]),
        ("**/*.md\n# note\n", [".dockerignore", "b.txt", "dir", "dir/sub", "dir/sub/c.txt"]),
        ("dir/", [".dockerignore", "a.md", "b.txt"]),
        ("/dir/sub", [".dockerignore", "a.md", "b.txt", "dir", "dir/a.md"]),
        ("*\n!b.txt", ["b.txt"]),
        ("!b.txt\n*", []),
        ("dir\n!dir/a.md", [".dockerignore", "a.md", "b.txt", "dir/a.md"]),
    ],
)
def test_what_dockerignore_leaves(tmp_path: Path, ignore: str, left: list[str]) -> None:
    (tmp_path / "dir" / "sub").mkdir(parents=True)
    for name in ("a.md", "b.txt", "dir/a.md", "dir/sub/c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text(ignore)
    assert sorted(names(tmp_path)) == left


def test_same_files_make_the_same_archive(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory, order in ((one, ("a", "b")), (two, ("b", "a"))):
        directory.mkdir()
        for name in order:
            (directory / name).write_text(name)
    packed = [pack_context(directory) for directory in (one, two)]
    assert packed[0].sha256 == packed[1].sha256
    text = gzip.decompress(packed[0].content.read())
    assert packed[0].size_bytes == packed[0].content.tell()
    assert b"root" not in text
    (two / "a").chmod(0o700)
    packed.append(pack_context(two))
    assert packed[2].sha256 != packed[0].sha256
    for item in packed:
        item.content.close()


def test_links_stay_links_and_odd_files_stay_out(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "out").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "fifo")
    assert names(tmp_path) == ["loop", "out"]
    with pytest.raises(InvalidRequest, match="not a directory"):
        pack_context(tmp_path / "none")


# --- the command line -------------------------------------------------------------


def test_ready_made_by_command_line(ready: FakeServer) -> None:
    listed = cli(ready, "template", "make")
    assert listed.returncode == 0 and b"numpy" in listed.stdout and b"TypeScript" in listed.stdout
    made = cli(ready, "template", "make", "-q", "python", "node")
    assert (made.returncode, made.stdout) == (0, b"python\nnode\n")
    unknown = cli(ready, "template", "make", "cobol")
    assert unknown.returncode != 0 and b"python, node" in unknown.stderr


def test_command_line(ready: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM x")
    sends_files(ready)
    built = cli(ready, "template", "build", "-t", "mine:v1", "--build-arg", "A=1", str(tmp_path))
    assert built.stdout.decode().split() == ["b1"]
    assert b"one" in built.stderr
    quiet = cli(ready, "template", "build", "-q", "-t", "mine", "--json", str(tmp_path))
    assert json.loads(quiet.stdout)["build_id"] == "b1"
    assert b"one" not in quiet.stderr
    failed = {"code": "build_failed", "message": "exited with code 3", "step": "2"}
    ready.on("GET", BUILD, Answer(200, build(state="error", error=failed)))
    broken = cli(ready, "template", "build", "-t", "mine", str(tmp_path))
    assert broken.returncode == 1
    assert b"exited with code 3" in broken.stderr
    missing = cli(ready, "template", "build", "-t", "mine", "-f", "/nowhere/x", str(tmp_path))
    assert b"Cannot read /nowhere/x" in missing.stderr
    ready.on("GET", "/v1/templates", Answer(200, {"templates": [TEMPLATE]}))
    assert cli(ready, "template", "ls").stdout.decode().splitlines()[1].split()[0] == "mine"
    assert cli(ready, "template", "ls", "-q").stdout == b"mine\n"
    detail = {**TEMPLATE, "tags": [{"tag": "v1", "build_id": "b1"}], "newest_builds": [build()]}
    ready.on("GET", "/v1/templates/mine", Answer(200, detail))
    ready.on("GET", BUILD, Answer(200, build()))
    assert b"two" in cli(ready, "template", "logs", "mine").stdout
    assert json.loads(cli(ready, "template", "inspect", "mine").stdout)["name"] == "mine"
    ready.on("POST", "/v1/templates/mine/tags", Answer(201, build()))
    assert b"v1" in cli(ready, "template", "tag", "mine", "v1").stdout
    ready.on("DELETE", "/v1/templates/mine", Answer(204))
    ready.on("DELETE", "/v1/templates/none", Answer(404, error("template_not_found")))
    removed = cli(ready, "template", "rm", "none", "mine")
    assert removed.stdout == b"mine\n"
    assert removed.returncode != 0

# SPDX-License-Identifier: AGPL-3.0-only
"""Template builds through E2B's published packages and through our command line, on real images."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from opendsec_server.images.tests.registries import (
    Entry,
    Registry,
    make_layout,
    running_registry,
    tar_of,
)
from tests.harness import BIN, Server

from .tours import JS, PROGRAMS, node_with_package, python_of, run_tour

E2B_CLI = JS / "node_modules" / ".bin" / "e2b"
APPLETS = [
    "cat", "chmod", "chown", "cp", "echo", "env", "false", "grep", "id", "ln", "ls", "mkdir", "mv",
    "ps", "pwd", "rm", "sed", "sh", "sleep", "stat", "tar", "test", "touch", "true", "wc",
]  # fmt: skip


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def image(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small image with a shell and little else: no bash, no users, no curl."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("the package busybox-static is not installed")
    entries = [Entry("bin/busybox", Path(busybox).read_bytes(), mode=0o755)]
    entries += [Entry(f"bin/{name}", kind=tarfile.SYMTYPE, link="busybox") for name in APPLETS]
    entries += [Entry("tmp", kind=tarfile.DIRTYPE, mode=0o1777)]
    layout = tmp_path_factory.mktemp("layout")
    make_layout(layout, [tar_of(entries)], {"Env": ["PATH=/bin", "FROM_IMAGE=yes"]})
    return registry.push(layout, "busybox:1")


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("program", "count"), [("e2b_template_sync.py", 8), ("e2b_template_async.py", 3)]
)
@pytest.mark.parametrize("release", ["2.63.0", "2.45.1"])
def test_python_package(
    server: Server, image: str, tmp_path: Path, release: str, program: str, count: int
) -> None:
    python = python_of(release)
    # Both releases build the same names: the second one begins anew.
    for name in ("tour", "bg", "bad", "pulled"):
        server.request("DELETE", f"/v1/templates/{name}")
    results = run_tour(server, [python, str(PROGRAMS / program), image, str(tmp_path / release)])
    assert not results["failed"], "\n".join(results["failed"].values())
    assert len(results["passed"]) == count  # type: ignore[arg-type]


@pytest.mark.timeout(360)
def test_javascript_package(server: Server, image: str, tmp_path: Path) -> None:
    node = node_with_package()
    results = run_tour(server, [node, str(JS / "templates.mjs"), image, str(tmp_path / "c")])
    assert not results["failed"], "\n".join(results["failed"].values())
    assert len(results["passed"]) == 7  # type: ignore[arg-type]


@pytest.mark.timeout(240)
def test_e2b_command_line(server: Server, image: str, tmp_path: Path) -> None:
    if shutil.which("node") is None or not E2B_CLI.exists():
        pytest.skip("node or the package @e2b/cli is missing: run tests/run")
    (tmp_path / "e2b.Dockerfile").write_text(
        f"FROM {image}\nWORKDIR /srv\nCOPY a.txt /srv/\nRUN cat a.txt > b.txt\n"
    )
    (tmp_path / "a.txt").write_text("by e2b\n")
    environment = {**server.client_environment, "HOME": str(tmp_path / "home")}

    def e2b(*arguments: str) -> str:
        run = subprocess.run(
            [str(E2B_CLI), "template", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, f"{run.stdout}{run.stderr}{server.log_tail()}"
        return run.stdout

    options = ("--cpu-count", "1", "--memory-mb", "512", "--ready-cmd", "test -e /tmp/up")
    built = e2b("create", "by-e2b", *options, "-c", "touch /tmp/up && sleep 1000")
    assert "cat a.txt > b.txt" in built
    assert "by-e2b" in e2b("list")
    e2b("publish", "by-e2b", "-y")
    listed = json.loads(opendsec(server, "template", "ls", "--json").stdout)
    assert [t["public"] for t in listed if t["name"] == "by-e2b"] == [True]
    ran = opendsec(server, "run", "--template", "by-e2b", "--", "cat", "/srv/b.txt", "/tmp/up")
    assert ran.stdout == "by e2b\n"
    e2b("delete", "by-e2b", "-y")
    listed = json.loads(opendsec(server, "template", "ls", "--json").stdout)
    assert "by-e2b" not in {t["name"] for t in listed}


@pytest.mark.timeout(120)
def test_files_that_are_too_large(server: Server) -> None:
    """Refused by what is announced; an upload that is cut off leaves nothing."""
    build_id = server.request_json("POST", "/v1/builds", {"name": "large"})[1]["build_id"]
    name = "a" * 64
    url = urlsplit(server.request_json("GET", f"/v1/builds/{build_id}/files/{name}")[1]["url"])
    for length in (5 << 30, 4_096):
        connection = http.client.HTTPConnection(url.netloc, timeout=30)
        connection.putrequest("PUT", f"{url.path}?{url.query}")
        connection.putheader("Content-Length", str(length))
        connection.endheaders(b"x" * 1_024)
        if length > 4_096:
            assert connection.getresponse().status == 413
        connection.close()
    files = server.config.state_path / "builds" / "files"
    until = time.monotonic() + 10
    while any(path.is_file() for path in files.rglob(".part-*")):
        assert time.monotonic() < until, "half a file is left"
        time.sleep(0.05)
    assert server.request_json("GET", f"/v1/builds/{build_id}/files/{name}")[1]["present"] is False


def opendsec(
    server: Server, *arguments: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Our command line, with the same three variables."""
    run = subprocess.run(
        [str(BIN / "opendsec"), *arguments],
        env=server.client_environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not check or run.returncode == 0, f"{run.stdout}{run.stderr}{server.log_tail()}"
    return run


DOCKERFILE = """ARG IMAGE
FROM ${IMAGE} AS tools
RUN mkdir /out && echo tool > /out/tool && ln -s tool /out/link
FROM ${IMAGE}
ARG WORD=default
ENV GREETING="hello $WORD" PATH=/opt/bin:$PATH
WORKDIR /srv/app
COPY --from=tools /out /opt/tools
COPY --chmod=700 run.sh *.txt ./
RUN cat a.txt > copied && echo "$WORD" > word && test "$FROM_IMAGE" = yes
CMD ["/srv/app/run.sh"]
"""


@pytest.mark.timeout(240)
def test_dockerfile_by_command_line(server: Server, image: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "a.txt").write_text("A")
    (tmp_path / "ignored.txt").write_text("no")
    (tmp_path / ".dockerignore").write_text("ignored.txt\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\ntouch /tmp/ran\nexec sleep 1000\n")
    command = (
        "template", "build", "-t", "cli:v1", "--build-arg", f"IMAGE={image}", "--build-arg",
        "WORD=world", "--start-image", "--ready-command", "test -e /tmp/ran", str(tmp_path),
    )  # fmt: skip
    built = opendsec(server, *command)
    build_id = built.stdout.strip()
    assert "RUN cat a.txt" in built.stderr
    show = (
        'echo "$GREETING:$PATH"; pwd; id -u; cat copied word; ls /opt/tools; ls; ls /tmp/ran; '
        "stat -c %a run.sh"
    )
    ran = opendsec(server, "run", "--template", "cli:v1", "--", "sh", "-c", show)
    assert ran.stdout.split() == [
        "hello", "world:/opt/bin:/bin", "/srv/app", "0", "Aworld", "link", "tool", "a.txt",
        "copied", "run.sh", "word", "/tmp/ran", "700",
    ], ran.stdout  # fmt: skip

    (tmp_path / "a.txt").write_text("changed")
    again = opendsec(server, *command)
    cached = [line for line in again.stderr.splitlines() if line.endswith("(cached)")]
    assert any("RUN mkdir /out" in line for line in cached), again.stderr
    assert not any("RUN cat a.txt" in line for line in cached)

    listed = json.loads(opendsec(server, "template", "ls", "--json").stdout)
    assert {t["name"] for t in listed} >= {"base", "cli"}
    opendsec(server, "template", "tag", "cli:v1", "stable")
    detail = json.loads(opendsec(server, "template", "inspect", "cli").stdout)
    assert {t["tag"] for t in detail["tags"]} == {"v1", "stable"}
    assert build_id in {b["build_id"] for b in detail["newest_builds"]}
    assert "RUN cat a.txt" in opendsec(server, "template", "logs", build_id).stdout
    host = image.partition("/")[0]
    opendsec(server, "template", "push", "cli:stable", f"{host}/pushed:1")
    opendsec(server, "template", "rm", "cli")
    # What was pushed is a whole image.
    run = opendsec(server, "run", "--image", f"{host}/pushed:1", "--", "cat", "/srv/app/word")
    assert run.stdout == "world\n"


@pytest.mark.timeout(120)
def test_refused_dockerfile_and_failing_step(server: Server, image: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\n\nONBUILD RUN true\n")
    refused = opendsec(server, "template", "build", "-t", "bad", str(tmp_path), check=False)
    assert refused.returncode != 0
    assert "line 3" in refused.stderr
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nRUN echo before; exit 6\n")
    failed = opendsec(server, "template", "build", "-t", "bad", str(tmp_path), check=False)
    assert failed.returncode != 0
    assert "exited with code 6" in failed.stderr
    assert "before" in failed.stderr


@pytest.mark.timeout(240)
def test_killed_server_mid_build(server: Server) -> None:
    """No half template, no builder left, and the next build goes on where it was."""
    steps = [{"type": "RUN", "args": ["echo kept > ~/kept"]}, {"type": "RUN", "args": ["sleep 60"]}]
    build_id = server.request_json("POST", "/v1/builds", {"name": "killed"})[1]["build_id"]
    body = {"from_template": "base", "steps": steps}
    assert server.request("POST", f"/v1/builds/{build_id}/start", body)[0] == 202
    until = time.monotonic() + 60
    while (
        b"sleep 60" not in server.request("GET", f"/templates/killed/builds/{build_id}/status")[2]
    ):
        assert time.monotonic() < until
        time.sleep(0.1)
    server.kill_daemon()
    server.start()
    build = server.request_json("GET", f"/v1/builds/{build_id}")[1]
    assert (build["state"], build["error"]["code"]) == ("error", "build_interrupted")
    assert server.request("POST", "/v2/sandboxes", {"templateID": "killed"})[0] == 404
    until = time.monotonic() + 60
    while server.request_json("GET", "/v1/info")[1]["node"]["sandboxes"]:
        assert time.monotonic() < until, "a builder sandbox is left"
        time.sleep(0.2)
    build_id = server.request_json("POST", "/v1/builds", {"name": "killed"})[1]["build_id"]
    body["steps"] = steps[:1]
    server.request("POST", f"/v1/builds/{build_id}/start", body)
    log = server.request("GET", f"/v1/builds/{build_id}/logs")[2].decode()
    assert "echo kept > ~/kept (cached)" in log
    assert json.loads(log.splitlines()[-1])["build"]["state"] == "ready"


@pytest.mark.timeout(120)
def test_interrupted_command_line_cancels(server: Server, image: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nRUN echo begun; sleep 60\n")
    client = subprocess.Popen(
        [str(BIN / "opendsec"), "template", "build", "-t", "ctrl-c", str(tmp_path)],
        env=server.client_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever started us may ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert client.stderr is not None
    for line in client.stderr:
        if line.rstrip().endswith("begun"):
            break
    os.kill(client.pid, signal.SIGINT)
    client.communicate(timeout=60)
    build = server.request_json("GET", "/v1/templates/ctrl-c")[1]["newest_builds"][0]
    assert build["error"]["code"] == "build_cancelled"

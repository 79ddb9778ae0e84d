# SPDX-License-Identifier: AGPL-3.0-only
"""Limits of a build's time, disk and network, on a server of its own."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import Server
from tests.servers import running_server


@pytest.fixture(scope="module")
def tight() -> Iterator[Server]:
    """A server that gives builds next to nothing. Nothing of it may be left."""
    with running_server(
        "e2t", "10.229.0.0/16", build_disk_mb=64, build_timeout_s=8, build_internet=False
    ) as server:
        yield server


def build(server: Server, *steps: dict[str, Any], files: bytes | None = None) -> dict[str, Any]:
    """The build as it ended, and nothing of it runs any more."""
    build_id = server.request_json("POST", "/v1/builds", {"name": "tight"})[1]["build_id"]
    if files is not None:
        name = hashlib.sha256(files).hexdigest()
        url = server.request_json("GET", f"/v1/builds/{build_id}/files/{name}")[1]["url"]
        request = urllib.request.Request(url, data=files, method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        steps = tuple({**step, "files": name} for step in steps)
    body = {"from_template": "base", "steps": list(steps)}
    assert server.request("POST", f"/v1/builds/{build_id}/start", body)[0] == 202
    log = server.request("GET", f"/v1/builds/{build_id}/logs")[2].decode()
    assert server.request_json("GET", "/v1/info")[1]["node"]["sandboxes"] == 0
    return dict(json.loads(log.splitlines()[-1])["build"])


def run(command: str) -> dict[str, Any]:
    return {"type": "RUN", "args": [command]}


@pytest.mark.timeout(300)
def test_a_step_that_fills_the_disk(tight: Server) -> None:
    done = build(tight, run("dd if=/dev/zero of=/tmp/x bs=1M count=200"))
    assert (done["error"]["code"], done["error"]["step"]) == ("build_failed", "1")
    assert "quota" in done["error"]["message"]


@pytest.mark.timeout(120)
def test_files_that_do_not_fit(tight: Server) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("big")
        member.size = 100 << 20
        tar.addfile(member, io.BytesIO(os.urandom(member.size)))
    done = build(tight, {"type": "COPY", "args": ["big", "/opt/big"]}, files=buffer.getvalue())
    assert (done["error"]["code"], done["error"]["step"]) == ("node_full", "1")


@pytest.mark.timeout(120)
def test_a_step_that_takes_too_long(tight: Server) -> None:
    done = build(tight, run("echo 1"), run("sleep 1000"))
    assert (done["error"]["code"], done["error"]["step"]) == ("build_failed", "2")
    assert "longer than 8 s" in done["error"]["message"]


@pytest.mark.timeout(120)
def test_no_internet(tight: Server) -> None:
    done = build(tight, run("! curl -m 3 -s http://1.1.1.1"))
    assert done["state"] == "ready"

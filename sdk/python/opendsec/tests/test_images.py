# SPDX-License-Identifier: Apache-2.0
"""Images: the client's calls, and the command line's words; a scripted server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from opendsec import (
    Client,
    ImageInUse,
    ImageNotFound,
    InvalidRequest,
    RegistryAuth,
    RegistryLimited,
)

from .fake_server import Answer, FakeServer, error
from .test_cli import cli

DIGEST = "sha256:" + "ab" * 32
ONE = f"/v1/images/{DIGEST.replace(':', '%3A')}"


def image(**changes: Any) -> dict[str, Any]:
    record = {
        "digest": DIGEST,
        "names": ["docker.io/library/alpine:3.20"],
        "layers": ["cd" * 32],
        "size_bytes": 3_145_728,
        "config": {"env": {"A": "1"}, "entrypoint": [], "cmd": ["sh"], "user": None},
        "source": None,
        "created_at": "2026-12-01T10:00:00Z",
        "last_used_at": "2026-12-01T10:00:00Z",
    }
    return {**record, **changes}


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(base_url=server.url, api_key="e2b_test", retries_max=2) as client:
        yield client


def test_calls(server: FakeServer, client: Client) -> None:
    server.on("POST", "/v1/images/pull", Answer(200, image()))
    server.on("GET", "/v1/images", Answer(200, {"images": [image()]}))
    server.on("GET", ONE, Answer(200, image()))
    server.on("DELETE", ONE, Answer(204, None))
    server.on("POST", f"{ONE}/push", Answer(200, {"digest": "sha256:" + "1" * 64}))
    server.on("POST", "/v1/images/prune", Answer(200, {"images": [DIGEST], "layers": 1}))
    auth = RegistryAuth(username="u", password="p")
    assert "p" not in repr(auth).replace("RegistryAuth", "")
    pulled = client.images.pull("alpine:3.20", auth=auth, refresh=False)
    assert (pulled.config.env, pulled.config.cmd) == ({"A": "1"}, ("sh",))
    assert server.of("POST", "/v1/images/pull")[0].json == {
        "reference": "alpine:3.20",
        "refresh": False,
        "registry_auth": {"username": "u", "password": "p"},
    }
    assert client.images.list() == [pulled]
    assert client.images.get(DIGEST) == pulled
    assert client.images.push(DIGEST, "host:5000/x:1").startswith("sha256:1")
    assert client.images.prune(unused_for_s=60).images == (DIGEST,)
    client.images.delete(DIGEST)
    with pytest.raises(InvalidRequest):
        client.images.get("")


def test_failures_of_a_registry_are_not_repeated_here(server: FakeServer, client: Client) -> None:
    told = error("registry_limited", fault="capacity", retryable=True)
    server.on("POST", "/v1/images/pull", Answer(503, told, headers={"Retry-After": "33"}))
    with pytest.raises(RegistryLimited) as raised:
        client.images.pull("alpine")
    assert raised.value.retry_after_s == 33
    assert len(server.of("POST", "/v1/images/pull")) == 1
    server.on("GET", ONE, Answer(404, error("image_not_found")))
    with pytest.raises(ImageNotFound):
        client.images.get(DIGEST)
    server.on("DELETE", ONE, Answer(409, error("image_in_use")))
    with pytest.raises(ImageInUse):
        client.images.delete(DIGEST)


def test_command_line(server: FakeServer) -> None:
    server.on("POST", "/v1/images/pull", Answer(200, image()))
    server.on("GET", "/v1/images", Answer(200, {"images": [image()]}))
    server.on("GET", ONE, Answer(200, image()))
    server.on("DELETE", ONE, Answer(409, error("image_in_use")))
    pulled = cli(server, "image", "pull", "alpine:3.20")
    assert (pulled.returncode, pulled.stdout.decode().strip()) == (0, DIGEST)
    assert b"docker.io/library/alpine:3.20" in cli(server, "image", "ls").stdout
    assert cli(server, "image", "ls", "-q").stdout.decode().split() == [DIGEST]
    assert json.loads(cli(server, "image", "inspect", DIGEST).stdout)["digest"] == DIGEST
    refused = cli(server, "image", "rm", DIGEST)
    assert (refused.returncode, b"image_in_use" in refused.stderr) == (1, True)
    both = cli(server, "image", "pull", "alpine", "--user", "me")
    assert (both.returncode, b"--password-stdin" in both.stderr) == (1, True)
    assert cli(server, "image").returncode == 2

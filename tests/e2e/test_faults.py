# SPDX-License-Identifier: AGPL-3.0-only
"""Bad input and faults: a typed answer, and nothing left behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from opendsec import AsyncClient, Client, Sandbox
from tests.harness import Server


@pytest.fixture(scope="module")
def sandbox(server: Server) -> Iterator[Sandbox]:
    with Client(base_url=server.url, api_key=server.api_key) as client, client.create() as one:
        yield one


def address(server: Server) -> tuple[str, int]:
    host, port = server.config.listen.rsplit(":", 1)
    return host, int(port)


def routed(sandbox: Sandbox) -> dict[str, str]:
    assert sandbox.record.access_token is not None
    return {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox.record.access_token,
    }


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/sandboxes", "/v2/sandboxes"])
def test_two_hundred_megabytes_of_json(server: Server, path: str) -> None:
    connection = http.client.HTTPConnection(*address(server), timeout=60)
    connection.putrequest("POST", path)
    connection.putheader("X-API-Key", server.api_key)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(200 * 1024 * 1024))
    connection.endheaders()
    try:
        for _ in range(200):
            connection.send(b" " * 1024 * 1024)
    except OSError:
        pass  # the server may close early; its answer is what counts
    answer = connection.getresponse()
    assert answer.status == 413
    connection.close()


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe", b"{", b"[]", b'{"template": "\\u0000"}', b'{"cpu": NaN}', b"[" * 100_000],
)
def test_malformed_json(server: Server, body: bytes) -> None:
    for path in ("/v1/sandboxes", "/v2/sandboxes"):
        connection = http.client.HTTPConnection(*address(server), timeout=30)
        connection.request(
            "POST",
            path,
            body,
            {"X-API-Key": server.api_key, "Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        content = json.loads(answer.read())
        assert answer.status in (400, 404), content
        connection.close()


def test_path_traversal_stays_inside(server: Server, sandbox: Sandbox) -> None:
    sandbox.files.write("../../../../../../tmp/escaped", "x", user="root")
    assert sandbox.exec("cat /tmp/escaped").stdout == "x"
    import pathlib

    assert not pathlib.Path("/tmp/escaped").exists()


def test_truncated_multipart_leaves_no_file(server: Server, sandbox: Sandbox) -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="half.txt"\r\n\r\n'
        b"only the first half"
    )
    connection = http.client.HTTPConnection(*address(server), timeout=30)
    connection.request(
        "POST",
        "/files",
        body,
        {**routed(sandbox), "Content-Type": "multipart/form-data; boundary=b"},
    )
    answer = connection.getresponse()
    assert answer.status == 400, answer.read()
    connection.close()
    assert sandbox.exec("echo alive").stdout == "alive\n"


def test_a_client_that_vanishes_in_the_middle_of_an_upload(
    server: Server, sandbox: Sandbox
) -> None:
    for _ in range(20):
        with socket.create_connection(address(server), timeout=10) as connection:
            head = [
                "POST /files?path=vanish.bin HTTP/1.1",
                "Host: x",
                "Content-Type: application/octet-stream",
                "Content-Length: 100000000",
                *(f"{name}: {value}" for name, value in routed(sandbox).items()),
            ]
            connection.sendall(("\r\n".join(head) + "\r\n\r\n").encode() + b"x" * 500_000)
    for _ in range(100):
        open_files = sandbox.exec("ls -l /proc/1/fd 2>/dev/null | grep -c vanish", user="root")
        if open_files.stdout.strip() == "0":
            break
        time.sleep(0.1)
    assert open_files.stdout.strip() == "0"
    assert sandbox.exec("echo alive").stdout == "alive\n"


def test_names_that_are_not_utf_8(sandbox: Sandbox) -> None:
    sandbox.exec("mkdir -p raw && touch raw/$(printf 'a\\377b')", check=True)
    assert len(sandbox.files.list("raw")) == 1


@pytest.mark.timeout(120)
async def test_ten_thousand_idle_connections(server: Server, sandbox: Sandbox) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12_000:
        pytest.skip(f"RLIMIT_NOFILE allows only {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    writers = []
    try:
        for _ in range(100):
            made = await asyncio.gather(
                *(asyncio.open_connection(*address(server)) for _ in range(100))
            )
            writers += [writer for _, writer in made]
        async with AsyncClient(base_url=server.url, api_key=server.api_key) as client:
            busy = await client.connect(sandbox.sandbox_id)
            assert (await busy.exec("echo served")).stdout == "served\n"
    finally:
        for writer in writers:
            writer.close()
        await asyncio.gather(*(w.wait_closed() for w in writers), return_exceptions=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(180)
async def test_a_burst_of_creates(server: Server) -> None:
    async with AsyncClient(base_url=server.url, api_key=server.api_key) as client:
        made = await asyncio.gather(*(client.create(labels=["burst"]) for _ in range(100)))
        assert len({one.sandbox_id for one in made}) == 100
        outs = await asyncio.gather(*(one.exec("hostname") for one in made))
        assert all(out.exit_code == 0 for out in outs)
        await asyncio.gather(*(one.kill() for one in made))
        left = [info async for info in client.list(labels=["burst"], states=["running"])]
        assert left == []


def test_later_features_say_not_yet(server: Server) -> None:
    for method, path in (("POST", "/templates"), ("POST", "/volumes"), ("POST", "/secrets")):
        status, _, body = server.request(method, path, {})
        assert status == 501, (path, status, body)

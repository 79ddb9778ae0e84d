# SPDX-License-Identifier: AGPL-3.0-only
"""Groups of real containers through the server's door: in order, by name, as one, whole or not."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opendsec import (
    AsyncClient,
    Client,
    Group,
    GroupExists,
    GroupNotFound,
    GroupServiceFailed,
    GroupStateConflict,
    GroupUnhealthy,
    InvalidRequest,
    Sandbox,
)
from opendsec_server.images.tests.registries import (
    Registry,
    files,
    make_layout,
    running_registry,
)
from tests.harness import BIN, Server
from tests.servers import running_server

from .test_images import busybox_layer

SMALL = {"memory_mb": 128, "disk_mb": 64, "cpu": 1}
# A database as far as this test needs one: it answers with what was stored, after a while.
DATABASE = """
import socketserver, threading, time
kept = {}
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            verb, key, *rest = line.decode().split()
            if verb == "set":
                kept[key] = rest[0]
            self.wfile.write((kept.get(key, "nil") + "\\n").encode())
            self.wfile.flush()
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
time.sleep(0.5)
print("ready", flush=True)
Server(("0.0.0.0", 6379), Handler).serve_forever()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 6379), timeout=5) as conn:
    conn.sendall((" ".join(sys.argv[2:]) + "\\n").encode())
    print(conn.makefile().readline().strip())
"""
WEB = """
import http.server, socket
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with socket.create_connection(("db", 6379), timeout=5) as conn:
            conn.sendall(b"get page\\n")
            text = conn.makefile().readline().strip()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""


def python(program: str, *arguments: str) -> list[str]:
    return ["python3", "-c", program, *arguments]


DB = {
    **SMALL,
    "command": python(DATABASE),
    "aliases": ["cache"],
    "healthcheck": {"test": python(ASK, "127.0.0.1", "get", "x"), "interval_s": 1, "retries": 30},
}
WEB_SERVICE = {**SMALL, "command": python(WEB), "depends_on": {"db": "healthy"}}


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """One that may be killed."""
    with running_server("grp", "10.232.0.0/16") as server:
        yield server


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def client(own_server: Server) -> Iterator[Client]:
    with Client(base_url=own_server.url, api_key=own_server.api_key) as client:
        yield client
        for info in client.groups.list(states=["starting", "running", "paused", "ending"]):
            client.groups.get(info.group_id).kill()


def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    over_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < over_at
        time.sleep(0.05)


def ask(sandbox: Sandbox, *words: str) -> str:
    return sandbox.exec(python(ASK, *words), check=True).stdout.strip()


def living(client: Client) -> set[str]:
    return {info.sandbox_id for info in client.list()}


def test_a_web_service_and_its_database(client: Client, own_server: Server) -> None:
    group = client.groups.create({"web": WEB_SERVICE, "db": DB}, name="shop", labels=["grp"])
    assert group.info.state == "running"
    states = {one.name: one.state for one in group.info.services}
    assert states == {"web": "started", "db": "healthy"}
    assert living(client) == {box.sandbox_id for box in group.sandboxes.values()}
    # By name and alias, from one to the other, and from a program that resolves by the C library.
    assert ask(group.sandboxes["web"], "db", "set", "page", "hello") == "hello"
    assert ask(group.sandboxes["web"], "cache", "get", "page") == "hello"
    said = group.sandboxes["db"].exec(["getent", "hosts", "web"], check=True).stdout
    assert said.split()[1] == "web"
    url = (
        "import urllib.request as u; print(u.urlopen('http://web:8000', timeout=5).read().decode())"
    )
    # Its program was started, and listens when it is ready.
    until(lambda: group.sandboxes["db"].exec(python(url)).exit_code == 0)
    assert group.sandboxes["db"].exec(python(url), check=True).stdout.strip() == "hello"
    # Through the door, too.
    address = f"8000-{group.sandboxes['web'].sandbox_id}.{own_server.config.domain}"
    status, _, body = own_server.request("GET", "/", headers={"Host": address})
    assert (status, body) == (200, b"hello")
    logs = group.logs("db")
    assert logs.stdout == "ready\n" and logs.program is not None
    assert logs.program.state == "running"
    with pytest.raises(GroupExists):
        client.groups.create({"a": SMALL}, name="shop")
    # The other group neither resolves its names nor reaches its addresses.
    other = client.groups.create({"db": {**SMALL}, "peer": {**SMALL}}, name="other")
    stranger = other.sandboxes["peer"]
    database = said_address(group.sandboxes["web"], "db")
    assert stranger.exec(["getent", "hosts", "web"]).exit_code != 0
    assert said_address(stranger, "db") != database
    refused = stranger.exec(python(ASK, database, "get", "page"))
    assert refused.exit_code != 0 and "hello" not in refused.stdout
    alone = client.create(memory_mb=128, disk_mb=64)
    assert alone.exec(["getent", "hosts", "db"]).exit_code != 0
    assert alone.exec(python(ASK, database, "get", "page")).exit_code != 0
    alone.kill()
    assert group.kill().state == "ended"
    assert living(client) == {box.sandbox_id for box in other.sandboxes.values()}
    assert client.groups.get("other").info.state == "running"
    other.kill()
    assert living(client) == set()


def said_address(sandbox: Sandbox, name: str) -> str:
    return sandbox.exec(["getent", "ahostsv4", name], check=True).stdout.split()[0]


def test_a_service_that_stays_ill_ends_all(client: Client) -> None:
    ill = {
        **SMALL,
        "command": ["sleep", "600"],
        "healthcheck": {"test": "echo no luck; exit 3", "interval_s": 0.2, "retries": 3},
    }
    with pytest.raises(GroupUnhealthy, match="service `db`") as caught:
        client.groups.create(
            {"db": ill, "side": SMALL, "web": {**SMALL, "depends_on": {"db": "healthy"}}},
            name="ill",
        )
    assert (caught.value.fault, caught.value.details["service"]) == ("user", "db")
    assert caught.value.details["output"] == "no luck"
    info = client.groups.get("ill").info
    assert (info.state, info.end_reason) == ("ended", "unhealthy")
    assert living(client) == set()


def test_what_ends_too_early_and_what_is_to_end(client: Client) -> None:
    with pytest.raises(GroupServiceFailed) as caught:
        client.groups.create({"job": {**SMALL, "command": "echo bad >&2; exit 7"}, "web": {
            **SMALL, "depends_on": {"job": "completed"}}})  # fmt: skip
    assert (caught.value.details["exit_code"], caught.value.details["stderr"]) == (7, "bad\n")
    with pytest.raises(GroupServiceFailed):
        client.groups.create({"job": {**SMALL, "command": ["/no/such/program"]}})
    assert living(client) == set()
    group = client.groups.create({"job": {**SMALL, "command": "echo made"}, "web": {
        **SMALL, "depends_on": {"job": "completed"}}})  # fmt: skip
    assert group.service("job").state == "completed"
    assert group.logs("job").stdout == "made\n"
    group.sandboxes["web"].kill()
    group.refresh()
    assert group.info.state == "degraded" and set(group.sandboxes) == {"job"}
    circle = {"a": {"depends_on": {"b": "started"}}, "b": {"depends_on": {"a": "started"}}}
    with pytest.raises(InvalidRequest, match="circle"):
        client.groups.create(circle)


def test_pause_and_resume_keep_the_network(client: Client) -> None:
    group = client.groups.create({"web": SMALL, "db": DB}, name="nap")
    assert ask(group.sandboxes["web"], "db", "set", "x", "kept") == "kept"
    assert group.pause().state == "paused"
    assert {one.sandbox_state for one in group.refresh().services} == {"paused"}
    assert group.resume().state == "running"
    until(lambda: group.sandboxes["web"].exec(python(ASK, "db", "get", "x")).exit_code == 0)
    assert ask(group.sandboxes["web"], "db", "get", "x") == "kept"
    group.kill()
    with pytest.raises(GroupStateConflict):
        group.pause()


def test_a_server_that_is_killed_half_way(client: Client, own_server: Server) -> None:
    """Finished by the next one, or undone: never half of it."""
    slow = {**DB, "command": ["sh", "-c", 'sleep 4; exec python3 -c "$0"', DATABASE]}
    group = client.groups.create({"web": WEB_SERVICE, "db": slow}, name="half", wait=False)
    until(lambda: group.refresh().services[1].state == "started")
    own_server.kill_daemon()
    own_server.start()
    group.wait_healthy(timeout_s=120)
    assert ask(group.sandboxes["web"], "db", "set", "page", "again") == "again"
    assert len(living(client)) == 2
    # And while it is being ended.
    client._transport.api("POST", f"/v1/groups/{group.group_id}/kill", type(group.info))
    own_server.kill_daemon()
    own_server.start()
    assert group.wait_ended(timeout_s=120)
    assert living(client) == set()


COMPOSE = """
name: composed
services:
  web:
    x-opendsec: {template: base, disk_mb: 64}
    command: python3 -m http.server ${PORT:-8000}
    environment: {GREETING: "${GREETING:-hello}"}
    mem_limit: 128m
    depends_on: {db: {condition: service_healthy}}
    ports: ["8080:8000"]
  db:
    x-opendsec: {template: base, disk_mb: 64}
    command: [sh, -c, "echo up > /tmp/up; sleep 600"]
    mem_limit: 128m
    healthcheck: {test: [CMD, test, -e, /tmp/up], interval: 1s, retries: 20}
    networks: {default: {aliases: [store]}}
"""


def opendsec(
    server: Server, *arguments: str, directory: Path, code: int = 0
) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(
        [str(BIN / "opendsec"), *arguments],
        env=server.client_environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran


def test_a_compose_file_by_the_command_line(
    client: Client, own_server: Server, tmp_path: Path
) -> None:
    (tmp_path / "compose.yml").write_text(COMPOSE)
    up = opendsec(own_server, "group", "up", directory=tmp_path)
    assert up.stdout == "composed\n"
    assert "services.web.ports" in up.stderr
    listed = opendsec(own_server, "group", "ls", "--state", "running", directory=tmp_path)
    assert "composed" in listed.stdout and "2/2" in listed.stdout
    services = json.loads(
        opendsec(own_server, "group", "ps", "composed", "--json", directory=tmp_path).stdout
    )
    assert [one["state"] for one in services] == ["started", "healthy"]
    ran = opendsec(
        own_server, "group", "exec", "composed", "web", "--", "sh", "-c",
        "echo $GREETING; getent hosts store > /dev/null && exit 5", directory=tmp_path, code=5,
    )  # fmt: skip
    assert ran.stdout == "hello\n"
    opendsec(own_server, "group", "logs", "composed", "db", directory=tmp_path)
    shown = json.loads(
        opendsec(own_server, "group", "inspect", "composed", directory=tmp_path).stdout
    )
    assert shown["state"] == "running"
    down = opendsec(own_server, "group", "down", "composed", directory=tmp_path)
    assert down.stdout == "composed: ended\n"
    assert living(client) == set()
    (tmp_path / "bad.yml").write_text("services:\n  a:\n    image: x\n    volumes: [a:/b]\n")
    bad = opendsec(own_server, "group", "up", "-f", "bad.yml", directory=tmp_path, code=1)
    assert "bad.yml:4: services.a.volumes" in bad.stderr


def test_programs_of_images(client: Client, registry: Registry, tmp_path: Path) -> None:
    """An image's own program, its arguments replaced, and another program in its place."""
    make_layout(
        tmp_path / "l",
        [busybox_layer(), files(page="from the image")],
        {"Entrypoint": ["busybox", "httpd", "-f", "-h", "/", "-p"], "Cmd": ["8080"]},
    )
    image = registry.push(tmp_path / "l", "groups/web:1")
    get = ["busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:8080/page"]
    group = client.groups.create(
        {
            "own": {**SMALL, "image": image, "healthcheck": {"test": get, "interval_s": 1}},
            "moved": {**SMALL, "image": image, "command": ["9090"]},
            "asks": {
                **SMALL,
                "image": image,
                "entrypoint": ["sh", "-c"],
                "command": [
                    "busybox wget -q -O - http://own:8080/page && "
                    "until busybox wget -q -O - http://moved:9090/page; do busybox sleep 0.2; done"
                ],
                "depends_on": {"own": "healthy", "moved": "started"},
            },
            "last": {**SMALL, "image": image, "depends_on": {"asks": "completed"}},
        },
        name="images",
    )
    assert group.logs("asks").stdout == "from the image" * 2
    assert {one.name: one.state for one in group.info.services} == {
        "own": "healthy",
        "moved": "started",
        "asks": "completed",
        "last": "started",
    }


async def test_the_async_half(own_server: Server) -> None:
    async with AsyncClient(base_url=own_server.url, api_key=own_server.api_key) as client:
        group = await client.groups.create({"web": SMALL, "db": DB}, name="async")
        said = await group.sandboxes["web"].exec(python(ASK, "db", "set", "x", "y"), check=True)
        assert said.stdout == "y\n"
        assert [one.name async for one in client.groups.list(states=["running"])] == ["async"]
        assert (await group.kill()).state == "ended"
        assert [info async for info in client.list()] == []


def test_its_time_is_over(client: Client) -> None:
    group: Group = client.groups.create({"a": SMALL, "b": SMALL}, timeout_s=20, wait=False)
    assert group.wait_ended(timeout_s=120)
    assert group.info.end_reason == "timeout"
    assert living(client) == set()
    with pytest.raises(GroupNotFound):
        client.groups.get("no-such-group")

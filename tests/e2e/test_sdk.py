# SPDX-License-Identifier: AGPL-3.0-only
"""Our own SDK against a real server: what the README and the docstrings promise."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from opendsec import (
    AsyncClient,
    Client,
    CommandTimeout,
    IdempotencyMismatch,
    InvalidRequest,
    NotSupported,
    OpendsecError,
    Sandbox,
    SandboxNotFound,
    TemplateNotFound,
    Unauthenticated,
)
from tests.harness import Server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(base_url=server.url, api_key=server.api_key) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(base_url=server.url, api_key=server.api_key) as client:
        yield client


@pytest.fixture(scope="module")
def sandbox(server: Server) -> Iterator[Sandbox]:
    with Sandbox.create(base_url=server.url, api_key=server.api_key, env={"A": "1"}) as sandbox:
        yield sandbox


def test_exec(sandbox: Sandbox) -> None:
    result = sandbox.exec("echo out $A; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("out 1\n", "err\n", 3)


def test_argument_list_needs_no_quoting(sandbox: Sandbox) -> None:
    assert sandbox.exec(["printf", "%s|", "a b", "$A", "*"]).stdout == "a b|$A|*|"


def test_stdin(sandbox: Sandbox) -> None:
    assert sandbox.exec("wc -c", stdin=b"x" * 100_000).stdout.strip() == "100000"


def test_a_timeout_kills_the_whole_tree(sandbox: Sandbox) -> None:
    marker = f"98765.{os.getpid()}"
    with pytest.raises(CommandTimeout) as caught:
        sandbox.exec(f"setsid sleep {marker} & sleep {marker}", timeout_s=1)
    assert caught.value.fault == "user"
    gone = (
        f"for i in $(seq 50); do pgrep -a sleep | grep {marker} || exit 0; sleep 0.1; done; false"
    )
    result = sandbox.exec(gone)
    assert result.exit_code == 0, result.stdout


def test_ten_megabytes_of_output(sandbox: Sandbox) -> None:
    result = sandbox.exec("head -c 10000000 /dev/zero | tr '\\0' x")
    assert len(result.stdout) == 10_000_000 and not result.truncated


def test_endless_output_is_cut_at_the_limit(sandbox: Sandbox) -> None:
    result = sandbox.exec("head -c 3000000 /dev/zero | tr '\\0' x", output_limit_bytes=1000)
    assert len(result.stdout) == 1000 and result.truncated


def test_files(sandbox: Sandbox) -> None:
    name = f"dir-{uuid.uuid4().hex[:6]}/ünï cödé.txt"
    sandbox.files.write(name, "text")
    assert sandbox.files.read_text(name) == "text"
    info = sandbox.files.stat(name)
    assert info.size_bytes == 4 and info.owner == "user"
    sandbox.files.move(name, "moved.txt")
    assert sandbox.files.exists("moved.txt") and not sandbox.files.exists(name)


def test_a_port_on_loopback_only_is_reachable(sandbox: Sandbox) -> None:
    sandbox.files.write("www/index.html", "from inside")
    sandbox.spawn("cd www && python3 -m http.server 8123 --bind 127.0.0.1")
    sandbox.wait_for_port(8123)
    with sandbox.http(8123) as web:
        assert web.get("/index.html").text == "from inside"
    sandbox.spawn("cd www && python3 -m http.server 8124 --bind ::1")
    sandbox.wait_for_port(8124)
    with sandbox.http(8124) as web:
        assert web.get("/index.html").text == "from inside"


def test_pty(sandbox: Sandbox) -> None:
    with sandbox.pty(cols=90, rows=30) as terminal:
        terminal.write("stty size; exit 4\n")
        result = terminal.wait()
    assert "30 90" in result.stdout
    assert result.exit_code == 4


def test_idempotent_create(client: Client) -> None:
    key = uuid.uuid4().hex
    first = client.create(idempotency_key=key, metadata={"a": "1"})
    second = client.create(idempotency_key=key, metadata={"a": "1"})
    assert first.sandbox_id == second.sandbox_id
    with pytest.raises(IdempotencyMismatch):
        client.create(idempotency_key=key, metadata={"a": "2"})
    first.kill()


async def test_twenty_racing_creates_with_one_key_make_one_sandbox(
    async_client: AsyncClient,
) -> None:
    key, label = uuid.uuid4().hex, uuid.uuid4().hex
    made = await asyncio.gather(
        *(async_client.create(idempotency_key=key, labels=[label]) for _ in range(20))
    )
    assert len({one.sandbox_id for one in made}) == 1
    listed = [info async for info in async_client.list(labels=[label])]
    assert len(listed) == 1
    await made[0].kill()


def test_kill_is_idempotent_and_final(client: Client) -> None:
    sandbox = client.create()
    assert sandbox.kill() is True
    sandbox.kill()
    info = sandbox.info()
    assert (info.state, info.end_reason) == ("ended", "killed")
    with pytest.raises(SandboxNotFound):
        sandbox.exec("true")
    states = [transition.to for transition in sandbox.transitions()]
    assert states[-1] == "ended" and "running" in states


def test_time_out_ends_it(client: Client) -> None:
    sandbox = client.create(timeout_s=2)
    for _ in range(150):
        info = sandbox.info()
        if info.state == "ended":
            break
        time.sleep(0.1)
    assert (info.state, info.end_reason) == ("ended", "timeout")


def test_idle_time_out_ends_an_idle_one_only(client: Client) -> None:
    idle = client.create(idle_timeout_s=2)
    busy = client.create(idle_timeout_s=2)
    for _ in range(40):
        busy.exec("sleep 0.15")
    assert idle.info().end_reason == "idle"
    assert busy.info().state == "running"
    busy.kill()


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"template": "no-such-template"}, TemplateNotFound),
        ({"memory_mb": -1}, InvalidRequest),
        ({"cpu": 1e9}, InvalidRequest),
        ({"timeout_s": 10**12}, InvalidRequest),
        ({"metadata": {"k" * 10_000: "v"}}, InvalidRequest),
        ({"env": {"A\0B": "v"}}, InvalidRequest),
        ({"backend": "vm"}, TemplateNotFound),  # base is no disk image
        ({"backend": "fncall"}, NotSupported),
    ],
)
def test_bad_parameters(client: Client, parameters: dict[str, object], error: type) -> None:
    with pytest.raises(error) as caught:
        client.create(**parameters)  # type: ignore[arg-type]
    problem = caught.value
    assert isinstance(problem, OpendsecError)
    assert problem.fault == "user" and problem.remediation and problem.request_id


def test_unknown_id_and_wrong_key(server: Server, client: Client) -> None:
    with pytest.raises(SandboxNotFound):
        client.info("i" + "a" * 19)
    with (
        Client(base_url=server.url, api_key="e2b_" + "0" * 40) as stranger,
        pytest.raises(Unauthenticated),
    ):
        stranger.info("i" + "a" * 19)


def test_limits_hold(client: Client) -> None:
    with client.create(memory_mb=128, disk_mb=128, cpu=0.5) as small:
        eaten = small.exec(["python3", "-c", "x = bytearray(512 * 1024 * 1024)"])
        assert eaten.exit_code == 137
        assert small.exec("echo still here").stdout == "still here\n"
        filled = small.exec("dd if=/dev/zero of=/home/user/big bs=1M count=400")
        assert filled.exit_code != 0 and "quota" in filled.stderr.lower()
        small.exec("rm /home/user/big", check=True)


def test_a_fork_bomb_hurts_only_its_own_sandbox(client: Client) -> None:
    bombed = client.create(cpu=0.5, memory_mb=256)
    bombed.spawn("bomb() { bomb | bomb & }; bomb; sleep 60")
    time.sleep(2)
    with client.create() as other:
        assert other.exec("echo fine").stdout == "fine\n"
    bombed.kill()
    assert bombed.info().state == "ended"

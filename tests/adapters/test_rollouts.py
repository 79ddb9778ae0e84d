# SPDX-License-Identifier: AGPL-3.0-only
"""Rollouts in one call, with agents that work, that fail, and that cheat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from opendsec import (
    AsyncClient,
    AsyncRollout,
    AsyncSandbox,
    Client,
    InvalidRequest,
    NetworkPolicy,
    Rollout,
    RolloutOutcome,
    Sandbox,
    Verifier,
)
from tests.conformance import outside
from tests.harness import Server

Agent = Callable[[Sandbox], Any]

TEST = """\
import os, sys
assert open('/opt/dependency').read() == 'there\\n'
assert not os.path.exists('/evil')
sys.exit(open('/work/answer').read().strip() != '42')
"""
VERIFIER = Verifier(
    command=["python3", "/tests/test.py"], files={"/tests/test.py": TEST}, take=["/work"]
)
SETUP = ["mkdir -m 777 /work", "echo there > /opt/dependency"]


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """Nothing of a rollout is left, however it came out."""
    with Client(base_url=server.url, api_key=server.api_key) as client:
        yield client
        assert [*client.list()] == []
        assert [*client.snapshots.list()] == []


def shell(command: str) -> Agent:
    """An agent that runs one command, as root."""
    return lambda sandbox: sandbox.exec(command, user="root", check=True).stdout


def outcome_of(client: Client, agent: Agent, **more: Any) -> RolloutOutcome[Any]:
    arguments = {"memory_mb": 128, "setup": SETUP, "verifier": VERIFIER, **more}
    return Rollout(client, **arguments).run(agent)


def test_work_that_is_right(client: Client) -> None:
    seen: list[NetworkPolicy | None] = []

    def agent(sandbox: Sandbox) -> str:
        seen.append(sandbox.info().network)
        assert not sandbox.files.exists("/tests")
        # What cannot be taken as a file is left behind; a second name becomes a copy.
        sandbox.exec("cd /work && mkfifo pipe && ln -s /etc/passwd link", check=True)
        sandbox.exec("echo 42 > /work/answer && ln /work/answer /work/twin", check=True)
        return "done"

    show = Verifier(command="ls /work; cat /work/twin", take=VERIFIER.take)
    outcome = outcome_of(client, agent, verifier=show)
    assert (outcome.value, outcome.phase, outcome.fault) == ("done", "done", None)
    assert outcome.verified is not None
    assert outcome.verified.stdout == "answer\nlink\ntwin\n42\n"
    assert outcome.sandbox_id != outcome.verifier_id
    assert seen == [NetworkPolicy(internet=False)]
    assert outcome_of(client, agent).passed is True


def test_a_tamperer_changes_nothing_but_its_work(client: Client) -> None:
    tampering = "touch /evil; echo changed > /opt/dependency; echo 42 > /work/answer"
    assert outcome_of(client, shell(tampering)).passed is True
    # Programs of the same sandbox would have been the agent's.
    fake = "printf '#!/bin/sh\\nexit 0' > /usr/bin/python3; echo 41 > /work/answer"
    assert outcome_of(client, shell(fake)).passed is False
    here = Verifier(command=VERIFIER.command, files=VERIFIER.files, isolated=False)
    assert outcome_of(client, shell(f"rm /usr/bin/python3; {fake}; chmod 755 /usr/bin/python3"),
                      verifier=here).passed is True  # fmt: skip


# Holds a connection that the setup was allowed to open, and tries it again when it is told to.
HOLDS = f"""
import os, socket, time
s = socket.create_connection(("{outside.PUBLIC}", {outside.PORT}), timeout=15)
f = s.makefile("rw")
def say(word):
    f.write(word + "\\n"); f.flush()
    return f.readline()
print(say("by the setup"))
open("/tmp/holds", "w")
while not os.path.exists("/tmp/again"):
    time.sleep(0.02)
try:
    result = say("by the agent")
except OSError as exc:
    result = f"closed: {{exc}}"
open("/tmp/result", "w").write(result)
"""


def test_the_network_is_open_for_the_setup_alone(
    client: Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    connect = f"timeout 5 bash -c '</dev/tcp/{outside.PUBLIC}/{outside.PORT}'"

    def agent(sandbox: Sandbox) -> tuple[int, str]:
        code = sandbox.exec(connect).exit_code
        sandbox.files.write("/tmp/again", "")
        waits = "until [ -s /tmp/result ]; do sleep 0.02; done; cat /tmp/result"
        return code, sandbox.exec(waits, timeout_s=30).stdout

    setup = [
        connect,
        ["sh", "-c", 'printf %s "$1" > /holds.py; python3 /holds.py > /said 2>&1 &', "sh", HOLDS],
        "timeout 20 sh -c 'until [ -e /tmp/holds ]; do sleep 0.02; done'",
    ]
    verifier = Verifier(command=f"! {connect}")
    with outside.open_outside(tmp_path_factory.mktemp("outside")) as world:
        outcome = outcome_of(client, agent, setup=setup, verifier=verifier)
        assert outcome.error is None
        assert world.heard("by the setup") == 1
        assert world.heard("by the agent") == 0
    assert outcome.value is not None
    code, result = outcome.value
    assert code != 0
    assert result.startswith("closed"), result
    assert outcome.passed is True


@pytest.mark.parametrize(
    ("command", "phase", "words"),
    [
        ("echo 41 > /work/answer", "done", None),
        ("false", "rollout", "exit code 1"),
        ("rm -rf /work", "collect", "left no /work"),
        ("rm -rf /work; ln -s /etc /work", "collect", "is a link"),
        (
            # A tar of its own, which reaches for a file of the verifier's.
            "printf '#!/bin/sh\\ncd / && exec /bin/tar.real -cPf - ../tests/test.py' > /t;"
            "chmod 755 /t; touch /tests; mkdir -p /tests.d; rm /tests; mkdir /tests;"
            "touch /tests/test.py; mv /bin/tar /bin/tar.real; mv /t /bin/tar",
            "collect",
            "is not below",
        ),
        (
            "printf '#!/bin/sh\\nhead -c 5000 /dev/urandom' > /t; chmod 755 /t; mv /t /bin/tar",
            "collect",
            "archive",
        ),
    ],
)
def test_what_is_the_agents_failure(
    client: Client, command: str, phase: str, words: str | None
) -> None:
    outcome = outcome_of(client, shell(command))
    assert (outcome.passed, outcome.phase) == (False, phase), outcome.error
    if words is not None:
        assert outcome.fault == "user"
        assert words in str(outcome.error)


def test_what_is_not_the_agents_failure(client: Client) -> None:
    right = shell("echo 42 > /work/answer")
    setup = outcome_of(client, right, setup=["false"])
    assert (setup.passed, setup.phase, setup.value) == (None, "setup", None)
    nowhere = outcome_of(client, right, template="no-such-template")
    assert (nowhere.passed, nowhere.phase, nowhere.sandbox_id) == (None, "create", None)
    no_program = Verifier(command=["no-such-program"], take=["/work"])
    verify = outcome_of(client, right, verifier=no_program)
    assert (verify.passed, verify.phase) == (None, "verify")
    assert outcome_of(client, right, verifier=None).passed is None


def test_work_that_is_too_large_or_never_ends(client: Client) -> None:
    small = Verifier(command="true", take=["/work"], take_max_bytes=1000)
    large = outcome_of(client, shell("head -c 2000 /dev/zero > /work/x"), verifier=small)
    assert (large.passed, large.phase) == (False, "collect")
    sparse = outcome_of(client, shell("truncate -s 1T /work/x"), verifier=small)
    assert (sparse.passed, sparse.phase) == (False, "collect")
    runs = Verifier(command="sh /work/run", take=["/work"], timeout_s=1)
    endless = outcome_of(client, shell("echo sleep 60 > /work/run"), verifier=runs)
    assert (endless.passed, endless.phase, endless.fault) == (False, "verify", "user")


def test_an_agents_own_bug_is_raised(client: Client) -> None:
    def broken(sandbox: Sandbox) -> None:
        raise ZeroDivisionError(sandbox.sandbox_id)

    with pytest.raises(ZeroDivisionError):
        outcome_of(client, broken)


@pytest.mark.parametrize(
    "arguments",
    [
        {"setup": "apt-get update"},
        {"network": NetworkPolicy()},
        {"verifier": Verifier(command="true", take=["work"])},
        {"verifier": Verifier(command="true", take=["/"])},
        {"verifier": Verifier(command="true", take=["/work/../etc"])},
    ],
)
def test_what_makes_no_sense(client: Client, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Rollout(client, **arguments)


async def test_async(server: Server) -> None:
    async def agent(sandbox: AsyncSandbox) -> int:
        await sandbox.exec("echo 42 > /work/answer", check=True)
        return 42

    async with AsyncClient(base_url=server.url, api_key=server.api_key) as client:
        rollout = AsyncRollout(client, memory_mb=128, setup=SETUP, verifier=VERIFIER)
        outcome = await rollout.run(agent)
    assert (outcome.value, outcome.passed) == (42, True)


async def test_one_that_is_cancelled_leaves_nothing(server: Server) -> None:
    begun = asyncio.Event()

    async def agent(sandbox: AsyncSandbox) -> None:
        begun.set()
        await sandbox.exec("sleep 600")

    async with AsyncClient(base_url=server.url, api_key=server.api_key) as client:
        rollout = AsyncRollout(client, memory_mb=64, setup=SETUP, verifier=VERIFIER)
        running = asyncio.create_task(rollout.run(agent))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [record async for record in client.list()] == []
        assert [snapshot async for snapshot in client.snapshots.list()] == []

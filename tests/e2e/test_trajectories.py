# SPDX-License-Identifier: AGPL-3.0-only
"""Actions against a real server: done once, whatever dies; and the programs of docs/rl.md."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opendsec import (
    ActionMismatch,
    Client,
    FileNotFound,
    InvalidRequest,
    OpendsecError,
    Sandbox,
    SandboxEnded,
    SandboxLost,
)
from tests.harness import BIN, Server

DOCS = Path(__file__).parents[2] / "docs"
MEMORY_MB = 128


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(base_url=server.url, api_key=server.api_key) as client:
        yield client


@pytest.fixture
def sandbox(client: Client) -> Iterator[Sandbox]:
    with client.create(memory_mb=MEMORY_MB, task_id="trajectories") as sandbox:
        yield sandbox


def until(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if check():
            return
        time.sleep(0.1)
    raise AssertionError(what)


def test_done_once_and_told_again(client: Client, sandbox: Sandbox) -> None:
    actions = sandbox.actions
    first = actions.exec("a", "echo x >> n; echo out; echo err >&2; exit 3", step=1)
    assert (first.exit_code, first.stdout, first.stderr) == (3, "out\n", "err\n")
    assert (first.cause, first.fault, first.ok) == ("exit_code", "user", False)
    assert actions.exec("a", "echo x >> n; echo out; echo err >&2; exit 3") == first
    assert sandbox.exec("cat n").stdout == "x\n"
    with pytest.raises(ActionMismatch):
        actions.exec("a", "true")
    assert actions.write_file("w", "d/f", "text").ok
    assert actions.read_file("r", "d/f").content == b"text"
    for _ in range(2):
        with pytest.raises(FileNotFound):
            actions.read_file("m", "nothing")
    with pytest.raises(InvalidRequest):
        actions.exec("p", ["/no/such/program"])
    proc = actions.read_file("proc", "/proc/self/status").content
    assert proc is not None and b"opendsec-agent" in proc
    assert [action.action_id for action in actions.list()] == ["a", "w", "r", "m", "p", "proc"]


def test_evidence_and_bounded_output(sandbox: Sandbox) -> None:
    actions = sandbox.actions
    killed = actions.exec("oom", ["sh", "-c", "head -c 400000000 /dev/zero | tail"])
    assert (killed.cause, killed.fault) == ("oom_kill", "user")
    assert killed.evidence["oom_kills"] >= 1
    late = actions.exec("late", ["sleep", "60"], timeout_s=0.5)
    assert (late.cause, late.timed_out) == ("time_out", True)
    assert late.evidence == {"of": "command", "limit_s": 0.5}
    died = actions.exec("died", ["sh", "-c", "kill -SEGV $$"])
    assert (died.cause, died.evidence["signal_name"]) == ("signal", "SIGSEGV")
    long = actions.exec("long", ["seq", "200000"], output_limit_bytes=1000)
    assert long.truncated and long.result is not None
    output = long.result.stdout
    assert (output.bytes, output.cut_bytes) == (1_288_895, 1_287_895)
    assert output.head.startswith("1\n2\n") and output.tail.endswith("\n200000\n")
    assert "1287895 bytes cut" in long.stdout


def test_a_paused_sandbox_keeps_its_action(sandbox: Sandbox) -> None:
    command = "echo x >> n; sleep 3; echo out"
    done = threading.Thread(target=lambda: sandbox.actions.exec("slow", command))
    done.start()
    until(lambda: sandbox.exec("cat n").stdout == "x\n", "the command does not run")
    sandbox.pause()
    assert sandbox.actions.get("slow").state == "running"
    with pytest.raises(OpendsecError, match="paused"):
        sandbox.actions.exec("other", "true")
    sandbox.resume()
    done.join()
    assert sandbox.actions.get("slow").stdout == "out\n"
    assert sandbox.exec("cat n").stdout == "x\n"


def test_a_pause_without_memory_makes_a_running_action_unknown(sandbox: Sandbox) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(sandbox.actions.exec, "slow", "echo x >> n; sleep 300", timeout_s=400)
        until(lambda: sandbox.exec("cat n").stdout == "x\n", "the command does not run")
        sandbox.pause(mode="filesystem")
        sandbox.resume()
        error = asked.exception()
    assert isinstance(error, OpendsecError)
    assert (error.code, error.fault) == ("action_unknown", "platform")
    assert sandbox.actions.resolve("slow", happened=True).resolved_by == "caller"
    assert sandbox.exec("cat n").stdout == "x\n"


def test_snapshot_at_a_step_restore_many_and_fast_forward(client: Client) -> None:
    with client.create(memory_mb=MEMORY_MB) as old:
        old.actions.exec("a", "echo 1 >> n", rollout_id="branching", step=0)
        old.actions.snapshot("snap", rollout_id="branching", step=1)
        old.actions.exec("b", "echo 2 >> n", rollout_id="branching", step=2)
    made = client.trajectories.branch(old.sandbox_id, "snap", 2)
    boxes = [box for box in made if isinstance(box, Sandbox)]
    assert len(boxes) == 2, made
    for box in boxes:
        assert box.exec("cat n").stdout == "1\n"
    left, right = boxes
    steps = list(left.actions.fast_forward(old.sandbox_id))
    assert [step.how for step in steps] == ["copied", "copied", "ran"]
    assert left.exec("cat n").stdout == "1\n2\n"
    assert right.exec("cat n").stdout == "1\n"
    # The client goes on with its ids.
    assert left.actions.exec("b", "echo 2 >> n").origin == old.sandbox_id
    exported = list(client.trajectories.export("branching"))
    assert {action.sandbox_id for action in exported} == {
        old.sandbox_id, left.sandbox_id, right.sandbox_id,
    }  # fmt: skip
    for box in boxes:
        box.kill()
    with pytest.raises(SandboxEnded):
        left.actions.exec("c", "true")


def test_the_command_line(server: Server, sandbox: Sandbox) -> None:
    def opendsec(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "opendsec"), "trajectory", *args],
            env=server.client_environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    name = sandbox.sandbox_id
    ran = opendsec("exec", "--rollout", "cli", name, "a", "--", "sh", "-c", "echo hi; exit 7")
    assert (ran.returncode, ran.stdout) == (7, "hi\n"), ran.stderr
    shown = opendsec("show", name)
    assert "exit_code" in shown.stdout and shown.returncode == 0
    assert opendsec("export", "cli").stdout.count("\n") == 1
    assert "exit_code" in opendsec("outcomes", "trajectories").stdout
    missing = opendsec("resolve", name, "nothing")
    assert missing.returncode == 1 and "trajectory show" in missing.stderr


# --- docs/rl.md ------------------------------------------------------------------------------


def program(name: str, folder: Path) -> str:
    text = (DOCS / "rl.md").read_text()
    found = re.search(rf"<!-- program: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None, f"docs/rl.md has no {name}"
    path = folder / name
    path.write_text(found[1])
    return str(path)


def run(server: Server, path: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, path, *args],
        env={**server.client_environment, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_rollout_of_the_docs_goes_on(server: Server, client: Client, tmp_path: Path) -> None:
    rollout, goon = program("rollout.py", tmp_path), program("goon.py", tmp_path)
    name = f"docs-{os.getpid()}"
    assert run(server, rollout, name, PREEMPT_AT="1").returncode == 9
    ended = run(server, rollout, name)
    assert ended.stdout == "begun\nstep one\nstep two\n", ended.stderr
    log = list(client.trajectories.export(name))
    assert [(a.action_id, a.state, a.attempt) for a in log] == [
        (f"step-{step}", "done", 1) for step in range(4)
    ]
    old = log[0].sandbox_id
    client.kill(old)
    again = run(server, goon, old, name)
    assert again.returncode == 0, again.stderr
    *steps, new = again.stdout.split("\n")[:-1]
    assert [step.split()[0] for step in steps] == ["ran"] * 4
    assert client.connect(new).exec("cat log").stdout == "begun\nstep one\nstep two\n"
    client.kill(new)


def test_kill_9_of_the_server_and_what_it_leaves(
    server: Server, client: Client, sandbox: Sandbox, tmp_path: Path
) -> None:
    """While a command runs; and while a sandbox dies that nobody watches."""
    reward = program("reward.py", tmp_path)
    command = "echo x >> n; echo begun; sleep 4; echo out; exit 5"
    good, bad, ended, lost = (client.create(memory_mb=MEMORY_MB) for _ in range(4))
    good.exec("echo done > log")
    lost.actions.exec("a", "echo done > log")
    ended.kill()
    names = [box.sandbox_id for box in (good, bad, ended, lost)]

    def ask() -> None:
        other = Client(base_url=server.url, api_key=server.api_key, retries_max=0)
        with other, pytest.raises(OpendsecError):
            other.trajectories.of(sandbox.sandbox_id).exec("slow", command)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: sandbox.exec("cat n").stdout == "x\n", "the command does not run")
    first = first_process(lost.sandbox_id)
    server.kill_daemon()
    asking.join()
    os.kill(first, signal.SIGKILL)
    # The reward loop of the docs, while there is nobody to ask.
    away = run(server, reward, *names)
    server.start()
    assert away.stdout.splitlines() == [f"{name} no sample" for name in names], away.stderr

    action = sandbox.actions.exec("slow", command)
    assert (action.exit_code, action.stdout, action.attempt) == (5, "begun\nout\n", 1)
    assert sandbox.exec("cat n").stdout == "x\n"

    until(lambda: lost.info().state == "ended", "its end was not noticed")
    with pytest.raises(SandboxLost) as failure:
        lost.actions.exec("b", "true")
    assert failure.value.fault == "platform"
    assert lost.actions.exec("a", "echo done > log").ok, "what was recorded is told"
    scores = ["1.0", "0.0", "0.0", "no sample"]
    scored = run(server, reward, *names)
    expected = [f"{name} {score}" for name, score in zip(names, scores, strict=True)]
    assert scored.stdout.splitlines() == expected, scored.stderr
    good.kill()
    bad.kill()


def first_process(sandbox_id: str) -> int:
    """The sandbox's PID 1, as the host sees it."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "status").read_text()
            groups = (entry / "cgroup").read_text()
        except OSError:
            continue
        if sandbox_id in groups and re.search(r"^NSpid:.*\s1$", status, re.MULTILINE):
            return int(entry.name)
    raise AssertionError("the sandbox has no first process")

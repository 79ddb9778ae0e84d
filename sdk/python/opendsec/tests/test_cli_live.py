# SPDX-License-Identifier: Apache-2.0
"""The command line with the real guest agent, also on a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Agent
from .fake_server import SANDBOX_ID, Answer, FakeServer, sandbox
from .test_cli import cli, environment

ONE = f"/v1/sandboxes/{SANDBOX_ID}"
EXPECT_S = 30.0


@pytest.fixture
def ready(server: FakeServer, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A scripted API in front of the real agent."""
    record = sandbox(access_token=agent.token)
    server.on("POST", "/v1/sandboxes", Answer(201, record))
    server.on("GET", ONE, Answer(200, record))
    server.on("DELETE", ONE, Answer(200, sandbox(state="ended")))
    return server


class Terminal:
    """A program on a terminal that a test can type on and read from."""

    def __init__(
        self, server: FakeServer, agent: Agent, *args: str, env: dict[str, str] | None
    ) -> None:
        self.master, slave = pty.openpty()
        self.resize(80, 24, signal_child=False)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [sys.executable, "-m", "opendsec.cli.main", *args],
            env=environment(server, OPENDSEC_SANDBOX_URL=agent.url, TERM="xterm", **(env or {})),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        self.seen = b""

    def resize(self, cols: int, rows: int, *, signal_child: bool = True) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        if signal_child:
            self.process.send_signal(signal.SIGWINCH)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, text: str) -> None:
        deadline = time.monotonic() + EXPECT_S
        while text.encode() not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self.master], [], [], min(left, 0.5))[0]:
                self.seen += os.read(self.master, 65536)
        self.seen = self.seen.partition(text.encode())[2]

    def wait(self) -> int:
        return self.process.wait(EXPECT_S)

    def is_restored(self) -> bool:
        return termios.tcgetattr(self.slave) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminals(ready: FakeServer, agent: Agent) -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def open_terminal(
    stack: contextlib.ExitStack,
    ready: FakeServer,
    agent: Agent,
    *args: str,
    env: dict[str, str] | None = None,
) -> Terminal:
    terminal = Terminal(ready, agent, *args, env=env)
    stack.callback(terminal.close)
    return terminal


def test_shell_session(ready: FakeServer, agent: Agent, terminals: contextlib.ExitStack) -> None:
    t = open_terminal(
        terminals, ready, agent, "exec", "-it", SANDBOX_ID, "bash", "--norc",
        env={"COLUMNS": "99", "LINES": "9"},  # not the terminal's own size: not taken for it
    )  # fmt: skip
    t.type("stty size; echo first-$((1 + 1))\n")
    t.expect("24 80")
    t.expect("first-2")
    t.resize(100, 50)
    # The new size takes its way through the server.
    t.type(
        "for i in $(seq 100); do s=$(stty size); [ \"$s\" != '24 80' ] && break; sleep 0.1; done\n"
    )
    t.type("echo size $s\n")
    t.expect("size 50 100")
    # Said by the program itself: an interrupt before it has the terminal goes to bash instead.
    t.type("sh -c 'echo now-$((5 + 5)); exec sleep 100'\n")
    t.expect("now-10")
    t.type("\x03")  # Ctrl-C goes to the program in the sandbox, not to us.
    t.expect("bash-")
    t.type("echo after-$((2 + 2))\n")
    t.expect("after-4")
    assert not t.is_restored()
    t.type("exit 9\n")
    assert t.wait() == 9
    assert t.is_restored()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminal_is_restored_when_killed(
    ready: FakeServer, agent: Agent, terminals: contextlib.ExitStack, number: int
) -> None:
    t = open_terminal(terminals, ready, agent, "shell", SANDBOX_ID)
    t.type("echo up-$((3 + 3))\n")
    t.expect("up-6")
    t.process.send_signal(number)
    assert t.wait() == 128 + number
    assert t.is_restored()


def test_run_on_a_terminal(
    ready: FakeServer, agent: Agent, terminals: contextlib.ExitStack
) -> None:
    t = open_terminal(
        terminals, ready, agent, "run", "-it", "--", "sh", "-c", "[ -t 0 ] && echo yes-tty; exit 2"
    )
    t.expect("yes-tty")
    assert t.wait() == 2
    assert len(ready.of("DELETE", ONE)) == 1


def test_ctrl_c_ends_run(
    ready: FakeServer, agent: Agent, terminals: contextlib.ExitStack, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    t = open_terminal(
        terminals,
        ready,
        agent,
        "run",
        "--",
        "sh",
        "-c",
        f"echo $$ > {pid_file}; echo begun; sleep 99",
    )
    t.expect("begun")
    t.process.send_signal(signal.SIGINT)
    assert t.wait() == 130
    assert len(ready.of("DELETE", ONE)) == 1


def test_table_on_a_terminal_has_colour_and_none_with_no_color(
    ready: FakeServer, agent: Agent, terminals: contextlib.ExitStack
) -> None:
    page = {"sandboxes": [sandbox()], "next_cursor": None}
    ready.on("GET", "/v1/sandboxes", Answer(200, page))
    t = open_terminal(terminals, ready, agent, "ls")
    t.expect("\x1b[32m")
    assert t.wait() == 0


# --- without a terminal ---------------------------------------------------------------


def test_pipes(ready: FakeServer, agent: Agent) -> None:
    data = os.urandom(200_000)
    done = cli(ready, "run", "--", "cat", stdin=data, OPENDSEC_SANDBOX_URL=agent.url)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == data
    done = cli(
        ready,
        "exec",
        "-i",
        SANDBOX_ID,
        "--",
        "wc",
        "-c",
        stdin=b"12345",
        OPENDSEC_SANDBOX_URL=agent.url,
    )
    assert done.stdout.strip() == b"5"


def test_codes(ready: FakeServer, agent: Agent) -> None:
    for command, code in (("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)):
        done = cli(ready, "run", "--", "sh", "-c", command, OPENDSEC_SANDBOX_URL=agent.url)
        assert done.returncode == code, done.stderr
    late = cli(ready, "run", "--timeout", "1", "--", "sleep", "60", OPENDSEC_SANDBOX_URL=agent.url)
    assert late.returncode == 124
    missing = cli(ready, "run", "--", "/nonexistent", OPENDSEC_SANDBOX_URL=agent.url)
    assert missing.returncode == 127
    assert b"/nonexistent" in missing.stderr


def test_run_scripts(ready: FakeServer, agent: Agent, tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import sys; print('hello', *sys.argv[1:])")
    done = cli(ready, "run", "-f", str(script), "--", "-x", OPENDSEC_SANDBOX_URL=agent.url)
    assert done.stdout == b"hello -x\n", done.stderr
    Path(f"/tmp/{script.name}").unlink()
    done = cli(ready, "run", "-c", "print(6 * 7)", OPENDSEC_SANDBOX_URL=agent.url)
    assert done.stdout == b"42\n"


def test_cp_both_ways(ready: FakeServer, agent: Agent, tmp_path: Path) -> None:
    local, there = tmp_path / "ä b", tmp_path / "there"
    local.mkdir()
    (local / "file").write_bytes(b"\x00\xff")
    url = agent.url

    def cp(*args: str, stdin: bytes | None = None) -> bytes:
        done = cli(ready, "cp", *args, stdin=stdin, OPENDSEC_SANDBOX_URL=url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    cp(str(local), f"{SANDBOX_ID}:{there}")
    assert (there / "file").read_bytes() == b"\x00\xff"
    cp(f"{SANDBOX_ID}:{there}", str(tmp_path / "back"))
    assert (tmp_path / "back" / "file").read_bytes() == b"\x00\xff"
    cp("-", f"{SANDBOX_ID}:{there}/piped", stdin=b"from a pipe")
    assert cp(f"{SANDBOX_ID}:{there}/piped", "-") == b"from a pipe"
    missing = cli(ready, "cp", f"{SANDBOX_ID}:{there}/none", "-", OPENDSEC_SANDBOX_URL=url)
    assert missing.returncode == 1
    assert b"file_not_found" in missing.stderr


def test_program_ends_while_input_stays_open(ready: FakeServer, agent: Agent) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "opendsec.cli.main", "run", "--", "true"],
        env=environment(ready, OPENDSEC_SANDBOX_URL=agent.url),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.wait(EXPECT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.communicate()

# SPDX-License-Identifier: Apache-2.0
"""``opendsec ls --watch``, as a program against a scripted server, on a terminal and without."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from opendsec import ConnectionFailed, SandboxInfo, Unauthenticated
from opendsec.cli import _watch

from .fake_server import SANDBOX_ID, Answer, Asked, FakeServer, sandbox
from .test_cli import WAIT_S, environment, hear_interrupts

SECOND = "itest0000000000000002"
ONE = f"/v1/sandboxes/{SANDBOX_ID}"


def page(*records: dict[str, Any]) -> Answer:
    return Answer(200, {"sandboxes": list(records), "next_cursor": None})


@pytest.fixture
def changing(server: FakeServer) -> FakeServer:
    """One that is paused and ends, and another that comes."""
    server.on(
        "GET",
        "/v1/sandboxes",
        page(sandbox()),
        page(sandbox()),
        page(sandbox(SECOND), sandbox(state="paused", end_at=None)),
        page(sandbox(SECOND)),
    )
    server.on("GET", ONE, Answer(200, sandbox(state="ended", end_reason="timeout")))
    return server


@contextmanager
def watching(server: FakeServer, *args: str, **files: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "opendsec.cli.main", "ls", "--watch", *args],
        env=environment(server, TERM="xterm", COLUMNS="200"),
        stdin=subprocess.DEVNULL,
        preexec_fn=hear_interrupts,
        **files,
    )
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def first_lines(process: subprocess.Popen[bytes], count: int) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for _ in range(count):
        assert select.select([process.stdout], [], [], WAIT_S)[0], lines
        lines.append(process.stdout.readline().decode())
    return lines


def test_lines_for_what_changes(changing: FakeServer) -> None:
    with watching(changing, stdout=subprocess.PIPE, bufsize=0) as process:
        lines = first_lines(process, 4)
    assert "\x1b" not in "".join(lines)
    assert [line.split()[2:] for line in lines] == [
        ["new", SANDBOX_ID, "base", "running"],
        ["changed", SANDBOX_ID, "base", "running", "->", "paused"],
        ["new", SECOND, "base", "running"],
        ["gone", SANDBOX_ID, "base", "paused", "->", "ended", "timeout"],
    ]


def test_json_is_one_document_per_change(changing: FakeServer) -> None:
    with watching(changing, "--json", stdout=subprocess.PIPE, bufsize=0) as process:
        changes = [json.loads(line) for line in first_lines(process, 4)]
    assert [(c["change"], c["sandbox"]["sandbox_id"], c["sandbox"]["state"]) for c in changes] == [
        ("new", SANDBOX_ID, "running"),
        ("changed", SANDBOX_ID, "paused"),
        ("new", SECOND, "running"),
        ("gone", SANDBOX_ID, "ended"),
    ]
    assert all(change["at"] for change in changes)
    # What only `info` tells is not printed.
    assert changes[-1]["sandbox"].get("access_token") is None


def test_a_terminal_shows_the_table_anew(changing: FakeServer) -> None:
    master, slave = pty.openpty()
    try:
        with watching(changing, stdout=slave, stderr=slave):
            seen, deadline = b"", time.monotonic() + WAIT_S
            while not (b"paused" in seen and seen.count(SECOND.encode()) > 1):
                assert time.monotonic() < deadline, seen
                if select.select([master], [], [], 0.5)[0]:
                    seen += os.read(master, 65_536)
    finally:
        os.close(master)
        os.close(slave)
    assert seen.count(b"BACKEND") >= 3
    assert b"\x1b[1A" in seen, "it goes up to draw over what was there"


def test_the_list_may_not_be_cut(server: FakeServer) -> None:
    for option in (["--limit", "3"], ["-q"]):
        command = [sys.executable, "-m", "opendsec.cli.main", "ls", "-w", *option]
        done = subprocess.run(command, env=environment(server), capture_output=True, timeout=WAIT_S)
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"--limit" in done.stderr
    assert not server.asked


def test_a_server_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_watch, "INTERVAL_S", 0.0)
    monkeypatch.setattr(_watch, "AWAY_RETRY_S", 0.0)
    record = SandboxInfo(sandbox_id=SANDBOX_ID, state="running")
    answers: list[Any] = [
        [record], ConnectionFailed("away"), ConnectionFailed("away"), [], Unauthenticated("no")
    ]  # fmt: skip

    def read() -> list[SandboxInfo]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    lists = _watch._lists(read)
    assert next(lists) == [record]
    assert next(lists) == []
    with pytest.raises(Unauthenticated):
        next(lists)


def test_the_first_failure_is_told(server: FakeServer) -> None:
    def denied(asked: Asked) -> Answer:
        return Answer(401, {"error": {"code": "unauthenticated", "message": "no", "fault": "user"}})

    server.on("GET", "/v1/sandboxes", denied)
    command = [sys.executable, "-m", "opendsec.cli.main", "ls", "-w"]
    done = subprocess.run(command, env=environment(server), capture_output=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (77, b"")

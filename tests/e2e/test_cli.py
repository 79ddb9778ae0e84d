# SPDX-License-Identifier: AGPL-3.0-only
"""The command line against a real server, as a user types it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from tests.harness import BIN, Server

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(server: Server) -> Run:
    def run(
        *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "opendsec"), *arguments],
            env=server.client_environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=check,
        )

    return run


@pytest.fixture
def sandbox_id(cli: Run) -> Iterator[str]:
    made = cli("create", "--timeout", "300").stdout.strip()
    yield made
    cli("kill", made)


def test_run_prints_and_passes_the_exit_code(cli: Run) -> None:
    run = cli("run", "-c", "import sys; print(6 * 7); sys.exit(9)", check=False)
    assert (run.stdout, run.returncode) == ("42\n", 9)


def test_run_pipes_stdin(cli: Run) -> None:
    assert cli("run", "--", "wc", "-l", stdin="a\nb\n").stdout.strip() == "2"


def test_run_leaves_nothing(cli: Run) -> None:
    before = {one["sandbox_id"] for one in json.loads(cli("ls", "--json").stdout)}
    cli("run", "--", "true")
    after = {one["sandbox_id"] for one in json.loads(cli("ls", "--json").stdout)}
    assert after <= before


def test_exec_and_exit_code(cli: Run, sandbox_id: str) -> None:
    assert cli("exec", sandbox_id, "--", "echo", "a b").stdout == "a b\n"
    assert cli("exec", sandbox_id, "--", "sh", "-c", "exit 6", check=False).returncode == 6


def test_list_and_logs(cli: Run, sandbox_id: str) -> None:
    assert sandbox_id in cli("ls").stdout
    assert "running" in cli("logs", sandbox_id).stdout


def test_copy_both_ways(cli: Run, sandbox_id: str, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "ü.txt").write_text("x")
    (tmp_path / "in" / "run.sh").write_text("#!/bin/sh\n")
    cli("cp", str(tmp_path / "in"), f"{sandbox_id}:/home/user/in")
    assert cli("exec", sandbox_id, "--", "cat", "/home/user/in/deep/ü.txt").stdout == "x"
    cli("cp", f"{sandbox_id}:/home/user/in", str(tmp_path / "out"))
    assert (tmp_path / "out" / "deep" / "ü.txt").read_text() == "x"


def test_a_terminal(server: Server, sandbox_id: str) -> None:
    terminal = pexpect.spawn(
        str(BIN / "opendsec"),
        ["shell", sandbox_id],
        env={**server.client_environment, "TERM": "xterm"},
        timeout=20,
        encoding="utf-8",
        dimensions=(33, 99),
    )
    terminal.expect(r"\$ ")
    terminal.sendline("stty size; echo mark$((40+2))")
    terminal.expect("33 99")
    terminal.expect("mark42")
    terminal.sendline("exit 3")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 3


def test_env_prints_the_three_lines(cli: Run, server: Server) -> None:
    lines = cli("env").stdout.splitlines()
    assert lines == [
        f"export E2B_API_KEY={server.api_key}",
        f"export E2B_API_URL={server.url}",
        f"export E2B_SANDBOX_URL={server.url}",
    ]


def test_an_error_says_what_to_do(cli: Run) -> None:
    run = cli("exec", "i" + "a" * 19, "--", "true", check=False)
    assert run.returncode not in (0, 1)
    assert "sandbox_not_found" in run.stderr and "Traceback" not in run.stderr

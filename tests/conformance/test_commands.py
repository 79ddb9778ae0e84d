# SPDX-License-Identifier: AGPL-3.0-only
"""Commands."""

from __future__ import annotations

import os
import signal

import pytest

from opendsec import CommandTimeout, InvalidRequest, ProcessNotFound, ProgramNotFound, Sandbox

from .kit import each, until


def test_a_command_gives_output_errors_and_exit_code(sandbox: Sandbox) -> None:
    result = sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)


def test_an_argument_list_needs_no_quoting(sandbox: Sandbox) -> None:
    assert sandbox.exec(["printf", "%s|", "a b", "$HOME", "*"]).stdout == "a b|$HOME|*|"


def test_environment_of_sandbox_and_command(sandbox: Sandbox) -> None:
    result = sandbox.exec("echo $OF_SANDBOX $OWN", env={"OWN": "2"})
    assert result.stdout == "1 2\n"


def test_working_directory_and_home(sandbox: Sandbox) -> None:
    assert sandbox.exec("pwd").stdout == "/home/user\n"
    assert sandbox.exec("pwd", cwd="/tmp").stdout == "/tmp\n"
    with pytest.raises(InvalidRequest):
        sandbox.exec("pwd", cwd="/no/such/directory")


def test_user_root_and_sudo(sandbox: Sandbox) -> None:
    assert sandbox.exec("whoami").stdout == "user\n"
    assert sandbox.exec("whoami", user="root").stdout == "root\n"
    assert sandbox.exec("sudo -n id -u").stdout == "0\n"


def test_a_missing_program_is_typed(sandbox: Sandbox) -> None:
    with pytest.raises(ProgramNotFound):
        sandbox.exec(["no-such-program"])
    assert sandbox.exec("no-such-program").exit_code == 127


def test_a_command_killed_by_a_signal_says_which(sandbox: Sandbox) -> None:
    result = sandbox.exec("kill -TERM $$")
    assert (result.signal, result.exit_code) == (signal.SIGTERM, 128 + signal.SIGTERM)


def test_signals_reach_a_running_command(sandbox: Sandbox) -> None:
    process = sandbox.spawn(
        ["bash", "-c", "trap 'echo heard; exit 4' INT; echo ready; while :; do sleep 0.05; done"]
    )
    for event in process:
        if b"ready" in event.data:
            break
    process.send_signal(signal.SIGINT)
    result = process.wait()
    assert "heard" in result.stdout and result.exit_code == 4


def test_stdin_reaches_a_command(sandbox: Sandbox) -> None:
    assert sandbox.exec("wc -c", stdin=b"x" * 300_000).stdout.strip() == "300000"


def test_a_background_child_does_not_delay_the_end(sandbox: Sandbox) -> None:
    result = sandbox.exec("sleep 271 & echo done", timeout_s=120)
    assert result.stdout == "done\n" and result.exit_code == 0
    assert sandbox.exec("pkill -f 'sleep 271'").exit_code == 0, "and it went on"


def test_large_output_is_complete(sandbox: Sandbox) -> None:
    result = sandbox.exec("head -c 4000000 /dev/zero | tr '\\0' x")
    assert len(result.stdout) == 4_000_000 and not result.truncated


def test_endless_output_is_cut_at_the_limit(sandbox: Sandbox) -> None:
    result = sandbox.exec("head -c 1000000 /dev/zero | tr '\\0' x", output_limit_bytes=1000)
    assert len(result.stdout) == 1000 and result.truncated


def test_a_timeout_kills_the_whole_tree(sandbox: Sandbox) -> None:
    marker = f"9876.{os.getpid()}"
    with pytest.raises(CommandTimeout) as caught:
        sandbox.exec(f"setsid sleep {marker} & sleep {marker}", timeout_s=1)
    assert caught.value.fault == "user"
    until(
        lambda: sandbox.exec(["pgrep", "-f", f"sleep {marker}"]).exit_code == 1,
        "a child of the command runs on",
    )


def test_a_terminal_has_a_size_and_an_exit_code(sandbox: Sandbox) -> None:
    with sandbox.pty(cols=90, rows=30) as terminal:
        terminal.write("stty size; exit 4\n")
        result = terminal.wait()
    assert "30 90" in result.stdout
    assert result.exit_code == 4


def test_a_terminal_can_be_resized(sandbox: Sandbox) -> None:
    with sandbox.pty(cols=80, rows=24) as terminal:
        terminal.resize(cols=101, rows=33)
        terminal.write("stty size; exit\n")
        assert "33 101" in terminal.wait().stdout


def test_a_running_command_can_be_left_and_found_again(sandbox: Sandbox) -> None:
    process = sandbox.spawn("sleep 1; echo late; exit 6", tag="left")
    process.disconnect()
    assert process.pid in [one.pid for one in sandbox.processes()]
    result = sandbox.attach("left").wait()
    assert result.stdout == "late\n" and result.exit_code == 6
    with pytest.raises(ProcessNotFound):
        sandbox.attach("never-there")


def test_many_commands_at_once_keep_their_answers(sandbox: Sandbox) -> None:
    answers = each(lambda n: sandbox.exec(f"echo {n}").stdout, range(12))
    assert answers == [f"{n}\n" for n in range(12)]


def test_real_programs_run(sandbox: Sandbox) -> None:
    run = sandbox.exec(
        "python3 -c 'import json,ssl,sqlite3; print(json.dumps([1,2]))' && "
        "git --version >/dev/null && curl --version >/dev/null && echo ok"
    )
    assert run.stdout == "[1, 2]\nok\n", run.stderr


def test_a_program_that_daemonises_lives_on(sandbox: Sandbox) -> None:
    sandbox.exec("setsid nohup sleep 272 >/dev/null 2>&1 &", check=True)
    assert sandbox.exec("pkill -f 'sleep 272'").exit_code == 0

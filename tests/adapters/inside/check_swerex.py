# SPDX-License-Identifier: AGPL-3.0-only
"""SWE-ReX's sessions, commands and files in a sandbox."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

from opendsec.adapters.swerex import (
    OpendsecDeployment,
    OpendsecDeploymentConfig,
    OpendsecRuntime,
)


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[OpendsecRuntime]:
    deployment = OpendsecDeploymentConfig(memory_mb=192, env={"GIVEN": "yes"}).get_deployment()
    await deployment.start()
    await deployment.start()  # Once is enough.
    assert await deployment.is_alive(timeout=10)
    yield deployment.runtime
    await deployment.stop()
    await deployment.stop()
    with pytest.raises(DeploymentNotStartedError):
        _ = deployment.runtime


@pytest.fixture
async def session(runtime: OpendsecRuntime) -> AsyncIterator[str]:
    name = uuid.uuid4().hex
    await runtime.create_session(CreateBashSessionRequest(session=name))
    yield name
    await runtime.close_session(CloseBashSessionRequest(session=name))


async def say(runtime: OpendsecRuntime, session: str, command: str, **more: object) -> str:
    action = BashAction(command=command, session=session, **more)
    return (await runtime.run_in_session(action)).output


async def test_a_session_keeps_its_state(runtime: OpendsecRuntime, session: str) -> None:
    assert await say(runtime, session, "cd /tmp; export A=5; echo $GIVEN") == "yes\n"
    assert await say(runtime, session, "pwd\necho $A é") == "/tmp\n5 é\n"
    assert await say(runtime, session, "cat <<EOF\n$A\nEOF") == "5\n"
    # bashlex cannot read this one.
    assert (await say(runtime, session, "[[ -d /tmp ]] && (echo yes)")).strip() == "yes"
    assert len(await say(runtime, session, "seq 1 100000")) == 588895


async def test_failures_of_commands(runtime: OpendsecRuntime, session: str) -> None:
    silent = await runtime.run_in_session(
        BashAction(command="(exit 7)", session=session, check="silent")
    )
    assert silent.exit_code == 7
    with pytest.raises(NonZeroExitCodeError, match="exit code 1"):
        await say(runtime, session, "false")
    with pytest.raises(BashIncorrectSyntaxError) as info:
        await say(runtime, session, "if then")
    assert "syntax error" in info.value.extra_info["bash_stderr"]
    with pytest.raises(CommandTimeoutError):
        await say(runtime, session, "sleep 30", timeout=0.5)
    await runtime.run_in_session(BashInterruptAction(session=session))
    assert await say(runtime, session, "echo back") == "back\n"


async def test_nothing_of_a_command_runs_here(
    runtime: OpendsecRuntime, session: str, tmp_path: Path
) -> None:
    # SWE-ReX pastes the command into a shell of its own machine, up to this word.
    escaped = tmp_path / "escaped"
    await say(runtime, session, f"true\nSOUNIQUEEOF\ntouch {escaped}", check="ignore")
    assert not escaped.exists()


async def test_an_interactive_program(runtime: OpendsecRuntime, session: str) -> None:
    await say(runtime, session, "python3", is_interactive_command=True, expect=[">>> "])
    two = await say(runtime, session, "1+1", is_interactive_command=True, expect=[">>> "])
    assert two == "2"
    await say(runtime, session, "exit()", is_interactive_quit=True)
    assert await say(runtime, session, "echo again") == "again\n"


async def test_sessions_run_side_by_side(runtime: OpendsecRuntime, session: str) -> None:
    await runtime.create_session(CreateBashSessionRequest(session="other"))
    with pytest.raises(SessionExistsError):
        await runtime.create_session(CreateBashSessionRequest(session="other"))
    # One waits for what the other does.
    waits = say(
        runtime, session, "until [ -e /tmp/met ]; do sleep 0.05; done; echo met", timeout=30
    )
    met, _ = await asyncio.gather(waits, say(runtime, "other", "sleep 0.2; touch /tmp/met"))
    assert met == "met\n"
    await runtime.close_session(CloseBashSessionRequest(session="other"))
    with pytest.raises(SessionDoesNotExistError):
        await say(runtime, "other", "true")


async def test_a_shell_that_ends_is_no_hang(runtime: OpendsecRuntime) -> None:
    await runtime.create_session(CreateBashSessionRequest(session="brief"))
    with pytest.raises(Exception, match="over"):
        await say(runtime, "brief", "exit 3")
    await runtime.close_session(CloseBashSessionRequest(session="brief"))


async def test_commands(runtime: OpendsecRuntime) -> None:
    ran = await runtime.execute(Command(command="echo out; echo err >&2; exit 3", shell=True))
    assert (ran.stdout, ran.stderr, ran.exit_code) == ("out\n", "err\n", 3)
    merged = await runtime.execute(
        Command(command=["sh", "-c", "echo a; echo b >&2"], merge_output_streams=True, cwd="/tmp")
    )
    assert (merged.stdout, merged.stderr) == ("a\nb\n", "")
    with pytest.raises(NonZeroExitCodeError, match="told: "):
        await runtime.execute(Command(command=["false"], check=True, error_msg="told"))
    with pytest.raises(CommandTimeoutError):
        await runtime.execute(Command(command=["sleep", "30"], timeout=0.5))
    with pytest.raises(FileNotFoundError):
        await runtime.execute(Command(command=["no-such-program"]))
    with pytest.raises(PermissionError):
        await runtime.execute(Command(command=["/etc/passwd"]))


async def test_files(runtime: OpendsecRuntime, tmp_path: Path) -> None:
    await runtime.write_file(WriteFileRequest(path="/tmp/a/b.txt", content="täxt"))
    read = await runtime.read_file(ReadFileRequest(path="/tmp/a/b.txt"))
    assert read.content == "täxt"
    latin = await runtime.read_file(
        ReadFileRequest(path="/tmp/a/b.txt", encoding="ascii", errors="replace")
    )
    assert latin.content.startswith("t\ufffd")
    with pytest.raises(FileNotFoundError):
        await runtime.read_file(ReadFileRequest(path="/no/such"))
    with pytest.raises(IsADirectoryError):
        await runtime.read_file(ReadFileRequest(path="/tmp"))
    (tmp_path / "d/deep").mkdir(parents=True)
    (tmp_path / "d/deep/x").write_text("x")
    (tmp_path / "d/top").write_text("t")
    for _ in range(2):  # Into what is not there, and into what is.
        await runtime.upload(UploadRequest(source_path=str(tmp_path / "d"), target_path="/tmp/up"))
    found = await runtime.execute(
        Command(command="cd /tmp/up && find . -type f | sort", shell=True)
    )
    assert found.stdout == "./deep/x\n./top\n"
    await runtime.upload(UploadRequest(source_path=str(tmp_path / "d/top"), target_path="/tmp/one"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/one"))).content == "t"


async def test_a_sandbox_that_is_gone(tmp_path: Path) -> None:
    deployment = OpendsecDeployment(memory_mb=64)
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.sandbox.kill()
    alive = await deployment.is_alive(timeout=10)
    assert not alive
    with pytest.raises(Exception, match=r"over|ended"):
        await say(deployment.runtime, "default", "echo hello", timeout=30)
    await deployment.stop()

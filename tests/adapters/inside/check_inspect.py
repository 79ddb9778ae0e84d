# SPDX-License-Identifier: AGPL-3.0-only
"""Inspect's own checks of a sandbox provider, and an evaluation that uses ours by its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from opendsec import Client, InvalidRequest, TemplateNotFound
from opendsec.adapters.inspect_ai import (
    LABEL,
    OpendsecConfig,
    OpendsecSandboxEnvironment,
)

# The checks add an account by adduser, which Debian's smallest system lacks.
ADDUSER = '#!/bin/sh\nfor name; do :; done\nexec useradd --create-home "$name"\n'


@pytest.fixture(scope="module")
async def made() -> AsyncIterator[OpendsecSandboxEnvironment]:
    environment = await OpendsecSandboxEnvironment.create(OpendsecConfig(memory_mb=384))
    await environment.sandbox.files.write("/usr/local/bin/adduser", ADDUSER, user="root")
    chmod = ["chmod", "755", "/usr/local/bin/adduser"]
    await environment.sandbox.exec(chmod, user="root", check=True)
    yield environment
    await environment.close()


@pytest.fixture
def sandbox_env(made: OpendsecSandboxEnvironment) -> OpendsecSandboxEnvironment:
    return made


@solver
def reads_its_file() -> Solver:
    """What a model would do, without one: models count tokens by files from the internet."""

    async def solve(state: TaskState, _generate: Generate) -> TaskState:
        said = await bash()("cat data.txt; pwd")
        state.output = ModelOutput.from_content("none", str(said))
        return state

    return solve


def test_an_evaluation_in_sandboxes(tmp_path: Path) -> None:
    task = Task(
        dataset=[
            Sample(input="What is it?", target=f"it is {number}", files={"data.txt": text})
            for number, text in ((41, "it is 41"), (42, "it is 42"), (43, "it is not"))
        ],
        solver=reads_its_file(),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("opendsec", OpendsecConfig(memory_mb=64, internet=False)),
    )
    (log,) = eval(task, model=None, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    outputs = [sample.output.completion for sample in log.samples]
    assert outputs == [f"it is {what}/home/user\n" for what in ("41", "42", "not")]
    assert [sample.scores["includes"].value for sample in log.samples] == ["C", "C", "I"]


def test_what_a_killed_evaluation_left_is_cleaned_up(sandbox_env: object) -> None:
    with Client() as client, client.create(memory_mb=64, labels=[LABEL]) as left:
        asyncio.run(OpendsecSandboxEnvironment.cli_cleanup(left.sandbox_id))
        assert left.info().ended


async def test_bad_configuration() -> None:
    sample_init = OpendsecSandboxEnvironment.sample_init
    with pytest.raises(TemplateNotFound):
        await sample_init("task", "no-such-template", {})
    with pytest.raises(InvalidRequest, match="no configuration"):
        await sample_init("task", ModelOutput(), {})
    with pytest.raises(ValueError, match="memory"):
        OpendsecConfig(memory="much")


async def test_a_sandbox_that_is_gone_is_no_result() -> None:
    environment = await OpendsecSandboxEnvironment.create(OpendsecConfig(memory_mb=64))
    await environment.sandbox.kill()
    with pytest.raises(SandboxUnavailableError):
        await environment.exec(["true"])
    with pytest.raises(SandboxUnavailableError):
        await environment.read_file("/etc/passwd")
    await environment.close()

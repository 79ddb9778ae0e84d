# SPDX-License-Identifier: AGPL-3.0-only
"""Inspect's own checks of a sandbox provider, and an evaluation that uses ours by its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from inspect_ai.util._sandbox.self_check import *  # noqa: F403
from pydantic import BaseModel

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


def test_an_evaluation_in_sandboxes(tmp_path: Path) -> None:
    call = ModelOutput.for_tool_call("mockllm/model", "bash", {"cmd": "cat data.txt; pwd"})
    answer = ModelOutput.from_content("mockllm/model", "It is 42.")
    task = Task(
        dataset=[Sample(input="What is it?", target="42", files={"data.txt": "it is 42"})],
        solver=[use_tools(bash()), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("opendsec", OpendsecConfig(memory_mb=128, internet=False)),
    )
    model = get_model("mockllm/model", custom_outputs=[call, answer])
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    (sample,) = log.samples
    (output,) = [message for message in sample.messages if message.role == "tool"]
    assert output.text == "it is 42/home/user\n"
    assert sample.scores["includes"].value == "C"


def test_what_a_killed_evaluation_left_is_cleaned_up(sandbox_env: object) -> None:
    with Client() as client, client.create(memory_mb=64, labels=[LABEL]) as left:
        asyncio.run(OpendsecSandboxEnvironment.cli_cleanup(left.sandbox_id))
        assert left.info().ended


async def test_bad_configuration() -> None:
    sample_init = OpendsecSandboxEnvironment.sample_init
    with pytest.raises(TemplateNotFound):
        await sample_init("task", "no-such-template", {})
    with pytest.raises(InvalidRequest, match="no configuration"):
        await sample_init("task", BaseModel(), {})
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

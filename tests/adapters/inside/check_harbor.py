# SPDX-License-Identifier: AGPL-3.0-only
"""Trials of Harbor in sandboxes: the oracle passes, an agent that does nothing does not.

``BASE_IMAGE`` names an image in a registry that a Dockerfile can begin with; ``PACKED_IMAGE`` one
that the server has.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harbor.models.task.config import EnvironmentConfig as TaskEnvironment
from harbor.models.task.config import NetworkMode
from harbor.models.task.config import NetworkPolicy as HarborPolicy
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.paths import TrialPaths
from harbor.trial.trial import Trial

from opendsec import Client
from opendsec.adapters.harbor import LABEL, OpendsecEnvironment

ENVIRONMENT = "opendsec.adapters.harbor:OpendsecEnvironment"
PACKED = os.environ["PACKED_IMAGE"]
SOLVE = """\
#!/bin/bash
set -e
echo hello > /app/hello.txt
mkfifo /logs/artifacts/pipe
ln -s /etc/passwd /logs/artifacts/link
"""
TEST = """\
#!/bin/bash
cd /logs/verifier
grep -q hello /app/hello.txt && echo 1 > reward.txt || echo 0 > reward.txt
"""


def task(
    folder: Path,
    environment: str,
    dockerfile: str | None = None,
    *,
    verifier: str = "",
    artifacts: str = "[]",
) -> Path:
    """A task in Harbor's form."""
    for name in ("environment", "solution", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(f"""\
version = "1.0"
artifacts = {artifacts}
[verifier]
timeout_sec = 60.0
{verifier}
[agent]
timeout_sec = 60.0
network_mode = "no-network"
[environment]
cpus = 1
memory_mb = 128
storage_mb = 256
workdir = "/app"
{environment}
""")
    (folder / "instruction.md").write_text("Write hello into /app/hello.txt.\n")
    (folder / "solution/solve.sh").write_text(SOLVE)
    (folder / "tests/test.sh").write_text(TEST)
    if dockerfile is not None:
        (folder / "environment/Dockerfile").write_text(dockerfile)
    return folder


async def trial(path: Path, agent: str, **environment: Any) -> Any:
    config = TrialConfig(
        task=TaskConfig(path=path),
        trials_dir=path.parent / "trials",
        agent=AgentConfig(name=agent),
        environment=EnvironmentConfig(import_path=ENVIRONMENT, **environment),
    )
    result = await (await Trial.create(config)).run()
    assert result.exception_info is None, result.exception_info.exception_traceback
    return result.verifier_result.rewards


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
async def test_a_task_with_an_image(tmp_path: Path, agent: str, reward: float) -> None:
    path = task(tmp_path / "task", f'docker_image = "{PACKED}"')
    assert await trial(path, agent) == {"reward": reward}


async def test_a_task_with_a_dockerfile(tmp_path: Path) -> None:
    text = (
        f"FROM {os.environ['BASE_IMAGE']}\nWORKDIR /app\nCOPY note /app/\nRUN grep -q seen note\n"
    )
    path = task(tmp_path / "task", "", text)
    (path / "environment/note").write_text("seen")
    options = {"kwargs": {"labels": ["docker"], "task_id": "harbor-job"}}
    with Client() as client:
        before = {template.name for template in client.templates.list()}
        assert await trial(path, "oracle", **options) == {"reward": 1.0}
        (name,) = {template.name for template in client.templates.list()} - before
        assert name.startswith("harbor-")
        # What was built is used again.
        assert await trial(path, "oracle", **options) == {"reward": 1.0}
        assert client.templates.get(name).builds == 1
        assert [*client.list(labels=[LABEL])] == []
        client.templates.delete(name)


async def test_a_verifier_in_a_sandbox_of_its_own(tmp_path: Path) -> None:
    path = task(
        tmp_path / "task",
        f'docker_image = "{PACKED}"',
        verifier='environment_mode = "separate"',
        artifacts='["/app/hello.txt"]',
    )
    # It would see this, if it were the agent's sandbox.
    with (path / "solution/solve.sh").open("a") as script:
        script.write("touch /tmp/agent-was-here\n")
    with (path / "tests/test.sh").open("a") as script:
        script.write("[ ! -e /tmp/agent-was-here ] || echo 0 > reward.txt\n")
    assert await trial(path, "oracle") == {"reward": 1.0}


@pytest.fixture
def environment(tmp_path: Path) -> OpendsecEnvironment:
    (tmp_path / "environment").mkdir()
    return OpendsecEnvironment(
        environment_dir=tmp_path / "environment",
        environment_name="unit",
        session_id="unit__env",
        trial_paths=TrialPaths(tmp_path / "trial"),
        task_env_config=TaskEnvironment(docker_image=PACKED, memory_mb=128, env={"TASK": "t"}),
        download_max_mb=1,
    )


async def test_the_interface(environment: OpendsecEnvironment, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="start"):
        await environment.exec("true")
    await environment.start(force_build=False)
    try:
        heard: list[tuple[str, str]] = []

        async def hear(text: str, stream: str) -> None:
            heard.append((stream, text))

        with environment.scoped_output_callback(hear):
            ran = await environment.exec("echo $TASK $X; pwd; exit 4", env={"X": "x"}, cwd="/tmp")
        assert (ran.return_code, ran.stdout, heard[0][0]) == (4, "t x\n/tmp\n", "stdout")
        assert (await environment.exec("id -u", user=0)).stdout == "0\n"
        with pytest.raises(RuntimeError, match="timed out"):
            await environment.exec("sleep 30", timeout_sec=1)

        source = tmp_path / "up"
        (source / "empty").mkdir(parents=True)
        (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (source / "run.sh").chmod(0o755)
        await environment.upload_dir(source, "/tmp/up")
        await environment.upload_dir(source, "/tmp/up")
        assert (
            await environment.exec("/tmp/up/run.sh; ls /tmp/up")
        ).stdout == "ran\nempty\nrun.sh\n"
        assert await environment.is_dir("/tmp/up/empty")
        assert not await environment.is_file("/tmp/up/none")
        await environment.exec("cd /tmp/up && mkfifo pipe && ln -s /etc/passwd out", user="root")
        await environment.download_dir("/tmp/up", tmp_path / "down")
        assert sorted(p.name for p in (tmp_path / "down").iterdir()) == ["empty", "run.sh"]
        await environment.exec("head -c 3000000 /dev/zero > /tmp/up/large", user="root")
        with pytest.raises(Exception, match="larger than 1 MiB"):
            await environment.download_dir("/tmp/up", tmp_path / "large")
        await environment.upload_file(source / "run.sh", "/tmp/one.sh")
        await environment.download_file("/tmp/one.sh", tmp_path / "one.sh")
        assert (tmp_path / "one.sh").read_text() == (source / "run.sh").read_text()

        assert environment.sandbox.record.network.internet
        await environment.set_network_policy(
            HarborPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["192.0.2.0/24"])
        )
        network = (await environment.sandbox.info()).network
        assert (network.internet, network.allow) == (False, ("192.0.2.0/24",))
        with pytest.raises(ValueError, match="hostnames"):
            await environment.set_network_policy(
                HarborPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["example.com"])
            )
        sandbox_id = environment.sandbox.sandbox_id
    finally:
        await environment.stop(delete=True)
    await environment.stop(delete=True)
    with Client() as client:
        assert client.info(sandbox_id).ended


async def test_kept_is_paused(environment: OpendsecEnvironment) -> None:
    await environment.start(force_build=False)
    sandbox_id = environment.sandbox.sandbox_id
    await environment.stop(delete=False)
    with Client() as client:
        assert client.info(sandbox_id).state == "paused"
        client.kill(sandbox_id)


def test_what_is_refused(tmp_path: Path) -> None:
    def make(**more: Any) -> OpendsecEnvironment:
        return OpendsecEnvironment(
            environment_dir=tmp_path,
            environment_name="unit",
            session_id="unit__env",
            trial_paths=TrialPaths(tmp_path / "trial"),
            **{"task_env_config": TaskEnvironment(), **more},
        )

    with pytest.raises(FileNotFoundError, match="no environment definition"):
        make()
    with pytest.raises(ValueError, match="Unknown option"):
        make(task_env_config=TaskEnvironment(docker_image="x"), colour="red")
    with pytest.raises(RuntimeError, match="GPU"):
        make(task_env_config=TaskEnvironment(docker_image="x", gpus=1))
    (tmp_path / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(ValueError, match="one sandbox"):
        make(task_env_config=TaskEnvironment(docker_image="x"))

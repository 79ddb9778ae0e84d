# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found"
"""An environment of Harbor, the harness of terminal-bench.

::

    harbor run --dataset terminal-bench@2.0 --agent ... \\
        --env opendsec.adapters.harbor:OpendsecEnvironment

A task's Dockerfile is built on the server, once for its content; a task's ``docker_image`` is
pulled there. Network modes of a phase are enforced outside of the sandbox, and change while it
runs. A task with a verifier environment of its own gets a second sandbox for it, which the agent
never reaches. Compose files are not supported, and refused.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.environments.definition import (
    COMPOSE_FILE_NAME,
    DOCKERFILE_NAME,
    effective_exec_cwd,
    require_agent_environment_definition,
    should_use_prebuilt_docker_image,
)
from harbor.environments.options import EnvironmentOptions
from harbor.environments.tar_transfer import (
    extract_dir_from_file,
    pack_dir,
    tar_pack_succeeded,
)
from harbor.models.task.config import NetworkMode
from harbor.models.task.config import NetworkPolicy as HarborPolicy
from pydantic import Field

from opendsec import (
    AsyncClient,
    AsyncSandbox,
    BuildFailed,
    CommandTimeout,
    InvalidRequest,
    NetworkPolicy,
    NotFound,
    TemplateNotFound,
    UserError,
)

from ._options import LIFE_S

LABEL = "harbor"
_MIB = 1024 * 1024
_PACK_S = 600.0

# Trials of one task start together: only the first builds.
_BUILDS: weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock] = weakref.WeakValueDictionary()


class OpendsecOptions(EnvironmentOptions):  # type: ignore[misc]
    """What ``--environment-kwarg`` takes."""

    template: str | None = Field(
        default=None, description="A template to use, whatever the task says of its image."
    )
    layers: list[str] = Field(default=[], description="Images put on top of the task's.")
    backend: str | None = Field(default=None, description="container, microvm or vm.")
    task_id: str | None = Field(default=None, description="The job that sandboxes belong to.")
    labels: list[str] = Field(default=[], description="Words to find sandboxes by.")
    life_s: float = Field(
        default=LIFE_S, gt=0, description="A sandbox ends after so many seconds in any case."
    )
    download_max_mb: int = Field(
        default=4096, gt=0, description="A directory that is copied out may be so large."
    )


class OpendsecEnvironment(BaseEnvironment):  # type: ignore[misc]
    """One sandbox."""

    options_model = OpendsecOptions
    options: OpendsecOptions

    _client: AsyncClient | None = None
    _sandbox: AsyncSandbox | None = None

    @staticmethod
    def type() -> str:
        """Its name in Harbor's records."""
        return "opendsec"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Networks are closed, opened to IPv4 addresses, and changed while it runs."""
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            dynamic_network_policy=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """CPU and memory are hard limits; fractions of a core are allowed."""
        return EnvironmentResourceCapabilities(
            cpu_limit=True, memory_limit=True, fractional_cpus=True
        )

    def _validate_definition(self) -> None:
        if (self.environment_dir / COMPOSE_FILE_NAME).exists():
            raise ValueError(
                f"{self.environment_dir} has a {COMPOSE_FILE_NAME}: an OpenDsec environment is one "
                "sandbox. Give the task a Dockerfile or a docker_image."
            )
        if self.options.template is None:
            require_agent_environment_definition(
                self.environment_dir, docker_image=self.task_env_config.docker_image
            )

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox.

        Raises:
            RuntimeError: the environment was not started.
        """
        if self._sandbox is None:
            raise RuntimeError("Sandbox not found. Please start the environment first.")
        return self._sandbox

    # --- life -----------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Build the task's image if need be, and create the sandbox."""
        if self._client is None:
            self._client = AsyncClient()
        try:
            source = await self._source(self._client, force_build)
            self._sandbox = await self._client.create(
                **source,
                cpu=self._effective_cpus,
                memory_mb=self._effective_memory_mb,
                disk_mb=self._effective_storage_mb,
                network=_policy(self._network_policy),
                layers=self.options.layers,
                backend=self.options.backend,
                task_id=self.options.task_id,
                labels=[*self.options.labels, LABEL],
                metadata={"harbor_session": self.session_id},
                timeout_s=self.options.life_s,
            )
            folders = self._mount_targets(writable_only=True)
            if self.task_env_config.workdir:
                folders.append(self.task_env_config.workdir)
            if folders:
                # From the root, since the task's own directory may be one of them.
                command = self._ensure_dirs_command(folders)
                made = await self.exec(command, cwd="/", user=self._reset_dirs_user())
                if made.return_code != 0:
                    raise RuntimeError(f"Cannot make {', '.join(folders)}: {made.stderr}")
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    async def _source(self, client: AsyncClient, force_build: bool) -> dict[str, Any]:
        """What the sandbox is made from."""
        if self.options.template is not None:
            return {"template": self.options.template}
        image = self.task_env_config.docker_image
        if image and should_use_prebuilt_docker_image(
            self.environment_dir, docker_image=image, force_build=force_build
        ):
            return {"image": image}
        name = f"harbor-{self.environment_id}"
        loop = asyncio.get_running_loop()
        lock = _BUILDS.setdefault((id(loop), name), asyncio.Lock())
        async with lock:
            if force_build or not await _is_ready(client, name):
                await self._build(client, name, force_build)
        return {"template": name}

    async def _build(self, client: AsyncClient, name: str, force: bool) -> None:
        dockerfile = self.environment_dir / DOCKERFILE_NAME
        try:
            await client.templates.build(
                name,
                dockerfile=await asyncio.to_thread(dockerfile.read_text),
                context=self.environment_dir,
                force=force,
                on_log=lambda line: self.logger.debug("build: %s", line.message),
            )
        except (BuildFailed, InvalidRequest) as error:
            raise SandboxBuildFailedError(error.message) from error

    async def stop(self, delete: bool) -> None:
        """End the sandbox; or, without ``delete``, pause it and keep all of it."""
        sandbox, self._sandbox = self._sandbox, None
        client, self._client = self._client, None
        try:
            if sandbox is not None and delete:
                await sandbox.kill()
            elif sandbox is not None:
                await sandbox.pause()
                self.logger.info(
                    "The sandbox %s is paused: `opendsec resume` lets it run on, `opendsec kill` "
                    "ends it.",
                    sandbox.sandbox_id,
                )
        except NotFound:
            pass  # It has ended.
        finally:
            if client is not None:
                await client.aclose()

    async def _apply_network_policy(self, network_policy: HarborPolicy) -> None:
        await self.sandbox.set_network(_policy(network_policy))

    async def attach(self) -> None:
        """Become a shell in the sandbox."""
        os.execvp("opendsec", ["opendsec", "shell", self.sandbox.sandbox_id])  # noqa: S606

    # --- commands -----------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a line of bash, as ``docker exec`` would: no login shell.

        Raises:
            RuntimeError: it reached ``timeout_sec``; it and its children were killed.
            OpendsecError: the platform failed; no exit code is made up.
        """
        account = self._resolve_user(user)
        emit = self._output_callback()

        def to(stream: Literal["stdout", "stderr"]) -> Callable[[str], Awaitable[None]] | None:
            return None if emit is None else lambda text: emit(text, stream)

        try:
            result = await self.sandbox.exec(
                ["bash", "-c", command],
                cwd=effective_exec_cwd(cwd, self.task_env_config.workdir, None),
                env=self._merge_env(env),
                user=None if account is None else str(account),
                timeout_s=timeout_sec,
                on_stdout=to("stdout"),
                on_stderr=to("stderr"),
            )
        except CommandTimeout as error:
            # What Harbor's own Docker environment raises.
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code)

    # --- files --------------------------------------------------------------------

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a local file into the sandbox."""
        await self.sandbox.files.upload(source_path, target_path, user="root")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what a local directory holds into one of the sandbox."""
        await self.sandbox.files.make_dir(target_dir, exist_ok=True, user="root")
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(_pack, Path(source_dir), archive)
            done = await self.sandbox.exec(
                ["tar", "-xzf", "-", "--no-same-owner", "-C", target_dir],
                stdin=archive,
                user="root",
                timeout_s=_PACK_S,
            )
        if not done.ok:
            raise RuntimeError(f"Cannot unpack into {target_dir}: {done.stderr}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file of the sandbox to this machine."""
        await self.sandbox.files.download(source_path, target_path, user="root")

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy what a directory of the sandbox holds to this machine.

        What it holds is not trusted: nothing is written outside of ``target_dir``, and no more than
        the option ``download_max_mb`` is taken.
        """
        limit_bytes = self.options.download_max_mb * _MIB
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "download.tar"
            process = await self.sandbox.spawn(
                ["tar", "-cf", "-", "-C", source_dir, "."],
                user="root",
                timeout_s=_PACK_S,
                output_limit_bytes=64 * 1024,
            )
            size_bytes = 0
            async with process:
                with archive.open("wb") as out:
                    async for event in process:
                        if event.stream != "stdout":
                            continue
                        size_bytes += len(event.data)
                        if size_bytes > limit_bytes:
                            await process.kill()
                            raise UserError(
                                f"{source_dir} is larger than {self.options.download_max_mb} MiB."
                            )
                        out.write(event.data)
                result = await process.wait()
            if not tar_pack_succeeded(result.exit_code, stderr=result.stderr, logger=self.logger):
                raise RuntimeError(f"Cannot pack {source_dir}: {result.stderr}")
            await asyncio.to_thread(extract_dir_from_file, archive, Path(target_dir))


def _pack(source: Path, archive: Any) -> None:
    """The content of a directory, at the beginning of an open file."""
    pack_dir(source, archive, include_root=False)
    archive.seek(0)


async def _is_ready(client: AsyncClient, name: str) -> bool:
    try:
        return (await client.templates.get(name)).state == "ready"
    except TemplateNotFound:
        return False


def _policy(policy: HarborPolicy) -> NetworkPolicy:
    """Harbor's words in ours."""
    allowed = tuple(policy.allowed_hosts) if policy.network_mode == NetworkMode.ALLOWLIST else ()
    return NetworkPolicy(internet=policy.network_mode == NetworkMode.PUBLIC, allow=allowed)

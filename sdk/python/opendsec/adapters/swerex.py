# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found"
"""A deployment of SWE-ReX (``swe-rex``): its sessions, commands and files in a sandbox.

::

    from opendsec.adapters.swerex import OpendsecDeployment

    deployment = OpendsecDeployment(image="python:3.12-slim")
    await deployment.start()
    runtime = deployment.runtime
    await runtime.create_session(CreateBashSessionRequest())
    print((await runtime.run_in_session(BashAction(command="ls"))).output)
    await deployment.stop()

The image needs ``bash`` and nothing of SWE-ReX: no server of it runs in the sandbox, where an agent
could get at it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    Action,
    CloseResponse,
    CloseSessionRequest,
    CloseSessionResponse,
    Command,
    CommandResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    IsAliveResponse,
    Observation,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)
from swerex.utils.log import get_logger

from opendsec import (
    AsyncSandbox,
    CommandTimeout,
    FileNotFound,
    InvalidRequest,
    OpendsecError,
    ProgramNotExecutable,
    ProgramNotFound,
)

from ._options import SandboxOptions
from ._swerex_session import SandboxSession, blocking

T = TypeVar("T")

LABEL = "swerex"


class OpendsecDeploymentConfig(SandboxOptions, frozen=True):
    """Configuration of a deployment.

    Attributes:
        user: Account of sessions, commands and files. None: the template's default.
        workdir: Where sessions and commands begin. None: the template's default.
    """

    user: str | None = None
    workdir: str | None = None
    type: Literal["opendsec"] = "opendsec"

    def get_deployment(self) -> OpendsecDeployment:
        """A deployment of this configuration, not started."""
        return OpendsecDeployment.from_config(self)


class OpendsecRuntime(AbstractRuntime):  # type: ignore[misc]
    """Sessions, commands and files of one sandbox."""

    def __init__(
        self,
        sandbox: AsyncSandbox,
        config: OpendsecDeploymentConfig,
        logger: logging.Logger | None = None,
    ) -> None:
        self.sandbox = sandbox
        self._config = config
        self.logger = logger or get_logger("rex-runtime")
        self._sessions: dict[str, SandboxSession] = {}

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ASYNC109
        """Whether the sandbox answers."""
        try:
            async with asyncio.timeout(timeout):
                alive = await self.sandbox.is_running()
        except (OpendsecError, TimeoutError) as error:
            return IsAliveResponse(is_alive=False, message=f"{type(error).__name__}: {error}")
        return IsAliveResponse(is_alive=alive, message="" if alive else "The sandbox has ended.")

    # --- sessions -----------------------------------------------------------------

    async def create_session(self, request: CreateSessionRequest) -> CreateSessionResponse:
        """Start a shell."""
        if request.session in self._sessions:
            raise SessionExistsError(f"session {request.session} already exists")
        session = SandboxSession(
            request, self.sandbox, self._config.user, self._config.workdir, self._config.env
        )
        self._sessions[request.session] = session
        try:
            return await session.start()
        except BaseException:
            del self._sessions[request.session]
            raise

    async def run_in_session(self, action: Action) -> Observation:
        """Run a command in a shell, or interrupt what runs there."""
        session = self._session(action.session)
        return await blocking(lambda: asyncio.run(session.run(action)))

    async def close_session(self, request: CloseSessionRequest) -> CloseSessionResponse:
        """End a shell and all that runs in it."""
        closed = await self._session(request.session).close()
        del self._sessions[request.session]
        return closed

    def _session(self, name: str) -> SandboxSession:
        try:
            return self._sessions[name]
        except KeyError:
            raise SessionDoesNotExistError(f"session {name!r} does not exist") from None

    # --- commands -----------------------------------------------------------------

    async def execute(self, command: Command) -> CommandResponse:
        """Run a program as ``subprocess.run`` would, but ``env`` is added to the sandbox's.

        Raises:
            CommandTimeoutError: it reached its time-out; it and its children were killed.
            NonZeroExitCodeError: ``check``, and it failed.
            FileNotFoundError, PermissionError: the program cannot be run.
        """
        argv = [command.command] if isinstance(command.command, str) else [*command.command]
        if command.shell:
            argv = ["/bin/sh", "-c", *argv]
        if command.merge_output_streams:
            argv = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *argv]
        try:
            result = await self.sandbox.exec(
                argv,
                cwd=command.cwd or self._config.workdir,
                env=command.env,
                user=self._config.user,
                timeout_s=command.timeout,
            )
        except CommandTimeout as error:
            raise CommandTimeoutError(
                f"Timeout ({command.timeout}s) exceeded while running command"
            ) from error
        except ProgramNotFound as error:
            raise FileNotFoundError(error.message) from error
        except ProgramNotExecutable as error:
            raise PermissionError(error.message) from error
        response = CommandResponse(
            stdout=result.stdout_bytes.decode(errors="backslashreplace"),
            stderr=result.stderr_bytes.decode(errors="backslashreplace"),
            exit_code=result.exit_code,
        )
        if command.check and result.exit_code != 0:
            prefix = f"{command.error_msg}: " if command.error_msg else ""
            raise NonZeroExitCodeError(
                f"{prefix}Command {command.command!r} failed with exit code {result.exit_code}. "
                f"Stdout:\n{response.stdout!r}\nStderr:\n{response.stderr!r}"
            )
        return response

    # --- files --------------------------------------------------------------------

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """A file as text."""
        data = await _local_errors(self.sandbox.files.read(request.path, user=self._config.user))
        content = data.decode(request.encoding or "utf-8", request.errors or "strict")
        return ReadFileResponse(content=content)

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Write text; parents are made."""
        await _local_errors(
            self.sandbox.files.write(request.path, request.content, user=self._config.user)
        )
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a local file or directory; a directory's content goes into ``target_path``."""
        source = Path(request.source_path)
        files, user = self.sandbox.files, self._config.user
        children = await asyncio.to_thread(
            lambda: sorted(source.iterdir()) if source.is_dir() else None
        )
        if children is not None:
            await files.make_dir(request.target_path, exist_ok=True, user=user)
            for child in children:
                await files.upload(child, request.target_path.rstrip("/") + "/", user=user)
        else:
            await _local_errors(files.upload(source, request.target_path, user=user))
        return UploadResponse()

    async def close(self) -> CloseResponse:
        """End the shells."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()
        return CloseResponse()


class OpendsecDeployment(AbstractDeployment):  # type: ignore[misc]
    """One sandbox.

    Args:
        kwargs: Fields of ``OpendsecDeploymentConfig``.
    """

    def __init__(self, *, logger: logging.Logger | None = None, **kwargs: Any) -> None:
        self._config = OpendsecDeploymentConfig(**kwargs)
        self.logger = logger or get_logger("rex-deploy")
        self._hooks = CombinedDeploymentHook()
        self._runtime: OpendsecRuntime | None = None

    @classmethod
    def from_config(cls, config: OpendsecDeploymentConfig) -> Self:
        """A deployment of a configuration, not started."""
        return cls(**config.model_dump())

    def add_hook(self, hook: DeploymentHook) -> None:
        """Tell ``hook`` of each step."""
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ASYNC109
        """Whether the sandbox answers."""
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Create the sandbox. One that runs is left as it is."""
        if self._runtime is not None:
            return
        self._hooks.on_custom_step("Creating sandbox")
        sandbox = await AsyncSandbox.create(**self._config.create_arguments(LABEL))
        self._runtime = OpendsecRuntime(sandbox, self._config, self.logger)
        self.logger.info("Sandbox %s runs", sandbox.sandbox_id)

    async def stop(self) -> None:
        """End the sandbox and all that runs in it."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        try:
            await runtime.close()
            await runtime.sandbox.kill()
        finally:
            await runtime.sandbox.aclose()

    @property
    def runtime(self) -> OpendsecRuntime:
        """Sessions, commands and files.

        Raises:
            DeploymentNotStartedError: it was not started.
        """
        if self._runtime is None:
            raise DeploymentNotStartedError()
        return self._runtime


async def _local_errors(work: Awaitable[T]) -> T:
    """What Python says of local files, for what the sandbox says of its own."""
    try:
        return await work
    except FileNotFound as error:
        raise FileNotFoundError(error.message) from error
    except InvalidRequest as error:
        if "is a directory" in error.message:
            raise IsADirectoryError(error.message) from error
        raise

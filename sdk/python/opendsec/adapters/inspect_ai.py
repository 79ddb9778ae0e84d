# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found"
"""A sandbox provider of Inspect (``inspect_ai``), known to it as ``opendsec``.

::

    from inspect_ai import Task
    from opendsec.adapters.inspect_ai import OpendsecConfig

    Task(..., sandbox="opendsec")
    Task(..., sandbox=("opendsec", "my-template"))
    Task(..., sandbox=SandboxEnvironmentSpec("opendsec", OpendsecConfig(image="python:3.12-slim")))

Every sample gets a sandbox of its own, which is killed with it. Platform failures are raised as
what they are: they never look like output of the command.
"""

from __future__ import annotations

import errno
import posixpath
from typing import Any, Literal, overload

import anyio
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from pydantic import BaseModel

from opendsec import (
    AgentUnresponsive,
    AsyncClient,
    AsyncSandbox,
    CommandResult,
    CommandTimeout,
    InvalidRequest,
    ProgramNotExecutable,
    ProgramNotFound,
    SandboxNotFound,
    SandboxPaused,
    Unauthenticated,
)

from ._options import SandboxOptions

LABEL = "inspect_ai"
_CLEANUP_S = 30.0
_NO_PROGRAM = 127
_CANNOT_RUN = 126

# Files are read and written by the account that commands run as: so its rights count, and what it
# makes is its own. The exit codes are above those of shells' and of head's own failures.
_ABSENT, _IS_DIR, _DENIED = 81, 82, 83
_PATH = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_READ = f"""\
[ -d "$1" ] && exit {_IS_DIR}
[ -e "$1" ] || exit {_ABSENT}
[ -r "$1" ] || exit {_DENIED}
exec head -c "$2" "$1"
"""
_WRITE = f"""\
[ -d "$1" ] && exit {_IS_DIR}
mkdir -p "$2" || exit 1
if [ -e "$1" ]; then [ -w "$1" ] || exit {_DENIED}; else [ -w "$2" ] || exit {_DENIED}; fi
exec cat > "$1"
"""


class OpendsecConfig(SandboxOptions, frozen=True):
    """Configuration of a sample's sandbox.

    Attributes:
        user: Account that commands run as. None: the template's default.
        workdir: Where relative paths begin. None: the template's default.
    """

    user: str | None = None
    workdir: str | None = None


@sandboxenv(name="opendsec")
class OpendsecSandboxEnvironment(SandboxEnvironment):  # type: ignore[misc]
    """One sandbox, for one sample."""

    def __init__(self, sandbox: AsyncSandbox, config: OpendsecConfig, workdir: str) -> None:
        super().__init__()
        self.sandbox = sandbox
        self._config = config
        self._workdir = workdir

    # --- life -----------------------------------------------------------------

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],
    ) -> dict[str, SandboxEnvironment]:
        """Make the sample's sandbox."""
        return {"default": await cls.create(_parse(config), task_name)}

    @classmethod
    async def create(
        cls, config: OpendsecConfig, task_name: str = ""
    ) -> OpendsecSandboxEnvironment:
        """Make a sandbox. ``close`` ends it."""
        arguments = config.create_arguments(LABEL)
        if task_name:
            arguments["metadata"] = {**config.metadata, "inspect_task": task_name[:200]}
        sandbox = await AsyncSandbox.create(**arguments)
        try:
            workdir = config.workdir
            if workdir is None:
                asked = await sandbox.exec(["pwd"], user=config.user, check=True)
                workdir = asked.stdout.strip() or "/"
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _end(sandbox)
            raise
        return cls(sandbox, config, workdir)

    async def close(self) -> None:
        """End the sandbox, also when the sample was cancelled."""
        with anyio.CancelScope(shield=True):
            await _end(self.sandbox)

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End the sample's sandboxes."""
        for environment in environments.values():
            await environment.as_type(cls).close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """End what a killed Inspect left behind: one sandbox, or all that are Inspect's."""
        async with AsyncClient() as client:
            if id is not None:
                await client.kill(id)
                return
            async for record in client.list(labels=[LABEL]):
                await client.kill(record.sandbox_id)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """The configuration as it stands in a log."""
        return OpendsecConfig(**config)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """How a person gets into it."""
        if not await self.sandbox.is_running():
            raise ConnectionError(f"The sandbox {self.sandbox.sandbox_id} is not running.")
        as_user = f" --user {user}" if user else ""
        return SandboxConnection(
            type="opendsec",
            command=f"opendsec shell{as_user} {self.sandbox.sandbox_id}",
            container=self.sandbox.sandbox_id,
        )

    def default_polling_interval(self) -> float:
        """Seconds between the requests of Inspect's own services in the sandbox."""
        return 0.5

    # --- commands ---------------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 - Inspect's interface
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command. One that reached its time-out is not run again: it may have had effects.

        Raises:
            TimeoutError: it reached ``timeout``; it and its children were killed.
            PermissionError: the program cannot be run.
            OutputLimitExceededError: a stream was longer than Inspect's limit.
            SandboxUserUnsupportedError: the image has no such user.
            SandboxUnavailableError: the sandbox has ended, is paused or does not answer.
            OpendsecError: the platform failed while the command ran.
        """
        limit_bytes = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            result = await self._run(cmd, input, self._path(cwd), env, user, timeout, limit_bytes)
        except ProgramNotFound as error:
            return ExecResult(False, _NO_PROGRAM, "", error.message)
        except ProgramNotExecutable as error:
            raise PermissionError(errno.EACCES, error.message) from error
        except InvalidRequest as error:  # The directory does not exist, as a shell says it.
            return ExecResult(False, _CANNOT_RUN, "", error.message)
        if result.truncated:
            raise OutputLimitExceededError(
                SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.stdout
            )
        return ExecResult(result.ok, result.exit_code, result.stdout, result.stderr)

    async def _run(
        self,
        command: list[str],
        stdin: str | bytes | None,
        cwd: str,
        env: dict[str, str] | None,
        user: str | None,
        timeout_s: float | None,
        limit_bytes: int,
    ) -> CommandResult:
        try:
            return await self.sandbox.exec(
                command,
                cwd=cwd,
                env=env,
                user=user or self._config.user,
                timeout_s=timeout_s,
                stdin=stdin,
                output_limit_bytes=limit_bytes,
            )
        except CommandTimeout as error:
            raise TimeoutError(error.message) from error
        except (SandboxNotFound, SandboxPaused, AgentUnresponsive) as error:
            raise SandboxUnavailableError(error.message) from error
        except Unauthenticated as error:
            if "invalid username" in error.message:
                raise SandboxUserUnsupportedError(error.message) from error
            raise

    # --- files ------------------------------------------------------------------

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file as the sandbox's user; parents are made."""
        path = self._path(file)
        result = await self._script(
            _WRITE, path, posixpath.dirname(path), stdin=contents, limit_bytes=64 * 1024
        )
        self._check(result, file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file as the sandbox's user. No more than Inspect's limit is transferred."""
        limit_bytes = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        result = await self._script(
            _READ, self._path(file), str(limit_bytes + 1), limit_bytes=limit_bytes
        )
        self._check(result, file)
        if result.stdout_truncated:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return result.stdout_bytes.decode() if text else result.stdout_bytes

    async def _script(
        self,
        script: str,
        *arguments: str,
        stdin: str | bytes | None = None,
        limit_bytes: int,
    ) -> CommandResult:
        command = ["/bin/sh", "-c", script, "sh", *arguments]
        return await self._run(command, stdin, "/", _PATH, None, None, limit_bytes)

    @staticmethod
    def _check(result: CommandResult, file: str) -> None:
        """Raise what Python would have raised for a local file."""
        if result.ok:
            return
        words = result.stderr.strip()
        if result.exit_code == _ABSENT:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", file)
        if result.exit_code == _IS_DIR:
            raise IsADirectoryError(errno.EISDIR, "Is a directory", file)
        if result.exit_code == _DENIED or "Permission denied" in words:
            raise PermissionError(errno.EACCES, words or "Permission denied", file)
        if "No space left" in words or "quota exceeded" in words:
            raise OSError(errno.ENOSPC, words, file)
        raise OSError(errno.EIO, words or f"exit code {result.exit_code}", file)

    def _path(self, path: str | None) -> str:
        return posixpath.join(self._workdir, path or "")


def _parse(config: SandboxEnvironmentConfigType | None) -> OpendsecConfig:
    """What a task says of its sandbox: nothing, the name of a template, or all of it."""
    if config is None:
        return OpendsecConfig()
    if isinstance(config, str):
        return OpendsecConfig(template=config)
    if isinstance(config, OpendsecConfig):
        return config
    raise InvalidRequest(
        f"{type(config).__name__} is no configuration of an OpenDsec sandbox.",
        remediation="Give an OpendsecConfig, or the name of a template.",
    )


async def _end(sandbox: AsyncSandbox) -> None:
    with anyio.move_on_after(_CLEANUP_S):
        try:
            await sandbox.kill()
        finally:
            await sandbox.aclose()

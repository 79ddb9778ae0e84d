# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found"
"""A server of the Model Context Protocol: sandboxes as the tools of a model.

``opendsec mcp`` runs it on standard input and output, as MCP clients start their servers::

    {"mcpServers": {"opendsec": {"command": "opendsec", "args": ["mcp", "--no-network"]}}}

A model reaches only the sandboxes it made through this server, and those named on the command line:
never others of the same project. What it made ends with the server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from opendsec import (
    AsyncClient,
    AsyncSandbox,
    Client,
    CommandResult,
    CommandTimeout,
    NetworkPolicy,
    OpendsecError,
    __version__,
)

LABEL = "mcp"
TEXT_BYTES_MAX = 64 * 1024
"""Of one stream of output, and of a file that is read: a model's context is small."""
SANDBOXES_MAX = 8
TIMEOUT_MAX_S = 3600.0

INSTRUCTIONS = """\
Isolated Linux machines to run code in. Make one with create_sandbox and give its sandbox_id to the
other tools. Files and installed packages stay until kill_sandbox or until its time runs out; each
run_command is a new shell. Long output is cut: write it to a file and read parts of it.
"""

SandboxId = Annotated[str, Field(description="What create_sandbox returned.")]


class Made(BaseModel):
    """A sandbox."""

    sandbox_id: str
    state: str
    template: str
    internet: bool
    ends_at: str | None = None


class Ran(BaseModel):
    """How a command ended."""

    exit_code: int | None
    stdout: str
    stderr: str
    truncated: bool
    timed_out: bool = False


class Entry(BaseModel):
    """An entry of a directory."""

    path: str
    type: str
    size_bytes: int


class Toolbox:
    """The tools, and the sandboxes they may touch.

    Args:
        template: What sandboxes are made from.
        image: Instead of a template.
        internet: Whether a model may ask for internet.
        memory_mb: Of each sandbox. None: the template's.
        life_s: How long a sandbox lives.
        sandboxes_max: How many it may have at once.
        given: Ids of sandboxes that exist, which the model may use too. They are not ended.
        base_url: As of ``Client``.
    """

    def __init__(
        self,
        *,
        template: str = "base",
        image: str | None = None,
        internet: bool = True,
        memory_mb: int | None = None,
        life_s: float = TIMEOUT_MAX_S,
        sandboxes_max: int = SANDBOXES_MAX,
        given: Sequence[str] = (),
        base_url: str | None = None,
    ) -> None:
        self._template = template
        self._image = image
        self._internet = internet
        self._memory_mb = memory_mb
        self._life_s = life_s
        self._sandboxes_max = sandboxes_max
        self._base_url = base_url
        self._given = frozenset(given)
        self._made: set[str] = set()
        self._making = 0
        self._known: dict[str, AsyncSandbox] = {}
        self._client_now: AsyncClient | None = None

    def server(self) -> MCPServer:
        """An MCP server with these tools."""
        server = MCPServer(
            "opendsec",
            instructions=INSTRUCTIONS,
            version=__version__,
            # It goes to standard error, which clients show or keep.
            log_level="WARNING",
        )
        for tool in (
            self.create_sandbox,
            self.run_command,
            self.write_file,
            self.read_file,
            self.list_files,
            self.list_sandboxes,
            self.kill_sandbox,
        ):
            server.add_tool(tool)
        return server

    def end_all(self) -> None:
        """End what was made. Sync, for the way out of a program: its event loop may be gone."""
        made, self._made = self._made, set()
        if not made:
            return
        with Client(base_url=self._base_url, retries_max=1) as client:

            def kill(sandbox_id: str) -> None:
                with contextlib.suppress(OpendsecError):  # Its time runs out in any case.
                    client.kill(sandbox_id)

            with ThreadPoolExecutor(max_workers=SANDBOXES_MAX) as pool:
                list(pool.map(kill, made))

    # --- tools: their docstrings are what the model reads -----------------------------

    async def create_sandbox(
        self,
        internet: Annotated[bool, Field(description="Open internet.")] = False,
    ) -> Made:
        """Make a new isolated Linux machine and return its sandbox_id."""
        if internet and not self._internet:
            raise ToolError("This server gives no internet. Ask for a sandbox without it.")
        if len(self._made) + self._making >= self._sandboxes_max:
            await self.list_sandboxes()  # Those that have ended do not count.
        if len(self._made) + self._making >= self._sandboxes_max:
            raise ToolError(
                f"There are {self._sandboxes_max} sandboxes, which is the limit. End one with "
                "kill_sandbox."
            )
        self._making += 1
        try:
            sandbox = await self._client.create(
                self._template,
                image=self._image,
                memory_mb=self._memory_mb,
                timeout_s=self._life_s,
                network=NetworkPolicy(internet=internet),
                labels=[LABEL],
            )
        except OpendsecError as error:
            raise _told(error) from error
        finally:
            self._making -= 1
        self._made.add(sandbox.sandbox_id)
        self._known[sandbox.sandbox_id] = sandbox
        return _public(sandbox)

    async def run_command(
        self,
        sandbox_id: SandboxId,
        command: Annotated[str, Field(description="A line for bash.")],
        cwd: Annotated[str | None, Field(description="Directory to run in.")] = None,
        timeout_s: Annotated[float, Field(gt=0, le=TIMEOUT_MAX_S)] = 120,
        stdin: Annotated[str | None, Field(description="What the command reads.")] = None,
        user: Annotated[Literal["root"] | None, Field(description="root, or the usual one")] = None,
    ) -> Ran:
        """Run a shell command and return its exit code and output. It is killed at timeout_s."""
        sandbox = await self._sandbox(sandbox_id)
        try:
            result = await sandbox.exec(
                command,
                cwd=cwd,
                user=user,
                stdin=stdin,
                timeout_s=timeout_s,
                output_limit_bytes=TEXT_BYTES_MAX,
            )
        except CommandTimeout as error:
            return Ran(
                exit_code=None,
                stdout=error.stdout,
                stderr=error.stderr,
                truncated=False,
                timed_out=True,
            )
        except OpendsecError as error:
            raise _told(error) from error
        return _ran(result)

    async def write_file(
        self, sandbox_id: SandboxId, path: str, content: str
    ) -> Annotated[str, Field(description="The file's full path.")]:
        """Write a text file; directories are made. What was there is replaced."""
        sandbox = await self._sandbox(sandbox_id)
        try:
            return (await sandbox.files.write(path, content)).path
        except OpendsecError as error:
            raise _told(error) from error

    async def read_file(
        self,
        sandbox_id: SandboxId,
        path: str,
        offset_bytes: Annotated[int, Field(ge=0, description="Where to start.")] = 0,
    ) -> str:
        """Read a text file, at most 64 KiB of it. Read on with a larger offset_bytes."""
        sandbox = await self._sandbox(sandbox_id)
        data = b""
        try:
            async with await sandbox.files.stream(path, offset_bytes=offset_bytes) as stream:
                async for chunk in stream:
                    data += chunk
                    if len(data) > TEXT_BYTES_MAX:
                        break
        except OpendsecError as error:
            raise _told(error) from error
        text = data[:TEXT_BYTES_MAX].decode(errors="replace")
        if len(data) > TEXT_BYTES_MAX:
            text += f"\n[cut: read on at offset_bytes={offset_bytes + TEXT_BYTES_MAX}]"
        return text

    async def list_files(self, sandbox_id: SandboxId, path: str = ".") -> list[Entry]:
        """The entries of a directory, at most 1,000."""
        sandbox = await self._sandbox(sandbox_id)
        try:
            found = await sandbox.files.list(path)
        except OpendsecError as error:
            raise _told(error) from error
        return [
            Entry(path=entry.path, type=entry.type, size_bytes=entry.size_bytes)
            for entry in found[:1000]
        ]

    async def list_sandboxes(self) -> list[Made]:
        """The sandboxes you can use."""
        found = []
        for sandbox_id in sorted(self._made | self._given):
            with contextlib.suppress(ToolError):
                found.append(_public(await self._sandbox(sandbox_id)))
        return found

    async def kill_sandbox(
        self, sandbox_id: SandboxId
    ) -> Annotated[bool, Field(description="False: it had ended already.")]:
        """End a sandbox that you made, with all its files."""
        if sandbox_id not in self._made:
            raise ToolError(f"You made no sandbox {sandbox_id!r}.")
        try:
            killed = await self._client.kill(sandbox_id)
        except OpendsecError as error:
            raise _told(error) from error
        self._made.discard(sandbox_id)
        self._known.pop(sandbox_id, None)
        return killed

    # --- help ---------------------------------------------------------------------------

    @property
    def _client(self) -> AsyncClient:
        if self._client_now is None:
            self._client_now = AsyncClient(base_url=self._base_url)
        return self._client_now

    async def _sandbox(self, sandbox_id: str) -> AsyncSandbox:
        """One that the model may use.

        Raises:
            ToolError: it may not, or it has ended.
        """
        if sandbox_id not in self._made and sandbox_id not in self._given:
            raise ToolError(f"You have no sandbox {sandbox_id!r}. Make one with create_sandbox.")
        known = self._known.get(sandbox_id)
        try:
            if known is None:
                known = self._known[sandbox_id] = await self._client.connect(sandbox_id)
            elif (await known.info()).ended:
                self._made.discard(sandbox_id)
                raise ToolError(
                    f"The sandbox {sandbox_id} has ended ({known.record.end_reason}). Make another."
                )
        except OpendsecError as error:
            raise _told(error) from error
        return known


def _public(sandbox: AsyncSandbox) -> Made:
    record = sandbox.record
    return Made(
        sandbox_id=record.sandbox_id,
        state=record.state,
        template=record.image or record.template,
        internet=record.network is None or record.network.internet,
        ends_at=None if record.end_at is None else record.end_at.isoformat(),
    )


def _ran(result: CommandResult) -> Ran:
    return Ran(
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        truncated=result.truncated,
    )


def _told(error: OpendsecError) -> ToolError:
    """What the model reads of a failure: also whether it is its own, and what to do."""
    whose = {
        "user": "",
        "platform": " This is the platform's failure, not that of your command.",
        "capacity": " There is no room now; try again later.",
    }[error.fault]
    return ToolError(f"{error.message}{whose} {error.remediation}")

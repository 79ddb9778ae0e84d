# SPDX-License-Identifier: Apache-2.0
"""One sandbox."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import httpx2
import msgspec

from opendsec import _limits, _network, _ports
from opendsec._errors import (
    InvalidRequest,
    OpendsecError,
    SandboxNotFound,
    SandboxPaused,
    WaitTimeout,
)
from opendsec._models import (
    CommandResult,
    ImageInfo,
    MetricSample,
    NetworkPolicy,
    OnTimeout,
    PauseReport,
    ProcessInfo,
    ReadyCheck,
    SandboxInfo,
    Snapshot,
    StateMode,
    Transition,
    VmOptions,
)

from . import _process
from ._concurrency import Content, OutputCallback, alongside, sleep
from ._connect import AsyncSandboxWire
from ._files import AsyncFiles
from ._process import AsyncProcess, AsyncPty, Command
from ._trajectories import AsyncActions

if TYPE_CHECKING:
    from ._client import AsyncClient


class AsyncSandbox:
    """A running sandbox.

    Make one with ``AsyncSandbox.create()`` or ``AsyncClient.create()``. As a context manager it
    is killed at the end of the block::

        async with await AsyncSandbox.create() as sandbox:
            result = await sandbox.exec("echo hello")
            print(result.stdout)

    Attributes:
        files: The sandbox's files.
        actions: What is done in it once, with a record.
        record: What the server said of it last; ``info()`` asks again.
        kill_on_exit: Whether the end of a ``with`` block kills it. Set it to False to keep it.
    """

    def __init__(self, client: AsyncClient, record: SandboxInfo, *, owns_client: bool) -> None:
        self._client = client
        self._owns_client = owns_client
        self.record = record
        self.kill_on_exit = True
        self._wire = AsyncSandboxWire(client._transport, record.sandbox_id, record.access_token)
        self.files = AsyncFiles(self._wire)
        self.actions = AsyncActions(client._transport, record.sandbox_id)

    @classmethod
    async def create(
        cls,
        template: str = "base",
        *,
        cpu: float | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Sequence[str] = (),
        task_id: str | None = None,
        timeout_s: float = 300,
        idle_timeout_s: float | None = None,
        on_timeout: OnTimeout = "kill",
        pause_mode: StateMode | None = None,
        auto_resume: bool = False,
        network: NetworkPolicy | None = None,
        backend: str | None = None,
        vm: VmOptions | None = None,
        image: str | None = None,
        layers: Sequence[str] = (),
        start_image: bool = False,
        ready: ReadyCheck | None = None,
        node_labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> AsyncSandbox:
        """Create a sandbox with a client of its own, made from the environment.

        The client is closed with the sandbox. To make many sandboxes, use one ``AsyncClient``.
        See ``AsyncClient.create`` for the arguments and the errors.
        """
        from ._client import AsyncClient

        client = AsyncClient(base_url=base_url, api_key=api_key)
        try:
            sandbox = await client.create(
                template,
                cpu=cpu,
                memory_mb=memory_mb,
                disk_mb=disk_mb,
                env=env,
                metadata=metadata,
                labels=labels,
                task_id=task_id,
                timeout_s=timeout_s,
                idle_timeout_s=idle_timeout_s,
                on_timeout=on_timeout,
                pause_mode=pause_mode,
                auto_resume=auto_resume,
                network=network,
                backend=backend,
                vm=vm,
                image=image,
                layers=layers,
                start_image=start_image,
                ready=ready,
                node_labels=node_labels,
                idempotency_key=idempotency_key,
            )
        except BaseException:
            await client.aclose()
            raise
        sandbox._owns_client = True
        return sandbox

    @classmethod
    async def connect(
        cls,
        sandbox_id: str,
        *,
        timeout_s: float | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> AsyncSandbox:
        """Connect to a sandbox with a client of its own; see ``AsyncClient.connect``."""
        from ._client import AsyncClient

        client = AsyncClient(base_url=base_url, api_key=api_key)
        try:
            sandbox = await client.connect(sandbox_id, timeout_s=timeout_s)
        except BaseException:
            await client.aclose()
            raise
        sandbox._owns_client = True
        return sandbox

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.sandbox_id} {self.record.state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.kill_on_exit:
                await self.kill()
        except OpendsecError:
            if exc is None:
                raise
            # The block's own failure says more; the sandbox still ends at its time-out.
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close this object's connections, if they are its own. The sandbox lives on."""
        if self._owns_client:
            await self._client.aclose()

    # --- life -----------------------------------------------------------------

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self.record.sandbox_id

    async def info(self) -> SandboxInfo:
        """Ask the server for its present record; also after its end.

        Raises:
            SandboxNotFound: the server does not know it (any more).
        """
        return self._learn(await self._client.info(self.sandbox_id))

    def _learn(self, record: SandboxInfo) -> SandboxInfo:
        """Take a newer record; most answers leave the tokens out, which never change."""
        self.record = msgspec.structs.replace(
            record,
            access_token=record.access_token or self.record.access_token,
            traffic_token=record.traffic_token or self.record.traffic_token,
        )
        return self.record

    async def is_running(self) -> bool:
        """Whether its agent answers. A paused sandbox is not resumed by it.

        Raises:
            OpendsecError: neither yes nor no could be found out.
        """
        try:
            return await self._wire.is_healthy()
        except (SandboxNotFound, SandboxPaused):
            return False

    async def set_timeout(self, timeout_s: float) -> SandboxInfo:
        """Let it end ``timeout_s`` from now, whether earlier or later than before.

        Raises:
            SandboxNotFound: it has ended.
        """
        return self._learn(await self._client.set_timeout(self.sandbox_id, timeout_s))

    async def console(self) -> str:
        """The end of what the machine printed on its serial console, at most 64 KiB.

        Raises:
            NotSupported: its backend has no console.
        """
        return await self._client.console(self.sandbox_id)

    async def set_network(self, network: NetworkPolicy) -> SandboxInfo:
        """Replace its network policy, at once and as a whole.

        Raises:
            SandboxNotFound: it has ended.
        """
        return self._learn(await self._client.set_network(self.sandbox_id, network))

    async def pause(self, mode: StateMode = "full") -> PauseReport:
        """Free its memory and keep the rest. Returns when it is paused.

        A paused sandbox has no end time. Streams and connections to it end with an error;
        commands that run under this package raise ``SandboxPaused``.

        Args:
            mode: ``full``: processes go on where they were when it is resumed. ``filesystem``:
                only the disk is kept and processes end; a resume starts afresh from it.

        Raises:
            AlreadyPaused: it is. Also after a repeated call, if the first one's answer was lost.
            SandboxNotFound: it has ended.
            StateConflict: it is starting, resuming or ending.
            NotSupported: its backend cannot keep memory; ask for ``filesystem``.
            SnapshotFailed: it could not be saved; it goes on running.
        """
        report = await self._client.pause(self.sandbox_id, mode=mode)
        self._learn(report.sandbox)
        return report

    async def resume(self, *, timeout_s: float | None = None, reboot: bool = False) -> SandboxInfo:
        """Let it run on; returns when it takes commands. One that runs is left as it is.

        Args:
            timeout_s: Its time runs out so many seconds from now; never shortens the life of one
                that runs. None: the server's default.
            reboot: Forget the kept memory and start from the disk.

        Raises:
            SandboxNotFound: it has ended.
            StateConflict: it is starting or ending.
            NodeFull: there is no room to run it now; it stays paused.
            SnapshotDamaged, SnapshotIncompatible: the kept memory cannot be used; it stays
                paused, and ``reboot`` may help.
            ResumeFailed: it did not come up; it stays paused.
        """
        record = await self._client.resume(self.sandbox_id, timeout_s=timeout_s, reboot=reboot)
        return self._learn(record)

    async def fork(
        self,
        count: int = 1,
        *,
        mode: StateMode = "full",
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Sequence[str] | None = None,
        idempotency_key: str | None = None,
    ) -> list[AsyncSandbox | OpendsecError]:
        """Make copies of it as it is at this instant; it goes on itself.

        Each child succeeds or fails for itself: look at each of the list. Children use this
        sandbox's client, so they cannot be used after that is closed; they live on.

        Args:
            count: How many, 1 to 100.
            mode: ``full``: children go on with the same processes. ``filesystem``: they start
                with a copy of the disk.
            timeout_s: A child's time runs out after so many seconds. None: the server's default.
            metadata: Of the children. None: as this one's.
            labels: Of the children. None: as this one's.
            idempotency_key: As of ``AsyncClient.create``: a repeated call finds the same children.

        Returns:
            One sandbox, or the error instead of it, for each child.

        Raises:
            SandboxNotFound: it has ended.
            StateConflict: it is not running.
            NotSupported: its backend cannot copy memory; ask for ``filesystem``.
            SnapshotFailed: its state could not be saved; it goes on, and there are no children.
        """
        return await self._client.fork(
            self.sandbox_id,
            count,
            mode=mode,
            timeout_s=timeout_s,
            metadata=metadata,
            labels=labels,
            idempotency_key=idempotency_key,
        )

    async def snapshot(
        self,
        name: str | None = None,
        *,
        mode: StateMode = "full",
        idempotency_key: str | None = None,
    ) -> Snapshot:
        """Save its state of this instant, to create sandboxes from; it goes on itself.

        A snapshot lasts until it is deleted (``client.snapshots.delete``), longer than the
        sandbox.

        Args:
            name: ``name`` or ``name:tag``, to find it by. None: it has only an id.
            mode: ``full``: with memory, so sandboxes from it go on with the same processes.
                ``filesystem``: the disk alone.
            idempotency_key: As of ``AsyncClient.create``: a repeated call finds the same snapshot.

        Raises:
            SandboxNotFound: it has ended.
            StateConflict: it is starting, resuming or ending.
            NotSupported: its backend cannot save memory, or a pause has dropped it; ask for
                ``filesystem``.
            SnapshotFailed: it could not be saved; it goes on, and nothing is left behind.
            NodeFull: there is no room on the disk.
        """
        return await self._client.snapshot(
            self.sandbox_id, name=name, mode=mode, idempotency_key=idempotency_key
        )

    async def pack(
        self, name: str | None = None, *, squash: bool = False, scrub: bool = True
    ) -> ImageInfo:
        """Make an image of its changes and what it stands on; it goes on itself.

        Sandboxes are created from it by ``client.create(image=...)``. Memory is not in it: that is
        what snapshots are for.

        Args:
            name: ``name`` or ``name:tag``, to create by. None: it has only a digest.
            squash: One layer of everything, instead of one on top.
            scrub: Leave out shell histories, host name and addresses, and the like.

        Raises:
            InvalidRequest: not a name.
            SandboxNotFound: it has ended.
            StateConflict: it is starting, resuming or ending.
            NotSupported: its backend has no layers.
            SnapshotFailed: it could not be saved; it goes on, and nothing is left behind.
            NodeFull: there is no room on the disk.
        """
        return await self._client.pack(self.sandbox_id, name=name, squash=squash, scrub=scrub)

    async def kill(self) -> bool:
        """End it. Returns when nothing of it runs; False if the server knows it no more."""
        return await self._client.kill(self.sandbox_id)

    async def metrics(
        self, *, start: float | None = None, end: float | None = None
    ) -> list[MetricSample]:
        """Readings of its CPU, memory and disk, oldest first.

        Args:
            start: Unix seconds; None: five minutes before ``end``. An hour is kept.
            end: Unix seconds; None: now.
        """
        return await self._client.metrics(self.sandbox_id, start=start, end=end)

    async def transitions(self) -> list[Transition]:
        """The changes of its state, oldest first, with reasons."""
        return await self._client.transitions(self.sandbox_id)

    # --- processes ------------------------------------------------------------

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: Content | None = None,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        check: bool = False,
        output_limit_bytes: int = _limits.OUTPUT_BYTES_MAX_DEFAULT,
    ) -> CommandResult:
        """Run a command and wait for its end.

        A child it leaves in the background does not delay the return. If the wait is abandoned
        (cancelled, Ctrl-C, or a callback fails), the command is killed. It is never started twice:
        a start that may have been seen by the sandbox is not repeated.

        Args:
            command: A line for ``bash -l -c``, or a list: a program and its arguments, no shell.
            cwd: Directory to run in. None: the user's home.
            env: Added to the sandbox's environment.
            user: Account to run as. None: the template's default, usually ``user``.
            timeout_s: Kill it after so many seconds. None: no limit but the sandbox's own life.
            stdin: What it reads: bytes, text, an open binary file or an iterable of bytes.
                None: nothing.
            on_stdout: Called with each piece of output as it comes.
            on_stderr: Called with each piece of error output as it comes.
            check: Raise unless the exit code is 0.
            output_limit_bytes: Of stdout and of stderr, keep the first so many bytes (default
                16 MiB each). More is read, given to the callbacks, and dropped; the result's
                ``truncated`` tells.

        Raises:
            CommandFailed: ``check`` and another exit code than 0.
            CommandTimeout: it reached ``timeout_s``; it and its children were killed.
            InvalidRequest: ``cwd`` or ``user`` does not exist, or the program cannot be started.
            ProgramNotFound, ProgramNotExecutable: the program is missing, or cannot be run.
            SandboxNotFound: the sandbox ended, or had ended before.
            SandboxPaused: the sandbox was paused, or had been. The command is not lost if memory
                was kept: resume the sandbox and attach by ``pid``.
            ConnectionFailed: the stream broke. ``sandbox_alive`` says whether the sandbox still
                answers; ``pid`` serves to attach again. An exit code is never made up.
        """
        process = await self.spawn(
            command,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=timeout_s,
            stdin=stdin is not None,
            output_limit_bytes=output_limit_bytes,
        )
        feed = None if stdin is None else lambda: _process.feed_stdin(process, stdin)
        async with process:
            try:
                async with alongside(feed):
                    return await process.wait(on_stdout=on_stdout, on_stderr=on_stderr, check=check)
            except OpendsecError:
                raise
            except BaseException:
                await _process.kill_quietly(process)
                raise

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bool = False,
        tag: str | None = None,
        output_limit_bytes: int = _limits.OUTPUT_BYTES_MAX_DEFAULT,
    ) -> AsyncProcess:
        """Start a command and return at once.

        Args:
            stdin: Whether its input can be written to; otherwise it reads nothing.
            tag: A name to attach by; must be unique among the running ones.

        The other arguments and the errors are those of ``exec``.
        """
        return await _process.start_process(
            self._wire,
            command,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=timeout_s,
            stdin=stdin,
            tag=tag,
            output_limit_bytes=output_limit_bytes,
        )

    async def pty(
        self,
        command: Command | None = None,
        *,
        cols: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncPty:
        """Start a command on a terminal of its own and return at once.

        Args:
            command: None: an interactive login shell.
            cols: Width in characters.
            rows: Height in characters.

        The other arguments and the errors are those of ``exec``.
        """
        return await _process.start_pty(
            self._wire,
            command,
            cols=cols,
            rows=rows,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=timeout_s,
        )

    async def attach(
        self,
        process: int | str,
        *,
        timeout_s: float | None = None,
        output_limit_bytes: int = _limits.OUTPUT_BYTES_MAX_DEFAULT,
    ) -> AsyncPty:
        """Connect to a process that was started before; an ended one for 30 seconds.

        Output from before is not repeated. The returned object's terminal methods only work if
        the process has a terminal.

        Args:
            process: Its pid, or its tag.
            timeout_s: How long to stay connected at most. None: no limit.

        Raises:
            ProcessNotFound: there is no such process.
        """
        return await _process.attach_process(
            self._wire, process, timeout_s=timeout_s, output_limit_bytes=output_limit_bytes
        )

    async def processes(self) -> list[ProcessInfo]:
        """The running processes that were started through the API."""
        return await _process.list_processes(self._wire)

    # --- ports ----------------------------------------------------------------

    def host(self, port: int) -> str:
        """Name a port of the sandbox is served under, without scheme."""
        return f"{_checked_port(port)}-{self.sandbox_id}.{self.record.domain}"

    def url(self, port: int) -> str:
        """Address of an HTTP service in the sandbox, for browsers and other programs."""
        scheme = urlsplit(self._client.settings.base_url).scheme
        return f"{scheme}://{self.host(port)}"

    def http(self, port: int) -> httpx2.AsyncClient:
        """An HTTP client for a service in the sandbox; the caller closes it.

        It goes by the server's address with routing headers, so it works without DNS for
        ``url()``, and it carries the traffic token.
        """
        headers = {"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": str(_checked_port(port))}
        if self.record.traffic_token:
            headers["E2b-Traffic-Access-Token"] = self.record.traffic_token
        transport = self._client._transport
        return transport.new_http_client(self._wire.base_url, headers, _network.ssl_context())

    async def wait_for_port(self, port: int, *, timeout_s: float = 30.0) -> None:
        """Wait until something in the sandbox listens on a TCP port. Nothing is sent to it.

        Raises:
            WaitTimeout: nothing listened within ``timeout_s``.
        """
        _checked_port(port)
        deadline = time.monotonic() + timeout_s
        pause_s = _limits.POLL_MIN_S
        while True:
            tables = await self.exec(_ports.LISTENERS_COMMAND, timeout_s=_limits.REQUEST_TIMEOUT_S)
            if _ports.is_listening(tables.stdout, port):
                return
            if time.monotonic() + pause_s > deadline:
                raise WaitTimeout(f"Nothing listened on port {port} within {timeout_s:g} s.")
            await sleep(pause_s)
            pause_s = min(pause_s * 1.5, _limits.POLL_MAX_S)


def _checked_port(port: int) -> int:
    if not 1 <= port <= 65535:
        raise InvalidRequest(f"{port} is not a TCP port (1 to 65535).")
    return port

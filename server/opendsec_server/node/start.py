# SPDX-License-Identifier: AGPL-3.0-only
"""Start commands: programs that are started with a sandbox, awaited, and left running.

The guest agent starts them as it starts any program; it lets them go on when our stream closes.
It keeps their latest output in ``/run/opendsec/start.log`` of the sandbox. What they print until
they are ready is also kept in ``start.log`` beside the sandbox's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from opendsec_server.contract.errors import (
    AgentUnresponsive,
    InvalidRequest,
    NodeFull,
    OpendsecError,
    SandboxStartFailed,
    StartTimeout,
)
from opendsec_server.contract.images import ExecEvent, ReadyCheck, StartCommand
from opendsec_server.contract.node import SandboxSpec

from . import agent_client, limits
from .exec import exec_events
from .paths import NodePaths
from .sandbox import Sandbox

TAG = "opendsec-start"
"""By which the program can be found among the agent's, and by which it knows to keep its output."""
LOG_FILE = "start.log"
_COMMAND_CHARS_MAX = 200
_TAIL_CHARS = 2_000
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
_REMEDY = "Look at what the command printed; try it by hand in a sandbox without a start command."


class StartCommandFailed(SandboxStartFailed):
    """The start command ended by itself, or cannot be run."""

    retryable = False
    fault = "user"
    default_remediation = _REMEDY


class StartCommandTimeout(StartTimeout):
    """The start command did not become ready in time."""

    retryable = False
    fault = "user"
    default_remediation = _REMEDY + " Give the readiness check more time if it only needs longer."


class _Output:
    """The end of what a program printed, in a bounded file as well."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        self._kept += data
        del self._kept[: -limits.START_LOG_BYTES_MAX]

    def save(self) -> None:
        """Best effort: a full disk is noticed elsewhere."""
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            fd = os.open(self._log, flags, 0o600)
            try:
                os.write(fd, self._kept)
            finally:
                os.close(fd)

    def tail(self) -> str:
        text = self._kept[-4 * _TAIL_CHARS :].decode(errors="replace").strip()
        return text[-_TAIL_CHARS:] or "(nothing)"


class StartPrograms:
    """Starts the programs of sandboxes that have just come up."""

    def __init__(self, paths: NodePaths) -> None:
        self._paths = paths

    async def run(self, box: Sandbox) -> None:
        """Start a sandbox's program and wait until it is ready. Nothing, if it has none or if it
        runs in the memory that the sandbox continued.

        Raises:
            StartCommandFailed: it cannot be run, or ended other than with 0 before it was ready.
            StartCommandTimeout: it was not ready in time.
            SandboxStartFailed: the guest agent went away meanwhile.
        """
        start = box.spec.start
        if start is None or box.start_in_memory or box.abort_reason is not None:
            return
        assert box.slot is not None
        output = _Output(self._paths.disk(box.sandbox_id) / LOG_FILE)
        watch = _Watch(box.slot.address, box.spec, start, output)
        aborted = asyncio.ensure_future(box.aborted.wait())
        work = asyncio.ensure_future(watch.until_ready())
        try:
            await asyncio.wait({aborted, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (aborted, work):
                task.cancel()
            await asyncio.gather(aborted, work, return_exceptions=True)
            output.save()


class _Watch:
    """One program, from its start until it is ready."""

    def __init__(
        self, address: str, spec: SandboxSpec, start: StartCommand, output: _Output
    ) -> None:
        self._address = address
        self._spec = spec
        self._start = start
        self._output = output
        self._name = " ".join(shlex.join(start.argv).split())[:_COMMAND_CHARS_MAX]
        self._runs = asyncio.Event()
        self._missing = "it was not started"

    async def until_ready(self) -> None:
        timeout_s = self._start.ready.timeout_s
        program = asyncio.ensure_future(self._follow())
        ready = asyncio.ensure_future(self._ready())
        try:
            async with asyncio.timeout(timeout_s):
                while not ready.done():
                    waiting = {task for task in (program, ready) if not task.done()}
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if program.done() and not ready.done():
                        # One that ended well may have put a server into the background.
                        self._must_have_ended_well(program.result())
            ready.result()
        except TimeoutError as exc:
            raise StartCommandTimeout(
                f"the start command `{self._name}` was not ready within {timeout_s:g} s: "
                f"{self._missing}. It printed: {self._output.tail()}"
            ) from exc
        except StartCommandFailed:
            raise
        except AgentUnresponsive as exc:
            raise SandboxStartFailed(
                f"{exc.message}, before the start command was ready. "
                f"It printed: {self._output.tail()}"
            ) from exc
        except OpendsecError as exc:
            raise StartCommandFailed(
                f"the start command `{self._name}`: {exc.message}. "
                f"It printed: {self._output.tail()}"
            ) from exc
        finally:
            for task in (program, ready):
                task.cancel()
            await asyncio.gather(program, ready, return_exceptions=True)

    async def _follow(self) -> ExecEvent:
        start = self._start
        events = exec_events(
            self._address,
            self._spec,
            start.argv,
            user=start.user,
            workdir=start.workdir,
            env=start.env,
            timeout_s=None,
            tag=TAG,
            on_started=self._runs.set,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if event.kind == "end":
                    return event
                self._output.add(event.data)
        raise AgentUnresponsive("the guest agent did not tell how it ended")

    def _must_have_ended_well(self, end: ExecEvent) -> None:
        if end.exit_code == 0:
            return
        how = f"signal {end.signal}" if end.exit_code is None else f"status {end.exit_code}"
        raise StartCommandFailed(
            f"the start command `{self._name}` ended with {how} before it was ready. "
            f"It printed: {self._output.tail()}",
            details={"exit_code": end.exit_code, "signal": end.signal},
        )

    async def _ready(self) -> None:
        await self._runs.wait()
        check = self._check()
        if check is None:
            return
        pause_s = limits.READY_PAUSE_FIRST_S
        while True:
            missing = await check()
            if missing is None:
                return
            self._missing = missing
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.READY_PAUSE_S)

    def _check(self) -> Callable[[], Awaitable[str | None]] | None:
        """Says what is missing, each time it is called; None: nothing has to be awaited."""
        ready = self._start.ready
        check_ready(ready)
        if ready.command is not None:
            command = ready.command
            return lambda: self._command_succeeds(command)
        if ready.port is not None:
            port = ready.port
            return lambda: self._port_listens(port)
        if ready.url is not None:
            url = ready.url
            return lambda: self._url_answers(url)
        return None

    async def _command_succeeds(self, command: str) -> str | None:
        start, said = self._start, bytearray()
        events = exec_events(
            self._address,
            self._spec,
            ("/bin/sh", "-c", command),
            user=start.user,
            workdir=start.workdir,
            env=start.env,
            timeout_s=start.ready.timeout_s,
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if event.kind != "end":
                        said += event.data
                        del said[:-_TAIL_CHARS]
                    elif event.exit_code == 0:
                        return None
                    else:
                        text = said.decode(errors="replace").strip()
                        return f"its readiness command `{command[:_COMMAND_CHARS_MAX]}` failed" + (
                            f" ({text})" if text else ""
                        )
        except InvalidRequest as exc:
            raise StartCommandFailed(
                f"the readiness command of `{self._name}` needs a shell: {exc.message}"
            ) from exc
        except NodeFull as exc:
            return exc.message
        return "its readiness command did not end"

    async def _port_listens(self, port: int) -> str | None:
        try:
            _reader, writer = await self._tunnel(port)
        except AgentUnresponsive as exc:
            return exc.message
        writer.close()
        return None

    async def _url_answers(self, url: str) -> str | None:
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            reader, writer = await self._tunnel(parts.port or 80)
        except AgentUnresponsive as exc:
            return exc.message
        try:
            async with asyncio.timeout(limits.READY_ANSWER_TIMEOUT_S):
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: opendsec\r\n"
                    "Accept: */*\r\nConnection: close\r\n\r\n".encode()
                )
                status = int((await reader.readline()).split(b" ", 2)[1])
        except (OSError, TimeoutError, ValueError, IndexError) as exc:
            return f"{url} does not answer: {exc!r}"
        finally:
            writer.close()
        return None if status < 400 else f"{url} answers {status}"

    async def _tunnel(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await agent_client.tunnel(self._address, self._spec.control_token, port)


def check_ready(ready: ReadyCheck) -> None:
    """Whether a readiness check makes sense.

    Raises:
        InvalidRequest: the message says what does not.
    """
    given = [ready.command, ready.port, ready.url]
    if sum(value is not None for value in given) > 1:
        raise InvalidRequest("ready: give one of command, port and url")
    if not 0 < ready.timeout_s <= limits.READY_TIMEOUT_MAX_S:
        raise InvalidRequest(
            f"ready.timeout_s: more than 0 and at most {limits.READY_TIMEOUT_MAX_S:.0f}"
        )
    if ready.port is not None and not 1 <= ready.port <= 65_535:
        raise InvalidRequest("ready.port: 1 to 65535")
    if ready.url is None:
        return
    try:
        parts = urlsplit(ready.url)
        usable = parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(ord(char) <= 32 or ord(char) > 126 for char in ready.url):
        raise InvalidRequest(
            "ready.url: an address like http://localhost:8000/health inside the sandbox"
        )


def start_budget_s(spec: SandboxSpec) -> float:
    """How long a sandbox's start command may take to become ready; 0: it has none."""
    return 0.0 if spec.start is None else spec.start.ready.timeout_s

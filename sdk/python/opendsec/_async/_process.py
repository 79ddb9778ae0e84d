# SPDX-License-Identifier: Apache-2.0
"""Processes in a sandbox: start, follow, feed, signal, and learn how they ended."""

from __future__ import annotations

import signal as _signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from opendsec import _limits
from opendsec._errors import (
    AgentUnresponsive,
    CommandFailed,
    CommandTimeout,
    ConnectionFailed,
    InvalidRequest,
    OpendsecError,
    ProcessNotFound,
    SandboxPaused,
    WaitTimeout,
)
from opendsec._models import CommandResult, OutputEvent, ProcessInfo
from opendsec._output import BoundedBuffer, TextDecoder
from opendsec._retry import Repeat
from opendsec._wire import (
    EmptyReply,
    EndEvent,
    ListReply,
    ProcessEvent,
    ProcessMessage,
    exit_code_of,
)

from ._concurrency import Content, OutputCallback, call, chunks
from ._connect import AsyncMessageStream, AsyncSandboxWire

Command = str | Sequence[str]
"""A line for ``bash -l -c``, or a program with its arguments, started without a shell."""

# Other signals go by number, which envd's protocol does not know but our agent does.
_SIGNALS: dict[int, str] = {_signal.SIGTERM: "SIGNAL_SIGTERM", _signal.SIGKILL: "SIGNAL_SIGKILL"}


class AsyncProcess:
    """A process in a sandbox and the stream of its output.

    Iterate over it to get ``OutputEvent`` objects as they come, or call ``wait()``; after
    iterating, ``wait()`` returns the result at once. As a context manager it disconnects at the
    end of the block and leaves the process running.

    The process runs on if this object is dropped. While a connected object does not read, the
    process is held back as soon as it has written some 256 KiB, and after five minutes the stream
    is cut; so read it, or disconnect. Output nobody is connected to is discarded.
    """

    def __init__(
        self,
        wire: AsyncSandboxWire,
        stream: AsyncMessageStream[ProcessMessage],
        pid: int,
        *,
        user: str | None,
        timeout_s: float | None,
        output_limit_bytes: int,
    ) -> None:
        self._wire = wire
        self._stream = stream
        self._pid = pid
        self._user = user
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._stdout = BoundedBuffer(output_limit_bytes)
        self._stderr = BoundedBuffer(output_limit_bytes)
        self._result: CommandResult | None = None
        self._connected = True
        stream.pid = pid

    @property
    def pid(self) -> int:
        """Its process id in the sandbox."""
        return self._pid

    @property
    def result(self) -> CommandResult | None:
        """How it ended; None while it runs, or while its end was not read yet."""
        return self._result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.disconnect()

    async def __aiter__(self) -> AsyncIterator[OutputEvent]:
        """Output as it comes, until the process has ended.

        Raises:
            CommandTimeout: it reached ``timeout_s`` and was killed.
            SandboxNotFound: the sandbox ended.
            SandboxPaused: the sandbox was paused; the process goes on if memory was kept.
            ConnectionFailed: the stream broke; see ``sandbox_alive``.
        """
        while self._result is None and self._connected:
            event = await self._receive()
            if event.data is not None:
                for output in _outputs(event):
                    keep = self._stderr if output.stream == "stderr" else self._stdout
                    keep.write(output.data)
                    yield output
            elif event.end is not None:
                # Disconnect first: a half-read end record would cost a pooled connection.
                await self._drain()
                self._result = self._result_of(event.end)

    async def wait(
        self,
        *,
        on_stdout: OutputCallback | None = None,
        on_stderr: OutputCallback | None = None,
        check: bool = False,
    ) -> CommandResult:
        """Read the output to its end and return how the process ended.

        Args:
            on_stdout: Called with each piece of output (also that of a terminal), as text.
            on_stderr: Called with each piece of error output.
            check: Raise unless the exit code is 0.

        Raises:
            CommandFailed: ``check`` and another exit code than 0.
            CommandTimeout: it reached ``timeout_s`` and was killed.
            SandboxNotFound: the sandbox ended.
            SandboxPaused: the sandbox was paused; the process goes on if memory was kept.
            ConnectionFailed: the stream broke; see ``sandbox_alive``. An exit code is never
                made up.
        """
        decoders = {"stdout": TextDecoder(), "stderr": TextDecoder(), "pty": TextDecoder()}
        callbacks = {"stdout": on_stdout, "stderr": on_stderr, "pty": on_stdout}
        async for event in self:
            callback = callbacks[event.stream]
            if callback is not None and (text := decoders[event.stream].feed(event.data)):
                await call(callback, text)
        for stream, callback in callbacks.items():
            if callback is not None and (text := decoders[stream].finish()):
                await call(callback, text)
        result = self._result
        if result is None:
            raise ConnectionFailed(
                "This object was disconnected from the process before it ended.",
                remediation="Re-attach to the process by its pid.",
                pid=self.pid,
            )
        if check and not result.ok:
            raise CommandFailed(_failure_text(result), result=result)
        return result

    async def write_stdin(self, data: bytes | str) -> None:
        """Write to its standard input; returns when the sandbox has taken all of it.

        Raises:
            ProcessNotFound: it has ended.
            Conflict: it was started without ``stdin=True``, or its input is closed.
        """
        payload = data.encode() if isinstance(data, str) else data
        await self._send_input("stdin", payload)

    async def close_stdin(self) -> None:
        """End its standard input.

        Raises:
            ProcessNotFound: it has ended.
        """
        await self._wire.unary(
            "process.Process/CloseStdin",
            {"process": {"pid": self.pid}},
            EmptyReply,
            user=self._user,
            not_found=ProcessNotFound,
        )

    async def send_signal(self, signal: int) -> None:
        """Send a signal, for example ``signal.SIGINT``.

        SIGKILL ends the process with all its children; any other goes to the process alone.

        Args:
            signal: Its number, 1 to 64.

        Raises:
            ProcessNotFound: it has ended.
            InvalidRequest: there is no such signal.
        """
        await self._wire.unary(
            "process.Process/SendSignal",
            {"process": {"pid": self.pid}, "signal": _SIGNALS.get(signal, int(signal))},
            EmptyReply,
            user=self._user,
            not_found=ProcessNotFound,
        )

    async def terminate(self) -> bool:
        """Ask it to end (SIGTERM). False if it has ended already."""
        return await self._signalled(_signal.SIGTERM)

    async def kill(self) -> bool:
        """End it and its children (SIGKILL). False if it has ended already."""
        return await self._signalled(_signal.SIGKILL)

    async def disconnect(self) -> None:
        """Stop reading. The process runs on; attach again by its pid."""
        self._connected = False
        await self._stream.aclose()

    async def _receive(self) -> ProcessEvent:
        try:
            message = await self._stream.receive()
        except WaitTimeout as exc:
            raise self._timed_out() from exc
        except (ConnectionFailed, SandboxPaused) as exc:
            exc.stdout, exc.stderr = self._stdout.text(), self._stderr.text()
            raise
        if message is None:
            raise self._ended_early()
        if (
            self._deadline is not None
            and time.monotonic() > self._deadline + _limits.DEADLINE_GRACE_S
        ):
            # The server should have ended it long ago; do not wait for a broken one.
            await self.disconnect()
            await self.kill()
            raise self._timed_out()
        return message.event

    async def _drain(self) -> None:
        """Read the end record after the end event, so that the connection can be used again."""
        try:
            while await self._stream.receive() is not None:
                pass
        except OpendsecError:
            pass  # The exit code is known; what follows it cannot change it.
        finally:
            await self._stream.aclose()

    def _result_of(self, event: EndEvent) -> CommandResult:
        code, signal = exit_code_of(event)
        return CommandResult(
            exit_code=code,
            signal=signal,
            stdout_bytes=self._stdout.getvalue(),
            stderr_bytes=self._stderr.getvalue(),
            stdout_truncated=self._stdout.truncated,
            stderr_truncated=self._stderr.truncated,
            error=None if event.error == event.status else event.error,
        )

    def _timed_out(self) -> CommandTimeout:
        limit_s = self._timeout_s or 0.0
        return CommandTimeout(
            f"The command did not end within {limit_s:g} s and was killed.",
            timeout_s=limit_s,
            stdout=self._stdout.text(),
            stderr=self._stderr.text(),
        )

    def _ended_early(self) -> OpendsecError:
        error = ConnectionFailed(
            "The stream ended without saying how the process ended.",
            sandbox_alive=True,
            pid=self.pid,
        )
        error.stdout, error.stderr = self._stdout.text(), self._stderr.text()
        return error

    async def _send_input(self, kind: str, payload: bytes) -> None:
        await self._wire.unary(
            "process.Process/SendInput",
            {"process": {"pid": self.pid}, "input": {kind: payload}},
            EmptyReply,
            user=self._user,
            # A program may take its time to read; the end of the process ends the call.
            silence_max_s=None,
            not_found=ProcessNotFound,
        )

    async def _signalled(self, signal: int) -> bool:
        try:
            await self.send_signal(signal)
        except ProcessNotFound:
            return False
        return True


class AsyncPty(AsyncProcess):
    """A process on a terminal of its own. Its output comes as events of the stream ``pty``."""

    async def write(self, data: bytes | str) -> None:
        """Type ``data``.

        Raises:
            ProcessNotFound: it has ended.
        """
        await self._send_input("pty", data.encode() if isinstance(data, str) else data)

    async def resize(self, cols: int, rows: int) -> None:
        """Tell the program its terminal's new size, in characters.

        Raises:
            ProcessNotFound: it has ended.
        """
        await self._wire.unary(
            "process.Process/Update",
            {"process": {"pid": self.pid}, "pty": {"size": {"cols": cols, "rows": rows}}},
            EmptyReply,
            user=self._user,
            not_found=ProcessNotFound,
        )


async def start_process(
    wire: AsyncSandboxWire,
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
    """Start a process; see ``AsyncSandbox.spawn``."""
    request = _start_request(command, cwd, env, tag)
    request["stdin"] = stdin
    stream, pid = await _open(wire, "Start", request, user, timeout_s)
    return AsyncProcess(
        wire,
        stream,
        pid,
        user=user,
        timeout_s=timeout_s,
        output_limit_bytes=output_limit_bytes,
    )


async def start_pty(
    wire: AsyncSandboxWire,
    command: Command | None,
    *,
    cols: int,
    rows: int,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
    timeout_s: float | None,
    output_limit_bytes: int = _limits.OUTPUT_BYTES_MAX_DEFAULT,
) -> AsyncPty:
    """Start a process on a terminal; see ``AsyncSandbox.pty``."""
    terminal = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    shell = ["/bin/bash", "-i", "-l"]
    request = _start_request(command or shell, cwd, {**terminal, **(env or {})}, None)
    request["pty"] = {"size": {"cols": cols, "rows": rows}}
    stream, pid = await _open(wire, "Start", request, user, timeout_s)
    return AsyncPty(
        wire,
        stream,
        pid,
        user=user,
        timeout_s=timeout_s,
        output_limit_bytes=output_limit_bytes,
    )


async def attach_process(
    wire: AsyncSandboxWire,
    selector: int | str,
    *,
    timeout_s: float | None,
    output_limit_bytes: int,
) -> AsyncPty:
    """Connect to a running process; see ``AsyncSandbox.attach``."""
    key = "tag" if isinstance(selector, str) else "pid"
    stream, pid = await _open(
        wire,
        "Connect",
        {"process": {key: selector}},
        None,
        timeout_s,
        repeat=Repeat.IDEMPOTENT,
        what=ProcessNotFound,
    )
    return AsyncPty(
        wire,
        stream,
        pid,
        user=None,
        timeout_s=timeout_s,
        output_limit_bytes=output_limit_bytes,
    )


async def list_processes(wire: AsyncSandboxWire) -> list[ProcessInfo]:
    """Processes started through the API; see ``AsyncSandbox.processes``."""
    reply = await wire.unary("process.Process/List", {}, ListReply, repeat=Repeat.IDEMPOTENT)
    return [process.public() for process in reply.processes]


async def feed_stdin(process: AsyncProcess, content: Content) -> None:
    """Write all of ``content`` to a process and close its input.

    Ends quietly when the process stops reading. If the content's own source fails, the process
    is killed, since it must not take a part for the whole.
    """
    try:
        async for chunk in chunks(content, _limits.STDIN_CHUNK_BYTES):
            await process.write_stdin(chunk)
        await process.close_stdin()
    except ConnectionFailed:
        await kill_quietly(process)
        raise
    except OpendsecError:
        return  # It has ended or closed its input: its right.
    except Exception:
        await kill_quietly(process)
        raise


async def kill_quietly(process: AsyncProcess) -> None:
    """Kill as far as that is possible, on the way out of another failure."""
    try:
        await process.kill()
    except OpendsecError:
        pass
    finally:
        await process.disconnect()


async def _open(
    wire: AsyncSandboxWire,
    method: str,
    request: dict[str, Any],
    user: str | None,
    timeout_s: float | None,
    *,
    repeat: Repeat = Repeat.IF_UNSENT,
    what: type[ProcessNotFound] | None = None,
) -> tuple[AsyncMessageStream[ProcessMessage], int]:
    if timeout_s is not None and timeout_s <= 0:
        raise InvalidRequest("timeout_s must be above 0; None means no limit.")
    stream = await wire.stream(
        f"process.Process/{method}",
        request,
        ProcessMessage,
        user=user,
        timeout_s=timeout_s,
        repeat=repeat,
        **({"not_found": what} if what else {}),
    )
    try:
        message = await stream.receive()
        while message is not None and message.event.start is None:
            message = await stream.receive()
    except BaseException:
        await stream.aclose()
        raise
    if message is None or message.event.start is None:
        raise AgentUnresponsive("The sandbox did not say whether the process was started.")
    return stream, message.event.start.pid


def _start_request(
    command: Command, cwd: str | None, env: Mapping[str, str] | None, tag: str | None
) -> dict[str, Any]:
    if isinstance(command, str):
        argv: Sequence[str] = ("/bin/bash", "-l", "-c", command)
    else:
        argv = command
    if not argv or not argv[0]:
        raise InvalidRequest("The command is empty.")
    config: dict[str, Any] = {"cmd": argv[0], "args": list(argv[1:]), "envs": dict(env or {})}
    if cwd is not None:
        config["cwd"] = cwd
    request: dict[str, Any] = {"process": config}
    if tag is not None:
        request["tag"] = tag
    return request


def _outputs(event: ProcessEvent) -> list[OutputEvent]:
    data = event.data
    if data is None:
        return []
    found: list[OutputEvent] = []
    if data.stdout:
        found.append(OutputEvent("stdout", data.stdout))
    if data.stderr:
        found.append(OutputEvent("stderr", data.stderr))
    if data.pty:
        found.append(OutputEvent("pty", data.pty))
    return found


def _failure_text(result: CommandResult) -> str:
    how = f"exit code {result.exit_code}"
    if result.signal_name:
        how = f"killed by {result.signal_name}"
    last = (result.stderr or result.stdout).rstrip().rsplit("\n", 1)[-1][:200]
    return f"The command failed ({how}){': ' + last if last else '.'}"

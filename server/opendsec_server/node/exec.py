# SPDX-License-Identifier: AGPL-3.0-only
"""Programs that the node itself runs in a sandbox, and archives that it unpacks there.

Both are calls to the guest agent: ``process.Process/Start``, a Connect stream of JSON messages
(https://connectrpc.com/docs/protocol#streaming-rpcs), and ``POST /opendsec/unpack``. HTTP/1.0 is
spoken for the stream: its body is not chunked and ends with the connection, and the Connect
frames say themselves whether it was whole.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from opendsec_server.contract.errors import (
    AgentUnresponsive,
    InvalidRequest,
    NodeFull,
    OpendsecError,
)
from opendsec_server.contract.images import ExecEvent
from opendsec_server.contract.node import SandboxSpec

from . import agent_client, limits
from .http_answer import read_answer
from .process import finish_in_thread

_FRAME_HEAD_BYTES = 5
_FLAG_END = 2
_FRAME_BYTES_MAX = 1 << 20
"""The agent's pieces of output are 32 KiB, in base64."""
_READ_AHEAD_BYTES = 256 * 1024
_ERROR_CHARS_MAX = 500
_UPLOAD_CHUNK_BYTES = 1 << 20

_SIGNALS = {
    "hangup": 1, "interrupt": 2, "quit": 3, "illegal instruction": 4,
    "trace/breakpoint trap": 5, "aborted": 6, "bus error": 7, "floating point exception": 8,
    "killed": 9, "user defined signal 1": 10, "segmentation fault": 11,
    "user defined signal 2": 12, "broken pipe": 13, "alarm clock": 14, "terminated": 15,
    "CPU time limit exceeded": 24, "file size limit exceeded": 25, "bad system call": 31,
}  # fmt: skip
"""The agent's words for signals (signal(7))."""

_CALLER_FAULTS = {
    "invalid_argument", "not_found", "permission_denied", "unauthenticated", "failed_precondition",
}  # fmt: skip


_BROKEN = (
    OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError,
    IndexError, msgspec.DecodeError,
)  # fmt: skip
"""What a broken connection or a malformed answer raises."""


class _Data(msgspec.Struct):
    stdout: str | None = None
    stderr: str | None = None


class _End(msgspec.Struct, rename="camel"):
    exit_code: int = 0
    exited: bool = False
    status: str = ""


class _Event(msgspec.Struct):
    start: dict[str, Any] | None = None
    data: _Data | None = None
    end: _End | None = None


class _Message(msgspec.Struct):
    event: _Event = msgspec.field(default_factory=_Event)


class _Error(msgspec.Struct):
    code: str = "unknown"
    message: str = ""


class _Refusal(msgspec.Struct):
    """Of an unpack. It has a number as its code."""

    message: str


class _Trailer(msgspec.Struct):
    error: _Error | None = None


async def exec_events(
    address: str,
    spec: SandboxSpec,
    argv: tuple[str, ...],
    *,
    user: str | None = None,
    workdir: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None,
    tag: str | None = None,
    on_started: Callable[[], None] = lambda: None,
) -> AsyncGenerator[ExecEvent, None]:
    """What a program does, as it does it; see ``NodeClient.exec``.

    The next piece is read when the caller asks for it, so a slow reader holds the program back.

    Args:
        address: The slot's address.
        spec: The sandbox.
        argv: Program and arguments.
        user: None: the sandbox's default user.
        workdir: None: the sandbox's default.
        env: Added to the sandbox's.
        timeout_s: The agent kills its process tree then. None: it may run for ever, also when
            the stream is closed.
        tag: A name that others can find it by.
        on_started: Called when it runs.

    Raises:
        InvalidRequest: no such user, directory or program.
        NodeFull: the sandbox has no room for another process.
        AgentUnresponsive: the agent broke off.
    """
    if not argv or not argv[0]:
        raise InvalidRequest("argv: a program is missing")
    reader, writer = await _open(address, spec, argv, user, workdir, env, timeout_s, tag)
    try:
        while True:
            flags, raw = await _frame(reader)
            if flags & _FLAG_END:
                event = _outcome(msgspec.json.decode(raw, type=_Trailer), argv)
                if event is not None:
                    yield event
                    return
                raise AgentUnresponsive("the guest agent did not tell how the program ended")
            message = msgspec.json.decode(raw, type=_Message).event
            if message.start is not None:
                on_started()
            if message.end is not None:
                yield _end_of(message.end)
                return
            if message.data is not None:
                if message.data.stdout:
                    yield ExecEvent(kind="stdout", data=base64.b64decode(message.data.stdout))
                if message.data.stderr:
                    yield ExecEvent(kind="stderr", data=base64.b64decode(message.data.stderr))
    except _BROKEN as exc:
        raise AgentUnresponsive(
            f"the guest agent went away while `{argv[0][:64]}` ran: {exc!r}"
        ) from exc
    finally:
        writer.close()


async def _open(
    address: str,
    spec: SandboxSpec,
    argv: tuple[str, ...],
    user: str | None,
    workdir: str | None,
    env: Mapping[str, str] | None,
    timeout_s: float | None,
    tag: str | None,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    config: dict[str, Any] = {"cmd": argv[0], "args": argv[1:], "envs": dict(env or {})}
    if workdir is not None:
        config["cwd"] = workdir
    start: dict[str, Any] = {"process": config, "stdin": False}
    if tag is not None:
        start["tag"] = tag
    try:
        message = msgspec.json.encode(start)
    except UnicodeEncodeError as exc:
        raise InvalidRequest("argv and env must be Unicode text") from exc
    body = bytes([0]) + len(message).to_bytes(4) + message
    head = [
        "POST /process.Process/Start HTTP/1.0",
        f"Host: {address}",
        "Content-Type: application/connect+json",
        "Connect-Protocol-Version: 1",
        f"X-Access-Token: {spec.access_token}",
        f"Keepalive-Ping-Interval: {limits.EXEC_KEEPALIVE_S}",
        f"Content-Length: {len(body)}",
    ]
    if user is not None:
        head.append(f"Authorization: Basic {base64.b64encode(f'{user}:'.encode()).decode()}")
    if timeout_s is not None:
        head.append(f"Connect-Timeout-Ms: {max(1, round(timeout_s * 1000))}")
    reader, writer = await agent_client.connect(
        address, limits.AGENT_CALL_TIMEOUT_S, limit=_READ_AHEAD_BYTES
    )
    try:
        async with asyncio.timeout(limits.EXEC_SILENCE_MAX_S):
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\n")
        status = int(answer.split(b" ", 2)[1])
        if status != 200:
            text = (await reader.read(_ERROR_CHARS_MAX)).decode(errors="replace")
            raise AgentUnresponsive(f"the guest agent answered {status}: {text}")
    except _BROKEN as exc:
        writer.close()
        raise AgentUnresponsive(f"the guest agent does not answer: {exc!r}") from exc
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    # A silent program is no silent agent: it sends keepalives.
    async with asyncio.timeout(limits.EXEC_SILENCE_MAX_S):
        head = await reader.readexactly(_FRAME_HEAD_BYTES)
        size = int.from_bytes(head[1:])
        if size > _FRAME_BYTES_MAX:
            raise ValueError(f"a message of {size} bytes")
        return head[0], await reader.readexactly(size)


def _outcome(trailer: _Trailer, argv: tuple[str, ...]) -> ExecEvent | None:
    """What the end of a stream without an ``end`` event means; None: nothing.

    Raises:
        OpendsecError: what it says.
    """
    error = trailer.error
    if error is None:
        return None
    if error.code == "deadline_exceeded":
        return ExecEvent(kind="end", timed_out=True)
    raise _as_error(error, f"`{argv[0][:64]}` was not run")


def _as_error(error: _Error, what: str) -> OpendsecError:
    text = f"{what}: {error.message[:_ERROR_CHARS_MAX]}"
    if error.code in _CALLER_FAULTS:
        return InvalidRequest(text)
    if error.code == "resource_exhausted":
        return NodeFull(text)
    return AgentUnresponsive(text)


def _end_of(end: _End) -> ExecEvent:
    if end.exited:
        return ExecEvent(kind="end", exit_code=end.exit_code)
    words = end.status.removeprefix("signal: ").removesuffix(" (core dumped)")
    number = _SIGNALS.get(words)
    if number is None and words.startswith("signal ") and words[7:].isdigit():
        number = int(words[7:])
    return ExecEvent(kind="end", signal=number)


async def unpack_archive(
    address: str,
    spec: SandboxSpec,
    archive: Path,
    *,
    sources: Sequence[str],
    target: str,
    user: str,
    mode: int | None,
) -> None:
    """See ``NodeClient.unpack``.

    Raises:
        InvalidRequest: as there; or the archive cannot be read.
        NodeFull: no room on the sandbox's disk.
        AgentUnresponsive: the agent broke off.
    """
    query = [*(("source", source) for source in sources), ("target", target), ("user", user)]
    if mode is not None:
        query.append(("mode", f"{mode:o}"))
    try:
        file = await finish_in_thread(archive.open, "rb")
    except OSError as exc:
        raise InvalidRequest(f"the archive cannot be read: {exc.strerror}") from exc
    with file:
        size = (await finish_in_thread(archive.stat)).st_size
        reader, writer = await agent_client.connect(address, limits.AGENT_CALL_TIMEOUT_S)
        try:
            writer.write(
                f"POST /opendsec/unpack?{urlencode(query)} HTTP/1.1\r\nHost: {address}\r\n"
                f"Connection: close\r\nX-Opendsec-Control: {spec.control_token}\r\n"
                f"Content-Type: application/x-tar\r\nContent-Length: {size}\r\n\r\n".encode()
            )
            # An agent that refuses answers at once and reads no further.
            with contextlib.suppress(ConnectionError):
                while chunk := await finish_in_thread(file.read, _UPLOAD_CHUNK_BYTES):
                    writer.write(chunk)
                    async with asyncio.timeout(limits.UNPACK_SILENCE_MAX_S):
                        await writer.drain()
            async with asyncio.timeout(limits.UNPACK_SILENCE_MAX_S):
                status, answer = await read_answer(reader, agent_client.ANSWER_BYTES_MAX)
        except _BROKEN as exc:
            raise AgentUnresponsive(f"the guest agent broke off an unpack: {exc!r}") from exc
        finally:
            writer.close()
    if status < 300:
        return
    try:
        text = msgspec.json.decode(answer, type=_Refusal).message
    except msgspec.DecodeError:
        text = answer.decode(errors="replace")
    text = text[:_ERROR_CHARS_MAX]
    if status == 507:
        raise NodeFull(f"no room on the sandbox's disk: {text}")
    if 400 <= status < 500:
        raise InvalidRequest(text)
    raise AgentUnresponsive(f"the guest agent answered {status} to an unpack: {text}")

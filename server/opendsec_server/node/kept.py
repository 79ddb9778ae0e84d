# SPDX-License-Identifier: AGPL-3.0-only
"""What the node asks of guest agents for actions: programs whose outcome is kept, small files.

The agent's ``/opendsec/kept`` (with the control token) and ``/files`` (with the access token).
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

import msgspec

from opendsec_server.contract.actions import (
    KEPT_OUTPUT_BYTES_MAX,
    KeptOutput,
    KeptProgram,
    KeptState,
    ProgramOrder,
)
from opendsec_server.contract.errors import (
    AgentUnresponsive,
    Conflict,
    FileNotFound,
    InvalidRequest,
    NodeFull,
    OpendsecError,
    PayloadTooLarge,
    StateConflict,
)
from opendsec_server.contract.node import SandboxSpec

from . import agent_client, limits

_ANSWER_BYTES_MAX = 4 * KEPT_OUTPUT_BYTES_MAX
"""Two outputs in base64, and some words."""
_HEAD_BYTES_MAX = 64 * 1024
_ERROR_CHARS_MAX = 500
_BROKEN = (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError)
"""What a broken connection or a malformed answer raises."""


class _Output(msgspec.Struct):
    head: bytes = b""
    tail: bytes = b""
    total: int = msgspec.field(default=0, name="bytes")


class _Kept(msgspec.Struct, rename="camel"):
    state: KeptState
    instance: str
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    lost: bool = False
    oom_kills: int = 0
    stdout: _Output = msgspec.field(default_factory=_Output)
    stderr: _Output = msgspec.field(default_factory=_Output)


class _Refusal(msgspec.Struct):
    code: str | int = "unknown"
    message: str = ""


async def start(address: str, spec: SandboxSpec, tag: str, order: ProgramOrder) -> None:
    """See ``NodeClient.start_kept``."""
    if not order.argv or not order.argv[0]:
        raise InvalidRequest("argv: a program is missing")
    body: dict[str, Any] = {
        "tag": tag,
        "cmd": order.argv[0],
        "args": order.argv[1:],
        "envs": order.env,
        "timeoutMs": max(1, round(order.timeout_s * 1000)),
        "outputBytes": order.output_bytes,
    }
    if order.instance is not None:
        body["instance"] = order.instance
    if order.user is not None:
        body["user"] = order.user
    if order.workdir is not None:
        body["cwd"] = order.workdir
    try:
        encoded = msgspec.json.encode(body)
    except UnicodeEncodeError as exc:
        raise InvalidRequest("argv and env must be Unicode text") from exc
    status, answer = await _ask(
        address, "POST", "/opendsec/kept", _control(spec), encoded, limits.KEPT_START_TIMEOUT_S
    )
    if status != 200:
        raise _error_of(status, answer, f"`{order.argv[0][:64]}` was not run")


async def ask(
    address: str, spec: SandboxSpec, tag: str, *, wait_s: float, void: bool
) -> KeptProgram:
    """See ``NodeClient.kept``, without what the host's kernel has counted."""
    query = {"tag": tag, "wait_ms": str(round(wait_s * 1000))}
    if void:
        query["void"] = "1"
    path = f"/opendsec/kept?{urlencode(query)}"
    timeout_s = wait_s + limits.AGENT_CALL_TIMEOUT_S
    status, answer = await _ask(address, "GET", path, _control(spec), b"", timeout_s)
    if status != 200:
        raise _error_of(status, answer, "what became of a program is not known")
    try:
        kept = msgspec.json.decode(answer, type=_Kept)
    except msgspec.DecodeError as exc:
        raise AgentUnresponsive(f"the guest agent's answer is malformed: {exc}") from exc
    return KeptProgram(
        state=kept.state,
        instance=kept.instance,
        exit_code=kept.exit_code,
        signal=kept.signal,
        timed_out=kept.timed_out,
        lost=kept.lost,
        oom_kills=kept.oom_kills,
        stdout=_output_of(kept.stdout),
        stderr=_output_of(kept.stderr),
    )


async def forget(address: str, spec: SandboxSpec, tag: str) -> None:
    """See ``NodeClient.forget_kept``."""
    path = f"/opendsec/kept?{urlencode({'tag': tag})}"
    status, answer = await _ask(
        address, "DELETE", path, _control(spec), b"", limits.AGENT_CALL_TIMEOUT_S
    )
    if status != 204:
        raise _error_of(status, answer, "a program's outcome was not dropped")


async def write_file(
    address: str, spec: SandboxSpec, path: str, data: bytes, *, user: str | None
) -> None:
    """See ``NodeClient.write_file``."""
    headers = {**_access(spec), "Content-Type": "application/octet-stream"}
    status, answer = await _ask(
        address, "POST", _file(path, user), headers, data, limits.FILE_CALL_TIMEOUT_S
    )
    if status >= 300:
        raise _error_of(status, answer, "the file was not written")


async def read_file(
    address: str, spec: SandboxSpec, path: str, *, user: str | None, bytes_max: int
) -> bytes:
    """See ``NodeClient.read_file``."""
    # One byte more than wanted: a file at the limit is whole, one above it is refused. A range
    # of a file that has nothing there is answered with 416.
    headers = {**_access(spec), "Range": f"bytes=0-{bytes_max}"}
    status, answer = await _ask(
        address, "GET", _file(path, user), headers, b"", limits.FILE_CALL_TIMEOUT_S,
        bytes_max=bytes_max + _HEAD_BYTES_MAX,
    )  # fmt: skip
    if status == 416:
        return b""
    if status >= 300:
        raise _error_of(status, answer, "the file was not read")
    if len(answer) > bytes_max:
        raise PayloadTooLarge(
            f"the file is larger than {bytes_max} bytes",
            remediation="Download it through the files API.",
        )
    return answer


def _file(path: str, user: str | None) -> str:
    query = {"path": path} if user is None else {"path": path, "username": user}
    try:
        return f"/files?{urlencode(query)}"
    except UnicodeEncodeError as exc:
        raise InvalidRequest("path and user must be Unicode text") from exc


def _control(spec: SandboxSpec) -> dict[str, str]:
    return {"X-Opendsec-Control": spec.control_token, "Content-Type": "application/json"}


def _access(spec: SandboxSpec) -> dict[str, str]:
    return {"X-Access-Token": spec.access_token}


def _output_of(output: _Output) -> KeptOutput:
    return KeptOutput(head=output.head, tail=output.tail, bytes_total=output.total)


async def _ask(
    address: str,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes,
    timeout_s: float,
    *,
    bytes_max: int = _ANSWER_BYTES_MAX,
) -> tuple[int, bytes]:
    """One request on a connection of its own.

    Raises:
        AgentUnresponsive: no proper answer in time. What the request asked for may be done.
    """
    lines = [
        f"{method} {path} HTTP/1.0",
        f"Host: {address}",
        *(f"{name}: {value}" for name, value in headers.items()),
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join([*lines, "", ""]).encode()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await agent_client.connect(
                address, limits.AGENT_CALL_TIMEOUT_S, limit=_HEAD_BYTES_MAX
            )
            try:
                writer.write(head + body)
                await writer.drain()
                return await _read(reader, bytes_max)
            finally:
                writer.close()
    except _BROKEN as exc:
        raise AgentUnresponsive(f"the guest agent does not answer: {exc!r}") from exc


async def _read(reader: asyncio.StreamReader, bytes_max: int) -> tuple[int, bytes]:
    """Status and body. HTTP/1.0 is spoken: what states no length, such as a file of /proc, ends
    with the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return status, await reader.readexactly(min(int(value), bytes_max))
    body = bytearray()
    while len(body) < bytes_max and (piece := await reader.read(bytes_max - len(body))):
        body += piece
    return status, bytes(body)


def _error_of(status: int, answer: bytes, what: str) -> OpendsecError:
    try:
        refusal = msgspec.json.decode(answer, type=_Refusal)
    except msgspec.DecodeError:
        refusal = _Refusal(message=answer.decode(errors="replace"))
    text = f"{what}: {refusal.message[:_ERROR_CHARS_MAX]}"
    if refusal.code == "failed_precondition":
        return StateConflict(text, remediation="Send it again.")
    if status == 404:
        return FileNotFound(text)
    if status == 409:
        return Conflict(text)
    if status in (429, 507):
        return NodeFull(text)
    if 400 <= status < 500:
        return InvalidRequest(text)
    return AgentUnresponsive(text)

# SPDX-License-Identifier: AGPL-3.0-only
"""What the node says to a guest agent: few small HTTP/1.1 requests, one connection each.

Written on asyncio streams: an HTTP library costs more per create than the request itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from opendsec_server.contract.errors import AgentUnresponsive
from opendsec_server.contract.node import SandboxSpec

from . import limits
from .http_answer import read_answer
from .network.policy import AGENT_PORT

ANSWER_BYTES_MAX = 64 * 1024


class AgentStatus(msgspec.Struct, frozen=True):
    """``GET /opendsec/status``, as far as the node needs it."""

    last_activity_ms: int
    active_streams: int


class NotListening(AgentUnresponsive):
    """Nothing answers at the agent's port (yet)."""


async def connect(
    address: str, timeout_s: float, *, limit: int = ANSWER_BYTES_MAX
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a guest agent.

    Args:
        address: The slot's address.
        timeout_s: For the connection.
        limit: Bytes that are read ahead.

    Raises:
        NotListening: refused, or, as long as a guest has no network, no answer at all.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.open_connection(address, AGENT_PORT, limit=limit)
    except (ConnectionRefusedError, TimeoutError) as exc:
        raise NotListening(f"the guest agent does not listen: {exc!r}") from exc


async def _exchange(
    address: str, method: str, path: str, token: str, body: bytes, connect_timeout_s: float
) -> tuple[int, bytes]:
    reader, writer = await connect(address, connect_timeout_s)
    try:
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
            f"X-Opendsec-Control: {token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        return await read_answer(reader, ANSWER_BYTES_MAX)
    finally:
        writer.close()


async def _call(
    address: str,
    method: str,
    path: str,
    token: str,
    body: bytes,
    timeout_s: float,
    connect_timeout_s: float | None = None,
) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            status, answer = await _exchange(
                address, method, path, token, body, connect_timeout_s or timeout_s
            )
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError) as exc:
        raise AgentUnresponsive(f"the guest agent does not answer: {exc!r}") from exc
    if status >= 300:
        text = answer.decode(errors="replace")[:500]
        raise AgentUnresponsive(f"the guest agent answered {status} to {path}: {text}")
    return answer


class Fresh(msgspec.Struct, kw_only=True, frozen=True, rename="camel", omit_defaults=True):
    """What makes a virtual machine one of its own; see the agent's ``POST /init``."""

    restored: bool = False
    """Its memory is a saved one: connections of its earlier life are dropped."""
    entropy: str
    """Base64; the guest's kernel is seeded with it."""
    machine_id: str | None = None
    """32 hex digits; None: stays."""
    boot_id: str | None = None
    """UUID; None: stays."""


def init_body(spec: SandboxSpec, fresh: Fresh | None = None) -> bytes:
    """The body of ``POST /init``."""
    body: dict[str, Any] = {
        "accessToken": spec.access_token,
        "controlToken": spec.control_token,
        "envVars": spec.env,
        "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "defaultUser": spec.default_user,
        "sandboxId": spec.sandbox_id,
        "templateId": spec.template_id,
        "hostname": spec.sandbox_id,
        "limits": {
            "cpuCount": spec.cpu,
            "memoryBytes": spec.memory_mb * 1024 * 1024,
            "diskBytes": spec.disk_mb * 1024 * 1024,
        },
    }
    if spec.default_workdir is not None:
        body["defaultWorkdir"] = spec.default_workdir
    if fresh is not None:
        body |= msgspec.to_builtins(fresh)
    return msgspec.json.encode(body)


async def initialise(
    address: str,
    spec: SandboxSpec,
    *,
    timeout_s: float,
    give_up: Callable[[], str | None],
    token: str | None = None,
    fresh: Fresh | None = None,
    connect_timeout_s: float | None = None,
) -> None:
    """Tell a starting guest agent who it is; tries until it listens.

    Args:
        address: The slot's address.
        spec: The sandbox.
        timeout_s: How long to try.
        give_up: Asked before each attempt; a text ends the attempts.
        token: Control token that the agent holds now. None: none yet, or the sandbox's own.
        fresh: Of a virtual machine.
        connect_timeout_s: How long the first attempt waits for a connection; later ones wait
            longer, about a tenth of the time since, for guests that are slow to answer at all.
            None: as long as is left.

    Raises:
        TimeoutError: it never listened.
        AgentUnresponsive: it refused, broke off, or ``give_up`` said so.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        reason = give_up()
        if reason is not None:
            raise AgentUnresponsive(reason)
        left_s = deadline - loop.time()
        if left_s <= 0:
            raise TimeoutError(f"the guest agent did not listen within {timeout_s:.0f} s")
        # Made anew each time: it tells the time.
        body = init_body(spec, fresh)
        try:
            await _call(
                address,
                "POST",
                "/init",
                token or spec.control_token,
                body,
                left_s,
                connect_timeout_s,
            )
        except NotListening:
            if connect_timeout_s is not None:
                connect_timeout_s = min(1.1 * connect_timeout_s, limits.GUEST_CONNECT_TIMEOUT_MAX_S)
            await asyncio.sleep(limits.AGENT_CONNECT_PAUSE_S)
        else:
            return


async def status(address: str, control_token: str) -> AgentStatus:
    """Ask a running guest agent how busy it is.

    Raises:
        AgentUnresponsive: no proper answer in time.
    """
    answer = await _call(
        address, "GET", "/opendsec/status", control_token, b"", limits.AGENT_CALL_TIMEOUT_S
    )
    try:
        return msgspec.json.decode(answer, type=AgentStatus)
    except msgspec.DecodeError as exc:
        raise AgentUnresponsive(f"the guest agent's status is malformed: {exc}") from exc


async def terminate(address: str, control_token: str, reason: str) -> None:
    """Have the guest agent end its streams properly before a kill. Bounded.

    Raises:
        AgentUnresponsive: it did not answer; the kill goes on all the same.
    """
    body = msgspec.json.encode({"reason": reason})
    await _call(
        address,
        "POST",
        "/opendsec/terminate",
        control_token,
        body,
        limits.AGENT_TERMINATE_TIMEOUT_S,
    )


async def sync(address: str, control_token: str) -> None:
    """Have a virtual machine write everything to its disk.

    Raises:
        AgentUnresponsive: it did not answer in time.
    """
    await _call(address, "POST", "/opendsec/sync", control_token, b"", limits.AGENT_SYNC_TIMEOUT_S)


async def tunnel(
    address: str, control_token: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a port inside a sandbox, loopback addresses included.

    Raises:
        AgentUnresponsive: nothing listens there, or the agent does not answer.
    """
    reader, writer = await connect(address, limits.AGENT_CALL_TIMEOUT_S)
    try:
        async with asyncio.timeout(limits.AGENT_CALL_TIMEOUT_S):
            writer.write(
                f"GET /opendsec/tunnel?port={port} HTTP/1.1\r\nHost: {address}\r\n"
                f"X-Opendsec-Control: {control_token}\r\nConnection: Upgrade\r\n"
                "Upgrade: opendsec-tunnel\r\n\r\n".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
        if int(head.split(b" ", 2)[1]) != 101:
            raise AgentUnresponsive(f"nothing listens on port {port} in the sandbox")
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError) as exc:
        writer.close()
        raise AgentUnresponsive(f"the guest agent does not answer: {exc!r}") from exc
    except BaseException:
        writer.close()
        raise
    return reader, writer

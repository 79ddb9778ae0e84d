# SPDX-License-Identifier: Apache-2.0
"""Calls to the guest agent of one sandbox: Connect with the JSON codec, and plain HTTP."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from typing import Any, Generic, TypeVar

import httpx2
import msgspec

from opendsec import _answers, _limits, _network
from opendsec._errors import (
    FAULTS,
    AgentUnresponsive,
    BadResponse,
    ConnectionFailed,
    NotFound,
    OpendsecError,
    SandboxNotFound,
    SandboxPaused,
    StateConflict,
    Unauthenticated,
)
from opendsec._models import SandboxInfo
from opendsec._retry import Repeat
from opendsec._wire import FLAG_END, EndRecord, FrameDecoder, encode_frame

from ._concurrency import Content, chunks, sleep
from ._transport import AsyncTransport, RequestMaker, decode

T = TypeVar("T")


class AsyncSandboxWire:
    """The way to one sandbox: its id, its token, and the shared transport."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str, token: str | None) -> None:
        self.transport = transport
        self.sandbox_id = sandbox_id
        self.token = token
        self.base_url = transport.settings.sandbox_url

    def headers(self, user: str | None = None) -> dict[str, str]:
        """Routing and access; ``user`` chooses the account in the sandbox."""
        headers = {
            "E2b-Sandbox-Id": self.sandbox_id,
            "E2b-Sandbox-Port": str(_limits.AGENT_PORT),
            # Compressing on a fast link costs more than it saves.
            "Accept-Encoding": "identity",
        }
        if self.token:
            headers["X-Access-Token"] = self.token
        if user is not None:
            basic = base64.b64encode(f"{user}:".encode()).decode("ascii")
            headers["Authorization"] = f"Basic {basic}"
        return headers

    async def exchange(
        self, make: RequestMaker, *, repeat: Repeat, retries: bool = True
    ) -> httpx2.Response:
        """Send to the sandbox and read the whole answer.

        Raises:
            OpendsecError: typed; a sandbox that takes no requests is asked why.
        """
        try:
            return await self.transport.exchange(make, repeat=repeat, retries=retries)
        except (SandboxNotFound, Unauthenticated) as error:
            raise await self._refusal(error) from error.__cause__

    async def open(self, make: RequestMaker, *, repeat: Repeat) -> httpx2.Response:
        """Send to the sandbox; return once the head of a good answer is there. Else as above."""
        try:
            return await self.transport.open(make, repeat=repeat)
        except (SandboxNotFound, Unauthenticated) as error:
            raise await self._refusal(error) from error.__cause__

    async def _refusal(self, error: OpendsecError) -> OpendsecError:
        """What the sandbox's record says beyond the edge's answer."""
        record = await self._record()
        if record is None:
            return error
        if record.asleep:
            return paused(record)
        return gone(record, error) if record.ended else error

    async def unary(
        self,
        method: str,
        message: Any,
        reply: type[T],
        *,
        user: str | None = None,
        repeat: Repeat = Repeat.IF_UNSENT,
        silence_max_s: float | None = _limits.REQUEST_TIMEOUT_S,
        not_found: type[NotFound] = NotFound,
    ) -> T:
        """One request, one answer.

        Args:
            not_found: What a Connect error ``not_found`` means for this method.

        Raises:
            OpendsecError: typed.
        """
        content = msgspec.json.encode(message)

        def make() -> httpx2.Request:
            return self.transport.http.build_request(
                "POST",
                f"{self.base_url}/{method}",
                content=content,
                headers={
                    **self.headers(user),
                    "Content-Type": "application/json",
                    "Connect-Protocol-Version": "1",
                },
                timeout=_network.timeout(silence_max_s),
            )

        try:
            response = await self.exchange(make, repeat=repeat)
        except NotFound as error:
            raise specific(error, not_found) from error.__cause__
        return decode(response, reply)

    async def stream(
        self,
        method: str,
        message: Any,
        message_type: type[T],
        *,
        user: str | None = None,
        timeout_s: float | None = None,
        repeat: Repeat = Repeat.IF_UNSENT,
        not_found: type[NotFound] = NotFound,
    ) -> AsyncMessageStream[T]:
        """One request, many answers. The caller closes the stream.

        Args:
            timeout_s: Deadline the server enforces. None: none.
        """
        headers = {
            **self.headers(user),
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Accept-Encoding": "identity",
            "Keepalive-Ping-Interval": str(_limits.KEEPALIVE_INTERVAL_S),
        }
        if timeout_s is not None:
            headers["Connect-Timeout-Ms"] = str(max(1, round(timeout_s * 1000)))
        content = encode_frame(message)

        def make() -> httpx2.Request:
            return self.transport.http.build_request(
                "POST",
                f"{self.base_url}/{method}",
                content=content,
                headers=headers,
                timeout=_network.timeout(_limits.STREAM_SILENCE_MAX_S),
            )

        response = await self.open(make, repeat=repeat)
        return AsyncMessageStream(self, response, message_type, not_found)

    def file_request(
        self,
        method: str,
        params: Mapping[str, str],
        *,
        content: Content | None = None,
        files: list[tuple[str, tuple[str, bytes]]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Request:
        """A request to the agent's ``/files``."""
        body: bytes | AsyncIterator[bytes] | None = None
        if isinstance(content, str):
            body = content.encode()
        elif isinstance(content, (bytes, bytearray)):
            body = bytes(content)
        elif content is not None:
            body = chunks(content, _limits.FILE_CHUNK_BYTES)
        return self.transport.http.build_request(
            method,
            f"{self.base_url}/files",
            params=dict(params),
            content=body,
            files=files,
            headers={**self.headers(), **(headers or {})},
            timeout=_network.timeout(_limits.REQUEST_TIMEOUT_S),
        )

    async def is_healthy(self) -> bool:
        """Whether the sandbox's agent answers.

        The token is left out on purpose: a running agent needs none for this, and a paused
        sandbox must not be resumed only to say that it was paused.

        Raises:
            SandboxNotFound: the sandbox is gone, or paused.
            SandboxPaused: it is paused.
            OpendsecError: nothing is known.
        """
        headers = self.headers()
        headers.pop("X-Access-Token", None)

        def make() -> httpx2.Request:
            return self.transport.http.build_request(
                "GET",
                f"{self.base_url}/health",
                headers=headers,
                timeout=_network.timeout(_limits.HEALTH_TIMEOUT_S),
            )

        try:
            await self.transport.exchange(make, repeat=Repeat.IDEMPOTENT, retries=False)
        except (Unauthenticated, StateConflict) as error:
            # The edge's answers for a sandbox that is, or is about to be, paused.
            raise SandboxPaused(f"Sandbox {self.sandbox_id} is paused.") from error
        return True

    async def explain_loss(self, cause: OpendsecError, pid: int | None = None) -> OpendsecError:
        """Find out whether the sandbox or only the connection failed.

        Returns:
            SandboxNotFound if the sandbox is gone or going, SandboxPaused if it is paused; else
            ConnectionFailed, which says in ``sandbox_alive`` whether the sandbox answers.
        """
        try:
            alive = await self._probe()
        except SandboxPaused as error:
            record = await self._record()
            return paused(record, pid) if record is not None and record.asleep else error
        except SandboxNotFound:
            return await self._gone(cause, pid)
        if isinstance(cause, AgentUnresponsive) or alive is None:
            # An agent says `unavailable` when its sandbox is about to end.
            record = await self._record()
            if record is not None and record.asleep:
                return paused(record, pid)
            if record is not None and (record.ended or record.state == "stopping"):
                return gone(record, cause)
        words = {True: "the sandbox is alive", None: "the sandbox could not be asked"}[alive]
        return ConnectionFailed(
            f"{cause.message.rstrip('.')}. The stream ended before its end record; {words}.",
            remediation="Re-attach to the process by its pid." if alive and pid else None,
            sandbox_alive=alive,
            pid=pid,
        )

    async def _probe(self) -> bool | None:
        """Whether the sandbox answers; None: nobody can be asked.

        Raises:
            SandboxNotFound: it is gone, or paused.
            SandboxPaused: it is paused.
        """
        for pause_s in (*_limits.PROBE_PAUSES_S, None):
            try:
                return await self.is_healthy()
            except (SandboxNotFound, SandboxPaused):
                raise
            except OpendsecError:
                if pause_s is not None:
                    await sleep(pause_s)
        return None

    async def _gone(self, cause: OpendsecError, pid: int | None) -> OpendsecError:
        record = await self._record()
        if record is None:
            return SandboxNotFound(f"Sandbox {self.sandbox_id} was killed or has ended.")
        return paused(record, pid) if record.asleep else gone(record, cause)

    async def _record(self) -> SandboxInfo | None:
        """What the API knows; None if it cannot be asked. It only enriches an error."""
        if self.transport.settings.api_key is None:
            return None
        try:
            return await self.transport.api(
                "GET",
                f"/v1/sandboxes/{self.sandbox_id}",
                SandboxInfo,
                timeout_s=_limits.HEALTH_TIMEOUT_S,
                retries=False,
            )
        except OpendsecError:
            return None


class AsyncMessageStream(Generic[T]):
    """The messages of one streamed answer."""

    def __init__(
        self,
        wire: AsyncSandboxWire,
        response: httpx2.Response,
        message_type: type[T],
        not_found: type[NotFound],
    ) -> None:
        self._wire = wire
        self._response = response
        self._chunks = response.aiter_raw()
        self._frames = FrameDecoder()
        self._pending: list[tuple[int, bytes]] = []
        self._decoder = msgspec.json.Decoder(message_type, strict=False)
        self._not_found = not_found
        self._ended = False
        self.pid: int | None = None
        """Set by the owner, to name the process in errors."""

    async def receive(self) -> T | None:
        """The next message; None after a good end record.

        Raises:
            SandboxNotFound: the sandbox ended.
            ConnectionFailed: the stream broke off without an end record.
            OpendsecError: the end record's error.
        """
        if self._ended:
            return None
        while not self._pending:
            try:
                chunk = await anext(self._chunks, None)
            except httpx2.HTTPError as exc:
                raise await self._lost(
                    _network.connection_failed(exc, self._wire.base_url)
                ) from exc
            if chunk is None:
                raise await self._lost(
                    ConnectionFailed(f"The connection to {self._wire.base_url} was closed.")
                )
            self._pending.extend(self._frames.feed(chunk))
        flags, payload = self._pending.pop(0)
        try:
            if flags & FLAG_END:
                await self._finish(msgspec.json.decode(payload, type=EndRecord))
                return None
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            await self.aclose()
            raise BadResponse(f"The sandbox's stream cannot be read: {exc}") from exc

    async def aclose(self) -> None:
        """Close the connection of this stream; what it watched goes on."""
        self._ended = True
        await self._response.aclose()

    async def _finish(self, record: EndRecord) -> None:
        self._ended = True
        try:
            # Read the end of the HTTP body too: only then can the connection be used again.
            await anext(self._chunks, None)
        except httpx2.HTTPError:
            pass  # The end record has said all there is to say.
        finally:
            await self.aclose()
        if record.error is None:
            return
        error = _answers.from_connect(record.error.code, record.error.message)
        if isinstance(error, (AgentUnresponsive, ConnectionFailed, SandboxNotFound)):
            error = await self._wire.explain_loss(error, self.pid)
        elif isinstance(error, NotFound):
            error = specific(error, self._not_found)
        raise error

    async def _lost(self, cause: OpendsecError) -> OpendsecError:
        await self.aclose()
        return await self._wire.explain_loss(cause, self.pid)


def specific(error: NotFound, cls: type[NotFound]) -> NotFound:
    """A plain ``not_found`` as the class that fits what was looked for."""
    if type(error) is not NotFound:
        return error
    return cls(error.message, request_id=error.request_id, http_status=error.http_status)


def paused(record: SandboxInfo, pid: int | None = None) -> SandboxPaused:
    """The error for a sandbox that is paused."""
    return SandboxPaused(
        f"Sandbox {record.sandbox_id} is {record.state}.",
        details={"state": record.state, "paused_mode": record.paused_mode},
        pid=pid,
    )


def gone(record: SandboxInfo, cause: OpendsecError | None = None) -> SandboxNotFound:
    """The error for a sandbox that has ended, with the reason and whose fault it was."""
    reason = record.end_reason or record.state
    extra = f" {record.message}" if record.message else ""
    error = SandboxNotFound(
        f"Sandbox {record.sandbox_id} ended ({reason}).{extra}",
        details={
            "state": record.state,
            "end_reason": record.end_reason,
            "cause": cause.message if cause else None,
        },
    )
    if record.fault in FAULTS:
        error.fault = record.fault
    return error

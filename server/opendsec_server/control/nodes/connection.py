# SPDX-License-Identifier: AGPL-3.0-only
"""Connections to one node's HTTP server, kept and used again.

Written on asyncio protocols with httptools' parser: thousands of small calls a second go through
it, and an HTTP library costs several times what the call itself does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import itertools
import secrets
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, cast

import httptools

from opendsec_server.contract import node_wire as wire
from opendsec_server.contract.errors import NodeUnavailable, PlatformError
from opendsec_server.contract.node_proof import (
    LINE_PROOF_CHARS,
    NONCE_CHARS,
    STREAMED,
    Prover,
    digest_of,
)

from .member import NodeNotReached

CONNECT_TIMEOUT_S = 3.0
IDLE_KEPT_S = 30.0
"""Less than the node's server keeps an idle connection."""
IDLE_KEPT_MAX = 64
BUFFERED_MAX = 1_048_576
"""Bytes of a stream that wait for their reader; above it the node is made to wait."""
WATCH_INTERVAL_S = 1.0
LINE_BYTES_MAX = 256 * 1_024 * 1_024


class Address:
    """Where a node is served: ``http://host:port``, ``https://host:port`` or ``unix:/path``.

    Args:
        url: As above.
        tls: For https.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        self.path: str | None = None
        self.tls: ssl.SSLContext | None = None
        if url.startswith("unix:"):
            self.path = url.removeprefix("unix:")
            self.host, self.port = "localhost", 0
            return
        scheme, _, rest = url.partition("://")
        host, _, port = rest.rstrip("/").rpartition(":")
        if scheme not in ("http", "https") or not host or not port.isdigit():
            raise ValueError(f"`{url}` is not http(s)://host:port or unix:/path")
        self.host, self.port = host.strip("[]"), int(port)
        if scheme == "https":
            self.tls = tls or ssl.create_default_context()

    @property
    def in_clear(self) -> bool:
        """What is said to it can be read and changed by others than this machine's root."""
        if self.path is not None or self.tls is not None or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            # Where a name leads is not known, and may change.
            return True


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.used = False
        """An exchange went well on it before."""
        self.heard_at = time.monotonic()
        self.idle_since = 0.0
        self.busy = False
        self.answered = False
        """Something of the present answer has come."""
        self.nonce = ""
        """Of the present request."""
        self._parser: Any = None
        self._status: asyncio.Future[int] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._complete = False
        self._keep = True
        self._trouble: str | None = None
        self._changed: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # --- transport ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection was lost" if exc is None else f"the connection failed: {exc}")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        if not self.busy:
            self.abort("the node spoke without being asked")
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self.abort(f"the node does not speak HTTP: {exc}")

    def abort(self, why: str) -> None:
        """End it at once."""
        self._fail(why)
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, why: str) -> None:
        self.closed = True
        self._writable.set()
        if self._complete:
            return
        self._trouble = self._trouble or why
        if self._status is not None and not self._status.done():
            self._status.set_exception(NodeUnavailable(self._trouble))
            # It may be that nobody waits for it any more.
            self._status.exception()
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    # --- parser -------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._keep = self._parser.should_keep_alive()
        if self._status is not None and not self._status.done():
            self._status.set_result(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._buffered += len(data)
        if self._buffered > BUFFERED_MAX and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        self._complete = True
        self._wake()

    # --- one exchange -------------------------------------------------------

    def begin(self, head: bytes, body: bytes) -> None:
        """Send a request whose body is known."""
        loop = asyncio.get_running_loop()
        self.busy = True
        self.answered = False
        self.heard_at = time.monotonic()
        self._parser = httptools.HttpResponseParser(self)
        self._status = loop.create_future()
        self._headers = {}
        self._pieces = []
        self._buffered = 0
        self._complete = False
        self._trouble = None
        if self.closed:
            self._fail("the connection was lost")
        elif self.transport is not None:
            self.transport.write(head + body)

    async def send(self, data: bytes) -> None:
        """One more piece of a request's body."""
        if self.transport is not None and not self.closed:
            self.heard_at = time.monotonic()
            self.transport.write(data)
            await self._writable.wait()

    async def head(self) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers of the answer."""
        assert self._status is not None
        return await self._status, self._headers

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            NodeUnavailable: it was broken off.
        """
        while True:
            if self._pieces:
                data = b"".join(self._pieces)
                self._pieces.clear()
                self._buffered = 0
                if self._paused and self.transport is not None and not self.closed:
                    self._paused = False
                    self.transport.resume_reading()
                yield data
                continue
            if self._complete:
                return
            if self._trouble is not None:
                raise NodeUnavailable(self._trouble)
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    def end(self) -> bool:
        """The exchange is over. True: the connection can be used again."""
        self.busy = False
        whole = self._complete and self._keep and not self.closed and not self._pieces
        if not whole:
            self.abort("the exchange was given up")
            return False
        self.used = True
        self.idle_since = time.monotonic()
        return True


class Connections:
    """The connections to one node.

    Args:
        address: Where it is served.
        secret: What proves us to it, and it to us.
    """

    def __init__(self, address: Address, secret: bytes) -> None:
        self.address = address
        self.node_id = ""
        """The node that requests are for. Empty: it is not known yet."""
        self._prover = Prover(secret)
        # Never the same twice; a system call for each would cost more than the proof.
        self._nonces = secrets.token_hex(NONCE_CHARS // 4)
        self._count = itertools.count()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        """Monotonic time at which the next look is due."""

    @contextlib.asynccontextmanager
    async def exchange(
        self,
        name: str,
        body: bytes | AsyncIterable[bytes],
        *,
        arguments: str = "",
        fresh: bool = False,
    ) -> AsyncIterator[Connection]:
        """Send a request; the connection whose answer has begun.

        Args:
            name: Of the call.
            body: Whole, or piece by piece.
            arguments: Those that do not go in the body.
            fresh: Use no kept connection, of which the node may just have let go. Then a failure
                before an answer is no reason to try again.

        Raises:
            NodeNotReached: no connection; the node has seen nothing of it.
            NodeUnavailable: the answer was broken off, or does not come from our node.
        """
        digest = digest_of(body) if isinstance(body, bytes) else STREAMED
        sent = False
        while True:
            try:
                connection = await self._take(fresh)
            except NodeNotReached as exc:
                if sent:
                    # It may have seen the first attempt.
                    raise NodeUnavailable(exc.message, details=exc.details) from exc
                raise
            try:
                # Each attempt is a request of its own: the node hears none twice.
                nonce = connection.nonce = f"{self._nonces}{next(self._count):016x}"
                head = self._head(name, nonce, digest, body, arguments)
                if isinstance(body, bytes):
                    connection.begin(head, body)
                else:
                    connection.begin(head, b"")
                    await self._send(connection, body, nonce)
                try:
                    status, answer_headers = await connection.head()
                except NodeUnavailable:
                    if connection.used and not connection.answered and isinstance(body, bytes):
                        # The node has closed it while it was idle.
                        sent = True
                        continue
                    raise
                self._check(status, answer_headers, nonce)
                yield connection
                return
            finally:
                self._busy.discard(connection)
                if connection.end() and len(self._idle) < IDLE_KEPT_MAX:
                    self._idle.append(connection)
                elif not connection.closed:
                    connection.abort("not needed any more")

    async def _send(self, connection: Connection, body: AsyncIterable[bytes], nonce: str) -> None:
        """A body piece by piece, then its proof."""
        content = hashlib.sha256()
        async for piece in body:
            await asyncio.to_thread(content.update, piece)
            await connection.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        trailer = self._prover.trailer(nonce, content.hexdigest())
        await connection.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(trailer), trailer))

    async def lines(self, connection: Connection) -> AsyncIterator[bytes]:
        """The lines of an answer, each proven; those that only show that the node lives are left
        out.

        Raises:
            NodeUnavailable: it was broken off, or changed on its way.
        """
        count, size = 0, 0
        parts: list[bytes] = []
        async for piece in connection.pieces():
            first, *others = piece.split(b"\n")
            parts.append(first)
            size += len(first)
            if size > LINE_BYTES_MAX:
                raise NodeUnavailable("the node's answer is too long")
            for other in others:
                line = b"".join(parts)
                parts, size = [other], len(other)
                if line:
                    yield self._proven(connection.nonce, count, line)
                    count += 1
        if any(parts):
            raise NodeUnavailable("the node's answer was broken off")

    def _proven(self, nonce: str, count: int, line: bytes) -> bytes:
        text = line[LINE_PROOF_CHARS:]
        wanted = self._prover.line(nonce, count, text)
        if not hmac.compare_digest(wanted, line[:LINE_PROOF_CHARS]):
            raise NodeUnavailable(
                "the node's answer is not the one that it proved",
                remediation="Something between gateway and node changes what they say; use https.",
            )
        return text

    def _head(
        self,
        name: str,
        nonce: str,
        digest: str,
        body: bytes | AsyncIterable[bytes],
        arguments: str,
    ) -> bytes:
        target = f"{wire.PREFIX}/{name}"
        proof = self._prover.request(
            nonce,
            int(time.time() * 1_000_000),
            "" if name == wire.INFO else self.node_id,
            "POST",
            target,
            digest,
            arguments,
        )
        length = (
            f"content-length: {len(body)}"
            if isinstance(body, bytes)
            else "transfer-encoding: chunked"
        )
        more = f"{wire.ARGUMENTS_HEADER}: {arguments}\r\n" if arguments else ""
        return (
            f"POST {target} HTTP/1.1\r\nhost: {self.address.host}\r\n"
            f"{wire.AUTH_HEADER}: {proof}\r\ncontent-type: application/json\r\n"
            f"{more}{length}\r\n\r\n"
        ).encode()

    def _check(self, status: int, headers: dict[bytes, bytes], nonce: str) -> None:
        refusal = wire.REFUSALS.get(status)
        if refusal is not None:
            # Anybody can say so: nothing follows from it but that this did not work.
            raise NodeUnavailable(
                f"the node refuses this gateway: {refusal.message}",
                remediation=refusal.remediation,
            )
        proof = headers.get(wire.PROOF_HEADER.encode(), b"")
        if not hmac.compare_digest(proof, self._prover.answer(nonce).encode()):
            raise NodeUnavailable(
                "what answers at the node's address does not hold the node's secret",
                remediation="Look at what listens there; the call was not trusted.",
            )

    async def _take(self, fresh: bool) -> Connection:
        connection = None if fresh else self._kept()
        if connection is None:
            connection = await self._connect()
        self._busy.add(connection)
        self._keep_watch()
        return connection

    def _kept(self) -> Connection | None:
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and now - connection.idle_since < IDLE_KEPT_S:
                return connection
            connection.abort("idle for too long")
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if address.path is not None:
                    _, connection = await loop.create_unix_connection(Connection, address.path)
                else:
                    _, connection = await loop.create_connection(
                        Connection, address.host, address.port, ssl=address.tls
                    )
        except TimeoutError as exc:
            raise self._not_reached("it does not answer") from exc
        except (OSError, ssl.SSLError) as exc:
            raise self._not_reached(str(exc)) from exc
        return connection

    def _not_reached(self, why: str) -> PlatformError:
        return NodeNotReached(
            f"node {self.address.url} cannot be reached: {why}",
            remediation="Retry after a moment; sandboxes on this node may go on running.",
            details={"node": self.address.url},
            retry_after_s=2,
        )

    def _keep_watch(self) -> None:
        if self._watch is None:
            self._look_at = time.monotonic() + WATCH_INTERVAL_S
            self._watch = asyncio.get_running_loop().call_later(WATCH_INTERVAL_S, self._look)

    def _look(self) -> None:
        """Give up answers of which nothing is heard: a node that lives shows it."""
        self._watch = None
        now = time.monotonic()
        silent = now - wire.SILENCE_S_MAX
        # A look that itself comes late says that this process was held up: what the nodes sent
        # meanwhile may not have been read yet.
        late = now - self._look_at > WATCH_INTERVAL_S
        for connection in () if late else list(self._busy):
            if connection.heard_at < silent:
                connection.abort(f"nothing was heard of the node for {wire.SILENCE_S_MAX:.0f} s")
        if self._busy:
            self._keep_watch()

    def close(self) -> None:
        """End all of them."""
        if self._watch is not None:
            self._watch.cancel()
        for connection in (*self._idle, *self._busy):
            connection.abort("the gateway stops")
        self._idle.clear()

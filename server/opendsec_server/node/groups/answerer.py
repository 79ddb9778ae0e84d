# SPDX-License-Identifier: AGPL-3.0-only
"""Answers one member's questions for names, on sockets in its own network namespace.

So who asks is known by the socket, and cannot be forged. The group's names come first; others go to
the host's resolvers if the member's policy lets it ask them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from . import messages
from .messages import Question
from .upstream import Upstream

_DATAGRAM_BYTES_MAX = 4_096
_DATAGRAMS_AT_ONCE = 16
"""Taken before others get their turn."""
_PENDING_MAX = 64
"""Questions of one member that wait for the host's resolvers."""
_CONNECTIONS_MAX = 16
_IDLE_S = 10.0
_PACE_S = 0.02
"""Between two answers on a connection: what a member sends at once must not keep the node busy."""

Names = Callable[[str], tuple[str, ...] | None]
"""Addresses of a name of the group; empty: nobody who runs; None: it is no name of the group."""


class Answerer:
    """One member's.

    Args:
        ends: Datagram socket and listening socket, bound. Owned from now on.
        names: The group's names.
        may_ask: Whether the member's policy lets it ask the host's resolvers.
        upstream: The host's resolvers.
    """

    def __init__(
        self,
        ends: tuple[socket.socket, socket.socket],
        names: Names,
        may_ask: Callable[[], bool],
        upstream: Upstream,
    ) -> None:
        self._datagrams, self._listener = ends
        self._names = names
        self._may_ask = may_ask
        self._upstream = upstream
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self._pending = 0
        self._loop.add_reader(self._datagrams.fileno(), self._readable)
        self._loop.add_reader(self._listener.fileno(), self._connectable)

    def close(self) -> None:
        """Answer no more."""
        for end in (self._datagrams, self._listener):
            self._loop.remove_reader(end.fileno())
            end.close()
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _own_answer(self, message: bytes, question: Question | None) -> bytes | None:
        """What we know ourselves; None: the host's resolvers must be asked."""
        if question is None:
            return messages.failure(message, None, messages.NOT_IMPLEMENTED)
        addresses = self._names(question.name)
        if addresses:
            mixed = random.sample(addresses, len(addresses))
            return messages.answer(message, question, mixed)
        if addresses is not None or (question.name and "." not in question.name):
            # A name without a dot is never one of the internet's.
            return messages.failure(message, question, messages.NO_SUCH_NAME)
        if not self._may_ask():
            return messages.failure(message, question, messages.REFUSED)
        return None

    # --- datagrams ----------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(_DATAGRAMS_AT_ONCE):
            try:
                message, peer = self._datagrams.recvfrom(_DATAGRAM_BYTES_MAX)
            except OSError:  # nothing more, or a refusal of what was sent earlier
                return
            if not messages.is_query(message):
                continue
            question = messages.parse(message)
            reply = self._own_answer(message, question)
            if reply is not None:
                self._send(reply, peer)
            elif question is not None and self._pending < _PENDING_MAX:
                self._pending += 1
                self._spawn(self._pass_on(message, question, peer))

    def _send(self, reply: bytes, peer: Any) -> None:
        with contextlib.suppress(OSError):
            self._datagrams.sendto(reply, peer)

    async def _pass_on(self, message: bytes, question: Question, peer: Any) -> None:
        try:
            reply = await self._upstream.ask(message, question)
            self._send(reply or messages.failure(message, question, messages.SERVER_FAILURE), peer)
        finally:
            self._pending -= 1

    # --- connections --------------------------------------------------------

    def _connectable(self) -> None:
        try:
            connection, _peer = self._listener.accept()
        except OSError:
            return
        if self._connections >= _CONNECTIONS_MAX:
            connection.close()
            return
        connection.setblocking(False)
        self._connections += 1
        self._spawn(self._converse(connection))

    async def _converse(self, connection: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
            try:
                with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                    while (reply := await self._next_reply(reader)) is not None:
                        writer.write(len(reply).to_bytes(2, "big") + reply)
                        async with asyncio.timeout(_IDLE_S):
                            await writer.drain()
                        await asyncio.sleep(_PACE_S)
            finally:
                # Answers that nobody reads would keep the descriptor for as long as the peer likes.
                if writer.transport.get_write_buffer_size():
                    writer.transport.abort()
                else:
                    writer.close()
        finally:
            self._connections -= 1

    async def _next_reply(self, reader: asyncio.StreamReader) -> bytes | None:
        async with asyncio.timeout(_IDLE_S):
            length = int.from_bytes(await reader.readexactly(2), "big")
            message = await reader.readexactly(length)
        if not messages.is_query(message):
            return None
        question = messages.parse(message)
        reply = self._own_answer(message, question)
        if reply is None:
            reply = await self._upstream.ask_by_connection(message)
        return reply or messages.failure(message, question, messages.SERVER_FAILURE)

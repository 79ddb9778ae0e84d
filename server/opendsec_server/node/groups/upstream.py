# SPDX-License-Identifier: AGPL-3.0-only
"""Questions that are not for a group's names: passed on to the host's resolvers, and back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from .messages import Question, answers

_RESOLVER_TIMEOUT_S = 1.5
"""Then the next one is asked too."""
_CONNECTION_TIMEOUT_S = 10.0
_AT_ONCE_MAX = 512
"""Of all groups of a node. A question beyond is dropped, and asked again by who wants to know."""
_PORT = 53


class _Waiting(asyncio.DatagramProtocol):
    """The first fitting reply from one resolver: the socket takes datagrams of no other."""

    def __init__(self, message: bytes, question: Question) -> None:
        self._message = message
        self._question = question
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        if not self.reply.done() and answers(data, self._message, self._question):
            self.reply.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(exc)


class Upstream:
    """The host's resolvers.

    Args:
        resolvers: Their addresses, now; best first.
    """

    def __init__(self, resolvers: Callable[[], tuple[str, ...]]) -> None:
        self._resolvers = resolvers
        self._room = asyncio.Semaphore(_AT_ONCE_MAX)

    async def ask(self, message: bytes, question: Question) -> bytes | None:
        """By datagram, under a number that the asker cannot know. None: no resolver answered."""
        if self._room.locked():
            return None
        async with self._room:
            numbered = os.urandom(2) + message[2:]
            for resolver in self._resolvers():
                reply = await self._ask_one(resolver, numbered, question)
                if reply is not None:
                    return message[:2] + reply[2:]
        return None

    @staticmethod
    async def _ask_one(resolver: str, message: bytes, question: Question) -> bytes | None:
        try:
            transport, waiting = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: _Waiting(message, question), remote_addr=(resolver, _PORT)
            )
        except OSError:
            return None
        try:
            transport.sendto(message)
            async with asyncio.timeout(_RESOLVER_TIMEOUT_S):
                return await waiting.reply
        except (OSError, TimeoutError):
            return None
        finally:
            transport.close()

    async def ask_by_connection(self, message: bytes) -> bytes | None:
        """By connection, for answers that are too long for a datagram."""
        if self._room.locked():
            return None
        async with self._room:
            for resolver in self._resolvers():
                try:
                    async with asyncio.timeout(_CONNECTION_TIMEOUT_S):
                        return await self._connect(resolver, message)
                except (OSError, TimeoutError, asyncio.IncompleteReadError):
                    continue
        return None

    @staticmethod
    async def _connect(resolver: str, message: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(resolver, _PORT)
        try:
            writer.write(len(message).to_bytes(2, "big") + message)
            length = int.from_bytes(await reader.readexactly(2), "big")
            return await reader.readexactly(length)
        finally:
            writer.close()

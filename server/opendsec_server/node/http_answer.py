# SPDX-License-Identifier: AGPL-3.0-only
"""Answers of the small HTTP servers that a node talks to: guest agents and VMMs."""

from __future__ import annotations

import asyncio


async def read_answer(reader: asyncio.StreamReader, bytes_max: int) -> tuple[int, bytes]:
    """Status and body of a small answer that states its length.

    Args:
        reader: The connection.
        bytes_max: No more of the body is read.

    Raises:
        OSError, asyncio.IncompleteReadError, ValueError, IndexError: there was none.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = min(int(value), bytes_max)
    return status, await reader.readexactly(length)

# SPDX-License-Identifier: AGPL-3.0-only
"""Answers of many lines: always with an end, alive in between, and never the work itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from opendsec_server.api import ndjson
from opendsec_server.contract.errors import QuotaExceeded


async def _read(
    lines: AsyncGenerator[object, None], closing: asyncio.Event | None = None, **kwargs: Any
) -> list[Any]:
    text = b""
    async for chunk in ndjson.chunks(lines, closing=closing or asyncio.Event(), **kwargs):
        text += chunk
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


async def test_lines_and_their_end() -> None:
    async def lines() -> AsyncGenerator[object, None]:
        for index in range(3_000):
            yield {"index": index}
        yield ndjson.done(made=3_000)

    found = await _read(lines())
    assert [line["index"] for line in found[:-1]] == list(range(3_000))
    assert found[-1] == {"done": {"made": 3_000}}


async def test_failures_are_the_last_line() -> None:
    async def typed() -> AsyncGenerator[object, None]:
        yield {"index": 0}
        raise QuotaExceeded("too many")

    async def defect() -> AsyncGenerator[object, None]:
        yield {"index": 0}
        raise ValueError("a secret")

    found = await _read(typed(), request_id="r1")
    assert found[-1]["failed"]["code"] == "quota_exceeded"
    assert found[-1]["failed"]["request_id"] == "r1"
    found = await _read(defect())
    assert found[-1]["failed"]["code"] == "internal" and "secret" not in str(found)


async def test_silence_is_filled_and_loses_nothing() -> None:
    async def lines() -> AsyncGenerator[object, None]:
        for index in range(3):
            await asyncio.sleep(0.05)
            yield {"index": index}
        yield ndjson.done()

    found = await _read(lines(), silence_s=0.01)
    assert {} in found
    assert [line for line in found if line] == [{"index": 0}, {"index": 1}, {"index": 2},
                                                {"done": {}}]  # fmt: skip


async def test_a_stopping_server_ends_the_answer() -> None:
    closing, closed = asyncio.Event(), asyncio.Event()

    async def lines() -> AsyncGenerator[object, None]:
        try:
            yield {"index": 0}
            await asyncio.Event().wait()
        finally:
            closed.set()

    asyncio.get_running_loop().call_later(0.02, closing.set)
    found = await _read(lines(), closing)
    assert found[0] == {"index": 0}
    assert found[-1]["failed"]["retryable"] is True
    assert closed.is_set()


async def test_a_reader_that_goes_away_closes_the_source() -> None:
    closed = asyncio.Event()

    async def lines() -> AsyncGenerator[object, None]:
        try:
            while True:
                yield {"a": "b" * 1_000}
        finally:
            closed.set()

    reader = ndjson.chunks(lines(), closing=asyncio.Event())
    await anext(reader)
    await reader.aclose()  # type: ignore[attr-defined]
    assert closed.is_set()


async def test_large_lines_wait_for_a_slow_reader() -> None:
    made = 0

    async def lines() -> AsyncGenerator[object, None]:
        nonlocal made
        for index in range(40):
            made += 1
            yield {"index": index, "text": "x" * 1_000_000}
        yield ndjson.done()

    answer = ndjson.chunks(lines(), closing=asyncio.Event())
    text = await anext(answer)
    for _ in range(50):
        await asyncio.sleep(0)
    assert made < 12, "the source ran ahead of a reader that takes nothing"
    async for chunk in answer:
        text += chunk
    found = [json.loads(line) for line in text.splitlines()]
    assert [line["index"] for line in found[:-1]] == list(range(40))

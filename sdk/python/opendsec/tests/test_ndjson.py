# SPDX-License-Identifier: Apache-2.0
"""Answers of many lines: whole, cut off, failed, malformed."""

from __future__ import annotations

import importlib
import json
from typing import Any

import msgspec
import pytest

from opendsec import BadResponse, ConnectionFailed, QuotaExceeded

from .fake_server import Answer, FakeServer
from .kits import Kit, collect, done


class _Line(msgspec.Struct):
    index: int


async def _open(kit: Kit, client: Any, server: FakeServer, text: bytes, cut: int = 7) -> Any:
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    server.on("POST", "/v1/many", Answer(raw=pieces))
    module = importlib.import_module(f"opendsec._{kit.name}._ndjson")
    return await done(module.open_lines(client._transport, "POST", "/v1/many", _Line, body={}))


def _text(*lines: Any) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


async def test_lines_however_the_network_cuts_them(
    kit: Kit, client: Any, server: FakeServer
) -> None:
    text = _text({"index": 0}, {}, {"index": 1}, {}, {"done": {"made": 2}})
    lines = await _open(kit, client, server, text)
    assert [line.index for line in await collect(lines)] == [0, 1]
    assert lines.done == {"made": 2}


async def test_a_failure_is_raised_after_the_lines(
    kit: Kit, client: Any, server: FakeServer
) -> None:
    failure = {"code": "quota_exceeded", "message": "full", "retryable": True, "fault": "capacity"}
    lines = await _open(kit, client, server, _text({"index": 0}, {"failed": failure}))
    with pytest.raises(QuotaExceeded):
        await collect(lines)
    assert lines.done is None


@pytest.mark.parametrize("text", [b"", _text({"index": 0}), _text({"index": 0}) + b'{"don'])
async def test_no_last_line_is_a_cut(
    kit: Kit, client: Any, server: FakeServer, text: bytes
) -> None:
    lines = await _open(kit, client, server, text)
    with pytest.raises(ConnectionFailed):
        await collect(lines)


@pytest.mark.parametrize("text", [b"no json\n", b'{"index": "a"}\n', b'{"done": 4}\n', b"\xff\n"])
async def test_what_is_no_line(kit: Kit, client: Any, server: FakeServer, text: bytes) -> None:
    lines = await _open(kit, client, server, text)
    with pytest.raises(BadResponse):
        await collect(lines)

# SPDX-License-Identifier: AGPL-3.0-only
"""The journal keeps what it was told, and refuses clearly."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from opendsec_server.config import ConfigError
from opendsec_server.contract.errors import NodeUnavailable
from opendsec_server.contract.states import EndReason, State
from opendsec_server.node import limits
from opendsec_server.node.journal import Journal, Record, Transition
from opendsec_server.node.tests.machine import small_spec


def opened(folder: Path) -> Journal:
    return Journal(folder / "node.db", folder / "node.lock")


def record(**changes: object) -> Record:
    spec = small_spec(env={"SECRET": "s3cr3t"})
    return Record(spec=spec, state=State.PENDING, end_at=spec.end_at, **changes)  # type: ignore[arg-type]


def move(source: State, target: State) -> Transition:
    return Transition(source=source, target=target, at=time.time(), cause="test")


async def test_survives_reopening(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    one = record()
    one.state, one.slot, one.pid = State.RUNNING, 7, 4_711
    await journal.save(one, move(State.PENDING, State.RUNNING))
    node_id = await journal.node_id()
    await journal.set_meta("fact", "1")
    await journal.close()

    journal = opened(tmp_path)
    assert await journal.node_id() == node_id
    assert await journal.get_meta("fact") == "1"
    assert await journal.live() == [one]
    assert await journal.find(one.spec.sandbox_id) == one
    assert [t.target for t in await journal.transitions(one.spec.sandbox_id)] == [State.RUNNING]
    assert (tmp_path / "node.db").stat().st_mode & 0o777 == 0o600
    await journal.close()


async def test_ended_rows_lose_their_secrets(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    one = record()
    await journal.save(one, None)
    one.state, one.reason, one.ended_at = State.ENDED, EndReason.KILLED, time.time()
    await journal.save(one, None)
    kept = await journal.find(one.spec.sandbox_id)
    assert kept is not None
    assert (kept.spec.env, kept.spec.access_token, kept.spec.control_token) == ({}, "", "")
    assert await journal.live() == []
    await journal.close()


async def test_transitions_are_bounded(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    one = record()
    for _ in range(130):
        await journal.save(one, move(State.RUNNING, State.PAUSING))
    assert len(await journal.transitions(one.spec.sandbox_id)) == 100
    await journal.close()


async def test_prune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENDED_KEPT_MAX", 3)
    journal = opened(tmp_path)
    now = time.time()
    rows = [record(ended_at=now - age) for age in (1, 2, 3, 4, 2 * limits.ENDED_KEPT_S)]
    living = record()
    await asyncio.gather(*(journal.save(row, move(State.RUNNING, State.ENDED)) for row in rows))
    await journal.save(living, None)
    await journal.prune(now)
    kept = [await journal.find(row.spec.sandbox_id) is not None for row in rows]
    assert kept == [True, True, True, False, False]
    assert await journal.transitions(rows[4].spec.sandbox_id) == []
    assert await journal.find(living.spec.sandbox_id) is not None
    await journal.close()


async def test_second_daemon(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    with pytest.raises(ConfigError, match="another opendsecd"):
        opened(tmp_path)
    await journal.close()


async def test_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "node.db"
    for content in (b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5_000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="damaged"):
            opened(tmp_path)
        assert path.read_bytes() == content


async def test_damaged_page(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for _ in range(200):
        await journal.save(record(), None)
    await journal.close()
    path = tmp_path / "node.db"
    data = bytearray(path.read_bytes())
    data[4_096 * 8 : 4_096 * 12] = b"\xa5" * (4_096 * 4)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="damaged"):
        opened(tmp_path)
    assert path.read_bytes() == bytes(data)


async def test_locked_by_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await opened(tmp_path).close()
    monkeypatch.setattr("opendsec_server.node.journal._BUSY_TIMEOUT_S", 0.1)
    other = sqlite3.connect(tmp_path / "node.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ConfigError, match="locked by another program"):
        opened(tmp_path)
    other.close()
    await opened(tmp_path).close()


async def test_read_only(tmp_path: Path) -> None:
    await opened(tmp_path).close()
    uri = f"file:{tmp_path / 'node.db'}?mode=ro"
    original = sqlite3.connect

    def read_only(_path: object, **options: object) -> sqlite3.Connection:
        return original(uri, uri=True, **options)  # type: ignore[call-overload, no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", read_only)
        with pytest.raises(ConfigError, match="cannot be written"):
            opened(tmp_path)
    await opened(tmp_path).close()


async def test_newer_version(tmp_path: Path) -> None:
    await opened(tmp_path).close()
    db = sqlite3.connect(tmp_path / "node.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="newer"):
        opened(tmp_path)


async def test_locked_while_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec_server.node.journal._BUSY_TIMEOUT_S", 0.05)
    journal = opened(tmp_path)
    other = sqlite3.connect(tmp_path / "node.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(NodeUnavailable, match="locked"):
        await journal.save(record(), None)
    other.execute("ROLLBACK")
    other.close()
    await journal.save(record(), None)
    await journal.close()

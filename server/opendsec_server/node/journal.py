# SPDX-License-Identifier: AGPL-3.0-only
"""The node's journal: SQLite, written before each kernel object is made.

One thread owns the connection. Whatever waits in its queue is committed together, so a burst of
creates costs few commits. WAL with ``synchronous=NORMAL``: a power cut may take the last
commits, but then it has taken the sandboxes as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from opendsec_server.config import ConfigError
from opendsec_server.contract.errors import NodeUnavailable
from opendsec_server.contract.ids import new_node_id
from opendsec_server.contract.node import Accelerator, SandboxSpec, Snapshot, StateMode
from opendsec_server.contract.states import TRANSITIONS_KEPT_MAX, EndReason, State

from . import limits

T = TypeVar("T")

SCHEMA_VERSION = 3
_BUSY_TIMEOUT_S = 5.0
_BATCH_MAX = 256

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE sandbox (
  sandbox_id TEXT PRIMARY KEY,
  spec       BLOB NOT NULL,
  state      TEXT NOT NULL,
  slot       INTEGER,
  pid        INTEGER,
  pid_ticks  INTEGER,
  boot_id    TEXT,
  started_at REAL,
  end_at     REAL NOT NULL,
  ended_at   REAL,
  reason     TEXT,
  message    TEXT,
  pause_mode TEXT,
  accelerator TEXT NOT NULL DEFAULT 'none',
  vmm        TEXT,
  disk_base_bytes INTEGER NOT NULL DEFAULT 0,
  seq        INTEGER NOT NULL DEFAULT 0,
  ram_base   TEXT,
  meter      BLOB
) STRICT;
CREATE INDEX sandbox_ended ON sandbox (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE transition (
  sandbox_id TEXT NOT NULL REFERENCES sandbox ON DELETE CASCADE,
  source     TEXT NOT NULL,
  target     TEXT NOT NULL,
  at         REAL NOT NULL,
  reason     TEXT,
  message    TEXT,
  cause      TEXT NOT NULL
) STRICT;
CREATE INDEX transition_sandbox ON transition (sandbox_id);
"""

_SNAPSHOT_SCHEMA = """
CREATE TABLE snapshot (
  snapshot_id   TEXT PRIMARY KEY,
  info          BLOB NOT NULL,
  state         TEXT NOT NULL,
  ephemeral     INTEGER NOT NULL,
  control_token TEXT NOT NULL
) STRICT;
"""

_TO_2 = (
    """
ALTER TABLE sandbox ADD COLUMN pause_mode TEXT;
ALTER TABLE sandbox ADD COLUMN accelerator TEXT NOT NULL DEFAULT 'none';
ALTER TABLE sandbox ADD COLUMN vmm TEXT;
ALTER TABLE sandbox ADD COLUMN disk_base_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandbox ADD COLUMN seq INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandbox ADD COLUMN ram_base TEXT;
"""
    + _SNAPSHOT_SCHEMA
)

_TO_3 = "ALTER TABLE sandbox ADD COLUMN meter BLOB;"

_COLUMNS = (
    "sandbox_id", "spec", "state", "slot", "pid", "pid_ticks", "boot_id", "started_at", "end_at",
    "ended_at", "reason", "message", "pause_mode", "accelerator", "vmm", "disk_base_bytes", "seq",
    "ram_base", "meter",
)  # fmt: skip

_UPSERT = (
    f"INSERT INTO sandbox VALUES ({', '.join('?' * len(_COLUMNS))}) "  # noqa: S608 (constants)
    "ON CONFLICT (sandbox_id) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in _COLUMNS[1:])
)


class Meter(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What a sandbox has used, and where the kernel's counters stood when that was read."""

    cpu_us: int = 0
    memory_mb_seconds: float = 0.0
    disk_bytes: int = 0
    egress_bytes: int = 0
    ingress_bytes: int = 0
    at: float = 0.0
    run: str = ""
    """Which run of it the rest belongs to: the counters begin at zero with each."""
    run_cpu_us: int = 0
    run_egress: int = 0
    run_ingress: int = 0
    memory_bytes: int | None = None


class Record(msgspec.Struct, kw_only=True):
    """One sandbox as the journal knows it. ``pid`` etc. are set once it was started."""

    spec: SandboxSpec
    state: State
    slot: int | None = None
    pid: int | None = None
    pid_ticks: int | None = None
    boot_id: str | None = None
    started_at: float | None = None
    end_at: float
    ended_at: float | None = None
    reason: EndReason | None = None
    message: str | None = None
    pause_mode: StateMode | None = None
    """While pausing, paused or resuming: what is kept."""
    accelerator: Accelerator = "none"
    vmm: str | None = None
    disk_base_bytes: int = 0
    """Bytes that its disk shares with the snapshot it was started from."""
    seq: int = 0
    """How many changes of state it has made."""
    ram_base: str | None = None
    """Directory of saved memory that a virtual machine was started from and still maps."""
    meter: Meter | None = None
    """None: nothing of it has run yet."""


class SnapshotRow(msgspec.Struct, kw_only=True, frozen=True):
    """One snapshot as the journal knows it."""

    info: Snapshot
    state: Literal["making", "ready"]
    ephemeral: bool
    """Gone at the node's next start."""
    control_token: str
    """Opens the guest agent that the saved memory holds; empty without memory."""


class Transition(msgspec.Struct, kw_only=True, frozen=True):
    """One change of state, with what caused it (``create``, ``kill``, ``deadline``…)."""

    source: State
    target: State
    at: float
    reason: EndReason | None = None
    message: str | None = None
    cause: str


def _without_secrets(spec: SandboxSpec) -> SandboxSpec:
    return msgspec.structs.replace(
        spec, env={}, access_token="", traffic_token="", control_token=""
    )


class Journal:
    """The journal of one node.

    Args:
        path: The SQLite file; made with mode 0600.
        lock_path: Locked as long as the journal is open, so that two daemons cannot share it.

    Raises:
        ConfigError: in use by another daemon, corrupt, read-only or of a newer version.
            Nothing is overwritten.

    What it answers with raises ``NodeUnavailable`` while the file is locked or the disk is full.
    """

    def __init__(self, path: Path, lock_path: Path) -> None:
        self._path = path
        self._lock = _lock(lock_path)
        try:
            self._db = _open(path)
        except BaseException:
            os.close(self._lock)
            raise
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="opendsec-journal", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Write what waits, and let go of the file and the lock."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._db.close()
        os.close(self._lock)

    # --- the thread ---------------------------------------------------------

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            batch = [item]
            stop = False
            while len(batch) < _BATCH_MAX:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    stop = True
                    break
                batch.append(more)
            self._commit(batch)
            if stop:
                return

    def _commit(self, batch: list[tuple[Callable[[], Any], _Answer]]) -> None:
        results: list[tuple[_Answer, Any]] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            results = [(answer, work()) for work, answer in batch]
            self._db.execute("COMMIT")
        except BaseException as exc:
            with contextlib.suppress(sqlite3.Error):  # this thread must live on
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            error = self._unavailable(exc) if isinstance(exc, sqlite3.Error) else exc
            for _work, answer in batch:
                answer.fail(error)
            return
        for answer, result in results:
            answer.give(result)

    def _unavailable(self, exc: sqlite3.Error) -> NodeUnavailable:
        error = NodeUnavailable(
            f"the node's journal {self._path} cannot be used now: {exc}", retry_after_s=1
        )
        error.__cause__ = exc
        return error

    def _do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        answer = _Answer()
        self._queue.put((work, answer))
        return answer.future

    # --- what is written and read -------------------------------------------

    def node_id(self) -> asyncio.Future[str]:
        """The node's short id; made at the first start."""

        def work() -> str:
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('node_id', ?)", (new_node_id(),))
            row = self._db.execute("SELECT value FROM meta WHERE key = 'node_id'").fetchone()
            return str(row[0])

        return self._do(work)

    def set_meta(self, key: str, value: str | None) -> asyncio.Future[None]:
        """Remember a fact about the node; None forgets it."""

        def work() -> None:
            if value is None:
                self._db.execute("DELETE FROM meta WHERE key = ?", (key,))
            else:
                self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

        return self._do(work)

    def get_meta(self, key: str) -> asyncio.Future[str | None]:
        """A remembered fact."""

        def work() -> str | None:
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return None if row is None else str(row[0])

        return self._do(work)

    def save(self, record: Record, transition: Transition | None) -> asyncio.Future[None]:
        """Write a sandbox's row and its newest transition, together."""
        spec = record.spec if record.ended_at is None else _without_secrets(record.spec)
        values = (
            spec.sandbox_id, msgspec.json.encode(spec), record.state, record.slot, record.pid,
            record.pid_ticks, record.boot_id, record.started_at, record.end_at, record.ended_at,
            record.reason, record.message, record.pause_mode, record.accelerator, record.vmm,
            record.disk_base_bytes, record.seq, record.ram_base, _packed(record.meter),
        )  # fmt: skip

        def work() -> None:
            self._db.execute(_UPSERT, values)
            if transition is not None:
                self._add_transition(spec.sandbox_id, transition)

        return self._do(work)

    def _add_transition(self, sandbox_id: str, t: Transition) -> None:
        self._db.execute(
            "INSERT INTO transition VALUES (?, ?, ?, ?, ?, ?, ?)",
            (sandbox_id, t.source, t.target, t.at, t.reason, t.message, t.cause),
        )
        self._db.execute(
            "DELETE FROM transition WHERE sandbox_id = ?1 AND rowid NOT IN (SELECT rowid FROM "
            "transition WHERE sandbox_id = ?1 ORDER BY rowid DESC LIMIT ?2)",
            (sandbox_id, TRANSITIONS_KEPT_MAX),
        )

    def save_meters(self, meters: Mapping[str, Meter]) -> asyncio.Future[None]:
        """Write the meters of sandboxes that have not ended, together."""
        rows = [(_packed(meter), sandbox_id) for sandbox_id, meter in meters.items()]

        def work() -> None:
            self._db.executemany(
                "UPDATE sandbox SET meter = ? WHERE sandbox_id = ? AND ended_at IS NULL", rows
            )

        return self._do(work)

    def ended_meters(self, sandbox_ids: Sequence[str]) -> asyncio.Future[dict[str, Meter]]:
        """The meters of ended sandboxes, of those that have one."""

        def work() -> dict[str, Meter]:
            found: dict[str, Meter] = {}
            for sandbox_id in sandbox_ids:
                row = self._db.execute(
                    "SELECT meter FROM sandbox WHERE sandbox_id = ? AND ended_at IS NOT NULL",
                    (sandbox_id,),
                ).fetchone()
                if row is not None and row[0] is not None:
                    found[sandbox_id] = _meter(row[0])
            return found

        return self._do(work)

    def transitions(self, sandbox_id: str) -> asyncio.Future[list[Transition]]:
        """Kept transitions of a sandbox, oldest first."""

        def work() -> list[Transition]:
            rows = self._db.execute(
                "SELECT source, target, at, reason, message, cause FROM transition "
                "WHERE sandbox_id = ? ORDER BY rowid",
                (sandbox_id,),
            ).fetchall()
            names = ("source", "target", "at", "reason", "message", "cause")
            return [msgspec.convert(dict(zip(names, row, strict=True)), Transition) for row in rows]

        return self._do(work)

    def find(self, sandbox_id: str) -> asyncio.Future[Record | None]:
        """One sandbox, live or ended."""

        def work() -> Record | None:
            row = self._db.execute(
                "SELECT * FROM sandbox WHERE sandbox_id = ?", (sandbox_id,)
            ).fetchone()
            return None if row is None else _record(row)

        return self._do(work)

    def live(self) -> asyncio.Future[list[Record]]:
        """Every sandbox that the journal does not call ended."""

        def work() -> list[Record]:
            rows = self._db.execute("SELECT * FROM sandbox WHERE ended_at IS NULL").fetchall()
            return [_record(row) for row in rows]

        return self._do(work)

    def save_snapshot(self, row: SnapshotRow) -> asyncio.Future[None]:
        """Add or replace a snapshot's row."""
        values = (
            row.info.snapshot_id,
            msgspec.json.encode(row.info),
            row.state,
            int(row.ephemeral),
            row.control_token,
        )

        def work() -> None:
            self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?)", values)

        return self._do(work)

    def forget_snapshot(self, snapshot_id: str) -> asyncio.Future[None]:
        """Remove a snapshot's row."""

        def work() -> None:
            self._db.execute("DELETE FROM snapshot WHERE snapshot_id = ?", (snapshot_id,))

        return self._do(work)

    def snapshots(self) -> asyncio.Future[list[SnapshotRow]]:
        """Every snapshot, also those that are not complete."""

        def work() -> list[SnapshotRow]:
            rows = self._db.execute(
                "SELECT info, state, ephemeral, control_token FROM snapshot"
            ).fetchall()
            return [
                msgspec.convert(
                    {
                        "info": msgspec.json.decode(info),
                        "state": state,
                        "ephemeral": bool(ephemeral),
                        "control_token": token,
                    },
                    SnapshotRow,
                )
                for info, state, ephemeral, token in rows
            ]

        return self._do(work)

    def prune(self, now: float) -> asyncio.Future[None]:
        """Forget old ended sandboxes."""

        def work() -> None:
            self._db.execute("DELETE FROM sandbox WHERE ended_at < ?", (now - limits.ENDED_KEPT_S,))
            self._db.execute(
                "DELETE FROM sandbox WHERE sandbox_id IN (SELECT sandbox_id FROM sandbox WHERE "
                "ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT -1 OFFSET ?)",
                (limits.ENDED_KEPT_MAX,),
            )

        return self._do(work)


class _Answer:
    """Carries a result from the thread to the loop that asked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def give(self, result: Any) -> None:
        self._loop.call_soon_threadsafe(self._settle, result, None)

    def fail(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._settle, None, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


def _record(row: tuple[Any, ...]) -> Record:
    values = dict(zip(_COLUMNS, row, strict=True))
    del values["sandbox_id"]
    values["spec"] = msgspec.json.decode(values["spec"])
    if values["meter"] is not None:
        values["meter"] = msgspec.json.decode(values["meter"])
    return msgspec.convert(values, Record)


def _packed(meter: Meter | None) -> bytes | None:
    return None if meter is None else msgspec.json.encode(meter)


_meter = msgspec.json.Decoder(Meter).decode


def _lock(path: Path) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(f"cannot open {path}: {exc.strerror}") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(fd)
        raise ConfigError(
            f"another opendsecd already uses {path.parent}. Stop it, or give this one its own "
            "state_dir, run_dir, instance and network_cidr."
        ) from exc
    return fd


def _open(path: Path) -> sqlite3.Connection:
    """Open and check; every failure names the file and says what to do."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(
            path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
    except (OSError, sqlite3.Error) as exc:
        raise ConfigError(f"cannot open the journal {path}: {exc}") from exc
    try:
        _check(db, path)
    except sqlite3.Error as exc:
        db.close()
        raise ConfigError(_explain(path, exc)) from exc
    except BaseException:
        db.close()
        raise
    return db


def _check(db: sqlite3.Connection, path: Path) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"the journal {path} was written by a newer opendsecd (schema {version}); "
            "install that version again"
        )
    verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA foreign_keys = ON")
    if version < SCHEMA_VERSION:
        script = _SCHEMA + _SNAPSHOT_SCHEMA
        if version > 0:
            script = (_TO_2 if version < 2 else "") + _TO_3
        db.executescript(f"BEGIN; {script} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT OR REPLACE INTO meta VALUES ('opened', datetime('now'))")
    db.execute("COMMIT")


def _explain(path: Path, exc: sqlite3.Error) -> str:
    text = str(exc)
    if "locked" in text or "busy" in text:
        return f"the journal {path} is locked by another program; end it (see `fuser {path}`)"
    if "readonly" in text or "read-only" in text:
        return f"the journal {path} cannot be written: {text}. Check the disk and its mount."
    return (
        f"the journal {path} is damaged ({text}). Nothing was changed. Restore it, or move it "
        "away to start empty: sandboxes of the old journal are then removed."
    )

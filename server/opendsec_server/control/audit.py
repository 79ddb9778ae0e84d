# SPDX-License-Identifier: AGPL-3.0-only
"""The audit log: who did what to what, and how it went.

An answer leaves when its entry is in the store. Entries of many calls are written together, so
that a burst costs few transactions. While the store is down they wait in memory, and answers do
not wait for them: what was refused because of it is written when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections import deque
from pathlib import Path

import msgspec
import structlog

from opendsec_server.contract.errors import Forbidden, StoreUnavailable
from opendsec_server.store import audit
from opendsec_server.store.audit import FIRST_HASH, AuditEntry, AuditFilter, Call, Place
from opendsec_server.store.store import Store

from .iam import Caller, Iam
from .tokens import write_private

log = structlog.get_logger(__name__)

AUDIT_HEAD_FILE = "audit.head"
"""In the state directory: the last entry that this server wrote. A log that was cut shows."""
BATCH_MAX = 1_000
"""Entries in one transaction."""
WAITING_MAX = 100_000
"""Entries in memory while the store is down. Those above it are counted, and the count is
written."""
ANSWER_WAITS_S = 2.0
RETRY_S = 1.0
STRANGERS_PER_S = 20
"""Entries for calls that nobody can be named for; more in a second are counted together."""
CHUNK = 2_000
LOST_ACTION = "audit: calls not written one by one"


class Verdict(msgspec.Struct, kw_only=True, frozen=True):
    """What a check of the whole log found."""

    ok: bool
    entries: int
    """That were looked at."""
    head_seq: int
    head_hash: str
    fault: str | None
    """What is wrong first. None: nothing."""


class Audit:
    """Writes the log, lists it and checks it."""

    def __init__(self, store: Store, iam: Iam, secret: bytes, head_file: Path) -> None:
        self._store = store
        self._iam = iam
        self._secret = secret
        self._head_file = head_file
        self._waiting: deque[tuple[Call, asyncio.Future[None]]] = deque()
        self._lost = 0
        self._some = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._store_down = False
        self._strangers_second = 0
        self._strangers = 0

    def start(self) -> None:
        """Begin to write."""
        self._writer = asyncio.create_task(self._write(), name="audit")

    async def stop(self) -> None:
        """Write what waits, if the store answers, and end."""
        if self._writer is None:
            return
        if self._waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._waiting[-1][1]), ANSWER_WAITS_S)
        self._writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writer
        if self._waiting:
            log.error("entries of the audit log are lost", count=len(self._waiting))

    async def record(self, call: Call) -> None:
        """Add a call; returns when it is in the store, or after a moment while that is down."""
        if call.actor_kind == "none" and self._too_many_strangers(call.at):
            self._lost += 1
            self._some.set()
            return
        if len(self._waiting) >= WAITING_MAX:
            self._lost += 1
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, done))
        self._some.set()
        if self._store_down:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(done), ANSWER_WAITS_S)

    async def page(self, caller: Caller, wanted: AuditFilter) -> list[AuditEntry]:
        """Entries of the caller's project and those below it; the installation's sees all."""
        everything = await self._iam.operates(caller)
        return await audit.list_entries(
            self._store,
            msgspec.structs.replace(wanted, project_id=None if everything else caller.project_id),
        )

    async def verify(self, caller: Caller) -> Verdict:
        """Read the whole log and check that nothing in it was changed, removed or added.

        Raises:
            Forbidden: the caller is not the installation's project.
        """
        if not await self._iam.operates(caller):
            raise Forbidden(
                "the log is one for all projects, and is checked as a whole",
                remediation="Check it with a key of the installation's first project.",
            )
        return await verify(self._store, self._secret, self._head_file)

    def _too_many_strangers(self, at: float) -> bool:
        if int(at) != self._strangers_second:
            self._strangers_second, self._strangers = int(at), 0
        self._strangers += 1
        return self._strangers > STRANGERS_PER_S

    async def _write(self) -> None:
        known = await asyncio.to_thread(_read_head, self._head_file)
        told = False
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                batch = [self._waiting[i] for i in range(min(BATCH_MAX, len(self._waiting)))]
                calls = [call for call, _ in batch]
                lost = self._lost
                if lost:
                    calls.append(_lost_call(lost))
                try:
                    last, stands = await audit.append(self._store, calls, self._secret, known)
                except StoreUnavailable as exc:
                    if not self._store_down:
                        log.warning("the audit log waits for the store", error=exc.message)
                    self._store_down = True
                    await asyncio.sleep(RETRY_S)
                    continue
                self._store_down = False
                self._lost -= lost
                for _, done in batch:
                    self._waiting.popleft()
                    if not done.done():
                        done.set_result(None)
                if stands:
                    known = last
                    await self._note_head(last)
                elif not told:
                    # What was noted is kept: it is the proof.
                    told = True
                    log.error("entries of the audit log were taken away or changed", known=known)

    async def _note_head(self, last: Place) -> None:
        text = msgspec.json.encode(last)
        try:
            await asyncio.to_thread(write_private, self._head_file, text)
        except OSError as exc:
            log.warning("the audit log's head cannot be kept", error=exc.strerror)


async def verify(store: Store, secret: bytes, head_file: Path) -> Verdict:
    """See ``Audit.verify``. Also without a running server.

    Raises:
        StoreUnavailable: not known.
    """
    noted = await asyncio.to_thread(_read_head, head_file)
    seq, digest, count = 0, FIRST_HASH, 0
    fault: str | None = None
    # Other servers write meanwhile: what is there now is looked at.
    last, _ = await audit.head(store)
    while seq < last:
        entries = await audit.list_entries(
            store, AuditFilter(project_id=None, after=seq, limit=CHUNK)
        )
        if not entries:
            break
        fault = await asyncio.to_thread(
            audit.first_fault, entries, seq=seq, digest=digest, secret=secret
        )
        count += len(entries)
        if fault is None and noted is not None:
            fault = _against(noted, entries)
        if fault is not None:
            break
        seq, digest = entries[-1].seq, entries[-1].hash
    if fault is None and noted is not None and noted.seq > seq:
        fault = f"entries after {seq} are missing: {noted.seq} was written"
    return Verdict(ok=fault is None, entries=count, head_seq=seq, head_hash=digest, fault=fault)


def _against(noted: Place, entries: list[AuditEntry]) -> str | None:
    for entry in entries:
        if entry.seq == noted.seq and not hmac.compare_digest(entry.hash, noted.hash):
            return f"entry {entry.seq} is not the one that was written"
    return None


def _read_head(path: Path) -> Place | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Place)
    except (OSError, msgspec.DecodeError):
        return None


def _lost_call(count: int) -> Call:
    return Call(
        at=time.time(),
        request_id="",
        actor_kind="none",
        actor_id=None,
        credential_id=None,
        project_id=None,
        action=LOST_ACTION,
        object=str(count),
        outcome="counted",
        status=0,
        address=None,
    )

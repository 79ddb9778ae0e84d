# SPDX-License-Identifier: AGPL-3.0-only
"""The snapshots of a node: journal rows and files, in step."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from opendsec_server.contract.errors import SnapshotNotFound
from opendsec_server.contract.node import Snapshot

from .journal import Journal, SnapshotRow
from .process import finish_in_thread
from .storage.pool import DiskPool

log = structlog.get_logger("opendsec.node")


class Snapshots:
    """What can be started from. The row comes before the files, and goes after them.

    Args:
        journal: Holds the rows.
        pool: Holds the files.
    """

    memory_in_use: Callable[[], set[Path]]
    """Directories of saved memory that running machines map."""

    def __init__(self, journal: Journal, pool: DiskPool) -> None:
        self._journal = journal
        self._pool = pool
        self._rows: dict[str, SnapshotRow] = {}
        self._held: Counter[str] = Counter()
        self._released: dict[str, asyncio.Event] = {}

    async def load(self) -> None:
        """At the node's start: take over what is complete, remove what is not or has no owner."""
        for row in await self._journal.snapshots():
            if row.state == "ready" and not row.ephemeral:
                self._rows[row.info.snapshot_id] = row
            else:
                await self._delete(row.info.snapshot_id)
        await self.sweep()

    async def sweep(self) -> None:
        """Remove files that no row owns and no running machine maps."""
        for name in set(self._pool.snapshots()) - self._rows.keys():
            await self._destroy(name)

    async def _destroy(self, snapshot_id: str) -> None:
        """Its files; memory that running machines map stays until they have ended."""
        memory = self._pool.snapshot_memory(snapshot_id)
        keep = memory in self.memory_in_use()
        await finish_in_thread(self._pool.destroy_snapshot, snapshot_id, keep_memory=keep)

    def all(self) -> list[Snapshot]:
        """Every complete snapshot that is there to stay."""
        return [r.info for r in self._rows.values() if r.state == "ready" and not r.ephemeral]

    def images(self) -> set[str]:
        """Images that snapshots stand on, those being made too."""
        return {row.info.image for row in self._rows.values()}

    def get(self, snapshot_id: str) -> Snapshot:
        """One complete snapshot.

        Raises:
            SnapshotNotFound: there is none.
        """
        return self.row(snapshot_id).info

    def row(self, snapshot_id: str) -> SnapshotRow:
        """One complete snapshot, with what only the node may know of it.

        Raises:
            SnapshotNotFound: there is none.
        """
        row = self._rows.get(snapshot_id)
        if row is None or row.state != "ready":
            raise SnapshotNotFound(f"there is no snapshot {snapshot_id} on this node")
        return row

    @contextlib.contextmanager
    def held(self, snapshot_id: str | None) -> Iterator[None]:
        """While something is being started from it: its files stay, even if it is deleted."""
        if snapshot_id is None:
            yield
            return
        self._held[snapshot_id] += 1
        try:
            yield
        finally:
            self._held[snapshot_id] -= 1
            if not self._held[snapshot_id]:
                del self._held[snapshot_id]
                if (event := self._released.get(snapshot_id)) is not None:
                    event.set()

    async def begin(self, info: Snapshot, *, ephemeral: bool, control_token: str) -> None:
        """Note that its files are about to be made."""
        row = SnapshotRow(
            info=info, state="making", ephemeral=ephemeral, control_token=control_token
        )
        await self._journal.save_snapshot(row)
        self._rows[info.snapshot_id] = row

    async def complete(self, info: Snapshot) -> None:
        """Note that its files are whole."""
        old = self._rows[info.snapshot_id]
        row = SnapshotRow(
            info=info, state="ready", ephemeral=old.ephemeral, control_token=old.control_token
        )
        await self._journal.save_snapshot(row)
        self._rows[info.snapshot_id] = row

    async def remove(self, snapshot_id: str) -> bool:
        """Delete it, complete or not; False when there is none. Waits for starts from it."""
        if self._rows.pop(snapshot_id, None) is None:
            return False
        if snapshot_id in self._held:
            event = self._released.setdefault(snapshot_id, asyncio.Event())
            await event.wait()
            del self._released[snapshot_id]
        await self._delete(snapshot_id)
        return True

    async def _delete(self, snapshot_id: str) -> None:
        await self._destroy(snapshot_id)
        await self._journal.forget_snapshot(snapshot_id)

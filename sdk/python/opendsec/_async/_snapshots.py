# SPDX-License-Identifier: Apache-2.0
"""Snapshots: saved states that sandboxes can be created from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

import msgspec

from opendsec import _limits
from opendsec._errors import InvalidRequest, SnapshotNotFound
from opendsec._models import Snapshot

from ._transport import AsyncTransport


class _SnapshotPage(msgspec.Struct):
    snapshots: list[Snapshot] = []
    next_cursor: str | None = None


class _Nothing(msgspec.Struct):
    pass


class AsyncSnapshots:
    """The snapshots of the key's project. Take one with ``AsyncSandbox.snapshot()``."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(
        self,
        *,
        sandbox_id: str | None = None,
        name: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Snapshot]:
        """Snapshots that fit every given filter, newest first, page by page.

        Args:
            sandbox_id: Taken of this sandbox.
            name: With this name.
            limit: End after so many. None: all.
        """
        params: dict[str, str | int | list[str]] = {}
        if sandbox_id is not None:
            params["sandbox_id"] = sandbox_id
        if name is not None:
            params["name"] = name
        left = limit
        while left is None or left > 0:
            params["limit"] = (
                _limits.LIST_PAGE_MAX if left is None else min(left, _limits.LIST_PAGE_MAX)
            )
            page = await self._transport.api("GET", "/v1/snapshots", _SnapshotPage, params=params)
            for snapshot in page.snapshots:
                yield snapshot
            if page.next_cursor is None:
                return
            params["cursor"] = page.next_cursor
            if left is not None:
                left -= len(page.snapshots)

    async def get(self, snapshot_id: str) -> Snapshot:
        """One snapshot, by its id or name.

        Raises:
            SnapshotNotFound: there is none.
        """
        return await self._transport.api("GET", _path(snapshot_id), Snapshot)

    async def delete(self, snapshot_id: str) -> bool:
        """Remove a snapshot; False if there is none. Sandboxes created from it go on."""
        try:
            await self._transport.api("DELETE", _path(snapshot_id), _Nothing)
        except SnapshotNotFound:
            return False
        return True


def _path(snapshot_id: str) -> str:
    """Its path; the id is quoted, so that a bad one cannot name another path."""
    if not snapshot_id:
        raise InvalidRequest("The snapshot id is empty.")
    return f"/v1/snapshots/{quote(snapshot_id, safe='')}"

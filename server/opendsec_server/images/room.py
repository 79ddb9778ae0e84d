# SPDX-License-Identifier: AGPL-3.0-only
"""Room for images: the disk, the store's quota, and what goes first when it is short."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable

import structlog

from opendsec_server.config import Config
from opendsec_server.contract.errors import NodeFull
from opendsec_server.contract.images import PruneReport

from . import limits
from .base import BASE
from .convert import no_room
from .store import ImageStore

log = structlog.get_logger("opendsec.images")

_MIB = 1024 * 1024


class Room:
    """Decides what may be taken in, and what goes for it.

    Args:
        store: The images.
        config: ``image_store_mb``.
        in_use: Digests of the images that sandboxes and snapshots stand on. Called on the event
            loop.
    """

    def __init__(
        self, store: ImageStore, config: Config, in_use: Callable[[], Iterable[str]]
    ) -> None:
        self._store = store
        self._quota_bytes = config.image_store_mb * _MIB
        self._in_use = in_use
        self.keep: set[str] = set()
        """Digests that stay besides: templates stand on them."""

    def used(self) -> set[str]:
        """Digests of images that must stay."""
        used = set(self._in_use())
        base = self._store.names().get(BASE)
        return used if base is None else used | {base}

    async def make(self, wanted_bytes: int) -> None:
        """Have room for as many bytes more. Images that nothing uses may go, if they can be had
        again: those that were pulled.

        Raises:
            NodeFull: there is none.
        """
        await asyncio.to_thread(self._check_disk, wanted_bytes)
        if not self._quota_bytes:
            return
        have = await asyncio.to_thread(self._store.size_bytes)
        if have + wanted_bytes <= self._quota_bytes:
            return
        report = await self.prune(
            over_bytes=have + wanted_bytes - self._quota_bytes, pulled_only=True
        )
        log.info("images_pruned", images=len(report.images), freed_bytes=report.freed_bytes)
        if have - report.freed_bytes + wanted_bytes > self._quota_bytes:
            raise self._quota_reached()

    async def settle(self, digest: str) -> None:
        """After a pull: its layers take more than what was sent. Others go for it; if that is not
        enough, it goes itself.

        Raises:
            NodeFull: it went.
        """
        if not self._quota_bytes:
            return
        over = await asyncio.to_thread(self._store.size_bytes) - self._quota_bytes
        if over <= 0:
            return
        report = await self.prune(over_bytes=over, pulled_only=True, keep=[digest])
        if report.freed_bytes < over and digest not in self.used() | self.keep:
            await asyncio.to_thread(self._store.remove, [digest])
            raise self._quota_reached()

    def _quota_reached(self) -> NodeFull:
        return NodeFull(
            f"the image store is limited to {self._quota_bytes // _MIB} MiB and full of images "
            "that are in use",
            remediation="Remove images, end sandboxes of old ones, or raise image_store_mb.",
        )

    def _check_disk(self, wanted_bytes: int) -> None:
        self._store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(self._store.root).free < limits.DISK_FREE_FLOOR_BYTES + wanted_bytes:
            raise no_room()

    async def prune(
        self,
        *,
        unused_before: float | None = None,
        keep: Iterable[str] = (),
        over_bytes: int | None = None,
        pulled_only: bool = False,
    ) -> PruneReport:
        """Remove images that nothing uses, those first that were used longest ago.

        Args:
            unused_before: Only those not used since (Unix seconds).
            keep: Digests that stay.
            over_bytes: Stop when as much was freed.
            pulled_only: Leave what was made here.
        """
        infos = await asyncio.to_thread(self._infos, pulled_only)
        # Asked after the look at the disk: whatever came into use meanwhile stays.
        stay = self.used() | self.keep | set(keep)
        gone: list[str] = []
        layers, freed = await asyncio.to_thread(
            self._store.remove_orphans, limits.ORPHAN_LAYER_KEPT_S
        )
        for used_at, digest in infos:
            if digest in stay or digest in self.used():
                continue
            if unused_before is not None and used_at > unused_before:
                break
            if over_bytes is not None and freed >= over_bytes:
                break
            count, size = await asyncio.to_thread(self._store.remove, [digest])
            gone.append(digest)
            layers += count
            freed += size
        return PruneReport(images=tuple(gone), layers=layers, freed_bytes=freed)

    def _infos(self, pulled_only: bool) -> list[tuple[float, str]]:
        names = self._store.names()
        infos = (self._store.info(image, names) for image in self._store.all())
        return sorted(
            (info.last_used_at, info.digest)
            for info in infos
            if info.source is not None or not pulled_only
        )

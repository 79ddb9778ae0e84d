# SPDX-License-Identifier: AGPL-3.0-only
"""Readings of every sandbox, taken from outside and kept for a while in small rings."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from opendsec_server.contract.errors import NodeUnavailable
from opendsec_server.contract.limits import METRICS_INTERVAL_S, METRICS_KEPT_S
from opendsec_server.contract.node import MetricSample

from . import limits
from .cgroups import CgroupSet
from .sandbox import Sandbox
from .storage.pool import DiskPool
from .usage import Links, Meters

log = structlog.get_logger("opendsec.node")

_SAMPLE = struct.Struct("=dfIII")
"""Time (s), CPU (cores), memory, cache and disk (KiB): 24 bytes a sample."""

_KEPT_MAX = int(METRICS_KEPT_S / METRICS_INTERVAL_S)


@dataclass(slots=True)
class _Ring:
    """Samples of one sandbox, and what the next one needs."""

    usage_file: Path | None = None
    cpu_us: int = 0
    at: float = 0.0
    count: int = 0
    data: bytearray = field(default_factory=bytearray)

    def add(self, sample: bytes) -> None:
        """Grows up to the maximum, then overwrites the oldest."""
        place = (self.count % _KEPT_MAX) * _SAMPLE.size
        if place == len(self.data):
            self.data += sample
        else:
            self.data[place : place + _SAMPLE.size] = sample
        self.count += 1

    def samples(self) -> list[tuple[float, float, int, int, int]]:
        """Oldest first."""
        kept = len(self.data) // _SAMPLE.size
        first = self.count % _KEPT_MAX if kept == _KEPT_MAX else 0
        return [
            _SAMPLE.unpack_from(self.data, ((first + i) % kept) * _SAMPLE.size) for i in range(kept)
        ]


class Metrics:
    """The sampler.

    Args:
        cgroups: Where processor and memory are read.
        pool: Where disk use is read.
        meters: Brought up to date with each reading.
        boxes: The running sandboxes.
    """

    def __init__(
        self,
        cgroups: CgroupSet,
        pool: DiskPool,
        meters: Meters,
        boxes: Callable[[], Iterable[Sandbox]],
    ) -> None:
        self._cgroups = cgroups
        self._meters = meters
        self._pool = pool
        self._boxes = boxes
        self._rings: dict[str, _Ring] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sample from now on."""
        self._task = asyncio.create_task(self._run(), name="metrics")

    async def stop(self) -> None:
        """Sample no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        kept_at = time.monotonic()
        while True:
            await asyncio.sleep(METRICS_INTERVAL_S)
            boxes = list(self._boxes())
            await asyncio.to_thread(self._sample_all, boxes)
            if time.monotonic() - kept_at >= limits.USAGE_KEPT_EVERY_S:
                kept_at = time.monotonic()
                try:
                    await self._meters.keep(boxes)
                except NodeUnavailable as exc:
                    log.warning("meters not written down now", why=exc.message)

    def _sample_all(self, boxes: list[Sandbox]) -> None:
        for gone in self._rings.keys() - {box.sandbox_id for box in boxes}:
            del self._rings[gone]
        links = self._meters.links()
        for box in boxes:
            self._sample(box, links)

    def _sample(self, box: Sandbox, links: Links | None = None) -> None:
        sandbox_id = box.sandbox_id
        ring = self._rings.setdefault(sandbox_id, _Ring())
        usage = self._cgroups.usage(sandbox_id)
        if usage is None:
            return
        now = time.time()
        passed_us = (now - ring.at) * 1e6
        cores = (usage.cpu_us - ring.cpu_us) / passed_us if ring.at and passed_us > 0 else 0.0
        ring.cpu_us, ring.at = usage.cpu_us, now
        disk_bytes = self._disk_bytes(ring, sandbox_id)
        self._meters.read(box, usage=usage, disk_bytes=disk_bytes or None, links=links)
        ring.add(
            _SAMPLE.pack(
                now,
                max(0.0, cores),
                min(usage.memory_bytes >> 10, 0xFFFFFFFF),
                min(usage.cache_bytes >> 10, 0xFFFFFFFF),
                min(disk_bytes >> 10, 0xFFFFFFFF),
            )
        )

    def _disk_bytes(self, ring: _Ring, sandbox_id: str) -> int:
        try:
            if ring.usage_file is None:
                ring.usage_file = self._pool.usage_file(sandbox_id)
            return int(ring.usage_file.read_text())
        except (OSError, ValueError):
            return 0

    async def of(self, box: Sandbox, start: float, end: float) -> list[MetricSample]:
        """Kept samples of a running sandbox in a span of time; one is taken if there is none."""
        if box.sandbox_id not in self._rings:
            await asyncio.to_thread(self._sample, box)
        ring = self._rings.get(box.sandbox_id)
        spec = box.spec
        return [
            MetricSample(
                at=at,
                cpu_count=spec.cpu,
                cpu_used_pct=round(100.0 * cores / spec.cpu, 2),
                memory_used_bytes=memory_kib << 10,
                memory_total_bytes=spec.memory_mb << 20,
                memory_cache_bytes=cache_kib << 10,
                disk_used_bytes=disk_kib << 10,
                disk_total_bytes=spec.disk_mb << 20,
            )
            for at, cores, memory_kib, cache_kib, disk_kib in (ring.samples() if ring else [])
            if start <= at <= end
        ]

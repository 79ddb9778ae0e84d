# SPDX-License-Identifier: AGPL-3.0-only
"""What each sandbox has used: counted from outside, and kept over pauses and restarts.

The kernel's own counters are the truth while a sandbox runs: processor time in its control group
(a virtual machine's VMM is in one too), bytes on the host's end of its link. They begin at zero
with each run, so that what a run used is added to the sum of those before. A daemon that is away
misses nothing of them; memory is then taken to have grown or shrunk evenly.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from opendsec_server.contract.limits import METRICS_INTERVAL_S
from opendsec_server.contract.node import SandboxUsage

from . import limits
from .cgroups import CgroupSet
from .cgroups.base import Usage
from .journal import Journal, Meter
from .network.slots import SlotPool
from .sandbox import Sandbox, usage_of
from .storage.pool import DiskPool

_MIB = 1 << 20
_NET = Path("/sys/class/net")
_NET_DEV = Path("/proc/net/dev")

Links = dict[str, tuple[int, int]]
"""Bytes received and sent by each link of the host."""


def read_links(text: str) -> Links:
    """Counters of ``/proc/net/dev``."""
    found: Links = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        if len(fields) >= 9:
            found[name.strip()] = (int(fields[0]), int(fields[8]))
    return found


class Meters:
    """Reads counters into the meters of sandboxes.

    Args:
        cgroups: Where processor and memory are read.
        pool: Where disk use is read.
        slots: Names the host's end of a sandbox's link.
        journal: Where meters are kept.
    """

    def __init__(
        self, cgroups: CgroupSet, pool: DiskPool, slots: SlotPool, journal: Journal
    ) -> None:
        self._cgroups = cgroups
        self._pool = pool
        self._slots = slots
        self._journal = journal
        # The sampler reads in a thread, the end of a run on the loop.
        self._lock = threading.Lock()

    # --- reading ------------------------------------------------------------

    def links(self) -> Links:
        """Counters of all links, in one read."""
        try:
            return read_links(_NET_DEV.read_text())
        except (OSError, ValueError):
            return {}

    def read(
        self,
        box: Sandbox,
        *,
        usage: Usage | None = None,
        disk_bytes: int | None = None,
        links: Links | None = None,
    ) -> None:
        """Bring a sandbox's meter up to date. What cannot be read keeps its last value.

        Args:
            box: Whose.
            usage: A reading of its group that was just taken. None: take one.
            disk_bytes: What its disk holds now. None: look.
            links: Counters of all links. None: read its own.
        """
        run = _run_of(box)
        if run is None:
            return
        usage = usage or self._cgroups.usage(box.sandbox_id)
        traffic = self._traffic(box, links)
        if disk_bytes is None:
            with contextlib.suppress(OSError, ValueError):
                disk_bytes = self._pool.used_bytes(box.sandbox_id)
        with self._lock:
            meter = box.record.meter or Meter()
            box.record.meter = _advanced(meter, run, usage, traffic, disk_bytes, time.time())

    def _traffic(self, box: Sandbox, links: Links | None) -> tuple[int, int] | None:
        """Bytes that left the sandbox and that came to it: what the host's end received, sent."""
        if box.slot is None:
            return None
        name = self._slots.link_of(box.slot.number)
        if links is not None:
            return links.get(name)
        counters = _NET / name / "statistics"
        try:
            return (
                int((counters / "rx_bytes").read_text()),
                int((counters / "tx_bytes").read_text()),
            )
        except (OSError, ValueError):
            return None

    async def of(self, boxes: Sequence[Sandbox]) -> dict[str, SandboxUsage]:
        """Meters of sandboxes that have not ended, read now; of many at once the sampler's latest
        readings are good enough."""
        oldest = time.time()
        if len(boxes) > limits.USAGE_FRESH_MAX:
            oldest -= METRICS_INTERVAL_S + 1
        stale = [box for box in boxes if (m := box.record.meter) is None or m.at < oldest]
        if stale:
            await asyncio.to_thread(self._read_all, stale)
        found = ((box.sandbox_id, usage_of(box.record.meter)) for box in boxes)
        return {name: usage for name, usage in found if usage is not None}

    def _read_all(self, boxes: Sequence[Sandbox]) -> None:
        links = self.links()
        for box in boxes:
            self.read(box, links=links)

    def begin(self, box: Sandbox) -> None:
        """A run begins: memory counts from now on."""
        run = _run_of(box)
        if run is not None:
            with self._lock:
                box.record.meter = _in_run(box.record.meter or Meter(), run, time.time())

    # --- keeping ------------------------------------------------------------

    async def keep(self, boxes: Iterable[Sandbox]) -> None:
        """Write meters to the journal. Each also goes with every change of state."""
        await self._journal.save_meters(
            {box.sandbox_id: box.record.meter for box in boxes if box.record.meter is not None}
        )


def _run_of(box: Sandbox) -> str | None:
    identity = box.identity
    if identity is None:
        return None
    return f"{identity.boot_id}/{identity.pid}/{identity.start_ticks}"


def _in_run(meter: Meter, run: str, now: float) -> Meter:
    """The meter as it stands at the begin of this run, if it has not begun before."""
    if meter.run == run:
        return meter
    return msgspec.structs.replace(
        meter, run=run, run_cpu_us=0, run_egress=0, run_ingress=0, memory_bytes=None, at=now
    )


def _advanced(
    meter: Meter,
    run: str,
    usage: Usage | None,
    traffic: tuple[int, int] | None,
    disk_bytes: int | None,
    now: float,
) -> Meter:
    """The meter with what was counted since its last reading."""
    meter = _in_run(meter, run, now)
    values: dict[str, object] = {"at": now}
    if usage is not None:
        values["cpu_us"] = meter.cpu_us + max(0, usage.cpu_us - meter.run_cpu_us)
        values["run_cpu_us"] = max(meter.run_cpu_us, usage.cpu_us)
        before = usage.memory_bytes if meter.memory_bytes is None else meter.memory_bytes
        passed_s = max(0.0, now - meter.at)  # a clock that was set back counts as no time
        mean_mb = (before + usage.memory_bytes) / 2 / _MIB
        values["memory_mb_seconds"] = meter.memory_mb_seconds + mean_mb * passed_s
        values["memory_bytes"] = usage.memory_bytes
    if traffic is not None:
        egress, ingress = traffic
        values["egress_bytes"] = meter.egress_bytes + max(0, egress - meter.run_egress)
        values["ingress_bytes"] = meter.ingress_bytes + max(0, ingress - meter.run_ingress)
        values["run_egress"] = max(meter.run_egress, egress)
        values["run_ingress"] = max(meter.run_ingress, ingress)
    if disk_bytes is not None:
        values["disk_bytes"] = disk_bytes
    return msgspec.structs.replace(meter, **values)

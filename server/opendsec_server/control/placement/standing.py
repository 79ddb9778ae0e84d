# SPDX-License-Identifier: AGPL-3.0-only
"""What is known of one node: its last report, and what this process did since."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal

from .need import Need

Health = Literal["unknown", "up", "suspect", "down"]
"""``unknown``: not reached yet. ``suspect``: the last poll failed. ``down``: several did."""

SEEN_AFTER_S = 1.0
"""From a choice until the node counts the sandbox. A report that is older does not show it."""
REFUSAL_PAUSE_S_MIN = 1.0
REFUSAL_PAUSE_S_MAX = 60.0
STARTS_FOR_EACH_CPU = 4
"""Starts under way on a node that count as a full load of starting."""
_STARTS_WEIGHT = 0.5
_TASK_WEIGHT = 0.25
_IMAGE_WEIGHT = 0.25


class Standing:
    """One node, as placement sees it. Times are of one monotonic clock, in seconds."""

    __slots__ = (
        "_own",
        "_own_cpu",
        "_own_memory_mb",
        "_refusal_pause_s",
        "backends",
        "cpu_count",
        "cpu_used",
        "disk_free_mb",
        "draining",
        "health",
        "images",
        "labels",
        "memory_free_mb",
        "memory_total_mb",
        "node_id",
        "refused_until",
        "sandboxes",
        "sandboxes_max",
        "starting",
    )

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.health: Health = "unknown"
        self.draining = False
        self.labels: Mapping[str, str] = {}
        self.backends: frozenset[str] = frozenset()
        self.images: frozenset[str] = frozenset()
        """Digests of the images that it holds."""
        self.cpu_count = 1
        self.cpu_used = 0.0
        """Share of its processors that is busy, 0 to 1."""
        self.memory_total_mb = 0
        self.memory_free_mb = 0
        self.disk_free_mb = 0
        self.sandboxes = 0
        self.sandboxes_max = 0
        self.starting = 0
        """Creates that this process waits for."""
        self.refused_until = float("-inf")
        self._refusal_pause_s = REFUSAL_PAUSE_S_MIN
        self._own: deque[tuple[float, float, int]] = deque()
        self._own_cpu = 0.0
        self._own_memory_mb = 0

    # --- what happens -------------------------------------------------------

    def placed(self, need: Need, now: float) -> None:
        """This process has chosen the node."""
        self._own.append((now, need.cpu, need.memory_mb))
        self._own_cpu += need.cpu
        self._own_memory_mb += need.memory_mb

    def reported(self, asked_at: float) -> None:
        """A report has come that was asked for at this time: what was placed well before is in
        it."""
        while self._own and self._own[0][0] + SEEN_AFTER_S <= asked_at:
            _, cpu, memory_mb = self._own.popleft()
            self._own_cpu -= cpu
            self._own_memory_mb -= memory_mb
        if not self._own:
            self._own_cpu = 0.0

    def refused(self, now: float) -> None:
        """It had no room, whatever it reports: it is left alone for a while, longer each time."""
        self.refused_until = now + self._refusal_pause_s
        self._refusal_pause_s = min(self._refusal_pause_s * 2, REFUSAL_PAUSE_S_MAX)

    def accepted(self) -> None:
        """It made a sandbox."""
        self._refusal_pause_s = max(self._refusal_pause_s / 2, REFUSAL_PAUSE_S_MIN)

    # --- what follows -------------------------------------------------------

    @property
    def unseen(self) -> int:
        """Own placements that no report shows yet."""
        return len(self._own)

    def can(self, need: Need) -> bool:
        """Whether it could ever do it, as it is now: what no waiting changes."""
        return (
            self.health in ("up", "suspect")
            and not self.draining
            and need.backend in self.backends
            and (need.only is None or self.node_id in need.only)
            and (
                not need.labels
                or all(self.labels.get(name) == value for name, value in need.labels.items())
            )
        )

    def has_room(self, need: Need, now: float) -> bool:
        """Whether, by all that is known, it would take it now. The node itself decides."""
        return (
            self.health == "up"
            and now >= self.refused_until
            and self.sandboxes + len(self._own) < self.sandboxes_max
            and self.disk_free_mb > 0
            and need.memory_mb <= self.memory_total_mb
        )

    def load(self, need: Need, of_task: float = 0.0) -> float:
        """How loaded it would be with this one: lower is better.

        Args:
            need: What is to be placed.
            of_task: Share of the task's sandboxes that it has already, 0 to 1.
        """
        unseen = len(self._own)
        load = (self.sandboxes + unseen + 1) / max(self.sandboxes_max, 1)
        if self.memory_total_mb:
            used_mb = self.memory_total_mb - self.memory_free_mb + self._own_memory_mb
            load = max(load, (used_mb + need.memory_mb) / self.memory_total_mb)
        load = max(load, self.cpu_used)
        load += _STARTS_WEIGHT * self.starting / (STARTS_FOR_EACH_CPU * self.cpu_count)
        load += _TASK_WEIGHT * of_task
        if need.image is not None and need.image not in self.images:
            load += _IMAGE_WEIGHT
        return load

# SPDX-License-Identifier: AGPL-3.0-only
"""Whose turn it is. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Projects take turns, item by item; within a project its batches do.

    So a project that asks for 32,768 does not hold up one that asks for ten, and nobody gets more
    by asking in many batches.
    """

    def __init__(self) -> None:
        self._projects: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._projects.values()))

    def add(self, project_id: str, work: T) -> None:
        """Work that waits, behind what waits already."""
        self._projects.setdefault(project_id, OrderedDict()).setdefault(work)

    def remove(self, project_id: str, work: T) -> None:
        """Nothing of it waits any more."""
        waiting = self._projects.get(project_id)
        if waiting is not None:
            waiting.pop(work, None)
            if not waiting:
                del self._projects[project_id]

    def pick(self, count: int, ready: Callable[[T], int]) -> dict[T, int]:
        """Whose turns the next ``count`` are, and how many of them each has.

        Args:
            count: At most so many turns.
            ready: How many items of some work could begin now.
        """
        picked: dict[T, int] = {}
        left: dict[T, int] = {}
        turns = list(self._projects)
        while turns and count > 0:
            still = []
            for project_id in turns:
                if count == 0:
                    break
                work = self._next_of(project_id, left, ready)
                if work is None:
                    continue
                picked[work] = picked.get(work, 0) + 1
                left[work] -= 1
                count -= 1
                # Whoever had a turn is last in the next round, also if this one ends here.
                self._projects.move_to_end(project_id)
                self._projects[project_id].move_to_end(work)
                still.append(project_id)
            turns = still
        return picked

    def _next_of(self, project_id: str, left: dict[T, int], ready: Callable[[T], int]) -> T | None:
        for work in self._projects[project_id]:
            if work not in left:
                left[work] = ready(work)
            if left[work] > 0:
                return work
        return None

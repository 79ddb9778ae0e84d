# SPDX-License-Identifier: AGPL-3.0-only
"""Who gets how many workers, and whose call is next. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


def allocate(
    wanted: Mapping[str, Mapping[str, int]], capacity: int, served: Mapping[str, float]
) -> dict[str, int]:
    """Max-min fair: nobody gets more by taking from a project that has less.

    Args:
        wanted: Project → pool → how many workers it could use now.
        capacity: Workers there may be.
        served: What each project has had lately. Of what cannot be divided, those that had least
            get more.

    Returns:
        Pool → workers. Their sum is the least of ``capacity`` and all that is wanted.
    """
    left = {project: dict(pools) for project, pools in wanted.items()}
    given = dict.fromkeys((pool for pools in wanted.values() for pool in pools), 0)
    order = sorted(left, key=lambda project: (served.get(project, 0.0), project))
    while capacity > 0:
        before = capacity
        for project in order:
            pools = left[project]
            open_pools = [pool for pool, count in pools.items() if count > 0]
            if not open_pools or capacity <= 0:
                continue
            pool = min(open_pools, key=lambda name: (given[name], name))
            pools[pool] -= 1
            given[pool] += 1
            capacity -= 1
        if capacity == before:
            break
    return given


class Lanes(Generic[T]):
    """A queue of queues: each request has a lane, and lanes take turns. So one call does not wait
    for the end of a map over thousands."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[T]] = OrderedDict()
        self._held: dict[str, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        """What could be taken now."""
        return self._count

    @property
    def held(self) -> int:
        """What waits in lanes that are held."""
        return sum(map(len, self._held.values()))

    def add(self, lane: str, item: T) -> None:
        """At the end of a lane."""
        self._lanes.setdefault(lane, deque()).append(item)
        self._count += 1

    def hold(self, lane: str) -> None:
        """Let nothing of a lane be taken, until it is let go."""
        items = self._lanes.pop(lane, None)
        if items is not None:
            self._count -= len(items)
            self._held[lane] = items

    def let_go(self, lane: str) -> bool:
        """Let a lane have its turns again. False: it was not held."""
        items = self._held.pop(lane, None)
        if items is None:
            return False
        self._lanes[lane] = items
        self._count += len(items)
        return True

    def take(self) -> T | None:
        """The next one of the lane whose turn it is. None: nothing waits."""
        if not self._lanes:
            return None
        lane, items = next(iter(self._lanes.items()))
        item = items.popleft()
        self._count -= 1
        if items:
            self._lanes.move_to_end(lane)
        else:
            del self._lanes[lane]
        return item

    def first(self) -> T | None:
        """What ``take`` would give; it goes on waiting."""
        return next(iter(self._lanes.values()))[0] if self._lanes else None

    def drop(self, lane: str) -> list[T]:
        """Everything that waits in a lane; nothing of it waits any more."""
        self.let_go(lane)
        items = list(self._lanes.pop(lane, ()))
        self._count -= len(items)
        return items

    def drop_all(self) -> list[T]:
        """Everything that waits, held or not."""
        for lane in list(self._held):
            self.let_go(lane)
        items = [item for lane in self._lanes.values() for item in lane]
        self._lanes.clear()
        self._count = 0
        return items

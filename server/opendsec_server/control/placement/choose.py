# SPDX-License-Identifier: AGPL-3.0-only
"""Filter, draw a few, take the least loaded."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from random import Random

from .need import Need
from .standing import Standing

SAMPLED = 3
"""Nodes that are compared for each sandbox."""
TASKS_KEPT_MAX = 4_096
"""Tasks whose spread is remembered; the one that placed nothing for the longest time goes first."""


class Placement:
    """Chooses nodes for one process.

    Args:
        random: Where draws come from.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._nodes: dict[str, Standing] = {}
        self._order: list[Standing] = []
        self._tasks: OrderedDict[str, Counter[str]] = OrderedDict()

    def add(self, node: Standing) -> None:
        """A node is there from now on."""
        if node.node_id not in self._nodes:
            self._nodes[node.node_id] = node
            self._order.append(node)

    @property
    def nodes(self) -> Iterable[Standing]:
        """Those that are there."""
        return self._nodes.values()

    def choose(
        self, need: Need, *, now: float, avoid: Collection[str] = (), k: int = SAMPLED
    ) -> Standing | None:
        """The node for a sandbox, and note that it gets it. None: no node could ever do it.

        One of which nothing says that it has room is asked only when no other is left: reports are
        old when they come, and the node knows best.
        """
        chosen = self._least_loaded(self._draw(need, now, avoid, k), need)
        if chosen is None:
            able = [n for n in self._order if n.node_id not in avoid and n.can(need)]
            self._random.shuffle(able)
            # Of those without room the one that may have some first, then the least loaded.
            chosen = min(
                able,
                key=lambda n: (n.health != "up", now < n.refused_until, n.load(need)),
                default=None,
            )
        if chosen is None:
            return None
        chosen.placed(need, now)
        if need.task_id is not None:
            self._spread(need.task_id)[chosen.node_id] += 1
        return chosen

    def _draw(self, need: Need, now: float, avoid: Collection[str], k: int) -> list[Standing]:
        """Up to ``k`` different nodes with room, drawn evenly: a shuffle that ends early, so that
        its cost does not grow with the number of nodes while most have room."""
        if need.only is not None and len(need.only) <= k:
            few = [self._nodes[name] for name in sorted(need.only) if name in self._nodes]
            return [
                n for n in few if n.node_id not in avoid and n.can(need) and n.has_room(need, now)
            ]
        order, found = self._order, []
        for left in range(len(order) - 1, -1, -1):
            at = int(self._random.random() * (left + 1))
            order[left], order[at] = order[at], order[left]
            node = order[left]
            if node.node_id not in avoid and node.can(need) and node.has_room(need, now):
                found.append(node)
                if len(found) == k:
                    break
        return found

    def _least_loaded(self, nodes: list[Standing], need: Need) -> Standing | None:
        if len(nodes) < 2:
            return nodes[0] if nodes else None
        if need.task_id is None:
            return min(nodes, key=lambda n: n.load(need))
        spread = self._spread(need.task_id)
        total = max(spread.total(), 1)
        return min(nodes, key=lambda n: n.load(need, spread[n.node_id] / total))

    def _spread(self, task_id: str) -> Counter[str]:
        spread = self._tasks.get(task_id)
        if spread is None:
            spread = self._tasks[task_id] = Counter()
            if len(self._tasks) > TASKS_KEPT_MAX:
                self._tasks.popitem(last=False)
        else:
            self._tasks.move_to_end(task_id)
        return spread

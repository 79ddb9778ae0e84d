# SPDX-License-Identifier: AGPL-3.0-only
"""Properties of whose turn it is, and of how many starts a node is given."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec_server.control.batches.fairness import FairQueue
from opendsec_server.control.batches.slots import StartSlots

WAITING = st.dictionaries(
    st.sampled_from("abcde"),
    st.dictionaries(st.integers(0, 3), st.integers(0, 40), min_size=1, max_size=4),
    min_size=1,
)


def filled(waiting: dict[str, dict[int, int]]) -> tuple[FairQueue[str], dict[str, int]]:
    queue: FairQueue[str] = FairQueue()
    left: dict[str, int] = {}
    for project, works in waiting.items():
        for number, count in works.items():
            queue.add(project, f"{project}{number}")
            left[f"{project}{number}"] = count
    return queue, left


@given(WAITING, st.lists(st.integers(0, 20), max_size=30))
def test_turns_are_fair_and_none_is_wasted(
    waiting: dict[str, dict[int, int]], picks: list[int]
) -> None:
    queue, left = filled(waiting)
    total = sum(left.values())
    for count in picks:
        before = dict(left)
        picked = queue.pick(count, lambda work: left[work])
        assert sum(picked.values()) == min(count, sum(before.values()))
        turns: dict[str, int] = {}
        for work, turn in picked.items():
            assert 0 < turn <= before[work]
            left[work] -= turn
            turns[work[0]] = turns.get(work[0], 0) + turn
        more = {p for p in waiting if sum(n for w, n in left.items() if w[0] == p)}
        for project in more:
            # Who has work left got as much as anybody else, but for the last round.
            assert turns.get(project, 0) >= max(turns.values(), default=0) - 1
    assert sum(left.values()) == max(0, total - sum(picks))


def test_a_late_small_one_has_its_turn_at_once() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("large", "l1")
    queue.add("large", "l2")
    queue.add("small", "s")
    assert queue.pick(4, lambda _: 1_000) == {"l1": 1, "s": 2, "l2": 1}
    queue.remove("small", "s")
    queue.remove("small", "s")
    assert set(queue.pick(4, lambda _: 1_000)) == {"l1", "l2"}
    assert len(queue) == 2


async def test_a_node_is_given_no_more_than_its_cap() -> None:
    freed: list[int] = []
    slots = StartSlots({"a": 2, "b": 1}.__getitem__, lambda: freed.append(1))
    assert slots.take("a") and slots.take("a") and not slots.take("a")
    assert slots.take("b") and not slots.take("b")
    waiting = asyncio.create_task(slots.acquire("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.release("b")
    slots.release("a")
    await asyncio.wait_for(waiting, 1)
    assert slots.taken() == 2 and len(freed) == 2
    with pytest.raises(KeyError):
        slots.release("b")

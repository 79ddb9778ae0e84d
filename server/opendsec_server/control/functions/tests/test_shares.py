# SPDX-License-Identifier: AGPL-3.0-only
"""Fair shares and turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opendsec_server.control.functions.shares import Lanes, allocate

_wanted = st.dictionaries(
    st.sampled_from("abcd"),
    st.dictionaries(st.integers(0, 3).map(str), st.integers(0, 12), max_size=3),
    max_size=4,
).map(
    lambda wanted: {
        project: {f"{project}{pool}": count for pool, count in pools.items()}
        for project, pools in wanted.items()
    }
)


@given(_wanted, st.integers(0, 20), st.dictionaries(st.sampled_from("abcd"), st.floats(0, 9)))
def test_shares_are_max_min_fair(
    wanted: dict[str, dict[str, int]], capacity: int, served: dict[str, float]
) -> None:
    given_ = allocate(wanted, capacity, served)
    flat = {pool: count for pools in wanted.values() for pool, count in pools.items()}
    assert given_.keys() == flat.keys()
    assert sum(given_.values()) == min(capacity, sum(flat.values()))
    assert all(given_[pool] <= count for pool, count in flat.items())
    have = {project: sum(given_[pool] for pool in pools) for project, pools in wanted.items()}
    for project, pools in wanted.items():
        if have[project] < sum(pools.values()):
            # Who lacks something has as much as anybody, but for what cannot be divided.
            assert all(other <= have[project] + 1 for other in have.values())


def test_who_had_least_gets_what_cannot_be_divided() -> None:
    wanted = {"a": {"a0": 5}, "b": {"b0": 5}}
    assert allocate(wanted, 1, {"a": 2.0, "b": 1.0}) == {"a0": 0, "b0": 1}
    assert allocate(wanted, 1, {"a": 1.0, "b": 2.0}) == {"a0": 1, "b0": 0}


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers()), max_size=40))
def test_lanes_take_turns_and_keep_their_order(items: list[tuple[str, int]]) -> None:
    lanes: Lanes[tuple[str, int]] = Lanes()
    for lane, number in items:
        lanes.add(lane, (lane, number))
    assert len(lanes) == len(items)
    taken = []
    while (item := lanes.take()) is not None:
        taken.append(item)
    assert len(lanes) == 0
    for lane in "xyz":
        assert [i for i in taken if i[0] == lane] == [i for i in items if i[0] == lane]
    # As long as several lanes have something, none is served twice before another.
    counts = dict.fromkeys("xyz", 0)
    totals = {lane: sum(1 for i in items if i[0] == lane) for lane in "xyz"}
    for lane, _ in taken:
        counts[lane] += 1
        waiting = [c for other, c in counts.items() if c < totals[other]]
        assert all(counts[lane] <= c + 1 for c in waiting)


def test_a_dropped_lane_is_gone() -> None:
    lanes: Lanes[int] = Lanes()
    for number in range(3):
        lanes.add("a", number)
        lanes.add("b", -number)
    assert lanes.drop("a") == [0, 1, 2]
    assert lanes.drop("a") == []
    assert (len(lanes), lanes.first()) == (3, 0)
    assert lanes.drop_all() == [0, -1, -2]
    assert lanes.take() is None and lanes.first() is None


def test_a_held_lane_waits_until_it_is_let_go() -> None:
    lanes: Lanes[int] = Lanes()
    for number in (1, 2):
        lanes.add("a", number)
        lanes.add("b", -number)
    lanes.hold("a")
    lanes.hold("none")
    assert (len(lanes), lanes.held) == (2, 2)
    assert [lanes.take(), lanes.take(), lanes.take()] == [-1, -2, None]
    assert not lanes.let_go("b")
    assert lanes.let_go("a") and (len(lanes), lanes.held) == (2, 0)
    assert lanes.take() == 1
    lanes.hold("a")
    assert lanes.drop("a") == [2] and (len(lanes), lanes.held) == (0, 0)

# SPDX-License-Identifier: AGPL-3.0-only
"""Placement: what it must never do, whatever it is told; and how evenly it spreads."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec_server.control.placement import Need, Placement, Standing

LABELS = st.dictionaries(st.sampled_from(["zone", "gpu"]), st.sampled_from(["a", "b"]))


def node(name: str, **changes: object) -> Standing:
    """A healthy, empty node."""
    made = Standing(name)
    made.health = "up"
    made.backends = frozenset({"container"})
    made.cpu_count = 64
    made.memory_total_mb = made.memory_free_mb = 512 * 1_024
    made.disk_free_mb = 1 << 20
    made.sandboxes_max = 1_000
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def need(**changes: object) -> Need:
    """A small container."""
    values: dict[str, object] = {
        "backend": "container",
        "cpu": 1.0,
        "memory_mb": 256,
        "disk_mb": 1_024,
        **changes,
    }
    return Need(**values)  # type: ignore[arg-type]


def placement_of(nodes: list[Standing], seed: int = 0) -> Placement:
    """Placement over these."""
    made = Placement(Random(seed))
    for each in nodes:
        made.add(each)
    return made


@st.composite
def standings(draw: st.DrawFn) -> list[Standing]:
    """Nodes in any condition."""
    return [
        node(
            f"n{number:03}",
            health=draw(st.sampled_from(["unknown", "up", "up", "suspect", "down"])),
            draining=draw(st.booleans()),
            backends=draw(st.sampled_from([frozenset({"container"}), frozenset({"vm"})])),
            labels=draw(LABELS),
            sandboxes=draw(st.integers(0, 12)),
            sandboxes_max=draw(st.integers(0, 10)),
            memory_free_mb=draw(st.integers(0, 512 * 1_024)),
            cpu_used=draw(st.floats(0, 1)),
            refused_until=draw(st.sampled_from([-1.0, 50.0, 150.0])),
        )
        for number in range(draw(st.integers(0, 8)))
    ]


NEEDS = st.builds(
    need,
    labels=LABELS,
    only=st.none() | st.frozensets(st.sampled_from([f"n{n:03}" for n in range(8)]), max_size=4),
    task_id=st.none() | st.just("t"),
)


@given(
    nodes=standings(),
    wanted=NEEDS,
    avoid=st.frozensets(st.sampled_from([f"n{n:03}" for n in range(8)]), max_size=3),
    seed=st.integers(0, 5),
    k=st.integers(1, 5),
)
def test_only_nodes_that_can_are_chosen_and_one_is_while_there_is_one(
    nodes: list[Standing], wanted: Need, avoid: frozenset[str], seed: int, k: int
) -> None:
    able = {n.node_id for n in nodes if n.can(wanted)} - avoid
    roomy = {n.node_id for n in nodes if n.has_room(wanted, 100.0)} & able
    chosen = placement_of(nodes, seed).choose(wanted, now=100.0, avoid=avoid, k=k)
    if chosen is None:
        assert not able
        return
    assert chosen.node_id in able
    if roomy:
        assert chosen.node_id in roomy
    assert chosen.unseen == 1


@given(nodes=standings(), wanted=st.lists(NEEDS, max_size=30), seed=st.integers(0, 5))
def test_a_node_is_not_filled_beyond_its_places_by_one_process(
    nodes: list[Standing], wanted: list[Need], seed: int
) -> None:
    placement = placement_of(nodes, seed)
    before = {n.node_id: (n.sandboxes, n.sandboxes_max) for n in nodes}
    for each in wanted:
        roomy = [n for n in nodes if n.can(each) and n.has_room(each, 0.0)]
        chosen = placement.choose(each, now=0.0)
        if roomy:
            assert chosen is not None
            sandboxes, at_most = before[chosen.node_id]
            assert sandboxes + chosen.unseen <= at_most


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["place", "report", "refuse", "accept"]), st.floats(0, 30)),
        max_size=40,
    )
)
def test_own_placements_are_forgotten_by_reports_and_never_go_below_nothing(
    steps: list[tuple[str, float]],
) -> None:
    one, now = node("n000"), 0.0
    for kind, passed in steps:
        now += passed
        if kind == "place":
            one.placed(need(), now)
        elif kind == "report":
            one.reported(now)
        elif kind == "refuse":
            one.refused(now)
            assert not one.has_room(need(), now)
        else:
            one.accepted()
        assert one.unseen >= 0
        assert one.load(need()) > 0
    one.reported(now + 1_000)
    assert one.unseen == 0
    empty = node("n001")
    assert one.load(need()) == empty.load(need())


def test_what_a_process_placed_itself_counts_before_any_report_shows_it() -> None:
    nodes = [node(f"n{n:03}", sandboxes_max=100) for n in range(10)]
    placement = placement_of(nodes)
    got = Counter(placement.choose(need(), now=0.0).node_id for _ in range(500))  # type: ignore[union-attr]
    assert max(got.values()) <= 60  # 50 each would be even
    assert min(got.values()) >= 40


def test_a_node_that_lies_about_its_load_gets_little_more_than_its_share() -> None:
    """It claims to be empty, and refuses: after each refusal it is left alone for longer."""
    honest = [node(f"n{n:03}") for n in range(9)]
    liar = node("liar")
    placement, now, asked = placement_of([*honest, liar]), 0.0, 0
    for number in range(5_000):
        now += 0.001
        chosen = placement.choose(need(), now=now)
        assert chosen is not None
        if chosen is liar:
            asked += 1
            liar.refused(now)
            again = placement.choose(need(), now=now, avoid={"liar"})
            assert again is not None and again is not liar
        if number % 1_000 == 0:
            for each in (*honest, liar):
                each.sandboxes = 0 if each is liar else each.sandboxes + each.unseen
                each.reported(now - 1.0)
    assert 1 <= asked <= 4


def test_a_slow_node_gets_less_than_others() -> None:
    """Starts that this process still waits for count as load."""
    nodes = [node(f"n{n:03}", cpu_count=4) for n in range(10)]
    slow = nodes[0]
    placement = placement_of(nodes)
    under_way: list[tuple[float, Standing]] = []
    got: Counter[str] = Counter()
    for step in range(2_000):
        now = step * 0.01
        for each in [item for item in under_way if item[0] <= now]:
            under_way.remove(each)
            each[1].starting -= 1
        chosen = placement.choose(need(), now=now)
        assert chosen is not None
        chosen.starting += 1
        under_way.append((now + (3.0 if chosen is slow else 0.05), chosen))
        got[chosen.node_id] += 1
    assert got["n000"] < 0.5 * min(count for name, count in got.items() if name != "n000")


def test_sandboxes_of_a_task_are_spread_where_load_does_not_say_otherwise() -> None:
    nodes = [node(f"n{n:03}", sandboxes_max=100_000) for n in range(4)]
    # One is a little emptier: without the spread it would get everything.
    for each in nodes[1:]:
        each.cpu_used = 0.02
    placement = placement_of(nodes)
    got: Counter[str] = Counter()
    for step in range(400):
        chosen = placement.choose(need(task_id="t"), now=float(step), k=4)
        assert chosen is not None
        got[chosen.node_id] += 1
        for each in nodes:
            each.reported(step + 10.0)
    assert max(got.values()) <= 150


def test_nodes_that_hold_the_image_come_first_while_they_are_not_loaded() -> None:
    nodes = [node(f"n{n:03}") for n in range(5)]
    nodes[3].images = frozenset({"sha256:1"})
    placement = placement_of(nodes)
    assert placement.choose(need(image="sha256:1"), now=0.0, k=5) is nodes[3]
    nodes[3].cpu_used = 0.9
    assert placement.choose(need(image="sha256:1"), now=0.0, k=5) is not nodes[3]


@settings(max_examples=20)
@given(seed=st.integers(0, 1_000))
def test_the_choice_is_the_least_loaded_of_all_when_all_are_compared(seed: int) -> None:
    random = Random(seed)
    nodes = [node(f"n{n:03}", cpu_used=random.random()) for n in range(6)]
    chosen = placement_of(nodes, seed).choose(need(), now=0.0, k=6)
    assert chosen is min(nodes, key=lambda n: n.cpu_used)

# SPDX-License-Identifier: AGPL-3.0-only
"""Identity, randomness and clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.server import agent_route
from opendsec import Sandbox

from .kit import Bench, Maker, at_once, clock_error_s, each, identity

CLOCK_ERROR_MAX_S = 0.5
NOT_OF_CONTAINERS = {"boot id", "machine id"}
"""Of the host's kernel, or absent, where sandboxes have no kernel of their own."""

RANDOM_LOOP = (
    "import os, time\n"
    "while True:\n"
    "    with open('/tmp/random.new', 'w') as f: f.write(os.urandom(16).hex())\n"
    "    os.replace('/tmp/random.new', '/tmp/random')\n"
    "    time.sleep(0.05)\n"
)


def assert_all_differ(bench: Bench, sandboxes: list[Sandbox]) -> None:
    """As new processes inside, the API, and the network see them."""
    seen = each(identity, sandboxes)
    for what in seen[0]:  # type: ignore[attr-defined]
        if what in NOT_OF_CONTAINERS and not bench.can.own_kernel:
            continue
        values = [one[what] for one in seen]  # type: ignore[index]
        assert len(set(values)) == len(values), f"{what}: {values}"
        assert all(values), f"{what}: {values}"
    records = [one.info() for one in sandboxes]
    for records_of in (
        [r.sandbox_id for r in records],
        [r.access_token for r in records],
        [r.traffic_token for r in records],
    ):
        assert len(set(records_of)) == len(sandboxes)
    if bench.server is not None:
        addresses = [agent_route(bench.server, r.sandbox_id)["address"] for r in records]
        assert len(set(addresses)) == len(sandboxes), addresses
    hostnames = [one["hostname"] for one in seen]  # type: ignore[index]
    assert hostnames == [one.sandbox_id for one in sandboxes]


def test_siblings_of_a_template_differ_in_everything(bench: Bench, make: Maker) -> None:
    made = at_once([make for _ in range(3)])
    assert all(isinstance(one, Sandbox) for one in made), made
    assert_all_differ(bench, [one for one in made if isinstance(one, Sandbox)])


def test_forks_differ_from_each_other_and_from_their_source(bench: Bench, make: Maker) -> None:
    source = make()
    assert_all_differ(bench, [source, *make.fork(source, 3)])


def test_sandboxes_of_one_snapshot_differ(bench: Bench, make: Maker) -> None:
    source = make()
    snapshot = make.snapshot(source)
    children = [make(template=snapshot.snapshot_id) for _ in range(2)]
    assert_all_differ(bench, [source, *children])


def test_a_running_process_draws_other_randomness_in_each_fork(bench: Bench, make: Maker) -> None:
    source = make()
    if not bench.can.memory_snapshot:
        bench.refused(lambda: source.fork(mode="full"))
        return
    source.spawn(["python3", "-ISc", RANDOM_LOOP]).disconnect()
    source.exec("for i in $(seq 100); do test -s /tmp/random && break; sleep 0.1; done")
    children = make.fork(source, 3)

    def next_ones(one: Sandbox) -> list[str]:
        ask = "for i in 1 2 3 4; do cat /tmp/random; echo; sleep 0.3; done"
        return one.exec(ask, check=True).stdout.split()[1:]  # the first may be from before

    drawn = each(next_ones, [source, *children])
    values = [value for one in drawn for value in set(one)]  # type: ignore[call-overload]
    assert len(values) >= 8, "the process goes on in every child"
    assert len(set(values)) == len(values), drawn


def test_a_forks_tokens_open_only_itself(make: Maker) -> None:
    source = make()
    (child,) = make.fork(source)
    assert child.record.access_token != source.record.access_token
    with source.http(49983) as agent:
        for token, status in (
            (child.record.access_token, 401),
            (source.record.access_token, 200),
        ):
            answer = agent.get("/envs", headers={"X-Access-Token": token or ""})
            assert answer.status_code == status


def assert_clock_is_right(sandbox: Sandbox) -> None:
    """The best of a few readings: a reading takes its time."""
    errors = [clock_error_s(sandbox) for _ in range(3)]
    assert min(errors) <= CLOCK_ERROR_MAX_S, errors


def test_the_clock_is_right_after_a_start(make: Maker) -> None:
    assert_clock_is_right(make())


def test_the_clock_is_right_after_a_cold_boot(make: Maker) -> None:
    one = make()
    one.pause("full")
    time.sleep(2)
    one.resume(reboot=True)
    assert_clock_is_right(one)


def test_the_clock_is_right_after_a_pause(make: Maker) -> None:
    one = make()
    one.pause("full")
    time.sleep(4)
    one.resume()
    assert_clock_is_right(one)


def test_the_clock_is_right_in_what_comes_from_an_old_snapshot(make: Maker) -> None:
    source = make()
    snapshot = make.snapshot(source)
    time.sleep(3)
    assert_clock_is_right(make(template=snapshot.snapshot_id))
    assert_clock_is_right(source)


def test_the_token_stays_the_same_through_a_pause(bench: Bench, make: Maker) -> None:
    one = make()
    before = (one.record.access_token, one.record.traffic_token)
    for mode in ("full", "filesystem"):
        one.pause(mode)
        one.resume()
        now = one.info()
        assert (now.access_token, now.traffic_token) == before
        assert bench.client.connect(one.sandbox_id).exec("echo same").stdout == "same\n"


def test_it_stays_itself_through_a_pause(make: Maker) -> None:
    checks: list[Callable[[Sandbox], str]] = [
        lambda one: one.exec("hostname").stdout,
        lambda one: one.exec("cat /etc/machine-id").stdout,
        lambda one: one.exec("echo $KEPT").stdout,
    ]
    one = make(env={"KEPT": "yes"})
    before = [check(one) for check in checks]
    for mode in ("full", "filesystem"):
        one.pause(mode)
        one.resume()
        assert [check(one) for check in checks] == before, mode

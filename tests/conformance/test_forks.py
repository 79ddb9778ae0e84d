# SPDX-License-Identifier: AGPL-3.0-only
"""Forks."""

from __future__ import annotations

import uuid

import pytest

from opendsec import InvalidRequest, OpendsecError, Sandbox

from .kit import TICKER, Bench, Maker, each, ticks, until
from .outside import TALKER, Outside

DEPTH = 5
MANY = 8


def test_one_child_goes_on_with_files_and_memory(bench: Bench, make: Maker) -> None:
    source = make(env={"KEPT": "yes"})
    source.files.write("then.txt", "then")
    process = source.spawn(TICKER, tag="ticker")
    process.disconnect()
    until(lambda: source.files.exists("/tmp/ticks"), "no tick")
    before = ticks(source)
    (child,) = make.fork(source)
    source.files.write("then.txt", "changed")
    assert child.files.read_text("then.txt") == "then"
    assert child.exec("echo $KEPT").stdout == "yes\n"
    if bench.can.memory_snapshot:
        assert [info.pid for info in child.processes()] == [process.pid]
        now = ticks(child)
        assert now >= before
        until(lambda: ticks(child) > now, "the child's process stands still")
    else:
        assert child.processes() == []
    child.files.write("childs.txt", "x")
    assert not source.files.exists("childs.txt")


def test_memory_is_copied_or_refused(bench: Bench, make: Maker) -> None:
    source = make()
    source.exec("echo in memory > /dev/shm/kept", check=True)
    if not bench.can.memory_snapshot:
        bench.refused(lambda: source.fork(mode="full"))
        assert source.exec("cat /dev/shm/kept").stdout == "in memory\n"
        assert not list(bench.client.snapshots.list(sandbox_id=source.sandbox_id))
        return
    (child,) = make.fork(source, mode="full")
    assert child.exec("cat /dev/shm/kept").stdout == "in memory\n"


def test_eight_children_at_once(make: Maker) -> None:
    source = make()
    source.files.write("then.txt", "then")
    children = make.fork(source, MANY)
    assert len({child.sandbox_id for child in children}) == MANY

    def use(child: Sandbox) -> str:
        child.files.write("own.txt", child.sandbox_id)
        return child.exec("cat then.txt own.txt", check=True).stdout

    answers = each(use, children)
    assert answers == [f"then{child.sandbox_id}" for child in children]


def test_forks_of_forks_five_deep(bench: Bench, make: Maker) -> None:
    line = [make()]
    for depth in range(DEPTH):
        line[-1].files.write(f"of-{depth}.txt", str(depth))
        line += make.fork(line[-1])
    for gone in line[1:-1:2]:
        gone.kill()
    last = line[-1]
    for depth in range(DEPTH):
        assert last.files.read_text(f"of-{depth}.txt") == str(depth)
    assert line[0].exec("ls of-*.txt").stdout == "of-0.txt\n"


def test_children_do_not_need_their_parent(make: Maker) -> None:
    source = make()
    source.files.write("then.txt", "then")
    children = make.fork(source, 2)
    source.kill()
    for child in children:
        assert child.files.read_text("then.txt") == "then"
        child.pause("full")
        child.resume()
        assert child.exec("cat then.txt; ls /usr/bin | wc -l", check=True).stdout[:4] == "then"


def test_the_source_goes_on_and_its_streams_are_not_cut(make: Maker) -> None:
    source = make()
    process = source.spawn("for i in $(seq 40); do echo $i; sleep 0.1; done")
    for event in process:
        if event.data:
            break
    make.fork(source, 2)
    assert process.wait().stdout.split() == [str(i) for i in range(1, 41)]
    assert source.info().state == "running"


def test_every_child_has_its_own_result(bench: Bench, make: Maker) -> None:
    source = make(metadata={"of": "source"})
    given = source.fork(
        3, mode=bench.best_mode, metadata={"of": "child"}, labels=[make.label], timeout_s=900
    )
    assert len(given) == 3
    for child in given:
        assert isinstance(child, Sandbox), child
        make.sources.add(child.sandbox_id)
        info = child.info()
        assert info.metadata == {"of": "child"} and info.state == "running"
        assert info.end_at is not None and info.started_at is not None
    (plain,) = make.fork(source)
    assert plain.info().metadata == {"of": "source"}
    for count in (0, 101):
        with pytest.raises(InvalidRequest):
            source.fork(count, mode=bench.best_mode)


def test_the_same_key_gives_the_same_children(make: Maker) -> None:
    source, key = make(), uuid.uuid4().hex
    first = make.fork(source, 2, idempotency_key=key)
    second = make.fork(source, 2, idempotency_key=key)
    assert {one.sandbox_id for one in first} == {one.sandbox_id for one in second}


def test_a_fork_leaves_no_snapshot_behind(bench: Bench, make: Maker) -> None:
    source = make()
    make.fork(source, 2)
    assert not list(bench.client.snapshots.list(sandbox_id=source.sandbox_id))


def test_a_paused_source_is_forked_or_refused(bench: Bench, make: Maker) -> None:
    source = make()
    source.files.write("then.txt", "then")
    source.pause("full")
    try:
        (child,) = make.fork(source)
    except OpendsecError as exc:
        assert exc.code == "sandbox_state_conflict" and exc.fault == "user"
    else:
        assert child.files.read_text("then.txt") == "then"
    assert source.info().state == "paused"


def test_a_forks_copy_of_a_connection_is_dead(
    bench: Bench, make: Maker, outside: Outside | None
) -> None:
    bench.own_machine()
    assert outside is not None
    source = make()
    if not bench.can.memory_snapshot:
        bench.refused(lambda: source.fork(mode="full"))
        return
    process = source.spawn(["python3", "-ISc", TALKER, source.sandbox_id], stdin=True)
    for event in process:
        if b"echo first" in event.data:
            break
    process.disconnect()
    children = make.fork(source, 2)
    for child in children:
        copy = child.attach(process.pid)
        copy.write_stdin("go on\n")
        result = copy.wait()
        assert result.stdout.split()[-1:] in (["reset"], ["closed"]), result
    assert outside.heard(f"second {source.sandbox_id}") == 0
    own = source.attach(process.pid)
    own.write_stdin("go on\n")
    assert own.wait().stdout.split()[-1] == "answered", "the source's own goes on"
    assert outside.heard(f"second {source.sandbox_id}") == 1

# SPDX-License-Identifier: AGPL-3.0-only
"""Snapshots."""

from __future__ import annotations

import uuid

import pytest

from opendsec import InvalidRequest, NotSupported, OpendsecError, Sandbox, SnapshotNotFound
from opendsec import Snapshot as Saved

from .kit import TICKER, Bench, Maker, at_once, ticks, until


def test_of_a_running_sandbox_which_goes_on(make: Maker) -> None:
    source = make()
    process = source.spawn(TICKER)
    process.disconnect()
    until(lambda: source.files.exists("/tmp/ticks"), "no tick")
    source.files.write("then.txt", "then")
    snapshot = make.snapshot(source)
    before = ticks(source)
    until(lambda: ticks(source) > before, "the source stands still")
    source.files.write("later.txt", "later")
    child = make(template=snapshot.snapshot_id)
    assert child.files.read_text("then.txt") == "then"
    assert not child.files.exists("later.txt")
    assert [info.pid for info in source.processes()] == [process.pid]


def test_a_full_one_holds_processes(bench: Bench, make: Maker) -> None:
    source = make()
    if not bench.can.memory_snapshot:
        bench.refused(lambda: source.snapshot(mode="full"))
        assert source.exec("echo goes on").stdout == "goes on\n"
        return
    process = source.spawn(TICKER, tag="ticker")
    process.disconnect()
    until(lambda: source.files.exists("/tmp/ticks"), "no tick")
    before = ticks(source)
    snapshot = source.snapshot(mode="full")
    assert snapshot.mode == "full" and snapshot.memory_bytes > 0
    child = make(template=snapshot.snapshot_id)
    assert ticks(child) >= before
    assert [info.pid for info in child.processes()] == [process.pid]
    now = ticks(child)
    until(lambda: ticks(child) > now, "the child's process stands still")


def test_a_filesystem_one_holds_files_only(make: Maker) -> None:
    source = make()
    source.spawn("sleep 600").disconnect()
    source.exec("echo disk > disk.txt; echo memory > /dev/shm/memory", check=True)
    snapshot = source.snapshot(mode="filesystem")
    assert (snapshot.mode, snapshot.memory_bytes) == ("filesystem", 0)
    child = make(template=snapshot.snapshot_id)
    assert child.files.read_text("disk.txt") == "disk\n"
    assert not child.files.exists("/dev/shm/memory")
    assert child.processes() == []


def test_of_a_paused_sandbox_which_stays_paused(bench: Bench, make: Maker) -> None:
    source = make()
    source.files.write("then.txt", "then")
    source.pause("full")
    snapshot = make.snapshot(source)
    assert source.info().state == "paused"
    assert make(template=snapshot.snapshot_id).files.read_text("then.txt") == "then"
    source.resume()
    assert source.files.read_text("then.txt") == "then"
    source.pause("filesystem")
    if bench.can.memory_snapshot:
        with pytest.raises(NotSupported):
            source.snapshot(mode="full")
    assert source.snapshot(mode="filesystem").mode == "filesystem"


def test_it_says_what_it_is(bench: Bench, make: Maker) -> None:
    source = make()
    source.exec("head -c 3000000 /dev/urandom > own.bin; sync", check=True)
    snapshot = make.snapshot(source)
    assert snapshot.backend == bench.backend and snapshot.source_id == source.sandbox_id
    assert (snapshot.memory_mb, snapshot.disk_mb) == (
        source.record.memory_mb,
        source.record.disk_mb,
    )
    assert snapshot.disk_bytes >= 3_000_000
    assert bench.client.snapshots.get(snapshot.snapshot_id) == snapshot
    listed = list(bench.client.snapshots.list(sandbox_id=source.sandbox_id))
    assert listed == [snapshot]


def test_it_serves_by_name_and_the_name_moves(bench: Bench, make: Maker) -> None:
    source, name = make(), f"n-{uuid.uuid4().hex[:8]}"
    source.files.write("which.txt", "older")
    older = make.snapshot(source, f"{name}:v1")
    assert make(template=f"{name}:v1").files.read_text("which.txt") == "older"
    source.files.write("which.txt", "newer")
    newer = make.snapshot(source, f"{name}:v1")
    assert make(template=f"{name}:v1").files.read_text("which.txt") == "newer"
    assert bench.client.snapshots.get(f"{name}:v1").snapshot_id == newer.snapshot_id
    assert make(template=older.snapshot_id).files.read_text("which.txt") == "older"
    with pytest.raises(InvalidRequest):
        make.snapshot(source, "no good name!")


def test_a_chain_of_snapshots(bench: Bench, make: Maker) -> None:
    one, ids = make(), []
    for step in range(4):
        one.files.write(f"of-{step}.txt", str(step))
        ids.append(make.snapshot(one).snapshot_id)
        one.kill()
        one = make(template=ids[-1])
    bench.client.snapshots.delete(ids[0])
    bench.client.snapshots.delete(ids[2])
    for step in range(4):
        assert one.files.read_text(f"of-{step}.txt") == str(step)
    assert make(template=ids[1]).files.exists("of-1.txt")
    assert make(template=ids[3]).files.exists("of-2.txt")


def test_deleting_one_in_use_is_safe(bench: Bench, make: Maker) -> None:
    source = make()
    source.files.write("kept.txt", "kept")
    snapshot = make.snapshot(source)
    child = make(template=snapshot.snapshot_id)
    answers = at_once(
        [
            lambda: make(template=snapshot.snapshot_id),
            lambda: bench.client.snapshots.delete(snapshot.snapshot_id),
        ]
    )
    assert answers[1] is True, answers
    racing = answers[0]
    if isinstance(racing, Sandbox):
        assert racing.files.read_text("kept.txt") == "kept"
    else:
        assert isinstance(racing, OpendsecError) and racing.code in (
            "template_not_found",
            "snapshot_not_found",
        ), racing
    source.kill()
    assert child.files.read_text("kept.txt") == "kept"
    child.pause("full")
    child.resume()
    assert child.exec("cat kept.txt; ls /usr/bin | wc -l", check=True).stdout.startswith("kept")
    assert bench.client.snapshots.delete(snapshot.snapshot_id) is False
    with pytest.raises((SnapshotNotFound, OpendsecError)) as caught:
        make(template=snapshot.snapshot_id)
    assert caught.value.code in ("template_not_found", "snapshot_not_found")


def test_it_outlives_its_source(make: Maker) -> None:
    source = make()
    source.files.write("kept.txt", "kept")
    snapshot = make.snapshot(source)
    source.kill()
    assert make(template=snapshot.snapshot_id).files.read_text("kept.txt") == "kept"


def test_the_same_key_gives_the_same_snapshot(bench: Bench, make: Maker) -> None:
    source, key = make(), uuid.uuid4().hex
    taken = at_once([lambda: make.snapshot(source, idempotency_key=key) for _ in range(3)])
    ids = {one.snapshot_id for one in taken if isinstance(one, Saved)}
    assert len(ids) == 1, taken
    assert len(list(bench.client.snapshots.list(sandbox_id=source.sandbox_id))) == 1


def test_sizes_of_a_snapshot_with_memory_are_fixed(bench: Bench, make: Maker) -> None:
    source = make()
    snapshot = make.snapshot(source)
    if snapshot.mode == "full":
        with pytest.raises(InvalidRequest):
            make(template=snapshot.snapshot_id, memory_mb=512)
    child = make(template=snapshot.snapshot_id)
    assert child.record.disk_mb == source.record.disk_mb
    assert child.record.backend == bench.backend

# SPDX-License-Identifier: AGPL-3.0-only
"""Faults and restarts."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from pathlib import Path

import pytest

from opendsec import OpendsecError, Sandbox
from opendsec_server.node.paths import NodePaths
from tests.harness import Server

from .kit import TICKER, Bench, Maker, at_once, state_is, ticks, until

END_OF_ITSELF = {"exited", "vmm_failed", "oom", "lost", "kernel_panic"}


def ended(sandbox: Sandbox) -> bool:
    return sandbox.info().ended


def main_processes(server: Server, sandbox: Sandbox) -> list[int]:
    """Pids, on the machine, of what a sandbox is: its VMM, or its first process."""
    group = f"/opendsec-{server.config.instance}/{sandbox.sandbox_id}"
    found: list[tuple[int, int]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if not re.search(rf":{group}(/|$)", (entry / "cgroup").read_text(), re.M):
                continue
            pids = (entry / "status").read_text().split("NSpid:")[1].split("\n")[0].split()
        except (OSError, IndexError):
            continue
        found.append((int(pids[-1]), int(entry.name)))
    first = [host for inner, host in found if inner == 1]
    return first or [host for _inner, host in found]


def kill_main(bench: Bench, sandbox: Sandbox) -> None:
    pids = main_processes(bench.own_machine(), sandbox)
    assert pids, "nothing of it runs"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_kill_9_of_its_process_is_typed(bench: Bench, make: Maker) -> None:
    bench.own_machine()
    one = make()
    process = one.spawn("sleep 600")
    kill_main(bench, one)
    with pytest.raises(OpendsecError) as caught:
        process.wait()
    assert caught.value.code in ("sandbox_not_found", "connection_failed")
    until(lambda: ended(one), "nobody noticed")
    info = one.info()
    assert info.end_reason in END_OF_ITSELF and info.message, info
    if bench.can.own_kernel:
        assert (info.end_reason, info.fault) == ("vmm_failed", "platform"), info


def test_kill_9_of_its_process_while_paused_loses_no_file(bench: Bench, make: Maker) -> None:
    bench.own_machine()
    one = make()
    one.files.write("kept.txt", "kept")
    one.pause("full")
    if bench.can.pause_survives_reboot:
        assert main_processes(bench.own_machine(), one) == [], "nothing of it runs"
    else:
        kill_main(bench, one)
        for _ in range(50):
            if not main_processes(bench.own_machine(), one):
                break
            time.sleep(0.1)
        else:
            one.kill()
            assert main_processes(bench.own_machine(), one) == []
            pytest.skip("this kernel (cgroup v1) holds killed processes until they are thawed")
        until(lambda: bool(one.info().message), "nobody noticed")
        assert "memory was lost" in str(one.info().message)
    one.resume()
    assert one.files.read_text("kept.txt") == "kept"


def test_a_kernel_panic_is_typed_and_quotes_the_console(bench: Bench, make: Maker) -> None:
    one = make()
    run = "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger"
    if not bench.can.own_kernel:
        assert one.exec(run, user="root").exit_code != 0, "the host's kernel is out of reach"
        assert one.exec("echo alive").stdout == "alive\n"
        return
    with pytest.raises(OpendsecError):
        one.exec(run, user="root")
        one.exec("true", timeout_s=60)
    until(lambda: ended(one), "nobody noticed")
    info = one.info()
    assert info.end_reason == "kernel_panic", info
    assert "panic" in str(info.message) and info.fault is not None, info


def test_root_inside_cannot_end_its_agent(make: Maker) -> None:
    one = make()
    one.exec("kill -9 1; pkill -9 opendsec-agent", user="root")
    assert one.exec("echo alive").stdout == "alive\n"


def test_a_power_off_inside_ends_it(bench: Bench, make: Maker) -> None:
    one = make()
    if not bench.can.own_kernel:
        one.exec("poweroff -f 2>/dev/null; echo o > /proc/sysrq-trigger", user="root")
        assert one.exec("echo alive").stdout == "alive\n"
        return
    call = "import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)"
    with pytest.raises(OpendsecError):
        one.exec(["python3", "-c", call], user="root")
        one.exec("true", timeout_s=60)
    until(lambda: ended(one), "nobody noticed")
    assert one.info().end_reason == "exited", one.info()


def test_kill_9_of_the_server_loses_nothing(bench: Bench, make: Maker) -> None:
    server = bench.own_machine()
    running, asleep, dormant, source = (
        make(),
        make(),
        make(),
        make(),
    )
    process = running.spawn(TICKER)
    process.disconnect()
    asleep.spawn("sleep 600", tag="sleeper").disconnect()
    for one in (running, asleep, dormant, source):
        one.files.write("kept.txt", one.sandbox_id)
    until(lambda: running.files.exists("/tmp/ticks"), "no tick")
    asleep.pause("full")
    dormant.pause("filesystem")
    snapshot = make.snapshot(source)
    source.kill()
    server.kill_daemon()
    server.start()
    assert [info.pid for info in running.processes()] == [process.pid]
    before = ticks(running)
    until(lambda: ticks(running) > before, "it stands still")
    assert (asleep.info().state, dormant.info().state) == ("paused", "paused")
    assert source.info().end_reason == "killed"
    asleep.resume()
    dormant.resume()
    assert [info.tag for info in asleep.processes()] == ["sleeper"]
    assert dormant.processes() == []
    for one in (running, asleep, dormant):
        assert one.files.read_text("kept.txt") == one.sandbox_id
    child = make(template=snapshot.snapshot_id)
    assert child.files.read_text("kept.txt") == source.sandbox_id
    running.pause("full")
    running.resume()
    until(lambda: ticks(running) > before, "it stands still")


def test_kill_9_of_the_server_in_the_middle_loses_nothing(bench: Bench, make: Maker) -> None:
    server = bench.own_machine()
    boxes = [make() for _ in range(3)]
    for one in boxes:
        one.files.write("kept.txt", one.sandbox_id)
    pausing, forking, saving = boxes
    at_once(
        [
            pausing.pause,
            lambda: make.fork(forking, 2),
            lambda: make.snapshot(saving),
            server.kill_daemon,
        ]
    )
    server.start()
    for one in boxes:
        until(state_is(one, "running", "paused"), f"it is stuck: {one.record}")
        one.resume()
        assert one.files.read_text("kept.txt") == one.sandbox_id


def test_kill_9_of_the_edge_cuts_streams_with_a_typed_error(bench: Bench, make: Maker) -> None:
    server = bench.own_machine()
    one = make()
    process = one.spawn("echo before; sleep 8; echo after; exit 5")
    edge = server.edge()
    server.kill_edge()
    with pytest.raises(OpendsecError) as caught:
        process.wait()
    assert caught.value.fault == "platform"
    until(lambda: server.edge() not in (None, edge), "no new edge")

    def attached() -> int | None:
        try:
            return one.attach(process.pid).wait().exit_code
        except OpendsecError as exc:
            assert exc.fault == "platform", exc
            return None

    assert until(attached, "no traffic after the edge came back") == 5


def test_a_damaged_snapshot_is_found_out(bench: Bench, make: Maker) -> None:
    server = bench.own_machine()
    source = make()
    if not bench.can.memory_snapshot:
        bench.refused(lambda: source.snapshot(mode="full"))
        return
    snapshot = source.snapshot(mode="full")
    memory = NodePaths.of(server.config).snapshot(snapshot.snapshot_id) / "memory"
    largest = max(
        (path for path in memory.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(OpendsecError) as caught:
        make(template=snapshot.snapshot_id)
    assert caught.value.code == "snapshot_damaged" and caught.value.fault == "platform"
    assert source.exec("echo goes on").stdout == "goes on\n"
    assert bench.client.snapshots.delete(snapshot.snapshot_id) is True


def test_a_create_that_was_answered_survives_kill_9(bench: Bench, make: Maker) -> None:
    server = bench.own_machine()
    key = uuid.uuid4().hex
    first = make(idempotency_key=key)
    server.kill_daemon()
    server.start()
    assert make(idempotency_key=key).sandbox_id == first.sandbox_id

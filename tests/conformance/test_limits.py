# SPDX-License-Identifier: AGPL-3.0-only
"""Limits."""

from __future__ import annotations

from opendsec import Sandbox

from .kit import Bench, Maker, until

MANY_PROCESSES = """
import os, signal
try:
    for _ in range(6000):
        if os.fork() == 0:
            signal.pause()
    print("all of them", flush=True)
except OSError:
    print("refused", flush=True)
os.killpg(0, signal.SIGKILL)
"""


def test_memory_is_limited_and_the_eater_is_killed(sandbox: Sandbox) -> None:
    size_mb = sandbox.record.memory_mb
    eaten = sandbox.exec(["python3", "-ISc", f"x = bytearray({size_mb * 4} * 1024 * 1024)"])
    assert eaten.exit_code in (1, 137), eaten
    assert eaten.exit_code == 137 or "MemoryError" in eaten.stderr
    assert sandbox.exec("echo still here").stdout == "still here\n"


def test_the_agent_survives_memory_pressure(sandbox: Sandbox) -> None:
    eater = f"x = bytearray({sandbox.record.memory_mb - 60} * 1024 * 1024)"
    sandbox.exec(f"for i in 1 2 3; do python3 -ISc '{eater}' & done; wait")
    assert sandbox.exec("echo still here").stdout == "still here\n"
    assert sandbox.info().state == "running"


def test_disk_is_limited_and_can_be_freed_again(make: Maker) -> None:
    small = make(disk_mb=128)
    filled = small.exec("dd if=/dev/zero of=/home/user/big bs=1M count=400")
    assert filled.exit_code != 0
    assert "quota" in filled.stderr.lower() or "no space" in filled.stderr.lower(), filled
    small.exec("rm /home/user/big", check=True, user="root")
    small.exec("dd if=/dev/zero of=/home/user/small bs=1M count=20", check=True)


def test_many_processes_run_but_not_any_number(make: Maker, bench: Bench) -> None:
    one = make()
    # What was forked is called `bash` until it has become `sleep`: the count is awaited.
    running = one.exec(
        "for i in $(seq 100); do sleep 60 & done; "
        "for i in $(seq 100); do n=$(pgrep -xc sleep); [ $n = 100 ] && break; sleep 0.1; done; "
        "echo $n; pkill -x sleep"
    )
    assert running.stdout == "100\n", running
    if bench.can.own_kernel:
        return  # its memory is the end; the host has no more than one VMM to run
    answer = one.exec(["setsid", "-w", "python3", "-ISc", MANY_PROCESSES], timeout_s=200)
    assert "all of them" not in answer.stdout, answer
    until(lambda: one.exec("echo alive").stdout == "alive\n", "no new process can be started")


def test_a_fork_bomb_hurts_only_its_own_sandbox(make: Maker, bench: Bench) -> None:
    bombed, other = make(cpu=0.5), make()
    bombed.spawn("bomb() { bomb | bomb & }; bomb; sleep 60").disconnect()
    for _ in range(5):
        assert other.exec("sleep 0.2; echo fine").stdout == "fine\n"
    bombed.kill()
    assert bench.client.info(bombed.sandbox_id).state == "ended"


def test_a_machine_has_the_processors_it_was_given(bench: Bench, sandbox: Sandbox) -> None:
    count = int(sandbox.exec("nproc").stdout)
    if bench.can.own_kernel:
        assert count == 1
    else:  # the host's are seen; time on them is what is limited
        assert count >= 1


def test_a_machine_has_the_memory_it_was_given(bench: Bench, sandbox: Sandbox) -> None:
    seen_mb = int(sandbox.exec("grep MemTotal /proc/meminfo").stdout.split()[1]) / 1024
    if bench.can.own_kernel:
        assert sandbox.record.memory_mb * 0.7 <= seen_mb <= sandbox.record.memory_mb
    else:
        assert seen_mb > 0


def test_metrics_are_taken_from_outside(sandbox: Sandbox) -> None:
    samples = until(lambda: sandbox.metrics(), "no sample")
    last = samples[-1]
    assert last.cpu_count == 1
    assert last.memory_total_bytes == sandbox.record.memory_mb * 1024 * 1024
    assert last.memory_used_bytes > 0
    assert 0 <= last.disk_used_bytes <= last.disk_total_bytes

# SPDX-License-Identifier: AGPL-3.0-only
"""Firecracker itself: boot, save, restore, what clones share and what they do not, faults."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from opendsec_server.contract.errors import (
    SandboxStartFailed,
    SnapshotDamaged,
    SnapshotFailed,
    SnapshotIncompatible,
)
from opendsec_server.node import process
from opendsec_server.node.vmm.firecracker import FirecrackerVmm
from opendsec_server.node.vmm.manifest import _own_sha256, read_manifest

from .conftest import MakeMachine
from .vms import CALL_TIMEOUT_S, Machine

COUNTER = "i=0; while :; do i=$((i+1)); echo $i >/tmp/new; mv /tmp/new /tmp/count; sleep 0.1; done"
PAUSES = 20


def report(what: str, started: float, **more: object) -> None:
    """A figure, for people. Never a condition."""
    shown = " ".join(f"{key}={value}" for key, value in more.items())
    print(f"FIGURE {what}: {time.monotonic() - started:.3f} s {shown}", flush=True)


async def start_counter(machine: Machine) -> None:
    await machine.sh(f"echo 0 >/tmp/count; ({COUNTER}) >/dev/null 2>&1 </dev/null &")


async def count(machine: Machine) -> int:
    return int(await machine.sh("cat /tmp/count"))


async def wait_count_above(machine: Machine, value: int) -> int:
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while (found := await count(machine)) <= value:
        assert time.monotonic() < deadline, f"it stays at {found}"
        await asyncio.sleep(0.1)
    return found


async def test_two_clones_of_a_running_machine(make_machine: MakeMachine, scratch: Path) -> None:
    source, memory = make_machine(), scratch / "memory"
    started = time.monotonic()
    await source.boot()
    report("boot to agent's first answer", started)
    started = time.monotonic()
    await source.sh("echo kept >/root/file && sync")
    report("first command", started)
    await start_counter(source)
    at_save = await wait_count_above(source, 2)

    started = time.monotonic()
    saved = await source.save(memory)
    report("freeze and save, 256 MiB", started, on_disk_mib=saved.ram_bytes_on_disk >> 20)
    clones = [make_machine(), make_machine()]
    for clone in clones:
        clone.make_disk(copy_of=source.disk)
    await source.driver.thaw(source.run_dir)
    started = time.monotonic()
    await source.driver.seal(memory, durable=True)
    report("seal", started)
    await source.driver.check(memory)
    assert await wait_count_above(source, at_save) > at_save

    assert saved.ram_bytes == 256 << 20
    assert saved.ram_bytes_on_disk < saved.ram_bytes * 3 // 4, "zero pages were stored"
    for clone in clones:
        started = time.monotonic()
        clone.pid = await clone.driver.restore(clone.config, memory)
        report("restore until it runs", started)
        await clone.init(source.control, {"restored": True})
        report("restore until the agent has answered", started)
    for clone in clones:
        assert await count(clone) >= at_save
        assert await clone.sh("cat /root/file") == "kept\n"
        await wait_count_above(clone, await count(clone))
        assert (await clone.sh("cat /proc/sys/kernel/hostname")).strip() == clone.net.name
    drawn = [await m.sh("dd if=/dev/urandom bs=16 count=1 2>/dev/null | md5sum") for m in clones]
    assert drawn[0] != drawn[1]
    await clones[0].sh("echo other >/root/file && sync")
    assert await clones[1].sh("cat /root/file") == "kept\n"
    assert await source.sh("cat /root/file") == "kept\n"
    # The guest's clock is right after a restore.
    for clone in clones:
        seen = float(await clone.sh("busybox date +%s"))
        assert abs(seen - time.time()) < 5

    for machine in (source, *clones):
        assert_confined(machine)
    assert len({machine.uid for machine in (source, *clones)}) == 3
    # A clone of a clone, saved over what it shares with its parent.
    grandchild, second = make_machine(), scratch / "memory2"
    started = time.monotonic()
    again = await clones[0].save(second, base=memory)
    report("freeze and save of a clone", started, written_mib=again.dirty_bytes >> 20)
    assert again.dirty_bytes < saved.dirty_bytes, "shared pages were written again"
    grandchild.make_disk(copy_of=clones[0].disk)
    await clones[0].driver.seal(second, durable=False)
    await grandchild.restore(second, control_was=clones[0].control)
    assert await grandchild.sh("cat /root/file") == "other\n"
    await wait_count_above(grandchild, at_save)


def assert_confined(machine: Machine) -> None:
    """Own user, no rights, filtered system calls, own root with nothing else in it, own groups."""
    status = Path(f"/proc/{machine.pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == [str(machine.uid)] * 4
    assert fields["Gid"].split() == [str(machine.uid)] * 4
    assert int(fields["CapEff"], 16) == 0
    for task in Path(f"/proc/{machine.pid}/task").iterdir():
        assert "Seccomp:\t2" in (task / "status").read_text()
    root = {path.name for path in Path(f"/proc/{machine.pid}/root/").iterdir()}
    assert root <= {
        *("dev", "disks", "firecracker", "firecracker.pid", "memory", "run"),
        *("kernel", "initramfs", "ram", "devices"),
    }
    ours = os.stat("/proc/self/ns/net").st_ino
    assert os.stat(f"/proc/{machine.pid}/ns/net").st_ino != ours
    for group in machine.cgroups:
        assert str(machine.pid) in (group / "cgroup.procs").read_text().split()


async def test_twenty_pauses_lose_nothing_and_leave_nothing(
    make_machine: MakeMachine, scratch: Path
) -> None:
    machine = make_machine()
    await machine.boot()
    await start_counter(machine)
    await machine.sh("echo 0 >/root/turns && sync")
    reached, base, sizes = 0, None, []
    started = time.monotonic()
    for turn in range(1, PAUSES + 1):
        reached = await wait_count_above(machine, reached)
        await machine.sh(f"echo {turn} >/root/turns && sync")
        memory = scratch / f"memory{turn}"
        saved = await machine.save(memory, base=base)
        sizes.append(saved.ram_bytes_on_disk)
        await machine.kill()
        await machine.driver.seal(memory, durable=False)
        machine.clear_run()
        await machine.restore(memory, control_was=machine.control)
        assert await count(machine) >= reached
        assert await machine.sh("cat /root/turns") == f"{turn}\n"
        if base is not None:
            for path in base.iterdir():
                path.unlink()
            base.rmdir()
        base = memory
    report(f"{PAUSES} pauses and resumes", started, ram_mib=[size >> 20 for size in sizes])
    assert [path.name for path in scratch.iterdir() if path.name.startswith("memory")] == [
        f"memory{PAUSES}"
    ]


async def test_saving_twice_in_a_row_after_the_first_was_deleted(
    make_machine: MakeMachine, scratch: Path
) -> None:
    source, clone = make_machine(), make_machine()
    await source.boot()
    await source.sh("echo one >/tmp/text")
    first, second = scratch / "first", scratch / "second"
    await source.save(first)
    await source.driver.thaw(source.run_dir)
    for path in first.iterdir():
        path.unlink()
    await source.sh("echo two >>/tmp/text")
    await source.save(second)
    clone.make_disk(copy_of=source.disk)
    await source.driver.seal(second, durable=False)
    await source.driver.check(second)
    await clone.restore(second, control_was=source.control)
    assert await clone.sh("cat /tmp/text") == "one\ntwo\n"


async def test_saving_by_a_driver_that_did_not_start_it(
    make_machine: MakeMachine, scratch: Path
) -> None:
    source, clone, memory = make_machine(), make_machine(), scratch / "memory"
    await source.boot()
    await source.sh("echo one >/tmp/text")
    later = FirecrackerVmm(source.driver._config)
    await later.probe()
    source.driver.release(source.run_dir)
    source.driver = later
    later.adopt(source.run_dir, source.pid)
    await source.save(memory)
    clone.make_disk(copy_of=source.disk)
    await later.seal(memory, durable=False)
    await later.thaw(source.run_dir)
    await clone.restore(memory, control_was=source.control)
    assert await clone.sh("cat /tmp/text") == "one\n"
    assert await source.sh("cat /tmp/text") == "one\n"


async def test_a_vmm_that_is_killed_is_told(make_machine: MakeMachine, scratch: Path) -> None:
    machine = make_machine()
    await machine.boot()
    os.kill(machine.pid, signal.SIGKILL)
    memory = scratch / "memory"
    memory.mkdir()
    with pytest.raises(SnapshotFailed):
        await machine.driver.freeze(machine.run_dir)
    with pytest.raises(SnapshotFailed):
        await machine.driver.save(machine.run_dir, machine.pid, memory, None)


async def test_a_guest_that_panics_says_so_on_its_console(make_machine: MakeMachine) -> None:
    machine = make_machine()
    await machine.boot()
    with pytest.raises((OSError, AssertionError)):
        await machine.sh("echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger")
    pidfd = os.pidfd_open(machine.pid)
    try:
        assert await process.wait_readable(pidfd, CALL_TIMEOUT_S)
    finally:
        os.close(pidfd)
    assert "Kernel panic" in machine.driver.console_tail(machine.run_dir)


async def test_damaged_memory_is_never_restored(make_machine: MakeMachine, scratch: Path) -> None:
    source, clone, memory = make_machine(), make_machine(), scratch / "memory"
    await source.boot()
    driver = source.driver
    await source.save(memory)
    await driver.thaw(source.run_dir)
    clone.make_disk(copy_of=source.disk)
    with pytest.raises(SnapshotDamaged):  # not sealed yet
        await driver.restore(clone.config, memory)
    await driver.seal(memory, durable=False)
    await driver.check(memory)

    ram, devices, manifest = (memory / name for name in ("ram", "devices", "manifest.json"))
    with ram.open("r+b") as file:
        file.seek(20 << 20)
        was = file.read(1)
        file.seek(20 << 20)
        file.write(bytes([was[0] ^ 0xFF]))
    with pytest.raises(SnapshotDamaged):
        await driver.check(memory)
    with ram.open("r+b") as file:
        file.seek(20 << 20)
        file.write(was)
    await driver.check(memory)

    os.truncate(ram, (256 << 20) - 4096)
    with pytest.raises(SnapshotDamaged):
        await driver.restore(clone.config, memory)
    os.truncate(ram, 256 << 20)
    whole = devices.read_bytes()
    devices.write_bytes(whole[:-1])
    with pytest.raises(SnapshotDamaged):
        await driver.restore(clone.config, memory)
    devices.write_bytes(whole)

    text = manifest.read_bytes()
    for change in ({"vmm_version": "1.0.0"}, {"cpu_model": "other"}, {"kernel": "5.0"}):
        changed = msgspec.structs.replace(read_manifest(memory), **change)
        changed = msgspec.structs.replace(changed, sha256=_own_sha256(changed))
        manifest.write_bytes(msgspec.json.encode(changed))
        with pytest.raises(SnapshotIncompatible):
            await driver.restore(clone.config, memory)
        manifest.write_bytes(text)
    manifest.unlink()
    with pytest.raises(SnapshotDamaged):
        await driver.restore(clone.config, memory)
    manifest.write_bytes(text)
    await clone.restore(memory, control_was=source.control)


async def test_a_start_that_fails_leaves_no_process(make_machine: MakeMachine) -> None:
    machine = make_machine()
    machine.make_disk()
    nonsense = machine.dir / "kernel"
    nonsense.write_bytes(b"not a kernel")
    broken = msgspec.structs.replace(machine.config, kernel_elf=nonsense)
    with pytest.raises(SandboxStartFailed, match="refused"):
        await machine.driver.boot(broken)
    missing = msgspec.structs.replace(machine.config, initramfs=machine.dir / "nothing")
    with pytest.raises(SandboxStartFailed, match="nothing"):
        await machine.driver.boot(missing)
    no_tap = msgspec.structs.replace(machine.config, tap="tap9")
    with pytest.raises(SandboxStartFailed, match="tap9"):
        await machine.driver.boot(no_tap)
    for group in machine.cgroups:
        assert (group / "cgroup.procs").read_text() == ""

# SPDX-License-Identifier: AGPL-3.0-only
"""The driver with real, emulated machines."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import time
from pathlib import Path

import msgspec
import pytest

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import (
    ResumeFailed,
    SandboxStartFailed,
    SnapshotDamaged,
    SnapshotFailed,
    SnapshotIncompatible,
)
from opendsec_server.node import process
from opendsec_server.node.vmm import manifest
from opendsec_server.node.vmm.base import DEVICES_FILE, MANIFEST_FILE, RAM_FILE, SUMS_FILE
from opendsec_server.node.vmm.console import CONSOLE_BYTES, TAIL_BYTES
from opendsec_server.node.vmm.firecracker.tests.vms import sh
from opendsec_server.node.vmm.qemu import QemuVmm, driver, program

from .conftest import MakeMachine, Saved
from .guests import UID_BASE, WAIT_S, numbers_on

PAUSES = 20


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def copy_of(saved: Saved, target: Path) -> Path:
    shutil.copytree(saved.memory, target)
    return target


async def test_booted_machine_runs_without_rights_and_loses_nothing_in_many_pauses(
    vmm: QemuVmm, make_machine: MakeMachine, scratch: Path
) -> None:
    machine = make_machine()
    await machine.boot(vmm)
    before = await machine.until_count(vmm, 3)
    assert before[0] == 1
    assert await asyncio.to_thread(machine.answers_ping)

    facts = status(machine.pid)
    assert set(facts["Uid"].split()) == set(facts["Gid"].split()) == {str(machine.uid)}
    assert facts["Groups"] == ""
    assert int(facts["CapPrm"], 16) == int(facts["CapEff"], 16) == 0
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
    assert int(facts["PPid"]) == os.getpid()
    here, there = os.fstat(machine.net.fd), os.stat(f"/proc/{machine.pid}/ns/net")
    assert (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    for number in range(PAUSES):
        target = scratch / f"pause{number}"
        await machine.save(vmm, target, None)
        last = machine.counts(vmm)[-1]
        # What was frozen is on the copy of the disk, up to the number being written.
        on_copy = numbers_on(target.with_suffix(".disk"))
        assert on_copy == list(range(1, len(on_copy) + 1))
        await machine.until_count(vmm, last + 1)
        if number < PAUSES - 1:
            shutil.rmtree(target)
    said = machine.counts(vmm)
    assert said == list(range(1, said[-1] + 1))
    written = machine.on_disk()
    assert written == list(range(1, len(written) + 1))
    assert len(written) >= said[-1]
    await vmm.check(scratch / f"pause{PAUSES - 1}")


async def test_freeze_stops_and_both_ways_are_idempotent(
    vmm: QemuVmm, make_machine: MakeMachine, saved: Saved
) -> None:
    machine = make_machine()
    await machine.restore(vmm, saved.memory, saved.disk)
    await machine.until_count(vmm, saved.count + 1)
    await vmm.freeze(machine.run_dir)
    await vmm.freeze(machine.run_dir)
    said, used = machine.counts(vmm), _cpu_ticks(machine.pid)
    await asyncio.sleep(1.0)
    assert machine.counts(vmm) == said
    # A main loop that only waits: a small part of the second.
    assert _cpu_ticks(machine.pid) - used < 50
    await vmm.thaw(machine.run_dir)
    await vmm.thaw(machine.run_dir)
    await machine.until_count(vmm, said[-1] + 1)


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_two_machines_from_one_saved_memory(
    vmm: QemuVmm, make_machine: MakeMachine, saved: Saved
) -> None:
    before = sha256(saved.memory / RAM_FILE)
    one, two = make_machine(), make_machine()
    await one.restore(vmm, saved.memory, saved.disk)
    await two.restore(vmm, saved.memory, saved.disk)
    for machine in (one, two):
        said = await machine.until_count(vmm, saved.count + 3)
        assert said[0] == saved.count + 1
        assert said == list(range(said[0], said[-1] + 1))
        assert await asyncio.to_thread(machine.answers_ping)
        assert len(machine.on_disk()) >= saved.count + 3
    # Most of the RAM is still the file, for both.
    for machine in (one, two):
        private_kb = int(status(machine.pid)["RssAnon"].split()[0])
        assert private_kb < 0.6 * (machine.config.memory_mb << 10), "RAM was copied"
    assert sha256(saved.memory / RAM_FILE) == before
    await vmm.check(saved.memory)


async def test_generations_share_what_did_not_change(
    vmm: QemuVmm, make_machine: MakeMachine, saved: Saved, scratch: Path
) -> None:
    whole = (saved.memory / RAM_FILE).stat().st_blocks * 512
    memory, disk, count = copy_of(saved, scratch / "g0"), saved.disk, saved.count
    for number in (1, 2, 3):
        machine = make_machine()
        await machine.restore(vmm, memory, disk)
        said = await machine.until_count(vmm, count + 2)
        assert said[0] == count + 1
        target = scratch / f"g{number}"
        # What a VM was restored from may be gone when it is saved.
        base = memory if number != 2 else None
        if number == 2:
            shutil.rmtree(memory)
        written = await machine.save(vmm, target, base)
        assert written < whole / 2
        count = numbers_on(target.with_suffix(".disk"))[-1]
        said = machine.counts(vmm)
        machine.kill()
        await vmm.check(target)
        memory, disk = target, target.with_suffix(".disk")
        # The copy of the disk may be one number ahead of the console.
        count = min(count, said[-1])


async def test_a_later_daemon_takes_over(
    vmm: QemuVmm, make_machine: MakeMachine, saved: Saved
) -> None:
    machine = make_machine()
    await machine.restore(vmm, saved.memory, saved.disk)
    await machine.until_count(vmm, saved.count + 1)
    later = QemuVmm(Config(), "tcg")
    await later.probe()
    assert later.console_tail(machine.run_dir) == ""
    later.adopt(machine.run_dir, machine.pid)
    await later.freeze(machine.run_dir)
    said = machine.counts(later)
    assert said == machine.counts(vmm)
    await later.thaw(machine.run_dir)
    await machine.until_count(later, said[-1] + 1)
    machine.kill()
    assert machine.counts(later)
    later.release(machine.run_dir)
    later.release(machine.run_dir)
    later.adopt(machine.run_dir, 2**22 - 1)
    assert later.console_tail(machine.run_dir) == ""


DAMAGES = {
    "flipped byte of RAM": (RAM_FILE, "flip", False),
    "RAM cut short": (RAM_FILE, "cut", True),
    "RAM missing": (RAM_FILE, "remove", True),
    "flipped byte of devices": (DEVICES_FILE, "flip", True),
    "devices cut short": (DEVICES_FILE, "cut", True),
    "devices missing": (DEVICES_FILE, "remove", True),
    "flipped byte of sums": (SUMS_FILE, "flip", False),
    "sums cut short": (SUMS_FILE, "cut", False),
    "sums missing": (SUMS_FILE, "remove", False),
    "manifest cut short": (MANIFEST_FILE, "cut", True),
    "manifest missing": (MANIFEST_FILE, "remove", True),
    "manifest empty": (MANIFEST_FILE, "empty", True),
}


async def test_damage_is_found_and_refused(
    vmm: QemuVmm, make_machine: MakeMachine, saved: Saved, scratch: Path
) -> None:
    machine = make_machine()
    for name, (file, how, cheap) in DAMAGES.items():
        memory = copy_of(saved, scratch / "damaged")
        path = memory / file
        size = path.stat().st_size
        if how == "flip":
            with path.open("r+b") as out:
                out.seek(size // 2)
                byte = out.read(1)
                out.seek(size // 2)
                out.write(bytes([byte[0] ^ 1]))
        elif how == "cut":
            os.truncate(path, size - 4096 if size > 8192 else size - 1)
        elif how == "empty":
            path.write_bytes(b"")
        else:
            path.unlink()
        with pytest.raises(SnapshotDamaged):
            await vmm.check(memory)
        if cheap:
            with pytest.raises(SnapshotDamaged):
                await vmm.restore(machine.config, memory)
        assert _children() == set(), name
        shutil.rmtree(memory)


def _children() -> set[int]:
    """Children of ours that are, or were to become, a VMM; zombies count."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    found = set()
    for pid in map(int, text.split()):
        facts = status(pid)
        if facts["Name"] == "opendsec-ram" or int(facts["Uid"].split()[0]) >= UID_BASE:
            found.add(pid)
    return found


async def test_what_does_not_fit_is_refused(
    vmm: QemuVmm, make_machine: MakeMachine, saved: Saved, scratch: Path
) -> None:
    machine = make_machine()
    for fields in (
        {"vcpus": 2},
        {"memory_mb": 128},
        {"kernel_id": "other"},
        {"agent_id": "other"},
        {"disks": machine.config.disks[:1]},
        {"disks": machine.config.disks[::-1]},
    ):
        other = msgspec.structs.replace(machine.config, **fields)
        with pytest.raises(SnapshotIncompatible):
            await vmm.restore(other, saved.memory)
    found = manifest.read_manifest(saved.memory)
    for changes in (
        {"vmm": "firecracker"},
        {"vmm_version": "1.2.3"},
        {"accelerator": "kvm"},
        {"cpu_model": "other"},
        {"machine": "pc"},
        {"tsc_khz": found.tsc_khz // 2},
    ):
        memory = copy_of(saved, scratch / "other")
        manifest.write_draft(memory, msgspec.structs.replace(found, **changes))
        await vmm.seal(memory, durable=False)
        with pytest.raises(SnapshotIncompatible):
            await vmm.check(memory)
        with pytest.raises(SnapshotIncompatible):
            await vmm.restore(machine.config, memory)
        shutil.rmtree(memory)
    assert _children() == set()


async def test_devices_that_qemu_refuses_leave_nothing(
    vmm: QemuVmm, make_machine: MakeMachine, saved: Saved, scratch: Path
) -> None:
    machine = make_machine()
    memory = copy_of(saved, scratch / "refused")
    devices = bytearray((memory / DEVICES_FILE).read_bytes())
    devices[200:400] = bytes(200)
    (memory / DEVICES_FILE).write_bytes(devices)
    manifest.write_draft(memory, manifest.read_manifest(memory))
    await vmm.seal(memory, durable=False)
    with pytest.raises(SandboxStartFailed):
        await vmm.restore(machine.config, memory)
    assert _children() == set()
    assert vmm.console_tail(machine.run_dir) == ""


async def test_a_killed_or_hung_vmm_is_an_error_soon(
    vmm: QemuVmm,
    make_machine: MakeMachine,
    saved: Saved,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = make_machine()
    await machine.restore(vmm, saved.memory, saved.disk)
    monkeypatch.setattr(driver, "COMMAND_TIMEOUT_S", 0.5)
    os.kill(machine.pid, signal.SIGSTOP)
    target = scratch / "failed"
    target.mkdir()
    # More often than QEMU lets clients wait.
    for _ in range(4):
        with pytest.raises(SnapshotFailed):
            await vmm.freeze(machine.run_dir)
    with pytest.raises(ResumeFailed):
        await vmm.thaw(machine.run_dir)
    os.kill(machine.pid, signal.SIGCONT)
    monkeypatch.undo()
    # It goes on as if nothing had happened, and takes commands again.
    await vmm.thaw(machine.run_dir)
    await machine.until_count(vmm, saved.count + 1)
    with pytest.raises(SnapshotFailed, match="not frozen"):
        await vmm.save(machine.run_dir, machine.pid, target, None)
    machine.kill()
    for call in (
        vmm.freeze(machine.run_dir),
        vmm.save(machine.run_dir, machine.pid, target, None),
    ):
        with pytest.raises(SnapshotFailed):
            await call
    with pytest.raises(ResumeFailed):
        await vmm.thaw(machine.run_dir)
    assert machine.counts(vmm), "the console is kept beyond the end"


async def test_a_full_disk_fails_the_save_only(
    vmm: QemuVmm, make_machine: MakeMachine, saved: Saved, scratch: Path
) -> None:
    machine = make_machine()
    await machine.restore(vmm, saved.memory, saved.disk)
    small = scratch / "small"
    small.mkdir()
    sh("mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small))
    try:
        await vmm.freeze(machine.run_dir)
        with pytest.raises(SnapshotFailed, match="No space"):
            await vmm.save(machine.run_dir, machine.pid, small, saved.memory)
        await vmm.thaw(machine.run_dir)
        await machine.until_count(vmm, saved.count + 1)
    finally:
        sh("umount", str(small))


async def test_memory_that_a_guest_frees_comes_back_and_the_saved_file_stays_whole(
    vmm: QemuVmm, make_machine: MakeMachine, scratch: Path
) -> None:
    """A balloon over a private file mapping must not punch holes into the file."""
    first = make_machine()
    first.change(cmdline=f"{first.config.cmdline} test.fill")
    await first.boot(vmm)
    await first.until_count(vmm, 3)
    memory = scratch / "memory"
    await first.save(vmm, memory, None)
    before = sha256(memory / RAM_FILE)
    second = make_machine()
    await second.restore(vmm, memory, memory.with_suffix(".disk"))
    for machine in (first, second):
        most_kb, deadline = 0, time.monotonic() + WAIT_S
        while True:
            now_kb = int(status(machine.pid)["RssAnon"].split()[0])
            most_kb = max(most_kb, now_kb)
            filled = "filled" in vmm.console_tail(machine.run_dir)
            if filled and now_kb < most_kb - (64 << 10):
                break
            assert time.monotonic() < deadline, (filled, now_kb, most_kb)
            await asyncio.sleep(0.05)
        last = machine.counts(vmm)[-1]
        await machine.until_count(vmm, last + 2)
    assert sha256(memory / RAM_FILE) == before
    later = scratch / "later"
    await second.save(vmm, later, memory)
    await vmm.check(later)
    third = make_machine()
    await third.restore(vmm, later, later.with_suffix(".disk"))
    await third.until_count(vmm, second.counts(vmm)[-1] + 1)


async def test_console_is_bounded_and_keeps_the_newest(
    vmm: QemuVmm, make_machine: MakeMachine
) -> None:
    machine = make_machine()
    machine.change(cmdline=f"{machine.config.cmdline} test.flood")
    await machine.boot(vmm)
    deadline = time.monotonic() + WAIT_S
    newest = 0
    while newest < 3 * CONSOLE_BYTES // 40:
        text = vmm.console_tail(machine.run_dir)
        assert len(text.encode()) <= TAIL_BYTES
        numbers = [
            int(line[6:].partition(":")[0])
            for line in text.split("\n")[1:-1]
            if line.startswith("flood ") and ":" in line
        ]
        newest = max(numbers, default=0)
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    size = os.stat(f"/proc/{machine.pid}/fd/1").st_size
    assert size == CONSOLE_BYTES
    # Nobody looks: it fills up, and the machine still takes commands.
    await asyncio.sleep(2.0)
    await vmm.freeze(machine.run_dir)
    assert os.stat(f"/proc/{machine.pid}/fd/1").st_size == CONSOLE_BYTES


async def test_a_guest_that_panics_ends_its_vmm_and_says_why(
    vmm: QemuVmm, make_machine: MakeMachine
) -> None:
    machine = make_machine()
    machine.change(cmdline=f"{machine.config.cmdline} test.exit")
    await machine.boot(vmm)
    pidfd = os.pidfd_open(machine.pid)
    try:
        assert await process.wait_readable(pidfd, WAIT_S)
        assert process.reap(pidfd) == 0
    finally:
        os.close(pidfd)
    machine.pid = 0
    assert "Kernel panic" in vmm.console_tail(machine.run_dir)


async def test_starts_that_fail_say_why_and_leave_nothing(
    vmm: QemuVmm, make_machine: MakeMachine, scratch: Path
) -> None:
    machine = make_machine()
    unreadable = scratch / "unreadable"
    unreadable.write_bytes(b"")
    unreadable.chmod(0o600)
    cases: dict[str, dict[str, object]] = {
        "No such file": {"kernel": scratch / "missing"},
        "could not load kernel|could not open|Permission": {"kernel": unreadable},
        "there is no tap tap7": {"tap": "tap7"},
        "cannot join": {"cgroups": (scratch,)},
        "does not run as root": {"uid": 0},
    }
    for said, fields in cases.items():
        other = msgspec.structs.replace(machine.config, **fields)
        with pytest.raises(SandboxStartFailed, match=said):
            await vmm.boot(other)
        (machine.run_dir / driver.CONTROL_SOCKET).unlink(missing_ok=True)
        assert _children() == set(), said
    assert vmm.console_tail(machine.run_dir) == ""


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


async def test_programs_that_are_no_qemu(
    usable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_PROBE_TIMEOUT_S", 0.3)
    hangs = _script(tmp_path / "hangs", "sleep 30")
    old = _script(tmp_path / "old", "echo QEMU emulator version 6.2.0")
    silent = _script(tmp_path / "silent", "exit 0")
    fails = _script(tmp_path / "fails", "exit 1")
    poor = _script(tmp_path / "poor", "echo QEMU emulator version 8.0.0")
    for path, said in (
        (hangs, "did not end"),
        (old, "too old"),
        (silent, "does not tell"),
        (fails, "failed"),
        (poor, "without the microvm machine"),
        (str(tmp_path / "missing"), "not executable"),
    ):
        with pytest.raises(ConfigError, match=said):
            await QemuVmm(Config(qemu_path=path), "tcg").probe()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="apt-get install"):
        program.find_qemu(None)


async def test_a_qemu_that_hangs_at_start_is_ended(
    vmm: QemuVmm, make_machine: MakeMachine, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_machine()
    scratch.chmod(0o755)
    scratch.parent.chmod(0o755)
    scratch.parent.parent.chmod(0o755)
    info = msgspec.structs.replace(
        vmm.info, path=Path(_script(scratch / "qemu", "exec sleep 1000"))
    )
    monkeypatch.setattr(vmm, "_info", info)
    monkeypatch.setattr(driver, "START_TIMEOUT_S", 0.5)
    with pytest.raises(SandboxStartFailed, match="does not answer"):
        await vmm.boot(machine.config)
    assert _children() == set()


async def test_a_cancelled_start_leaves_nothing(
    vmm: QemuVmm, make_machine: MakeMachine, saved: Saved
) -> None:
    machine = make_machine()
    for wait_s in (0.0, 0.01, 0.03, 0.06):
        (machine.run_dir / driver.CONTROL_SOCKET).unlink(missing_ok=True)
        start = asyncio.create_task(vmm.restore(machine.config, saved.memory))
        await asyncio.sleep(wait_s)
        start.cancel()
        try:
            machine.pid = await start
        except asyncio.CancelledError:
            assert _children() == set()
        else:
            machine.kill()
            vmm.release(machine.run_dir)

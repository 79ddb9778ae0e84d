# SPDX-License-Identifier: AGPL-3.0-only
"""The probe of KVM is bounded, asks once, and believes only a guest that has booted."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from opendsec_server.node.process import start_ticks_of
from opendsec_server.ops import kvm_probe
from opendsec_server.ops.kvm_probe import KvmAnswer, probe_kvm

Ask = Callable[[], KvmAnswer]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Probes with a device that opens."""
    device = tmp_path / "kvm"
    device.touch()
    monkeypatch.setattr(kvm_probe, "_KVM", device)
    monkeypatch.setenv(kvm_probe.TIMEOUT_ENV, "1")
    kernel = tmp_path / "vmlinuz"
    kernel.touch()
    return lambda: probe_kvm(tmp_path, kernel=kernel, answer_file=tmp_path / "answer.json")


@pytest.fixture
def qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in QEMU's place; returns the file where it counts how often it ran."""

    def put(script: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        runs = tmp_path / "runs"
        program = folder / f"qemu-system-{platform.machine()}"
        program.write_text(f"#!/bin/sh\necho $$ >>{runs}\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return runs

    return put


def test_a_guest_that_hangs_costs_one_bounded_probe(ask: Ask, qemu: Callable[[str], Path]) -> None:
    runs = qemu("echo early text; exec sleep 1000")
    answer = ask()
    assert not answer.usable and "did not boot" in answer.detail
    assert ask() == answer, "remembered"
    pids = runs.read_text().split()
    assert len(pids) == 1
    deadline = time.monotonic() + 10
    while start_ticks_of(int(pids[0])) is not None:
        assert time.monotonic() < deadline, "the guest goes on"
        time.sleep(0.01)


def test_a_guest_that_boots_ends_the_probe(ask: Ask, qemu: Callable[[str], Path]) -> None:
    runs = qemu("echo 'Kernel panic - not syncing: VFS'; exec sleep 1000")
    assert ask().usable
    assert ask().usable
    assert len(runs.read_text().split()) == 1


def test_a_bad_answer_is_asked_again_after_a_reboot_and_a_good_one_is_not(
    ask: Ask, qemu: Callable[[str], Path], tmp_path: Path
) -> None:
    runs, kept = qemu("echo no kvm for you; exit 1"), tmp_path / "answer.json"
    answer = ask()
    assert not answer.usable and "no kvm for you" in answer.detail
    kept.write_bytes(msgspec.json.encode(msgspec.structs.replace(answer, boot_id="earlier")))
    ask()
    assert len(runs.read_text().split()) == 2
    good = msgspec.structs.replace(answer, usable=True, boot_id="earlier")
    kept.write_bytes(msgspec.json.encode(good))
    assert ask() == good
    kept.write_bytes(msgspec.json.encode(msgspec.structs.replace(good, cpu="another")))
    assert not ask().usable
    kept.write_bytes(b"{")
    assert not ask().usable


def test_without_anything_to_boot_nothing_is_claimed(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OPENDSEC_FIRECRACKER", raising=False)
    answer = ask()
    assert not answer.usable and not answer.probed
    assert not (tmp_path / "answer.json").exists()

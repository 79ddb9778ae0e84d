# SPDX-License-Identifier: AGPL-3.0-only
"""Freezing groups, taking their memory, and the swap it goes to, on the real kernel."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import NotSupported
from opendsec_server.node.cgroups import CgroupSet, detect
from opendsec_server.node.cgroups.base import Limits
from opendsec_server.node.cgroups.v1 import CgroupV1
from opendsec_server.node.cgroups.v2 import CgroupV2
from opendsec_server.node.memory.swap import PauseSwap
from opendsec_server.node.tests.conftest import MakeNode
from tests.leaks import Snapshot
from tests.shares import instance_name

MB = 1024 * 1024
TOUCHED_MB = 256
WAIT_S = 10.0

# Half of each page is random: zram gets about what it gets from real programs.
PROGRAM = """
import hashlib, os, sys
size = int(sys.argv[1]) << 20
memory = bytearray(size)
for at in range(0, size, 4096):
    memory[at:at + 2048] = os.urandom(2048)
print(hashlib.sha256(memory).hexdigest(), flush=True)
for _ in sys.stdin:
    print(hashlib.sha256(memory).hexdigest(), flush=True)
"""

TICKS = """
import sys, time
while True:
    sys.stdout.write("x"); sys.stdout.flush(); time.sleep(0.002)
"""


@dataclass
class Groups:
    """Real groups of a test.

    Attributes:
        beside: Whether these are of version 2 on a host whose controllers are version 1's.
    """

    cgroups: CgroupSet
    beside: bool = False
    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def _make(self, sandbox_id: str) -> list[Path]:
        if self.beside:  # no controller lives there
            directory = self.cgroups.hierarchies()[0] / self.cgroups.root[1:] / sandbox_id
            directory.mkdir(parents=True, exist_ok=True)
            return [directory]
        return self.cgroups.create(sandbox_id, Limits(cpu=2, memory_bytes=1024 * MB, pids=64))

    def start(self, sandbox_id: str, code: str, *arguments: str) -> subprocess.Popen[bytes]:
        directories = self._make(sandbox_id)

        def join() -> None:
            for directory in directories:
                (directory / "cgroup.procs").write_text("0")

        program = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=join,
        )
        self.programs.append(program)
        return program


@pytest.fixture
def instance() -> str:
    return instance_name()


@pytest.fixture
def groups(request: pytest.FixtureRequest, instance: str) -> Iterator[Groups]:
    """Of the host's version; as parameter ``v2``: of version 2, if only beside version 1."""
    if os.geteuid() != 0:
        pytest.skip("control groups need root")
    mounts = Path("/proc/self/mountinfo").read_text()
    root = f"/opendsec-{instance}"
    if getattr(request, "param", "") == "v2":
        points = [line.split()[4] for line in mounts.splitlines() if " - cgroup2 " in line]
        if not points:
            pytest.skip("version 2 is not mounted")
        cgroups: CgroupSet = CgroupV2(root, Path(points[0]))
    else:
        cgroups = detect(root, mounts)
    before = Snapshot.take(instance)
    made = Groups(cgroups, beside=cgroups.kind != detect(root, mounts).kind)
    yield made
    for sandbox_id in cgroups.known():
        cgroups.kill(sandbox_id)
    for program in made.programs:
        program.kill()
        program.communicate()
    deadline = time.monotonic() + WAIT_S
    while not all(cgroups.remove(s) for s in cgroups.known()) and time.monotonic() < deadline:
        time.sleep(0.01)
    cgroups.remove_root()
    before.assert_nothing_new()


def ticks(program: subprocess.Popen[bytes], within_s: float) -> int:
    """How much a program wrote within a time, what was waiting first not counted."""
    assert program.stdout is not None
    fd = program.stdout.fileno()
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 65_536):
            pass
    time.sleep(within_s)
    try:
        return len(os.read(fd, 65_536))
    except BlockingIOError:
        return 0


both = pytest.mark.parametrize("groups", ["host", "v2"], indirect=True)


@both
async def test_frozen_stand_still_and_go_on(groups: Groups) -> None:
    program = groups.start("i1", TICKS)
    groups.start("i1", TICKS)
    assert not groups.cgroups.is_frozen("i1")
    assert program.stdout is not None
    assert program.stdout.read(1), "it runs"
    assert ticks(program, 0.5)
    await groups.cgroups.freeze("i1")
    assert groups.cgroups.is_frozen("i1")
    assert not ticks(program, 0.3)
    await groups.cgroups.freeze("i1")
    await groups.cgroups.thaw("i1")
    assert ticks(program, 0.5)
    assert not groups.cgroups.is_frozen("i1")


@both
async def test_killed_while_frozen(groups: Groups) -> None:
    program = groups.start("i1", TICKS)
    await groups.cgroups.freeze("i1")
    groups.cgroups.kill("i1")
    assert program.wait(WAIT_S) == -signal.SIGKILL


@both
async def test_no_such_group(groups: Groups) -> None:
    with pytest.raises(OSError):
        await groups.cgroups.freeze("i1")
    await groups.cgroups.thaw("i1")
    assert not groups.cgroups.is_frozen("i1")
    groups.cgroups.allow_swap("i1", True)
    assert groups.cgroups.memory_now("i1") is None
    assert await groups.cgroups.reclaim("i1", MB) == 0


async def test_no_freezer(tmp_path: Path) -> None:
    """Said, and not done by halves."""
    groups = CgroupV1("/od", {"memory": tmp_path}, hybrid=False)
    with pytest.raises(NotSupported, match="freezer"):
        await groups.freeze("i1")
    await groups.thaw("i1")
    assert not groups.is_frozen("i1")


async def test_reclaim_in_steps(tmp_path: Path) -> None:
    """Version 2: bounded steps, until enough or until a step brings nothing."""

    class Fake(CgroupV2):
        steps: list[int] = []  # noqa: RUF012
        at_least = 0

        def _reclaim_step(self, sandbox_id: str, step_bytes: int) -> None:
            self.steps.append(step_bytes)
            current = tmp_path / "od/i1/memory.current"
            now = int(current.read_text())
            current.write_text(str(max(self.at_least, now - step_bytes)))
            if now - step_bytes < self.at_least:
                raise BlockingIOError

    (tmp_path / "od/i1").mkdir(parents=True)
    (tmp_path / "od/i1/memory.current").write_text(str(200 * MB))
    groups = Fake("/od", tmp_path)
    assert await groups.reclaim("i1", 100 * MB) == 100 * MB
    assert groups.steps == [64 * MB, 36 * MB]
    groups.steps.clear()
    groups.at_least = 90 * MB
    assert await groups.reclaim("i1", 500 * MB) == 10 * MB
    assert len(groups.steps) == 2


# --- swap -------------------------------------------------------------------


@pytest.fixture
def config(instance: str) -> Iterator[Config]:
    state = Path(tempfile.mkdtemp(prefix="opendsec-swap-", dir="/var/tmp"))
    before = Snapshot.take(instance, (state,))
    yield Config(instance=instance, state_dir=str(state))
    before.assert_nothing_new()
    shutil.rmtree(state)


def swap_of(config: Config, kind: str, mb: int) -> PauseSwap:
    if os.geteuid() != 0:
        pytest.skip("swap needs root")
    if kind == "zram" and not Path("/sys/class/zram-control").is_dir():
        pytest.skip("this kernel has no zram")
    return PauseSwap(msgspec.structs.replace(config, pause_swap=kind, pause_swap_mb=mb))


def priorities() -> dict[str, int]:
    """By name; a path is only what the process saw that added it."""
    lines = Path("/proc/swaps").read_text().splitlines()[1:]
    return {Path(line.split()[0]).name: int(line.split()[-1]) for line in lines}


@pytest.mark.parametrize("kind", ["zram", "file"])
async def test_swap_comes_and_goes(config: Config, kind: str) -> None:
    others = priorities()
    swap = swap_of(config, kind, 64)
    assert swap.use() is None
    await swap.set_up()
    try:
        use = swap.use()
        assert use is not None
        assert use.size == 64 * MB - os.sysconf("SC_PAGE_SIZE")
        assert all(priorities()[Path(use.device).name] < priority for priority in others.values())
        # After a restart it is found again, and left alone.
        again = swap_of(config, kind, 64)
        await again.set_up()
        assert again.use() == use
        assert len(priorities()) == len(others) + 1
        # Another size, or none, replaces it.
        await swap_of(config, kind, 32).set_up()
        assert len(priorities()) == len(others) + 1
        await swap_of(config, "none", 0).set_up()
        assert priorities() == others
    finally:
        await swap.tear_down()
    await swap.tear_down()
    assert priorities() == others


async def test_two_instances_keep_apart(config: Config) -> None:
    one = swap_of(config, "zram", 32)
    two = swap_of(msgspec.structs.replace(config, instance="t0two"), "zram", 32)
    await one.set_up()
    await two.set_up()
    try:
        first, second = one.use(), two.use()
        assert first is not None
        assert second is not None
        assert first.device != second.device
        await one.tear_down()
        assert two.use() is not None
    finally:
        await one.tear_down()
        await two.tear_down()


async def test_file_system_without_swap_files(config: Config) -> None:
    """Refused with the reason, and nothing stays."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        swap = swap_of(msgspec.structs.replace(config, state_dir=directory), "file", 8)
        with pytest.raises(ConfigError, match="pause_swap"):
            await swap.set_up()
        assert not os.listdir(directory)


async def test_swap_file_on_btrfs(config: Config) -> None:
    if os.geteuid() != 0 or shutil.which("mkfs.btrfs") is None:
        pytest.skip("needs root and mkfs.btrfs")
    image, point = config.state_path / "image", config.state_path / "btrfs"
    with image.open("wb") as file:
        file.truncate(512 * MB)
    point.mkdir()
    subprocess.run(["mkfs.btrfs", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop,compress-force=zstd", image, point], check=True)
    try:
        swap = swap_of(msgspec.structs.replace(config, state_dir=str(point)), "file", 32)
        await swap.set_up()
        assert swap.use() is not None
        await swap.tear_down()
        assert swap.use() is None
    finally:
        subprocess.run(["umount", point], check=True)
        point.rmdir()
        image.unlink()


async def test_pause_takes_memory_and_resume_gives_it_back(config: Config, groups: Groups) -> None:
    """The figures are printed: ``pytest -s``."""
    cgroups = groups.cgroups
    swap = swap_of(config, "zram", 1024)
    cgroups.prepare()
    await swap.set_up()
    try:
        program = groups.start("i1", PROGRAM, str(TOUCHED_MB))
        assert program.stdout is not None
        assert program.stdin is not None
        content = program.stdout.readline()
        assert await cgroups.reclaim("i1", TOUCHED_MB * MB) < TOUCHED_MB * MB // 4, "runs: no swap"

        started = time.monotonic()
        await cgroups.freeze("i1")
        frozen = time.monotonic()
        before = cgroups.memory_now("i1")
        cgroups.allow_swap("i1", True)
        assert before is not None
        freed = await cgroups.reclaim("i1", before.resident)
        done = time.monotonic()
        after, use = cgroups.memory_now("i1"), swap.use()
        assert after is not None
        assert use is not None

        cgroups.allow_swap("i1", False)
        resumed = time.monotonic()
        await cgroups.thaw("i1")
        program.stdin.write(b"\n")
        program.stdin.flush()
        assert program.stdout.readline() == content
        answered = time.monotonic()
        digest_s = _digest_s()
        print(
            f"\n{cgroups.kind}: before {before}\nafter {after}\nfreed {freed / MB:.0f} MB "
            f"({100 * freed / before.resident:.1f} %), zram holds {use.used / MB:.0f} MB in "
            f"{use.stored / MB:.0f} MB; freeze {1e3 * (frozen - started):.1f} ms, reclaim "
            f"{1e3 * (done - frozen):.0f} ms, all content read after "
            f"{1e3 * (answered - resumed):.0f} ms (of it {1e3 * digest_s:.0f} ms checksum)"
        )
        assert before.resident >= TOUCHED_MB * MB
        assert freed >= 0.8 * before.resident
        assert after.swapped >= 0.8 * TOUCHED_MB * MB
    finally:
        cgroups.kill("i1")
        await swap.tear_down()


def _digest_s() -> float:
    memory = bytearray(TOUCHED_MB * MB)
    started = time.monotonic()
    hashlib.sha256(memory)
    return time.monotonic() - started


HOLD = """
import hashlib, os, pathlib, time
memory = bytearray(os.urandom(64 << 20)) + bytearray(64 << 20)
digest = lambda: hashlib.sha256(memory).hexdigest()
pathlib.Path("/tmp/before").write_text(digest())
while not os.path.exists("/tmp/go"):
    time.sleep(0.01)
pathlib.Path("/tmp/after.new").write_text(digest())
os.rename("/tmp/after.new", "/tmp/after")
"""


@pytest.mark.node
async def test_paused_sandbox_lies_in_swap(make_node: MakeNode) -> None:
    """Through a real node, which dies meanwhile and finds its swap again."""
    if not Path("/sys/class/zram-control").is_dir():
        pytest.skip("this kernel has no zram")
    node = make_node(pause_swap="zram", pause_swap_mb=512)
    await node.start()
    assert node.config_error is None
    spec = await node.create(memory_mb=512)
    await node.exec(spec, f"setsid python3 -c '{HOLD}' >/dev/null 2>&1 </dev/null &")
    code, _ = await node.exec(
        spec, "for i in $(seq 1000); do [ -s /tmp/before ] && exit; sleep 0.02; done; exit 1"
    )
    assert code == 0
    report = await node.call("pause", spec.sandbox_id)
    print({k: v for k, v in report.items() if k != "status"})
    assert report["memory_before_bytes"] >= 128 * MB
    assert report["memory_freed_bytes"] >= 0.8 * report["memory_before_bytes"]
    swaps = priorities()
    await node.kill9()
    await node.start()
    assert node.config_error is None
    assert priorities() == swaps
    await node.call("resume", spec.sandbox_id, end_at=time.time() + 60)
    _code, output = await node.exec(
        spec,
        "touch /tmp/go; for i in $(seq 1000); do [ -s /tmp/after ] && break; sleep 0.02; done; "
        "cmp /tmp/before /tmp/after && echo same",
    )
    assert output.strip() == "same"

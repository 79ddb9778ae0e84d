# SPDX-License-Identifier: AGPL-3.0-only
"""MicroVMs on a real node: life, pause, snapshots, faults. Emulated where there is no KVM."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from opendsec_server.config import ConfigError
from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.images import ReadyCheck, StartCommand
from opendsec_server.contract.node import SandboxSpec
from opendsec_server.node.vmm.qemu.program import find_qemu

from .conftest import MakeNode
from .layered import OPAQUE, WHITEOUT, Tree, busybox, make_image, store_of
from .machine import CallError, NodeProcess
from .test_images import sh
from .test_restart import again

pytestmark = [pytest.mark.node]


@pytest.fixture(autouse=True)
def _qemu() -> None:
    try:
        find_qemu(None)
    except ConfigError as exc:
        pytest.skip(f"no microVMs: {exc}")


async def create(node: NodeProcess, **changes: Any) -> SandboxSpec:
    return await node.create(backend="microvm", memory_mb=256, disk_mb=512, **changes)


async def resume(node: NodeProcess, spec: SandboxSpec, **options: Any) -> dict[str, Any]:
    status: dict[str, Any] = await node.call(
        "resume", spec.sandbox_id, end_at=time.time() + 600, **options
    )
    return status


async def snapshot(node: NodeProcess, spec: SandboxSpec, **options: Any) -> dict[str, Any]:
    saved: dict[str, Any] = await node.call(
        "snapshot", spec.sandbox_id, random_chars(20), **options
    )
    return saved


def vmm_pid(node: NodeProcess, sandbox_id: str) -> int:
    groups = f"**/opendsec-{node.config.instance}/{sandbox_id}/cgroup.procs"
    for procs in Path("/sys/fs/cgroup").glob(groups):
        for pid in procs.read_text().split():
            return int(pid)
    raise AssertionError("no VMM")


async def check_clock(node: NodeProcess, spec: SandboxSpec) -> None:
    """The guest's clock is the host's, within half a second (and what the call took)."""
    before = time.time()
    _code, now = await node.exec(spec, "date +%s.%N")
    assert before - 0.5 < float(now) < time.time() + 0.5


UNIQUE = (
    "cat /proc/sys/kernel/random/boot_id /etc/machine-id; hostname; "
    "head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid"
)


async def test_life_and_siblings(node: NodeProcess) -> None:
    """Two of one template: each is its own machine."""
    specs = [await create(node) for _ in range(2)]
    status = await node.call("get", specs[0].sandbox_id)
    assert status["backend"] == "microvm"
    assert status["accelerator"] in ("kvm", "tcg")
    assert status["vmm"].startswith(("qemu ", "firecracker "))
    seen = [(await node.exec(spec, UNIQUE))[1].split("\n") for spec in specs]
    for one, other in zip(*seen, strict=True):
        assert one != other or one == ""
    assert (await node.exec(specs[0], "id -un; uname -r; sudo id -u; pwd"))[1].split() == [
        "user",
        (await node.exec(specs[1], "uname -r"))[1].strip(),
        "0",
        "/home/user",
    ]
    for spec in specs:
        await check_clock(node, spec)
    _code, out = await node.exec(specs[0], "df -B1 --output=size / | tail -1; nproc; free -m")
    assert 300 << 20 < int(out.split()[0]) <= 512 << 20
    for spec in specs:
        assert (await node.call("kill", spec.sandbox_id))["reason"] == "killed"


async def test_pauses_lose_nothing(node: NodeProcess) -> None:
    spec = await create(node)
    await node.exec(spec, "(while sleep 0.05; do echo >>/tmp/beat; done) >/dev/null 2>&1 & exit 0")
    _code, identity = await node.exec(spec, "cat /proc/sys/kernel/random/boot_id; hostname")
    for turn in range(6):
        await node.exec(spec, f"echo {turn} >>~/turns; sync")
        report = await node.call("pause", spec.sandbox_id)
        assert report["status"]["pause_mode"] == "full"
        assert report["stored_bytes"] < 256 << 20
        groups = Path("/sys/fs/cgroup").glob(f"**/opendsec-{node.config.instance}/*/cgroup.procs")
        assert not [g for g in groups if g.read_text()]
        await resume(node, spec)
    assert (await node.exec(spec, "cat ~/turns"))[1].split() == [str(t) for t in range(6)]
    assert (await node.exec(spec, "cat /proc/sys/kernel/random/boot_id; hostname"))[1] == identity
    await check_clock(node, spec)
    beats = [int((await node.exec(spec, "wc -l </tmp/beat"))[1]) for _ in range(2)]
    assert beats[1] > beats[0]


async def test_filesystem_pause_and_reboot(node: NodeProcess) -> None:
    spec = await create(node)
    await node.exec(spec, "echo kept >~/file; sleep 1000 >/dev/null 2>&1 & exit 0")
    _code, boot = await node.exec(spec, "cat /proc/sys/kernel/random/boot_id")
    await node.call("pause", spec.sandbox_id, mode="filesystem")
    await resume(node, spec)
    assert (await node.exec(spec, "cat ~/file; pgrep sleep || echo none"))[1] == "kept\nnone\n"
    assert (await node.exec(spec, "cat /proc/sys/kernel/random/boot_id"))[1] != boot
    await node.exec(spec, "sync; sleep 1000 >/dev/null 2>&1 & exit 0")
    await node.call("pause", spec.sandbox_id)
    await resume(node, spec, reboot=True)
    assert (await node.exec(spec, "cat ~/file; pgrep sleep || echo none"))[1] == "kept\nnone\n"


async def test_forks_of_forks(node: NodeProcess) -> None:
    """Memory and disk of the instant, six deep; parents are killed on the way."""
    spec = await create(node)
    await node.exec(spec, "(while sleep 0.05; do echo >>/tmp/beat; done) >/dev/null 2>&1 & exit 0")
    for depth in range(6):
        await node.exec(spec, f"echo {depth} >>~/depth")
        saved = await snapshot(node, spec, ephemeral=True)
        assert saved["memory_bytes"] > 0
        child = await create(node, snapshot_id=saved["snapshot_id"])
        await node.call("delete_snapshot", saved["snapshot_id"])
        await node.exec(spec, "echo parent >>~/depth")
        await node.call("kill", spec.sandbox_id)
        spec = child
    assert (await node.exec(spec, "cat ~/depth"))[1].split() == [str(d) for d in range(6)]
    assert (await node.exec(spec, "hostname"))[1].strip() == spec.sandbox_id
    beats = [int((await node.exec(spec, "wc -l </tmp/beat"))[1]) for _ in range(2)]
    assert beats[1] > beats[0]
    await node.call("pause", spec.sandbox_id)
    await resume(node, spec)
    assert (await node.exec(spec, "cat ~/depth"))[1].split() == [str(d) for d in range(6)]


async def test_vmm_killed_and_kernel_panic(node: NodeProcess) -> None:
    spec = await create(node)
    os.kill(vmm_pid(node, spec.sandbox_id), signal.SIGKILL)
    status = await node.wait_state(spec.sandbox_id, "ended")
    assert (status["reason"], "signal 9" in status["message"]) == ("vmm_failed", True)
    spec = await create(node)
    # Later: nobody would answer a call that a panic interrupts.
    panic = "(sleep 1; echo c >/proc/sysrq-trigger) >/dev/null 2>&1 & exit 0"
    await node.exec(spec, panic, user="root")
    status = await node.wait_state(spec.sandbox_id, "ended")
    assert status["reason"] == "kernel_panic", status
    assert "Kernel panic" in status["message"]


@pytest.mark.parametrize("file", ["ram", "devices", "manifest.json"])
async def test_damaged_memory_is_never_used(node: NodeProcess, file: str) -> None:
    spec = await create(node)
    await node.exec(spec, "echo kept >~/file; sync")
    await node.call("pause", spec.sandbox_id)
    memory = node.config.state_path / "pool/sandboxes" / spec.sandbox_id / "memory"
    path = memory / file
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CallError) as error:
        await resume(node, spec)
    assert error.value.code == "snapshot_damaged"
    assert await node.state(spec.sandbox_id) == "paused"
    await resume(node, spec, reboot=True)
    assert (await node.exec(spec, "cat ~/file"))[1] == "kept\n"


async def test_full_disk_loses_nothing(make_node: MakeNode) -> None:
    """The pool is filled up while memory is saved: a typed error, and it runs on."""
    node = make_node(disk_pool_mb=1_536)
    await node.start()
    spec = await create(node)
    await node.exec(spec, "head -c 80M /dev/urandom >/dev/shm/fill; echo kept >~/file; sync")
    pool = node.config.state_path / "pool"
    fill = pool / "fill"
    with fill.open("wb") as file, pytest.raises(OSError):
        while True:
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    with pytest.raises(CallError) as error:
        await node.call("pause", spec.sandbox_id)
    assert error.value.code in ("node_full", "snapshot_failed")
    fill.unlink()
    assert await node.state(spec.sandbox_id) == "running"
    assert (await node.exec(spec, "cat ~/file"))[1] == "kept\n"
    await node.call("pause", spec.sandbox_id)
    await resume(node, spec)
    assert (await node.exec(spec, "cat ~/file; stat -c %s /dev/shm/fill"))[1].split() == [
        "kept",
        str(80 << 20),
    ]


@pytest.mark.parametrize(
    "point",
    ["pause:begun", "pause:saved", "pause:run ended", "resume:begun", "resume:runs",
     "snapshot:frozen", "snapshot:made"],
)  # fmt: skip
async def test_daemon_killed_in_the_middle(make_node: MakeNode, point: str) -> None:
    node = make_node()
    await node.start(OPENDSEC_CRASH_AT=point)
    spec = await create(node)
    await node.exec(spec, "echo kept >~/file; sleep 1000 >/dev/null 2>&1 & exit 0")
    with pytest.raises(ConnectionError):
        if point.startswith("snapshot"):
            await snapshot(node, spec)
        else:
            await node.call("pause", spec.sandbox_id)
            await resume(node, spec)
    await node.wait()
    await again(node)
    if await node.state(spec.sandbox_id) == "paused":
        await resume(node, spec)
    assert (await node.exec(spec, "cat ~/file; pgrep -c sleep"))[1] == "kept\n1\n"
    assert await node.call("snapshots") == []
    await asyncio.sleep(0)


# --- images -------------------------------------------------------------------


async def test_layers_start_command_and_pack(node: NodeProcess) -> None:
    """One machine with more layers than it has disks; then one of what was packed of it."""
    trees: list[Tree] = [{"top": str(n), f"files/{n}": "x"} for n in range(14)]
    last: Tree = {"files/0": WHITEOUT, "data": OPAQUE, "data/new": "new"}
    image = await make_image(store_of(node.config), busybox() | {"data/old": "old"}, *trees, last)
    start = StartCommand(
        argv=("sh", "-c", "echo run >> /runs; exec sleep 7777"),
        user="root",
        workdir="/",
        ready=ReadyCheck(command="cat /runs"),
    )
    options = {"default_user": "root", "default_workdir": "/"}
    spec = await create(node, image=image.digest, start=start, **options)
    look = "cat /top /runs; ls /files | grep -c .; ls /data; ps | grep -c '[s]leep 7777'"
    assert await sh(node, spec, look) == "13run\n13\nnew\n1\n"
    sibling = await create(node, image=image.digest, start=start, **options)
    assert await sh(node, sibling, look) == "13run\n13\nnew\n1\n", "from memory: not run again"
    await sh(node, spec, "rm /top; echo mine > /data/mine; echo hush > /.ash_history")
    packed = await node.call("pack", spec.sandbox_id, {"name": "mine"})
    assert await sh(node, spec, "cat /data/mine") == "mine\n", "it goes on"
    await sh(node, spec, "echo later > /data/later")
    await node.call("pause", spec.sandbox_id)
    again_packed = await node.call("pack", spec.sandbox_id, {"squash": True})
    assert len(again_packed["layers"]) == 1
    await node.call("kill", spec.sandbox_id)
    await node.call("kill", sibling.sandbox_id)
    child = await node.create(image=packed["digest"], **options)
    look = "ls -A / | grep -e top -e hist -e runs; ls /data /lib"
    assert await sh(node, child, look) == "runs\n/data:\nmine\nnew\n\n/lib:\nmodules\n"
    child = await node.create(image=again_packed["digest"], **options)
    assert await sh(node, child, "ls /data") == "later\nmine\nnew\n"
    assert not list((node.config.state_path / "pool/snapshots").iterdir())


async def test_a_start_command_that_fails(node: NodeProcess) -> None:
    for script, ready, code, words in (
        ("echo no luck; exit 7", ReadyCheck(port=1), "sandbox_start_failed", "status 7"),
        ("sleep 999", ReadyCheck(port=1, timeout_s=2), "start_timeout", "port 1"),
    ):
        start = StartCommand(argv=("/bin/sh", "-c", script), ready=ready)
        with pytest.raises(CallError, match=words) as error:
            await create(node, start=start)
        assert error.value.code == code
    assert await node.call("list") == []
    assert not list((node.config.state_path / "pool/templates").iterdir())


async def test_killed_while_packing(make_node: MakeNode) -> None:
    node = make_node()
    await node.start(OPENDSEC_CRASH_AT="pack:mounted")
    spec = await create(node)
    await node.exec(spec, "echo kept > ~/file")
    with pytest.raises(ConnectionError):
        await node.call("pack", spec.sandbox_id, {})
    await node.wait()
    await again(node)
    assert await node.state(spec.sandbox_id) == "running"
    assert not list((node.config.state_path / "pool/snapshots").iterdir())
    packed = await node.call("pack", spec.sandbox_id, {})
    child = await node.create(image=packed["digest"])
    assert (await node.exec(child, "cat ~/file"))[1] == "kept\n"

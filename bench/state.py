# SPDX-License-Identifier: AGPL-3.0-only
"""Restore, pause, resume, fork, and memory of siblings: what saved state costs.

    sudo .venv/bin/python -m bench.state [--backend microvm|container] [--count 10]
        [--pause-swap zram|file]

- restore: create from the template's memory until the first command has answered, against a bare
  VMM restore of the same memory (process start until the processors run; no API, no network slot,
  no command), in the same run.
- pause and resume of a sandbox that has touched 256 MiB.
- fork(8), against eight creates from one snapshot, one after the other; and how long the source
  stood still, by the node's own record of its states.
- memory of 16 idle machines of one template against 16 that booted (proportional share of pages).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from bench.server import bench_server
from bench.stats import Result, print_ratio, print_results, summarise, write_json
from opendsec import Client, Sandbox
from opendsec_server.binaries import find_agent
from opendsec_server.images.guest import ensure_guest, guest_cmdline
from opendsec_server.images.guest.cmdline import GUEST_MAC, layer_serial
from opendsec_server.images.store import ImageStore
from opendsec_server.node.storage.reflink import clone_file
from opendsec_server.node.vmm.base import VmConfig, VmDisk
from opendsec_server.node.vmm.qemu import QemuVmm
from tests.harness import Server

TOUCH = (
    "python3 -c 'import os, time\n"
    "held = bytearray(256 << 20)\n"
    "for at in range(0, len(held), 1 << 20): held[at : at + (1 << 20)] = os.urandom(1 << 20)\n"
    'print("touched", flush=True)\ntime.sleep(100000)\' >/tmp/touched 2>&1 & '
    "while ! grep -q touched /tmp/touched; do kill -0 $! || exit 1; sleep 0.3; done"
)
MEMORY_MB = 512
SIBLINGS = 16
FORKS = 8
_UID = 64_999


def restores(client: Client, backend: str, count: int) -> list[Result]:
    """Create (its answer means that the guest agent has answered), and until the first command."""
    made: list[Sandbox] = []
    creates, commands = [], []
    client.create(backend=backend, memory_mb=256, disk_mb=1024).kill()  # makes the template
    for _ in range(count):
        started = time.perf_counter()
        sandbox = client.create(backend=backend, memory_mb=256, disk_mb=1024)
        creates.append(time.perf_counter() - started)
        assert sandbox.exec("true").exit_code == 0
        commands.append(time.perf_counter() - started)
        made.append(sandbox)
    for sandbox in made:
        sandbox.kill()
    return [
        summarise(f"{backend}: create, agent has answered", 1, creates),
        summarise(f"{backend}: create and first command", 1, commands),
    ]


@contextlib.contextmanager
def namespace_with_tap() -> Iterator[int]:
    """A network namespace with the tap that a machine wants; yields a descriptor of it."""
    name = f"bench{os.getpid()}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", name)
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        ip("-n", name, "tuntap", "add", "tap0", "mode", "tap", "user", str(_UID), "vnet_hdr")
        ip("-n", name, "link", "set", "tap0", "up")
        yield fd
    finally:
        os.close(fd)
        ip("netns", "delete", name)


async def bare_restores(server: Server, count: int) -> Result:
    """The VMM alone, from the server's own template."""
    state = server.config.state_path
    template = next(
        path for path in (state / "pool/templates").iterdir() if (path / "memory").is_dir()
    )
    vmm = QemuVmm(server.config, "tcg")
    await vmm.probe()
    images = ImageStore(state / "images")
    guest = await ensure_guest(server.config, state / "images", find_agent(server.config))
    durations = []
    work = state / "pool/bench"
    work.mkdir()
    with namespace_with_tap() as netns:
        for number in range(count):
            run_dir, disk = work / f"run{number}", work / f"disk{number}"
            run_dir.mkdir(mode=0o700)
            clone_file(template / "disk.ext4", disk)
            layer = images.layer_path(images.find("base").layers[0])
            config = VmConfig(
                sandbox_id=f"bench{number}",
                vcpus=2,
                memory_mb=256,
                kernel=guest.kernel,
                kernel_elf=guest.kernel_elf,
                initramfs=guest.initramfs,
                cmdline=guest_cmdline(layers=1),
                disks=(
                    VmDisk(serial=layer_serial(0), path=layer),
                    VmDisk(serial="modules", path=guest.modules_erofs),
                    VmDisk(serial="disk", path=disk, read_only=False),
                ),
                tap="tap0",
                guest_mac=GUEST_MAC,
                netns_fd=netns,
                run_dir=run_dir,
                cgroups=(),
                uid=_UID,
                gid=_UID,
                kernel_id=guest.kernel_version,
                agent_id=guest.agent_sha256,
            )
            started = time.perf_counter()
            pid = await vmm.restore(config, template / "memory")
            durations.append(time.perf_counter() - started)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            vmm.release(run_dir)
    shutil.rmtree(work)
    return summarise("bare restore by the VMM", 1, durations)


def pauses(client: Client, backend: str, count: int) -> list[Result]:
    """Pause and resume, with 256 MiB touched."""
    sandbox = client.create(backend=backend, memory_mb=MEMORY_MB, disk_mb=2048, timeout_s=3600)
    assert sandbox.exec(TOUCH).exit_code == 0
    pausing, resuming, stored, freed, before = [], [], [], [], []
    for _ in range(count):
        started = time.perf_counter()
        report = sandbox.pause()
        pausing.append(time.perf_counter() - started)
        stored.append(report.stored_bytes >> 20)
        before.append(report.memory_before_bytes >> 20)
        freed.append(report.memory_freed_bytes >> 20)
        started = time.perf_counter()
        sandbox.resume(timeout_s=3600)
        assert sandbox.exec("pgrep -c python3").exit_code == 0
        resuming.append(time.perf_counter() - started)
    sandbox.kill()
    print(f"{backend}: MiB written by each pause: {stored}")
    print(f"{backend}: MiB in memory before: {before}, freed: {freed}")
    return [
        summarise(f"{backend}: pause, 256 MiB touched", 1, pausing),
        summarise(f"{backend}: resume and first command", 1, resuming),
    ]


def forks(client: Client, backend: str, count: int) -> list[Result]:
    """fork(8) against eight creates from one snapshot."""
    mode: Literal["full", "filesystem"] = "full" if backend == "microvm" else "filesystem"
    source = client.create(backend=backend, memory_mb=256, disk_mb=1024, timeout_s=3600)
    source.exec("true")
    forked, single = [], []
    for _ in range(count):
        started = time.perf_counter()
        children = source.fork(FORKS, mode=mode)
        forked.append(time.perf_counter() - started)
        for child in children:
            assert isinstance(child, Sandbox), child
            assert child.exec("true").exit_code == 0
            child.kill()
        snapshot = source.snapshot(mode=mode)
        started = time.perf_counter()
        made = [client.create(template=snapshot.snapshot_id) for _ in range(FORKS)]
        single.append(time.perf_counter() - started)
        for sandbox in made:
            sandbox.kill()
        client.snapshots.delete(snapshot.snapshot_id)
    stood = []
    changes = client.transitions(source.sandbox_id)
    for one, next_one in itertools.pairwise(changes):
        if one.to == "pausing" and next_one.to == "running":
            stood.append((next_one.at - one.at).total_seconds())
    source.kill()
    return [
        summarise(f"{backend}: fork({FORKS})", 1, forked),
        summarise(f"{backend}: {FORKS} creates of a snapshot", 1, single),
        summarise(f"{backend}: source stands still", 1, stood),
    ]


def proportional_kb(server: Server) -> int:
    """Proportional share of memory of all VMMs of this server, in KiB."""
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if f"opendsec-{server.config.instance}/" not in (folder / "cgroup").read_text():
                continue
            for line in (folder / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total


def siblings(server: Server, client: Client) -> None:
    """16 restored machines against 16 that booted."""
    made = [client.create(backend="microvm", memory_mb=256, disk_mb=1024) for _ in range(SIBLINGS)]
    time.sleep(5)
    restored = proportional_kb(server)
    for sandbox in made:
        sandbox.kill()
    booted_one = client.create(backend="microvm", memory_mb=256, disk_mb=1024, timeout_s=3600)
    booted = [booted_one]
    booted += [
        client.create(backend="microvm", memory_mb=256, disk_mb=1024, timeout_s=3600)
        for _ in range(SIBLINGS - 1)
    ]
    for sandbox in booted:
        sandbox.pause(mode="filesystem")
        sandbox.resume(timeout_s=3600)  # without memory: its kernel boots
    time.sleep(5)
    cold = proportional_kb(server)
    for sandbox in booted:
        sandbox.kill()
    print(
        f"memory of {SIBLINGS} idle machines: of one template {restored >> 10} MiB, "
        f"booted {cold >> 10} MiB: {restored / cold:.2f}x"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="microvm", choices=["microvm", "container"])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--pause-swap", choices=["zram", "file"], help="as in the settings")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    results: list[Result] = []
    settings: dict[str, object] = {}
    if options.pause_swap is not None:
        settings = {"pause_swap": options.pause_swap, "pause_swap_mb": 4096}
    with bench_server(**settings) as server:
        client = Client(base_url=server.url, api_key=server.api_key)
        with client:
            answered, first = restores(client, options.backend, options.count)
            results += [answered, first]
            if options.backend == "microvm":
                bare = asyncio.run(bare_restores(server, options.count))
                results.append(bare)
                print_ratio(
                    "create, agent has answered / bare restore, p50",
                    answered.p50_ms,
                    bare.p50_ms,
                    "no limit of its own",
                )
                print_ratio(
                    "create and first command / bare restore, p50",
                    first.p50_ms,
                    bare.p50_ms,
                    "at most 1.5, aim 1.2",
                )
            results += pauses(client, options.backend, options.count)
            forked, single, stood = forks(client, options.backend, max(3, options.count // 3))
            results += [forked, single, stood]
            print_ratio(
                f"fork({FORKS}) / {FORKS} creates of a snapshot, p50",
                forked.p50_ms,
                single.p50_ms,
                "at most 0.7",
            )
            if options.backend == "microvm":
                siblings(server, client)
    print_results(results)
    write_json(options.json, results)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: AGPL-3.0-only
"""Pause, resume and kill of a whole task: real containers, and simulated ones on many nodes.

sudo .venv/bin/python -m bench.tasks --real 500
.venv/bin/python -m bench.tasks --simulated 32768 --nodes 160
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
import uvloop

from bench.server import bench_server, cpu_ticks, resident_kb
from bench.simulated import fill, fleet_of, simulated_nodes
from opendsec import Client
from opendsec_server.config import Config
from opendsec_server.contract.states import State
from opendsec_server.control.services import Services
from opendsec_server.store.task_operations import OperationParams
from tests.leaks import Snapshot

TASK = "bench"
MIB = 1 << 20
NODES_PER_PROCESS = 80
HERTZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Figures:
    """One operation on the whole task."""

    kind: str
    count: int
    begin_ms: float
    first_ms: float
    took_s: float
    failed: int
    memory_freed_mib: float
    cpu_s: float
    """Processor time of the control plane: what a busy machine does not change."""

    def line(self) -> str:
        """For people."""
        return (
            f"{self.kind:8} {self.count:7} {self.begin_ms:10.1f} {self.first_ms:10.1f} "
            f"{self.took_s:9.2f} {self.count / self.took_s:9.0f} {self.failed:6} "
            f"{self.memory_freed_mib:10.0f} {self.cpu_s:7.1f}"
        )


def print_table(title: str, rows: list[Figures]) -> None:
    """What was measured."""
    print(title)
    print(
        f"{'':8} {'n':>7} {'begun ms':>10} {'first ms':>10} {'took s':>9} {'per s':>9} "
        f"{'failed':>6} {'freed MiB':>10} {'CPU s':>7}"
    )
    for row in rows:
        print(row.line())
    print(flush=True)


# --- real containers ----------------------------------------------------------------------


def real(count: int, fill_mib: int, concurrency: int) -> list[Figures]:
    """A task of real containers on one node, by the SDK."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(bench_server(slots_ready=64))
        client = stack.enter_context(Client(base_url=server.url, api_key=server.api_key))
        started = time.perf_counter()
        _make(client, count, fill_mib, concurrency)
        print(f"{count} containers made in {time.perf_counter() - started:.1f} s")
        pid = server.daemon()
        assert pid is not None
        rows = []
        for kind in ("pause", "resume", "pause", "kill"):
            rows.append(_operate(client, kind, pid.pid))
            print(rows[-1].line(), flush=True)
        started = time.perf_counter()
        task = client.tasks.get(TASK)
        print(f"show: {(time.perf_counter() - started) * 1e3:.1f} ms; used: {task.usage}")
        print(f"server: {resident_kb(pid.pid) / 1024:.0f} MiB resident")
        assert task.sandboxes.live == 0
    left = Snapshot.take("bench", (server.root,)).seen
    print(f"left behind: {sorted(left) or 'nothing'}")
    assert not left
    return rows


def _make(client: Client, count: int, fill_mib: int, concurrency: int) -> None:
    def one(_number: int) -> None:
        box = client.create(task_id=TASK, memory_mb=64, disk_mb=64, cpu=0.5, timeout_s=7_200)
        # What a pause can give back: file cache, as programs leave it behind.
        box.exec(f"head -c {fill_mib * MIB} /dev/zero | tr '\\0' a > /tmp/filled", check=True)

    with ThreadPoolExecutor(concurrency) as pool:
        for _ in pool.map(one, range(count)):
            pass


def _operate(client: Client, kind: str, pid: int) -> Figures:
    started, ticks = time.perf_counter(), cpu_ticks(pid)
    operation = getattr(client.tasks, kind)(TASK)
    begun = first = time.perf_counter()
    for number, _outcome in enumerate(operation):
        if number == 0:
            first = time.perf_counter()
    info = operation.info
    return Figures(
        kind=kind,
        count=info.asked,
        begin_ms=(begun - started) * 1e3,
        first_ms=(first - started) * 1e3,
        took_s=time.perf_counter() - started,
        failed=info.failed,
        memory_freed_mib=info.memory_freed_bytes / MIB,
        cpu_s=(cpu_ticks(pid) - ticks) / HERTZ,
    )


# --- simulated nodes ----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _plane(state: Path, urls: list[str]) -> AsyncIterator[Services]:
    services = await Services.start(Config(state_dir=str(state)), fleet_of(urls))
    try:
        yield services
    finally:
        await services.stop()


async def simulated(count: int, nodes: int, *, measured: bool) -> list[Figures]:
    """A task of simulated sandboxes on many nodes, that the real control plane works on."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="opendsec-bench-") as text:
        directory = Path(text)
        (directory / "state").mkdir(mode=0o700)
        serving = simulated_nodes(
            nodes, directory, measured=measured, per_process=NODES_PER_PROCESS
        )
        with serving as urls:
            async with _plane(directory / "state", urls) as services:
                key = services.config.api_key_file.read_text().strip()
                caller = await services.iam.authenticate(key)
                await fill(services.store, urls, caller.project_id, count, task_id=TASK)
                for kind in ("pause", "resume", "kill"):
                    started, used = time.perf_counter(), time.process_time()
                    operation, _ = await services.tasks.operate(
                        caller, TASK, kind, OperationParams()
                    )
                    begun, first = time.perf_counter(), 0.0
                    async for now, items in services.tasks.follow(operation):
                        operation = now
                        if items and not first:
                            first = time.perf_counter()
                    rows.append(
                        Figures(
                            kind=kind,
                            count=operation.asked,
                            begin_ms=(begun - started) * 1e3,
                            first_ms=(first - started) * 1e3,
                            took_s=time.perf_counter() - started,
                            failed=operation.failed,
                            memory_freed_mib=operation.memory_freed_bytes / MIB,
                            cpu_s=time.process_time() - used,
                        )
                    )
                    print(rows[-1].line(), flush=True)
                started = time.perf_counter()
                view = await services.tasks.get(caller, TASK)
                print(f"show: {(time.perf_counter() - started) * 1e3:.1f} ms")
                print(f"control plane: {resident_kb(os.getpid()) / 1024:.0f} MiB resident")
                assert all(one.state is State.ENDED for one in view.counts)
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", type=int, default=0, help="containers on this machine")
    parser.add_argument("--fill-mib", type=int, default=4, help="file cache in each of them")
    parser.add_argument("--concurrency", type=int, default=16, help="creates at one time")
    parser.add_argument("--simulated", type=int, default=0, help="sandboxes on simulated nodes")
    parser.add_argument("--nodes", type=int, default=160)
    parser.add_argument(
        "--measured", action="store_true", help="simulated nodes take as long as real ones"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    found: dict[str, list[Figures]] = {}
    if args.real:
        found["real"] = real(args.real, args.fill_mib, args.concurrency)
        print_table(f"task of {args.real} containers on one node", found["real"])
    if args.simulated:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found["simulated"] = runner.run(
                simulated(args.simulated, args.nodes, measured=args.measured)
            )
        print_table(
            f"task of {args.simulated} simulated sandboxes on {args.nodes} nodes",
            found["simulated"],
        )
    if args.json:
        figures = {name: [asdict(row) for row in rows] for name, rows in found.items()}
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: AGPL-3.0-only
"""The control plane against simulated nodes that speak the node protocol over HTTP.

.venv/bin/python -m bench.scale --placement            # decisions: how long, as nodes grow
.venv/bin/python -m bench.scale --protocol             # creates through the protocol, no store
.venv/bin/python -m bench.scale --curve                # 1,000 to 380,000 live records

Everything runs on this machine: the nodes' processes take their share of its processors, and each
line says how much processor time the gateway itself took. Decisions are timed in processor time,
so that what else runs here does not show. What is compared is within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa
import structlog
import uvloop

from bench.server import resident_kb
from bench.simulated import addresses, fill, fleet_of, simulated_nodes
from bench.stats import percentile
from opendsec_server.config import Config
from opendsec_server.contract.ids import new_sandbox_id, random_chars
from opendsec_server.contract.node import SandboxSpec
from opendsec_server.control.batches.params import BatchParams
from opendsec_server.control.params import CreateParams
from opendsec_server.control.placement import Need, Placement, Standing
from opendsec_server.control.services import Services
from opendsec_server.store.quotas import NO_LIMIT
from opendsec_server.store.store import Store
from opendsec_server.store.tables import PROJECTS
from tests.sim.serve import node_id

SINGLES = 500
PARAMS = CreateParams(template="base", cpu=1.0, memory_mb=512, disk_mb=512, timeout_s=86_400)


def cpu_s() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- decisions ----------------------------------------------------------------------------


def placement(count: int) -> None:
    """How long one decision takes, as nodes grow; half of them with no room in the last rows."""
    print(f"{'nodes':>6} {'with room':>10} {'decisions/s':>12} {'p50 us':>8} {'p99 us':>8}")
    for nodes, with_room in ((10, 1.0), (160, 1.0), (160, 0.5), (160, 0.02), (1_000, 1.0)):
        chooser = Placement(random.Random(1))
        rng = random.Random(2)
        for number in range(nodes):
            chooser.add(_standing(number, rng, has_room=rng.random() < with_room))
        needs = [
            Need(backend="container", cpu=1.0, memory_mb=512, disk_mb=512, task_id=f"t{n % 50}")
            for n in range(1_000)
        ]
        durations, now = [], 0.0
        gc.collect()
        for number in range(count):
            now += 1 / 5_000
            if number % 10_000 == 0:
                # Reports come every two seconds.
                for node in chooser.nodes:
                    node.sandboxes += node.unseen
                    node.reported(now)
            started = time.thread_time_ns()
            chooser.choose(needs[number % 1_000], now=now)
            durations.append(time.thread_time_ns() - started)
        values = sorted(duration / 1_000 for duration in durations)
        print(
            f"{nodes:6} {with_room:10.0%} {1e6 * count / sum(values):12,.0f} "
            f"{percentile(values, 0.5):8.1f} {percentile(values, 0.99):8.1f}",
            flush=True,
        )


def _standing(number: int, rng: random.Random, *, has_room: bool) -> Standing:
    node = Standing(node_id(number))
    node.health = "up"
    node.backends = frozenset({"container"})
    node.cpu_count = 192
    node.memory_total_mb = node.memory_free_mb = 1_536 * 1_024
    node.disk_free_mb = 1 << 22
    node.sandboxes = rng.randrange(2_000)
    node.sandboxes_max = 1_000_000 if has_room else 0
    node.cpu_used = rng.random() * 0.5
    return node


# --- the protocol -------------------------------------------------------------------------


async def protocol(urls: list[str], count: int, concurrency: int) -> None:
    """Choose a node and create there: no store, one gateway process."""
    fleet = fleet_of(urls)
    await fleet.start()
    left = iter(range(count))
    durations: list[float] = []
    decisions: list[float] = []

    async def worker() -> None:
        for _ in left:
            started = time.perf_counter()
            need = Need(backend="container", cpu=1.0, memory_mb=512, disk_mb=512)
            chosen = fleet.choose(need)
            decisions.append(time.perf_counter() - started)
            await fleet.create(_spec(chosen.node_id))
            durations.append(time.perf_counter() - started)

    before, began = cpu_s(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    took, used = time.perf_counter() - began, cpu_s() - before
    await fleet.stop()
    ms = sorted(1e3 * duration for duration in durations)
    us = sorted(1e6 * decision for decision in decisions)
    print(
        f"{count:8} creates, {concurrency} at once: {count / took:8,.0f}/s; "
        f"{count / used:8,.0f} for each second of this process's time; "
        f"p50 {percentile(ms, 0.5):.1f} ms, p99 {percentile(ms, 0.99):.1f} ms; "
        f"decision p99 {percentile(us, 0.99):.0f} us",
        flush=True,
    )


def _spec(node: str) -> SandboxSpec:
    now = time.time()
    return SandboxSpec(
        sandbox_id=new_sandbox_id(node),
        project_id="p",
        template_id="t",
        image="base",
        cpu=1.0,
        memory_mb=512,
        disk_mb=512,
        env={},
        created_at=now,
        end_at=now + 300,
        access_token="a" * 64,
        traffic_token="t" * 64,
        control_token="c" * 64,
    )


# --- the whole control plane --------------------------------------------------------------


async def _fill(state: Path, urls: list[str], count: int) -> None:
    store = await Store.open(Config(state_dir=str(state)))
    try:
        project_id = await store.read(
            lambda connection: connection.execute(
                sa.text("SELECT project_id FROM projects ORDER BY created_at LIMIT 1")
            ).scalar_one()
        )
        await fill(store, urls, project_id, count)
    finally:
        await store.close()


async def measure(state: Path, urls: list[str], singles: int, batch: int) -> dict[str, float]:
    """One point of the curve, in a process of its own."""
    found: dict[str, float] = {}
    began = time.perf_counter()
    services = await Services.start(Config(state_dir=str(state), role="all-in-one"), fleet_of(urls))
    found["start_s"] = time.perf_counter() - began
    try:
        key = services.config.api_key_file.read_text().strip()
        caller = await services.iam.authenticate(key)
        before, began = cpu_s(), time.perf_counter()
        await services.watcher.reconcile()
        found["compare_s"] = time.perf_counter() - began
        found["compare_cpu_s"] = cpu_s() - before
        decisions = []
        need = Need(backend="container", cpu=1.0, memory_mb=512, disk_mb=512, task_id="t")
        for _ in range(10_000):
            started = time.thread_time_ns()
            services.fleet.choose(need)
            decisions.append((time.thread_time_ns() - started) / 1_000)
        found["decision_p99_us"] = percentile(sorted(decisions), 0.99)
        durations: list[float] = []
        left = iter(range(singles))

        async def worker() -> None:
            for _ in left:
                started = time.perf_counter()
                await services.creates.create(caller, PARAMS, key=random_chars(20))
                durations.append(1e3 * (time.perf_counter() - started))

        before, began = cpu_s(), time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(64)))
        found["singles_per_s"] = singles / (time.perf_counter() - began)
        found["singles_per_cpu_s"] = singles / (cpu_s() - before)
        found["create_p50_ms"] = percentile(sorted(durations), 0.5)
        found["create_p99_ms"] = percentile(sorted(durations), 0.99)
        before, began = cpu_s(), time.perf_counter()
        asked = BatchParams.of(PARAMS, None, count=batch, wait_s=600)
        made = await services.batches.create(caller, asked, key=None)
        outcomes, first = 0, 0.0
        async for news in services.batches.watch(caller, made.batch_id):
            outcomes += len(news.outcomes)
            first = first or time.perf_counter() - began
        took = time.perf_counter() - began
        over = await services.batches.get(caller, made.batch_id)
        assert over.made + over.failed == outcomes == batch, over
        found["batch_per_s"] = batch / took
        found["batch_per_cpu_s"] = batch / (cpu_s() - before)
        found["batch_first_ms"] = 1e3 * first
        found["batch_failed"] = over.failed
        gc.collect()
        found["rss_mib"] = resident_kb(os.getpid()) / 1_024
    finally:
        await services.stop()
    return found


def curve(points: list[int], nodes: int, batch: int, *, measured: bool) -> None:
    """The same work with more and more live records."""
    columns = {
        "start_s": "start s",
        "compare_s": "compare s",
        "compare_cpu_s": "its CPU s",
        "decision_p99_us": "decide us",
        "singles_per_s": "single/s",
        "singles_per_cpu_s": "/CPU s",
        "create_p50_ms": "p50 ms",
        "create_p99_ms": "p99 ms",
        "batch_per_s": "batch/s",
        "batch_per_cpu_s": "/CPU s",
        "batch_first_ms": "first ms",
        "batch_failed": "failed",
        "rss_mib": "RSS MiB",
    }
    print(f"{'records':>8} " + " ".join(f"{text:>9}" for text in columns.values()))
    first: tuple[int, float] | None = None
    with tempfile.TemporaryDirectory(prefix="opendsec-bench-") as text:
        directory = Path(text)
        state = directory / "state"
        state.mkdir(mode=0o700)
        with simulated_nodes(nodes, directory, measured=measured) as urls:
            _child("--first-start", state, urls)
            live = 0
            for point in points:
                _child("--fill", state, urls, str(point - live))
                found = _child("--measure", state, urls, str(SINGLES), str(batch))
                print(
                    f"{point:8} " + " ".join(f"{found[name]:9,.1f}" for name in columns),
                    flush=True,
                )
                live = point + SINGLES + batch
                if first is None:
                    first = (point, found["rss_mib"])
                else:
                    each = (found["rss_mib"] - first[1]) * 2**20 / (point - first[0])
                    print(f"{'':8} gateway's memory per live record more: {each:.0f} bytes")


def _child(what: str, state: Path, urls: list[str], *more: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.scale", what, str(state), str(len(urls)), *more]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


async def _first_start(state: Path, urls: list[str]) -> dict[str, float]:
    services = await Services.start(Config(state_dir=str(state)), fleet_of(urls))

    def unlimited(connection: sa.Connection) -> None:
        connection.execute(sa.update(PROJECTS).values(sandboxes_max=NO_LIMIT))

    await services.store.write(unlimited)
    await services.stop()
    return {}


def _as_child(arguments: list[str]) -> None:
    what, state, nodes = arguments[0], Path(arguments[1]), int(arguments[2])
    numbers = [int(text) for text in arguments[3:]]
    urls = addresses(nodes, state.parent)
    if what == "--first-start":
        uvloop.run(_first_start(state, urls))
        print("{}")
    elif what == "--fill":
        uvloop.run(_fill(state, urls, numbers[0]))
        print("{}")
    else:
        print(json.dumps(uvloop.run(measure(state, urls, numbers[0], numbers[1]))))


def main() -> None:
    """Entry point."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if sys.argv[1:] and sys.argv[1] in ("--first-start", "--fill", "--measure"):
        _as_child(sys.argv[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--placement", action="store_true")
    parser.add_argument("--protocol", action="store_true")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--nodes", type=int, default=160)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=32_768)
    parser.add_argument("--points", default="1000,10000,100000,346000")
    parser.add_argument("--measured", action="store_true", help="nodes take as long as real ones")
    options = parser.parse_args()
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    if options.placement:
        placement(100_000)
    if options.protocol:
        with tempfile.TemporaryDirectory(prefix="opendsec-bench-") as text:
            directory = Path(text)
            with simulated_nodes(options.nodes, directory, measured=options.measured) as urls:
                for concurrency in (1, 64, 1_024):
                    uvloop.run(
                        protocol(
                            urls, options.count // (20 if concurrency == 1 else 1), concurrency
                        )
                    )
    if options.curve:
        points = [int(text) for text in options.points.split(",")]
        curve(points, options.nodes, options.batch, measured=options.measured)


if __name__ == "__main__":
    main()

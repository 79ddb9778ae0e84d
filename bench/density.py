# SPDX-License-Identifier: AGPL-3.0-only
"""Bursts and many idle sandboxes: failures, latency, memory, CPU.

sudo .venv/bin/python -m bench.density --burst 500 --live 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

from bench.server import agent_pids, bench_server, cpu_ticks, resident_kb
from bench.stats import Result, print_ratio, print_results, summarise
from bench.wire import Connection
from tests.harness import Server
from tests.leaks import Snapshot

HERTZ = os.sysconf("SC_CLK_TCK")


async def create_many(server: Server, count: int, concurrency: int) -> tuple[list[str], Result]:
    """Create ``count`` sandboxes; ids and latencies."""
    host, port = server.config.listen.rsplit(":", 1)
    headers = {"X-API-Key": server.api_key, "Content-Type": "application/json"}
    body = json.dumps({"timeout_s": 3600}).encode()
    ids: list[str] = []
    durations: list[float] = []
    failed = 0
    remaining = iter(range(count))

    async def worker() -> None:
        nonlocal failed
        connection = Connection(host, int(port))
        for _ in remaining:
            started = time.perf_counter()
            status, answer = await connection.request("POST", "/v1/sandboxes", headers, body)
            if status == 201:
                durations.append(time.perf_counter() - started)
                ids.append(json.loads(answer)["sandbox_id"])
            else:
                failed += 1
                print(f"  HTTP {status}: {answer[:300]!r}")
        await connection.close()

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return ids, summarise("create", concurrency, durations, failed)


async def kill_many(server: Server, ids: list[str]) -> float:
    """Kill them all, 50 at a time; seconds."""
    host, port = server.config.listen.rsplit(":", 1)
    headers = {"X-API-Key": server.api_key}
    remaining = iter(ids)

    async def worker() -> None:
        connection = Connection(host, int(port))
        for sandbox_id in remaining:
            status, answer = await connection.request(
                "DELETE", f"/v1/sandboxes/{sandbox_id}", headers
            )
            if status != 200:
                print(f"  kill: HTTP {status}: {answer[:300]!r}")
        await connection.close()

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(50)))
    return time.perf_counter() - started


def proportional_kb(pid: int) -> int:
    """PSS: shared pages counted once over all who share them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


async def idle_figures(server: Server, label: str, seconds: int = 20) -> None:
    """Memory and CPU of server and edge while nothing is asked."""
    daemon, edge = server.daemon(), server.edge()
    assert daemon is not None and edge is not None
    before = cpu_ticks(daemon.pid), cpu_ticks(edge.pid)
    await asyncio.sleep(seconds)
    used = [
        (after - start) / HERTZ / seconds * 100
        for after, start in zip((cpu_ticks(daemon.pid), cpu_ticks(edge.pid)), before, strict=True)
    ]
    print(
        f"{label}: server {resident_kb(daemon.pid) / 1024:.0f} MiB, {used[0]:.1f} % of a core; "
        f"edge {resident_kb(edge.pid) / 1024:.1f} MiB, {used[1]:.1f} % of a core"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--burst", type=int, default=500)
    parser.add_argument("--live", type=int, default=1_000)
    parser.add_argument("--probe", type=int, default=100, help="creates measured at each level")
    options = parser.parse_args()
    before = Snapshot.take()
    with bench_server(slots_ready=64) as server:
        await asyncio.sleep(3)
        await idle_figures(server, "0 sandboxes")

        started = time.perf_counter()
        ids, result = await create_many(server, options.burst, options.burst)
        took_s = time.perf_counter() - started
        print(f"burst: {options.burst} creates at once in {took_s:.1f} s, {result.failed} failed")
        print_results([result])
        await idle_figures(server, f"{len(ids)} sandboxes")
        took_s = await kill_many(server, ids)
        print(f"killed {len(ids)} in {took_s:.1f} s")

        levels: dict[int, Result] = {}
        kept: list[str] = []
        for level in (10, options.live):
            more, _ = await create_many(server, level - len(kept), 8)
            kept += more
            await asyncio.sleep(5)
            probes, levels[level] = await create_many(server, options.probe, 1)
            await kill_many(server, probes)
            print_results([levels[level]])
        print_ratio(
            f"create p50 with {options.live} live / with 10 live",
            levels[options.live].p50_ms,
            levels[10].p50_ms,
            "at most 1.5x",
        )
        await idle_figures(server, f"{len(kept)} sandboxes")
        pids = agent_pids(server)
        sample = pids[:: max(1, len(pids) // 50)]
        print(
            f"guest agent: resident {sum(map(resident_kb, sample)) / len(sample):.0f} KiB, "
            f"proportional {sum(map(proportional_kb, sample)) / len(sample):.0f} KiB (mean)"
        )
        took_s = await kill_many(server, kept)
        print(f"killed {len(kept)} in {took_s:.1f} s")
    before.assert_nothing_new()
    print("nothing left behind")


if __name__ == "__main__":
    asyncio.run(main())

# SPDX-License-Identifier: AGPL-3.0-only
"""Many creates in one call against one after the other, and against ``docker run``; real
containers, tiny sizes. With ``--control``: the control plane alone, on a node that does nothing.

    sudo .venv/bin/python -m bench.batch [--count 1000] [--docker]
    .venv/bin/python -m bench.batch --control --count 32768
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import pstats
import tempfile
import time
from pathlib import Path

import msgspec
import structlog

from bench.create import docker, docker_with_image
from bench.density import kill_many
from bench.server import bench_server, resident_kb
from bench.wire import Connection
from opendsec import AsyncClient
from tests.harness import Server
from tests.leaks import Snapshot

TINY = {"memory_mb": 64, "cpu": 0.1, "disk_mb": 64, "timeout_s": 3_600}


async def batch(server: Server, count: int) -> float:
    """One batch, a command in all of it, and its end; creates per second."""
    async with AsyncClient(base_url=server.url, api_key=server.api_key) as client:
        started = time.perf_counter()
        asked = await client.batches.create(count, **TINY)  # type: ignore[arg-type]
        first_s = 0.0
        failed = 0
        async for item in asked:
            first_s = first_s or time.perf_counter() - started
            failed += item.error is not None
        took_s = time.perf_counter() - started
        daemon = server.daemon()
        assert daemon is not None
        print(
            f"batch of {count}: {took_s:.1f} s, {count / took_s:.1f} creates/s, {failed} failed, "
            f"first result after {first_s * 1e3:.0f} ms; server {resident_kb(daemon.pid) >> 10} MiB"
        )
        started = time.perf_counter()
        ran = [one async for one in client.batches.exec("true", batch_id=asked.batch_id)]
        exec_s = time.perf_counter() - started
        print(f"exec of true in {len(ran)}: {exec_s:.1f} s, {sum(not r.ok for r in ran)} failed")
        started = time.perf_counter()
        ended = await asked.kill()
        kill_s = time.perf_counter() - started
        print(f"kill of {len(ended)}: {kill_s:.1f} s, {sum(not e.ok for e in ended)} failed")
        return count / took_s


async def sequential(server: Server, count: int) -> float:
    """Creates one after the other on one connection; per second."""
    host, port = server.config.listen.rsplit(":", 1)
    headers = {"X-API-Key": server.api_key, "Content-Type": "application/json"}
    connection = Connection(host, int(port))
    body = json.dumps(TINY).encode()
    ids, failed = [], 0
    started = time.perf_counter()
    for _ in range(count):
        status, answer = await connection.request("POST", "/v1/sandboxes", headers, body)
        if status == 201:
            ids.append(json.loads(answer)["sandbox_id"])
        else:
            failed += 1
    took_s = time.perf_counter() - started
    await connection.close()
    print(f"{count} sequential creates: {took_s:.1f} s, {count / took_s:.1f}/s, {failed} failed")
    await kill_many(server, ids)
    return count / took_s


async def best_docker(server: Server) -> float:
    """``docker run --rm`` of /bin/true per second, at the concurrency where it does most."""
    best = 0.0
    layer = next((server.config.state_path / "images").rglob("*.erofs"))
    with docker_with_image(layer) as client:
        for concurrency in (1, 2, 4, 8, 16):
            started = time.perf_counter()
            result = await docker(client, concurrency, 24)
            rate = (24 - result.failed) / (time.perf_counter() - started)
            print(f"docker run, {concurrency} at a time: {rate:.2f}/s, {result.failed} failed")
            best = max(best, rate)
    return best


async def real(options: argparse.Namespace) -> None:
    """With containers on this machine."""
    before = Snapshot.take("bench")
    with bench_server(slots_ready=64) as server:
        await asyncio.sleep(3)  # let the pool of slots fill
        rates = [await batch(server, options.count)]
        one_by_one = await sequential(server, options.sequential or options.count)
        rates.append(await batch(server, options.count))
        print(f"batch / sequential: {max(rates) / one_by_one:.2f}x")
        if options.docker:
            print(f"batch / best docker run: {max(rates) / await best_docker(server):.1f}x")
    before.assert_nothing_new()
    print("nothing left behind")


async def control(options: argparse.Namespace) -> None:
    """What the control plane costs: every other part is imitated and takes no time."""
    from opendsec_server.config import Config
    from opendsec_server.contract.node import NodeInfo
    from opendsec_server.control.batches import BatchParams
    from opendsec_server.control.params import CreateParams
    from opendsec_server.control.services import Services
    from opendsec_server.control.tests.fake_node import FakeNode

    class ManyCores(FakeNode):
        """As many starts at one time as 160 nodes of 8 processors would be given."""

        async def info(self) -> NodeInfo:
            return msgspec.structs.replace(await super().info(), cpu_count=1_280)

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as folder:
        config = Config(state_dir=folder)
        services = await Services.start(config, ManyCores())
        key = await asyncio.to_thread(config.api_key_file.read_text)
        caller = await services.iam.authenticate(key.strip())
        params = BatchParams.of(CreateParams(), None, count=options.count, wait_s=3_600)
        profile = cProfile.Profile()
        if options.profile:
            profile.enable()
        started, first_s = time.perf_counter(), 0.0
        asked = await services.batches.create(caller, params, key="k")
        async for news in services.batches.watch(caller, asked.batch_id):
            if news.outcomes and not first_s:
                first_s = time.perf_counter() - started
        took_s = time.perf_counter() - started
        profile.disable()
        made = (await services.batches.get(caller, asked.batch_id)).made
        size_mb = Path(folder, "store.db").stat().st_size >> 20
        print(
            f"{made} of {options.count} in {took_s:.1f} s: {made / took_s:.0f}/s in one process, "
            f"first result after {first_s * 1e3:.0f} ms, database {size_mb} MiB"
        )
        if options.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        await services.stop()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--sequential", type=int, help="sequential creates (default: as many)")
    parser.add_argument("--docker", action="store_true", help="compare with docker too (dockerd)")
    parser.add_argument("--control", action="store_true", help="the control plane alone")
    parser.add_argument("--profile", action="store_true", help="with --control: where time goes")
    options = parser.parse_args()
    asyncio.run(control(options) if options.control else real(options))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: AGPL-3.0-only
"""create (request until the guest agent has answered) against bare ``crun run`` and docker.

    sudo .venv/bin/python -m bench.create [--docker]

``crun run`` gets the very bundle of a sandbox (namespaces, user namespace, network namespace,
seccomp, limits) with ``/bin/true`` as its program, on overlays of the same layers that were
mounted before the clock started. ``docker run --rm --network none`` gets the same files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.density import kill_many
from bench.docker import docker_daemon, mounted
from bench.server import agent_pids, bench_server, create_sandbox
from bench.stats import Result, print_ratio, print_results, run_series, summarise, write_json
from bench.wire import Connection
from tests.harness import Server


async def ours(server: Server, concurrency: int, count: int) -> Result:
    """POST /v1/sandboxes through the edge; they are killed after the series."""
    host, port = server.config.listen.rsplit(":", 1)
    headers = {"X-API-Key": server.api_key, "Content-Type": "application/json"}
    body = json.dumps({"timeout_s": 600, "labels": ["bench"]}).encode()
    idle = [Connection(host, int(port)) for _ in range(concurrency)]
    durations: list[float] = []
    made: list[str] = []
    failed = 0
    remaining = iter(range(count))

    async def worker() -> None:
        nonlocal failed
        connection = idle.pop()
        for _ in remaining:
            started = time.perf_counter()
            status, answer = await connection.request("POST", "/v1/sandboxes", headers, body)
            elapsed_s = time.perf_counter() - started
            if status != 201:
                failed += 1
                print(f"  create: HTTP {status} {answer[:300]!r}", file=sys.stderr)
                continue
            durations.append(elapsed_s)
            made.append(json.loads(answer)["sandbox_id"])
        await connection.close()

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    await kill_many(server, made)
    await asyncio.sleep(1)  # let the pool of slots fill again
    return summarise("create", concurrency, durations, failed)


def crun(server: Server, bundle: Path, concurrency: int, count: int) -> Result:
    """The runtime alone, inside the server's mount namespace, as the server itself sees it."""
    daemon, agent = server.daemon(), agent_pids(server)[0]
    assert daemon is not None
    run = subprocess.run(
        [
            *("nsenter", "--mount", "--target", str(daemon.pid)),
            *(sys.executable, "-m", "bench.crun_series", str(bundle), str(agent)),
            *(server.config.state_dir, str(concurrency), str(count)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    figures = json.loads(run.stdout)
    return summarise("crun run /bin/true", concurrency, figures["durations_s"], figures["failed"])


@contextlib.contextmanager
def docker_with_image(layer: Path) -> Iterator[list[str]]:
    """Docker with one image made of the layer's files; yields the client's command."""
    with docker_daemon() as client, mounted(layer) as tree:
        tar = subprocess.Popen(["tar", "-C", tree, "-c", "."], stdout=subprocess.PIPE)
        subprocess.run(
            [*client, "import", "-", "bench"], stdin=tar.stdout, check=True, capture_output=True
        )
        tar.wait()
        yield client


async def docker(client: list[str], concurrency: int, count: int) -> Result:
    """``docker run --rm`` of /bin/true."""

    async def once() -> None:
        process = await asyncio.create_subprocess_exec(
            *client,
            *("run", "--rm", "--network", "none", "--memory", "1g", "bench", "/bin/true"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(stderr.decode())

    return await run_series("docker run /bin/true", concurrency, count, once)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="creates per series")
    parser.add_argument("--docker", action="store_true", help="compare with docker too (dockerd)")
    parser.add_argument("--json")
    options = parser.parse_args()
    results: list[Result] = []
    with bench_server(slots_ready=64) as server:
        await asyncio.sleep(3)  # let the pool of slots fill
        sandbox = create_sandbox(server)
        bundle = server.config.run_path / "sandboxes" / sandbox["sandbox_id"]
        await ours(server, 1, 5)
        for concurrency in (1, 10, 50):
            for _ in range(2):
                results.append(await ours(server, concurrency, options.count))
                results.append(crun(server, bundle, concurrency, options.count))
        if options.docker:
            layer = next((server.config.state_path / "images").rglob("*.erofs"))
            with docker_with_image(layer) as client:
                for concurrency in (1, 10, 50):
                    results.append(await docker(client, concurrency, max(concurrency, 20)))
                    results.append(await ours(server, concurrency, options.count))
    print_results(results)
    for concurrency in (1, 10, 50):
        p50 = {
            name: min(r.p50_ms for r in results if r.concurrency == concurrency and r.name == name)
            for name in {r.name for r in results}
        }
        print_ratio(
            f"create / crun run, p50, concurrency {concurrency}",
            p50["create"],
            p50["crun run /bin/true"],
            "at most 3x, aim 1.5x",
        )
        if "docker run /bin/true" in p50:
            print_ratio(
                f"docker run / create, p50, concurrency {concurrency}",
                p50["docker run /bin/true"],
                p50["create"],
                "at least 5x, aim 10x",
            )
    write_json(options.json, results)


if __name__ == "__main__":
    asyncio.run(main())

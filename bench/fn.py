# SPDX-License-Identifier: AGPL-3.0-only
"""``fn.map`` over many calls, against ``docker run``, against a program started in a sandbox that
is there already, and against bare pools of processes on this machine.

    sudo .venv/bin/python -m bench.fn [--docker] [--count 10000]

Every call of ours and of the pool ``a process for each call`` runs in a process of its own; the
pool ``processes used again`` keeps nothing apart and is the floor. ``--transport`` compares
the ways to a worker: a port through the guest agent's tunnel, and exec.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.create import docker_with_image
from bench.server import agent_route, bench_server
from bench.stats import Result, print_ratio, print_results, run_series, summarise, write_json
from opendsec import AsyncClient, Client, Sandbox
from tests.harness import Server

POOL = "bench"
PROGRAM = "print(sum(range(1000)))"
ECHO = """
import socket, threading
s = socket.socket(); s.bind(("127.0.0.1", 7077)); s.listen()
def serve(c):
    while True:
        data = c.recv(65536)
        if not data: return
        c.sendall(data)
while True:
    c = s.accept()[0]
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=serve, args=(c,), daemon=True).start()
"""


def work(number: int) -> int:
    """A call: little, so that what is measured is the way to it and back."""
    return number + sum(range(1000))


def timed(name: str, count: int, run: Callable[[], list[int]]) -> tuple[str, float]:
    """Calls per second of a whole map; its results are checked."""
    started = time.perf_counter()
    found = run()
    elapsed_s = time.perf_counter() - started
    if found != [work(number) for number in range(count)]:
        raise RuntimeError(f"{name}: a result is wrong")
    rate = count / elapsed_s
    print(f"{name:44} {count:6} calls  {elapsed_s:8.2f} s  {rate:9.1f} calls/s", flush=True)
    return name, rate


def pools(count: int, processes: int) -> list[tuple[str, float]]:
    """Pools of processes without anything between the calls and the machine."""
    # Forked, as our workers are.
    context = multiprocessing.get_context("fork")

    def used_again() -> list[int]:
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            return list(pool.map(work, range(count)))

    def one_each() -> list[int]:
        # By hand: multiprocessing replaces processes that have ended only ten times a second.
        found = [0] * count
        running: dict[int, tuple[int, int]] = {}
        for number in range(count + processes):
            if number < count:
                running |= dict([_forked(number)])
            if len(running) < processes and number < count:
                continue
            for reader in select.select(list(running), [], [])[0] if running else ():
                index, pid = running.pop(reader)
                found[index] = int(os.read(reader, 64))
                os.close(reader)
                os.waitpid(pid, 0)
        return found

    return [
        timed("pool: processes used again", count, used_again),
        timed("pool: a process for each call", count, one_each),
    ]


def _forked(number: int) -> tuple[int, tuple[int, int]]:
    """A process for one call: where its result comes, which call, its pid."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, str(work(number)).encode())
        os._exit(0)
    os.close(writer)
    return reader, (number, pid)


def ours(client: Client, count: int, workers: int) -> tuple[str, float]:
    """``fn.map``; the workers are there already."""
    client.fn.pools.put(POOL, memory_mb=256, workers_min=workers, workers_max=workers)
    until = time.monotonic() + 60
    while client.fn.pools.get(POOL).workers_idle < workers:
        if time.monotonic() > until:
            raise RuntimeError("workers do not come up")
        time.sleep(0.1)
    remote = client.fn(pool=POOL)(work)
    list(remote.map(range(workers * 4)))
    return timed(f"fn.map, {workers} workers", count, lambda: list(remote.map(range(count))))


def latency(client: Client, count: int) -> Result:
    """One call after the other."""
    remote = client.fn(pool=POOL)(work)
    durations = []
    for number in range(count):
        started = time.perf_counter()
        remote(number)
        durations.append(time.perf_counter() - started)
    return summarise("fn call", 1, durations)


async def docker(client: list[str], concurrency: int, count: int) -> Result:
    """``docker run --rm`` of Python that does the same."""

    async def once() -> None:
        process = await asyncio.create_subprocess_exec(
            *client,
            *("run", "--rm", "--network", "none", "bench", "python3", "-c", PROGRAM),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        if process.returncode != 0 or out.strip() != b"499500":
            raise RuntimeError(err.decode())

    return await run_series("docker run python3", concurrency, count, once)


async def executed(server: Server, concurrency: int, count: int) -> Result:
    """Python started anew for each call, in one sandbox that is there."""
    async with AsyncClient(base_url=server.url, api_key=server.api_key) as client:
        sandbox = await client.create(cpu=os.cpu_count())

        async def once() -> None:
            result = await sandbox.exec(["python3", "-c", PROGRAM])
            if result.stdout.strip() != "499500":
                raise RuntimeError(result.stderr)

        result = await run_series("exec python3 in a sandbox", concurrency, count, once)
        await sandbox.kill()
    return result


def transport(server: Server, client: Client, count: int) -> list[Result]:
    """Round trips of 1 KiB to a port of a sandbox by the agent's tunnel, which is how workers are
    reached, and of exec. (From outside of a sandbox its ports are reached in no other way.)"""
    sandbox: Sandbox = client.create(timeout_s=600)
    sandbox.spawn(["python3", "-c", ECHO])
    connection = _tunnel(agent_route(server, sandbox.sandbox_id))
    durations = []
    for _ in range(count):
        started = time.perf_counter()
        connection.sendall(b"x" * 1024)
        left = 1024
        while left:
            left -= len(connection.recv(left))
        durations.append(time.perf_counter() - started)
    connection.close()
    results = [summarise("1 KiB by the tunnel", 1, durations)]
    for argv in (["true"], ["python3", "-c", "pass"]):
        durations = []
        for _ in range(100):
            started = time.perf_counter()
            sandbox.exec(argv)
            durations.append(time.perf_counter() - started)
        results.append(summarise(f"exec of {argv[0]}", 1, durations))
    sandbox.kill()
    return results


def _tunnel(route: dict[str, Any]) -> socket.socket:
    until = time.monotonic() + 10
    while True:
        connection = socket.create_connection((route["address"], route["agent_port"]), 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(
            f"GET /opendsec/tunnel?port=7077 HTTP/1.1\r\nHost: x\r\n"
            f"X-Opendsec-Control: {route['control_token']}\r\nConnection: Upgrade\r\n"
            "Upgrade: opendsec-tunnel\r\n\r\n".encode()
        )
        head = b""
        while b"\r\n\r\n" not in head and (piece := connection.recv(4096)):
            head += piece
        if b" 101 " in head.partition(b"\r\n")[0]:
            return connection
        connection.close()
        if time.monotonic() > until:
            raise RuntimeError("the program in the sandbox does not listen")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--workers", type=int, action="append")
    parser.add_argument("--docker", action="store_true", help="compare with docker too (dockerd)")
    parser.add_argument("--transport", action="store_true", help="the ways to a worker only")
    parser.add_argument("--json")
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    rates: dict[str, float] = {}
    results: list[Result] = []
    with (
        bench_server() as server,
        Client(base_url=server.url, api_key=server.api_key) as client,
    ):
        if options.transport:
            print_results(transport(server, client, 2_000))
            return
        rates |= dict(pools(options.count, cores))
        best = 0.0
        for workers in options.workers or (cores, 2 * cores):
            name, rate = ours(client, options.count, workers)
            rates[name], best = rate, max(best, rate)
        results.append(latency(client, 200))
        client.fn.pools.delete(POOL)
        results.append(asyncio.run(executed(server, cores, 100)))
        if options.docker:
            layer = next((server.config.state_path / "images").rglob("*.erofs"))
            with docker_with_image(layer) as docker_client:
                results += [
                    asyncio.run(docker(docker_client, concurrency, 40))
                    for concurrency in (1, 2, 4, 8)
                ]
    print_results(results)
    others = {
        f"{r.name}, {r.concurrency} at once": r.concurrency * 1_000 / r.p50_ms
        for r in results
        if r.name != "fn call"
    }
    for name, rate in others.items():
        print_ratio(f"fn.map against {name} ({rate:.1f}/s)", best, rate, "calls per second")
    for name in ("pool: a process for each call", "pool: processes used again"):
        print_ratio(f"fn.map against {name}", best, rates[name], "calls per second")
    write_json(options.json, results, rates=rates)


if __name__ == "__main__":
    main()

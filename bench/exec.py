# SPDX-License-Identifier: AGPL-3.0-only
"""exec of ``true`` through the edge against the same call made directly to the guest agent.

sudo .venv/bin/python -m bench.exec
"""

from __future__ import annotations

import argparse
import asyncio

from bench.server import agent_route, bench_server, create_sandbox
from bench.stats import Result, print_ratio, print_results, run_series, write_json
from bench.wire import Connection, end_event, start_request


async def measure(
    name: str, host: str, port: int, headers: dict[str, str], concurrency: int, count: int
) -> Result:
    """Time Start(true) over keep-alive connections."""
    body = start_request("true")
    idle: list[Connection] = [Connection(host, port) for _ in range(concurrency)]
    sent = {**headers, "Content-Type": "application/connect+json"}

    async def once() -> None:
        connection = idle.pop()
        try:
            status, answer = await connection.request("POST", "/process.Process/Start", sent, body)
            if status != 200 or end_event(answer).get("exitCode", 0) != 0:
                raise RuntimeError(f"HTTP {status}: {answer[:200]!r}")
        finally:
            idle.append(connection)

    await run_series(name, concurrency, concurrency * 2, once)
    result = await run_series(name, concurrency, count, once)
    for connection in idle:
        await connection.close()
    return result


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--json")
    options = parser.parse_args()
    with bench_server() as server:
        sandbox = create_sandbox(server)
        route = agent_route(server, sandbox["sandbox_id"])
        token = {"X-Access-Token": sandbox["access_token"]}
        routed = {**token, "E2b-Sandbox-Id": sandbox["sandbox_id"], "E2b-Sandbox-Port": "49983"}
        host, port = server.config.listen.rsplit(":", 1)
        results: list[Result] = []
        for concurrency in (1, 10, 50):
            # Interleaved rounds, so that a drift of the machine hits both alike.
            for _ in range(2):
                results.append(
                    await measure(
                        "direct to agent",
                        route["address"],
                        route["agent_port"],
                        token,
                        concurrency,
                        options.count,
                    )
                )
                results.append(
                    await measure(
                        "through edge", host, int(port), routed, concurrency, options.count
                    )
                )
    print_results(results)
    for concurrency in (1, 10, 50):
        direct = [r for r in results if r.concurrency == concurrency and "direct" in r.name]
        edge = [r for r in results if r.concurrency == concurrency and "edge" in r.name]
        print_ratio(
            f"exec through edge / direct, p50, concurrency {concurrency}",
            sum(r.p50_ms for r in edge),
            sum(r.p50_ms for r in direct),
            "limit 1.3x",
        )
    write_json(options.json, results)


if __name__ == "__main__":
    asyncio.run(main())

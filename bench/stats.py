# SPDX-License-Identifier: AGPL-3.0-only
"""Percentiles, ratios and tables: what all benchmarks print."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """Durations of one series, in milliseconds."""

    name: str
    concurrency: int
    count: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    failed: int = 0


def percentile(sorted_values: list[float], share: float) -> float:
    """Nearest-rank percentile of sorted values."""
    rank = max(0, min(len(sorted_values) - 1, round(share * len(sorted_values) + 0.5) - 1))
    return sorted_values[rank]


def summarise(name: str, concurrency: int, durations_s: list[float], failed: int = 0) -> Result:
    """Percentiles of a series."""
    values = sorted(duration * 1_000 for duration in durations_s)
    return Result(
        name=name,
        concurrency=concurrency,
        count=len(values),
        p50_ms=percentile(values, 0.50),
        p95_ms=percentile(values, 0.95),
        p99_ms=percentile(values, 0.99),
        failed=failed,
    )


async def run_series(
    name: str, concurrency: int, count: int, once: Callable[[], Awaitable[None]]
) -> Result:
    """Call ``once`` ``count`` times, ``concurrency`` at a time, and time each call."""
    durations: list[float] = []
    failed = 0
    remaining = iter(range(count))

    async def worker() -> None:
        nonlocal failed
        for _ in remaining:
            started = time.perf_counter()
            try:
                await once()
            except Exception as exc:
                failed += 1
                print(f"  {name}: {exc!r}", file=sys.stderr)
            else:
                durations.append(time.perf_counter() - started)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return summarise(name, concurrency, durations, failed)


def print_results(results: list[Result]) -> None:
    """A table for people."""
    print(
        f"{'series':34} {'c':>4} {'n':>6} {'p50 ms':>9} {'p95 ms':>9} {'p99 ms':>9} {'failed':>6}"
    )
    for result in results:
        print(
            f"{result.name:34} {result.concurrency:4} {result.count:6} {result.p50_ms:9.2f} "
            f"{result.p95_ms:9.2f} {result.p99_ms:9.2f} {result.failed:6}"
        )


def print_ratio(label: str, ours: float, theirs: float, target: str) -> None:
    """A ratio, with what is aimed at."""
    print(f"{label:60} {ours / theirs:6.2f}x   ({target})")


def write_json(path: str | None, results: list[Result], **more: Any) -> None:
    """Keep the figures for machines, if asked to."""
    if path:
        with open(path, "w") as out:
            json.dump({"results": [asdict(result) for result in results], **more}, out, indent=1)

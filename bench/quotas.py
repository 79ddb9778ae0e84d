# SPDX-License-Identifier: AGPL-3.0-only
"""What admitting and counting sandboxes costs, as their number grows. Processor time.

.venv/bin/python -m bench.quotas --records 380000
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterator

import sqlalchemy as sa

from opendsec_server.config import Config
from opendsec_server.contract.states import State
from opendsec_server.store import accounts, projects
from opendsec_server.store.quotas import NO_LIMIT, admit, wanted_of
from opendsec_server.store.records import ApiKey, Project, SandboxRecord
from opendsec_server.store.sandboxes import row_of
from opendsec_server.store.store import Store
from opendsec_server.store.tables import SANDBOXES

BATCH = 10_000
TRIGGERS = ("insert", "update", "delete")


def record_of(number: int) -> SandboxRecord:
    """A sandbox of the deepest project."""
    return SandboxRecord(
        sandbox_id=f"in0de{number:015d}",
        project_id="deep",
        node_id="n0de",
        template_id="t",
        template="base",
        backend="container",
        state=State.RUNNING,
        cpu=0.1,
        memory_mb=64,
        disk_mb=64,
        env={},
        metadata={},
        labels=[],
        task_id=None,
        created_at=float(number),
        end_at=1e10,
    )


async def tree(store: Store) -> None:
    """Three projects above each other, each with limits."""
    top = Project(
        project_id="top",
        name="top",
        sandboxes_max=10**7,
        created_at=0.0,
        cpu_max=1e6,
        memory_mb_max=10**9,
        disk_mb_max=10**9,
    )
    key = ApiKey(key_id="k", project_id="top", name="k", sha256="k", hint="", created_at=0.0)
    await accounts.insert_project(store, top, key)
    for name, parent in (("middle", "top"), ("deep", "middle")):
        below = Project(
            project_id=name,
            name=name,
            sandboxes_max=NO_LIMIT,
            created_at=1.0,
            parent_id=parent,
            cpu_max=1e6,
        )
        await projects.insert_child(store, below)


def add(connection: sa.Connection, numbers: Iterator[int]) -> dict[str, float]:
    """Admit and insert one batch; milliseconds of each."""
    records = [record_of(number) for number in itertools.islice(numbers, BATCH)]
    began = time.process_time()
    admitted = admit(connection, "deep", [wanted_of(one) for one in records], now=1.0)
    decided = time.process_time()
    if admitted.count != BATCH:
        raise SystemExit(f"only {admitted.count} fit: {admitted.refusal}")
    connection.execute(sa.insert(SANDBOXES), [row_of(one) for one in records])
    inserted = time.process_time()
    return {
        "admit_ms": round((decided - began) * 1e3, 1),
        "insert_ms": round((inserted - decided) * 1e3, 1),
    }


def drop_triggers(connection: sa.Connection) -> None:
    """Count no more, to see what counting costs."""
    for name in TRIGGERS:
        connection.exec_driver_sql(f"DROP TRIGGER sandboxes_use_{name}")


async def run(count: int) -> None:
    """Fill a store, and print figures at its beginning, middle and end."""
    with tempfile.TemporaryDirectory(prefix="opendsec-bench-") as directory:
        store = await Store.open(Config(state_dir=directory))
        await tree(store)
        numbers = itertools.count()
        for before in range(0, count, BATCH):
            figures = await store.write(lambda c: add(c, numbers))
            if before in (0, count // BATCH // 2 * BATCH) or before + BATCH >= count:
                print(json.dumps({"records": before, "of": BATCH, **figures}))
        await store.write(drop_triggers)
        figures = await store.write(lambda c: add(c, numbers))
        print(json.dumps({"records": count, "of": BATCH, "counted": False, **figures}))
        await store.close()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=380_000, help="how many in all")
    asyncio.run(run(parser.parse_args().records))


if __name__ == "__main__":
    main()

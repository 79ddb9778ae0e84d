# SPDX-License-Identifier: AGPL-3.0-only
"""Two gateways on one database: either answers for all batches, and one goes on for the other.

With ``OPENDSEC_TEST_POSTGRES_URL`` on PostgreSQL too.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from opendsec_server.config import Config
from opendsec_server.control.batches import service
from opendsec_server.control.iam import Caller
from opendsec_server.control.services import Services

from .batch_kit import check, crash, many, outcomes, started
from .conftest import first_caller
from .fake_node import FakeNode

DATABASES = ["sqlite"]
if "OPENDSEC_TEST_POSTGRES_URL" in os.environ:
    DATABASES.append("postgres")


class Two:
    """Two gateways with state directories of their own."""

    def __init__(self, directory: Path, url: str) -> None:
        self.node = FakeNode()
        self.directory = directory
        self.url = url
        self.servers: list[Services] = []
        self.callers: list[Caller] = []
        self.background: list[set[asyncio.Task[Any]]] = []

    async def start(self, name: str) -> None:
        own = self.directory / name
        own.mkdir(exist_ok=True)
        if self.servers:
            # They know the same tokens and keys.
            first = self.servers[0].config.state_path
            for file in ("secret", "api-key"):
                shutil.copy(first / file, own / file)
        config = Config(state_dir=str(own), database_url=self.url)
        services, background = await started(config, self.node)
        self.servers.append(services)
        self.background.append(background)
        self.callers.append(await first_caller(services))


async def emptied(url: str) -> None:
    import asyncpg  # type: ignore[import-untyped,unused-ignore]

    connection = await asyncpg.connect(url)
    await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await connection.close()


async def database(name: str, directory: Path) -> str:
    """The address of one that is empty."""
    if name == "sqlite":
        return f"sqlite:///{directory}/shared.db"
    url = os.environ["OPENDSEC_TEST_POSTGRES_URL"]
    await emptied(url)
    return url


@pytest_asyncio.fixture(params=DATABASES)
async def two(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Two]:
    monkeypatch.setattr(service, "LEASE_S", 0.8)
    monkeypatch.setattr(service, "RENEW_INTERVAL_S", 0.2)
    two = Two(tmp_path, await database(request.param, tmp_path))
    await two.start("one")
    await two.start("two")
    yield two
    for services in two.servers:
        await services.stop()


async def test_either_answers_and_cancels(two: Two) -> None:
    (one, other), (caller, another) = two.servers, two.callers
    calls = [one.batches.create(caller, many(60), key="k1"),
             other.batches.create(another, many(60), key="k1")]  # fmt: skip
    found = {batch.batch_id for batch in await asyncio.gather(*calls)}
    assert len(found) == 1
    batch, items = await outcomes(other, another, found.pop())
    check(batch, items, two.node)
    assert batch.made == two.node.created == 60

    two.node.gate = asyncio.Event()
    two.node.admitted.clear()
    asked = await one.batches.create(caller, many(100), key=None)
    await two.node.admitted.wait()
    await other.batches.cancel(another, asked.batch_id)
    two.node.gate.set()
    batch, items = await outcomes(other, another, asked.batch_id)
    assert batch.made + batch.failed == 100 and batch.failed > 50


async def test_one_goes_on_for_the_other(two: Two) -> None:
    (one, other), (caller, another) = two.servers, two.callers
    two.node.gate = asyncio.Event()
    asked = await one.batches.create(caller, many(60), key=None)
    await two.node.admitted.wait()
    await crash(two.servers.pop(0), two.background.pop(0))
    two.node.gate.set()
    batch, items = await outcomes(other, another, asked.batch_id)
    check(batch, items, two.node)
    assert batch.made == two.node.created == 60


async def test_what_is_left_by_a_stop_is_taken_at_once(two: Two) -> None:
    (one, other), (caller, another) = two.servers, two.callers
    two.node.gate = asyncio.Event()
    asked = await one.batches.create(caller, many(60), key=None)
    await two.node.admitted.wait()
    stopping = asyncio.create_task(two.servers.pop(0).stop())
    await asyncio.sleep(0.05)
    two.node.gate.set()
    await stopping
    batch, items = await outcomes(other, another, asked.batch_id)
    check(batch, items, two.node)
    assert batch.made == two.node.created == 60


async def test_many_at_once_do_not_get_in_each_others_way(two: Two) -> None:
    calls = [
        services.batches.create(caller, many(40), key=f"k{number}")
        for number in range(4)
        for services, caller in zip(two.servers, two.callers, strict=True)
    ]
    found = {batch.batch_id for batch in await asyncio.gather(*calls)}
    assert len(found) == 4
    for name in found:
        batch, _ = await outcomes(two.servers[0], two.callers[0], name)
        assert batch.made == 40
    assert two.node.created == len(two.node.statuses) == 160

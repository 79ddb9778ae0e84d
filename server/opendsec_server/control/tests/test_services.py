# SPDX-License-Identifier: AGPL-3.0-only
"""A start that fails ends all that it has begun, and a stop ends every part."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from opendsec_server.config import Config
from opendsec_server.control.services import Services
from opendsec_server.store.store import Store

from .fake_node import FakeNode

STARTS = (
    "opendsec_server.control.iam.Iam.ensure_first_key",
    "opendsec_server.control.templates.Templates.register",
    "opendsec_server.control.builds.service.Builds.start_up",
    "opendsec_server.control.images.Images.start",
    "opendsec_server.control.batches.Batches.start",
    "opendsec_server.control.groups.Groups.start",
    "opendsec_server.control.functions.service.Functions.start",
    "opendsec_server.control.watch.Watcher.start",
    "opendsec_server.control.trajectories.Trajectories.start",
    "opendsec_server.control.tasks.keeper.TaskKeeper.start",
)


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", STARTS, ids=[place.split(".")[-2] for place in STARTS])
async def test_a_start_that_fails_leaves_no_task_and_no_open_store(
    config: Config, node: FakeNode, monkeypatch: pytest.MonkeyPatch, place: str, late: bool
) -> None:
    closed = []
    close = Store.close

    async def closes(self: Store) -> None:
        await close(self)
        closed.append(self)

    monkeypatch.setattr(Store, "close", closes)
    module, _, name = place.rpartition(".")
    path, _, cls = module.rpartition(".")
    true = getattr(getattr(__import__(path, fromlist=[cls]), cls), name)

    async def breaks(self: object, *given: object) -> None:
        if late:
            await true(self, *given)
        raise BrokenError

    before = asyncio.all_tasks()
    with monkeypatch.context() as patch:
        patch.setattr(place, breaks)
        with pytest.raises(BrokenError):
            await Services.start(config, node)
    assert asyncio.all_tasks() == before
    assert len(closed) == 1
    # What it left is no hindrance.
    await (await Services.start(config, node)).stop()


async def test_a_start_that_fails_at_its_very_end_or_beginning_leaves_nothing(
    config: Config, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = asyncio.all_tasks()
    for place, breaks in (
        ("opendsec_server.control.audit.Audit.start", Mock(side_effect=BrokenError)),
        ("opendsec_server.control.nodes.Fleet.start", AsyncMock(side_effect=BrokenError)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, breaks)
            with pytest.raises(BrokenError):
                await Services.start(config, node)
        assert asyncio.all_tasks() == before


async def test_a_part_that_cannot_be_stopped_does_not_keep_the_others(
    config: Config, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = asyncio.all_tasks()
    services = await Services.start(config, node)
    stop = services.functions.stop

    async def breaks() -> None:
        await stop()
        raise BrokenError

    monkeypatch.setattr(services.functions, "stop", breaks)
    with pytest.raises(BrokenError):
        await services.stop()
    assert asyncio.all_tasks() == before

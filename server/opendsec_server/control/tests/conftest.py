# SPDX-License-Identifier: AGPL-3.0-only
"""A control plane over a fake node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from opendsec_server.config import Config
from opendsec_server.control.iam import Caller
from opendsec_server.control.services import Services

from .fake_node import FakeNode
from .seed import seeded


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(seeded(tmp_path)))


@pytest_asyncio.fixture
async def services(config: Config, node: FakeNode) -> AsyncIterator[Services]:
    started = await Services.start(config, node)
    yield started
    await started.stop()


@pytest_asyncio.fixture
async def caller(services: Services) -> Caller:
    return await first_caller(services)


async def first_caller(services: Services) -> Caller:
    """The caller of the key that was made at the first start."""
    return await services.iam.authenticate(services.config.api_key_file.read_text().strip())

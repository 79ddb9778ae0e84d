# SPDX-License-Identifier: AGPL-3.0-only
"""The APIs on a loopback port, over a fake node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from opendsec_server.control.tests.seed import seeded

from .harness import Plane, running_plane


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return seeded(tmp_path)


@pytest_asyncio.fixture
async def plane(state_dir: Path) -> AsyncIterator[Plane]:
    async with running_plane(state_dir) as running:
        yield running


@pytest_asyncio.fixture
async def http(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=plane.url, headers=plane.headers) as client:
        yield client

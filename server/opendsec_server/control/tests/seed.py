# SPDX-License-Identifier: AGPL-3.0-only
"""A state directory after a first start, to copy: migrations cost more than most tests."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from functools import cache
from pathlib import Path

from opendsec_server.config import Config
from opendsec_server.control.services import Services

from .fake_node import FakeNode


@cache
def _seed() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="opendsec-seed-")

    async def first_start() -> None:
        await (await Services.start(Config(state_dir=directory.name), FakeNode())).stop()

    asyncio.run(first_start())
    return directory


def seeded(state_dir: Path) -> Path:
    """Fill ``state_dir`` with what a first start leaves. Call it outside of an event loop."""
    shutil.copytree(_seed().name, state_dir, dirs_exist_ok=True)
    return state_dir

# SPDX-License-Identifier: AGPL-3.0-only
"""Which tests share a process when they run in several (``pytest -n 2 --dist loadgroup``).

Tests of one file do. So do those that share a server or a machine that takes long to start, and
those that need the one stand-in for the internet, whose addresses a machine can have only once.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
TOGETHER = {
    "server/opendsec_server/node/tests/test_network.py": "internet",
    "server/opendsec_server/node/tests/test_tap.py": "internet",
    "tests/adapters": "internet",
    "tests/conformance": "internet",
    "server/opendsec_server/node/vmm/qemu": "machines",
    "server/opendsec_server/node/vmm/firecracker": "firecracker",
    "sdk/python/opendsec/tests": "sdk",
    "tests/e2e": "e2e",
    "tests/vm": "vm",
}
"""Folder or file, and the name of the process's share."""


FIRST = "internet"
"""The share that takes longest: the other processes do the rest meanwhile."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Name each test's share, and put the longest first."""
    if not config.pluginmanager.hasplugin("xdist"):
        return (yield)
    shares = {item: _share(item) for item in items}
    for item, share in shares.items():
        item.add_marker(pytest.mark.xdist_group(share))
    yield
    if config.getoption("dist", "no") != "no" or hasattr(config, "workerinput"):
        items.sort(key=lambda item: shares[item] != FIRST)


def _share(item: pytest.Item) -> str:
    path = item.path.relative_to(ROOT)
    places = [path.as_posix(), *(parent.as_posix() for parent in path.parents)]
    return next((TOGETHER[place] for place in places if place in TOGETHER), places[0])

# SPDX-License-Identifier: AGPL-3.0-only
"""Which tests go to the same process when several processes share a run (pytest-xdist).

A share's tests run one after the other in one process: they use the same server or the same
imitated internet, which is there once on a machine. What is in no share here goes by file.
A pytest plugin; without several processes it only puts the long shares first.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

NODE = "server/opendsec_server/node"

SHARES = (
    ("internet", ("tests/conformance/", f"{NODE}/tests/test_network.py",
                  f"{NODE}/tests/test_tap.py", f"{NODE}/tests/test_groups.py", "tests/adapters/")),
    ("doors", ("tests/e2e/",)),
    ("machines", (f"{NODE}/vmm/", "tests/vm/")),
)  # fmt: skip
"""Longest first: a long one at the end would be waited for."""

_RANK = {name: rank for rank, (name, _paths) in enumerate(SHARES)}


def share_of(nodeid: str) -> str:
    """The share of a test, or its file."""
    for name, paths in SHARES:
        if nodeid.startswith(paths):
            return name
    return nodeid.partition("::")[0]


def draw(below: int) -> int:
    """A random number that no other process of this run draws: for names and addresses that must
    be unique on the machine."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return secrets.randbelow(below // count) * count + number % count


def instance_name() -> str:
    """A name for a short-lived instance."""
    return f"t{draw(16**3):03x}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long shares first, else the order of the files."""
    items.sort(key=lambda item: _RANK.get(share_of(item.nodeid), len(_RANK)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Deals out shares instead of single tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByShare(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return share_of(nodeid)

    config.option.loadscopereorder = False
    return ByShare(config, log)

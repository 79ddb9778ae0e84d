# SPDX-License-Identifier: AGPL-3.0-only
"""One real server for the folder; the machine is compared before and after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Server
from tests.servers import running_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here are end-to-end tests."""
    for item in items:
        if "tests/adapters" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """A running server. At the end it is purged, and nothing of it may be left."""
    with running_server("ada", "10.227.0.0/16") as server:
        yield server

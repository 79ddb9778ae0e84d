# SPDX-License-Identifier: AGPL-3.0-only
"""A real server for tests that leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .harness import Server, new_server
from .leaks import Snapshot


@contextmanager
def running_server(instance: str, network_cidr: str, **settings: object) -> Iterator[Server]:
    """A running server. At the end it is purged, and nothing of it may be left.

    Args:
        instance, network_cidr, settings: See ``new_server``.
    """
    if os.geteuid() != 0:
        pytest.skip("a real server needs root")
    server = new_server(instance, network_cidr, **settings)
    before = Snapshot.take(instance, (server.root,))
    try:
        server.start()
        yield server
    finally:
        server.purge()
    before.assert_nothing_new()

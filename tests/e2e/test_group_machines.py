# SPDX-License-Identifier: AGPL-3.0-only
"""A group of microVMs: by name, over a pause that ends the VMM and a resume of what it kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from opendsec import Client
from tests.harness import Server
from tests.servers import running_server

from .test_groups import ASK, DATABASE, ask, living, python

SMALL: dict[str, Any] = {"memory_mb": 256, "cpu": 1, "disk_mb": 256}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """One that starts microVMs with QEMU, on a machine without KVM emulated."""
    with running_server("grv", "10.234.0.0/16", vmm="qemu", default_backend="microvm") as server:
        yield server


def test_a_group_of_machines(own_server: Server) -> None:
    with Client(base_url=own_server.url, api_key=own_server.api_key) as client:
        if "microvm" not in {one.name for one in client.server_info().backends}:
            pytest.skip("no QEMU here")
        check = {
            "test": python(ASK, "127.0.0.1", "get", "x"),
            "interval_s": 5,
            "timeout_s": 60,
            "retries": 30,
        }
        group = client.groups.create(
            {
                "web": {**SMALL, "depends_on": {"db": "healthy"}},
                "db": {**SMALL, "command": python(DATABASE), "healthcheck": check},
            }
        )
        web, db = group.sandboxes["web"], group.sandboxes["db"]
        assert ask(web, "db", "set", "a", "kept") == "kept"
        assert db.exec(["getent", "hosts", "web"], check=True).stdout.split()[1] == "web"
        assert group.pause().state == "paused"
        assert group.resume().state == "running"
        # The database has it in its memory only.
        assert ask(web, "db", "get", "a") == "kept"
        assert group.kill().state == "ended"
        assert living(client) == set()

# SPDX-License-Identifier: AGPL-3.0-only
"""A group's member can be found by its names from when it has come up until it goes."""

from __future__ import annotations

from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services


class Names:
    """Shows and hides it. Nothing for a sandbox in no group."""

    name = "names"

    def __init__(self, services: Services) -> None:
        self._groups = services.groups

    async def setup(self, box: Sandbox) -> None:
        """Show it."""
        self._groups.show(box)

    async def teardown(self, box: Sandbox) -> None:
        """Hide it."""
        self._groups.hide(box)

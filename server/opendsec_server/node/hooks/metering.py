# SPDX-License-Identifier: AGPL-3.0-only
"""Counting what a sandbox uses: from the begin of each run to its end."""

from __future__ import annotations

from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services


class Metering:
    """The last of a backend's hooks: it is set up last and torn down first."""

    name = "metering"

    def __init__(self, services: Services) -> None:
        self._meters = services.meters

    async def setup(self, box: Sandbox) -> None:
        """Nothing is read now: creates are to be quick."""
        self._meters.begin(box)

    async def teardown(self, box: Sandbox) -> None:
        """Its control group and its link are still there."""
        self._meters.read(box)

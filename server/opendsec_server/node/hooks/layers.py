# SPDX-License-Identifier: AGPL-3.0-only
"""The read-only layers of a sandbox's image."""

from __future__ import annotations

from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services


class Layers:
    """Has the image's layers mounted; they are shared by all and stay."""

    name = "layers"

    def __init__(self, services: Services) -> None:
        self._layers = services.layers

    async def setup(self, box: Sandbox) -> None:
        """Find and mount them."""
        box.layers = await self._layers.resolve(box.spec.image)

    async def teardown(self, box: Sandbox) -> None:
        """Nothing was made for this sandbox alone."""

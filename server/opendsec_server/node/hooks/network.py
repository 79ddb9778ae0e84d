# SPDX-License-Identifier: AGPL-3.0-only
"""A network slot with the sandbox's egress policy."""

from __future__ import annotations

from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services


class Network:
    """Takes a slot and gives it back once the sandbox's last process is gone."""

    name = "network"

    def __init__(self, services: Services) -> None:
        self._slots = services.slots
        self._cgroups = services.cgroups

    async def setup(self, box: Sandbox) -> None:
        """Take a slot."""
        box.slot = await self._slots.take(box.spec.network)
        box.record.slot = box.slot.number

    async def teardown(self, box: Sandbox) -> None:
        """Give it back. While a process is left, the address stays taken."""
        if box.slot is None:
            return
        left = self._cgroups.processes(box.sandbox_id)
        if left:
            raise RuntimeError(f"address {box.slot.address} is kept: processes {sorted(left)} live")
        slot, box.slot = box.slot, None
        self._slots.release(slot)

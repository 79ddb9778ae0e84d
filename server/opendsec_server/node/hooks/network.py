# SPDX-License-Identifier: AGPL-3.0-only
"""A network slot with the sandbox's egress policy, connected with those of its group."""

from __future__ import annotations

from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services


class Network:
    """Takes a slot and gives it back once the sandbox's last process is gone."""

    name = "network"

    def __init__(self, services: Services) -> None:
        self._slots = services.slots
        self._groups = services.groups
        self._cgroups = services.cgroups

    async def setup(self, box: Sandbox) -> None:
        """Take a slot and connect it."""
        box.slot = await self._slots.take(box.spec.network)
        box.record.slot = box.slot.number
        await self._shape(box)
        await self._groups.join(box)

    async def _shape(self, box: Sandbox) -> None:
        """Make of it what its sandbox needs, before others can reach it."""

    async def teardown(self, box: Sandbox) -> None:
        """Give it back. While a process is left, or its group's way is open, the address stays
        taken."""
        if box.slot is None:
            return
        left = self._cgroups.processes(box.sandbox_id)
        if left:
            raise RuntimeError(f"address {box.slot.address} is kept: processes {sorted(left)} live")
        await self._groups.leave(box)
        slot, box.slot = box.slot, None
        self._slots.release(slot)

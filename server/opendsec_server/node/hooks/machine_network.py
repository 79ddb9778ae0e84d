# SPDX-License-Identifier: AGPL-3.0-only
"""A network slot with a tap behind it, for a virtual machine."""

from __future__ import annotations

from opendsec_server.node.sandbox import Sandbox

from .network import Network


class MachineNetwork(Network):
    """As ``Network``; the tap belongs to the user that the machine's VMM runs as."""

    async def _shape(self, box: Sandbox) -> None:
        """Add the tap."""
        assert box.slot is not None
        await self._slots.add_tap(box.slot, box.slot.id_base, box.spec.network)

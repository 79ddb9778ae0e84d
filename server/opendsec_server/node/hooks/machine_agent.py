# SPDX-License-Identifier: AGPL-3.0-only
"""The guest agent of a virtual machine: told who it is, what time it is, and given entropy."""

from __future__ import annotations

from opendsec_server.contract.errors import (
    AgentUnresponsive,
    ResumeFailed,
    SandboxStartFailed,
    StartTimeout,
)
from opendsec_server.contract.states import State
from opendsec_server.node import agent_client, limits
from opendsec_server.node.machines.identity import fresh_identity
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.vmm.base import Vmm

from .agent import Agent

_CONSOLE_CHARS_MAX = 2_000


class MachineAgent(Agent):
    """As ``Agent``, over a network that comes up with the guest, and with its own identity."""

    def __init__(self, services: Services, vmm: Vmm, budget_s: float) -> None:
        super().__init__(services)
        self._vmm = vmm
        self._budget_s = budget_s

    async def setup(self, box: Sandbox) -> None:
        """``POST /init``, as soon as the agent listens."""
        assert box.slot is not None
        resumed = box.state is State.RESUMING
        try:
            await agent_client.initialise(
                box.slot.address,
                box.spec,
                timeout_s=self._budget_s,
                give_up=lambda: self._why_hopeless(box),
                token=None if resumed else box.agent_token,
                fresh=fresh_identity(box, resumed=resumed),
                connect_timeout_s=limits.GUEST_CONNECT_TIMEOUT_S,
            )
        except TimeoutError as exc:
            raise StartTimeout(f"{exc}; its console ends: {self._console(box)}") from exc
        except AgentUnresponsive as exc:
            error = ResumeFailed if resumed else SandboxStartFailed
            raise error(f"{exc.message}; its console ends: {self._console(box)}") from exc
        box.asleep = False

    def _console(self, box: Sandbox) -> str:
        text = self._vmm.console_tail(self._paths.machine_run(box.sandbox_id))
        return text.strip()[-_CONSOLE_CHARS_MAX:] or "(it printed nothing)"

# SPDX-License-Identifier: AGPL-3.0-only
"""The guest agent: told who it is; asked to end its streams."""

from __future__ import annotations

import contextlib

from opendsec_server.contract.errors import AgentUnresponsive, SandboxStartFailed, StartTimeout
from opendsec_server.contract.limits import START_BUDGET_S
from opendsec_server.contract.states import EndReason, State
from opendsec_server.node import agent_client, process
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services

from .runtime import log_tail

_TERMINATE_REASON = {EndReason.TIMEOUT: "timeout", EndReason.IDLE: "timeout"}


class Agent:
    """Hands the agent its tokens, environment and limits: the sandbox is ready after that."""

    name = "agent"

    def __init__(self, services: Services) -> None:
        self._paths = services.paths

    async def setup(self, box: Sandbox) -> None:
        """``POST /init``, as soon as the agent listens."""
        assert box.slot is not None
        try:
            await agent_client.initialise(
                box.slot.address,
                box.spec,
                timeout_s=START_BUDGET_S,
                give_up=lambda: self._why_hopeless(box),
            )
        except TimeoutError as exc:
            raise StartTimeout(f"{exc}; its log ends: {self._log_tail(box)}") from exc
        except AgentUnresponsive as exc:
            raise SandboxStartFailed(f"{exc.message}; its log ends: {self._log_tail(box)}") from exc

    def _log_tail(self, box: Sandbox) -> str:
        return log_tail(self._paths.disk(box.sandbox_id) / "agent.log")

    @staticmethod
    def _why_hopeless(box: Sandbox) -> str | None:
        if box.abort_reason is not None:
            return "the sandbox was killed while starting"
        if box.pidfd is not None and process.has_ended(box.pidfd):
            return "the guest agent ended while starting"
        return None

    async def teardown(self, box: Sandbox) -> None:
        """Give streams a proper end, if the agent still can."""
        if box.slot is None or box.pidfd is None or process.has_ended(box.pidfd):
            return
        reason = _TERMINATE_REASON.get(box.record.reason or EndReason.KILLED, "killed")
        if box.state is State.PAUSING:
            reason = "paused"
        with contextlib.suppress(AgentUnresponsive):
            await agent_client.terminate(box.slot.address, box.spec.control_token, reason)

# SPDX-License-Identifier: AGPL-3.0-only
"""The steps that make a sandbox, in order, each with its way back.

``setup`` may fail at any point. ``teardown`` must work after a complete, a partial and no set-up
at all, also in another process than the one that set up: it looks at the machine, not at memory.
"""

from __future__ import annotations

from opendsec_server.node.services import Services

from .admit import Admit
from .agent import Agent
from .base import Hook, set_up, tear_down
from .bundle import Bundle
from .network import Network
from .runtime import Runtime
from .storage import Storage

__all__ = ["Hook", "container_hooks", "set_up", "tear_down"]


def container_hooks(services: Services) -> list[Hook]:
    """The steps of the container backend."""
    return [
        Admit(services),
        Network(services),
        Bundle(services),
        Storage(services),
        Runtime(services),
        Agent(services),
    ]

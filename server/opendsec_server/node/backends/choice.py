# SPDX-License-Identifier: AGPL-3.0-only
"""Which backends this machine can offer."""

from __future__ import annotations

from opendsec_server.node.services import Services

from .base import Backend
from .container import ContainerBackend


async def find_backends(services: Services) -> dict[str, Backend]:
    """Every backend that works here, by name, the simplest first."""
    found: list[Backend] = [ContainerBackend(services)]
    return {backend.info.name: backend for backend in found}

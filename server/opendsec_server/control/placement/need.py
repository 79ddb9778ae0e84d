# SPDX-License-Identifier: AGPL-3.0-only
"""What a sandbox needs of a node."""

from __future__ import annotations

import msgspec

from opendsec_server.contract.node import Backend


class Need(msgspec.Struct, kw_only=True, frozen=True):
    """What a sandbox needs of a node."""

    backend: Backend
    cpu: float
    memory_mb: int
    disk_mb: int
    image: str | None = None
    """Digest of its image. Nodes that hold it are preferred. None, or a name that every node has
    (``base``): no preference."""
    only: frozenset[str] | None = None
    """Ids of the nodes that can do it at all: those that hold its snapshot or image. None: any."""
    labels: dict[str, str] = {}
    """Labels that the node must have."""
    task_id: str | None = None
    """Sandboxes of one task are spread over nodes."""

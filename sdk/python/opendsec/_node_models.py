# SPDX-License-Identifier: Apache-2.0
"""What the server says of its nodes."""

from __future__ import annotations

import msgspec


class NodeInfo(msgspec.Struct, kw_only=True, frozen=True):
    """One machine that runs sandboxes, as the server knows it.

    Attributes:
        node_id: Part of its sandboxes' ids; None: it was not reached yet.
        name: As the server's settings name it.
        health: ``up``; ``suspect``: the last poll was not answered; ``down``: several were not;
            ``unknown``: it was never reached.
        trouble: Why the last poll failed.
        unreached_s: Since when it is not reached; 0 if it is.
        draining: It takes no new sandboxes.
        labels: What operators say of it.
        cpu_used: Share of its processors that is busy, 0 to 1.
        starting: Creates that the server waits for.
        unseen: Placements that no report of the node shows yet.
    """

    node_id: str | None
    name: str
    health: str
    trouble: str | None = None
    unreached_s: float = 0.0
    draining: bool = False
    labels: dict[str, str] = {}
    hostname: str | None = None
    version: str | None = None
    backends: tuple[str, ...] = ()
    cpu_count: int = 0
    cpu_used: float = 0.0
    memory_total_mb: int = 0
    memory_available_mb: int = 0
    disk_free_mb: int = 0
    sandboxes: int = 0
    sandboxes_max: int = 0
    starting: int = 0
    unseen: int = 0

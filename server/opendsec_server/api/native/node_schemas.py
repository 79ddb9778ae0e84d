# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of the native API's nodes. Their descriptions are also its documentation."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Labels = Annotated[
    dict[str, str],
    Meta(description="What operators say of it; creates may ask for them (`node_labels`)."),
]


class Node(Struct, kw_only=True, frozen=True):
    """One machine that runs sandboxes."""

    node_id: Annotated[
        str | None, Meta(description="Part of its sandboxes' ids. null: it was not reached yet.")
    ]
    name: Annotated[str, Meta(description="As the gateway's settings name it.")]
    health: Annotated[
        Literal["unknown", "up", "suspect", "down"],
        Meta(
            description="`suspect`: the last poll was not answered, it gets no new sandboxes. "
            "`down`: several were not, calls to its sandboxes are refused at once with "
            "`node_unavailable`. `unknown`: it was never reached."
        ),
    ]
    trouble: Annotated[str | None, Meta(description="Why the last poll failed.")]
    unreached_s: Annotated[float, Meta(description="Since when it is not reached; 0 if it is.")]
    draining: Annotated[bool, Meta(description="It takes no new sandboxes.")]
    labels: Labels
    hostname: str | None
    version: str | None
    backends: list[str]
    cpu_count: int
    cpu_used: Annotated[float, Meta(description="Share of the processors that is busy, 0 to 1.")]
    memory_total_mb: int
    memory_available_mb: int
    disk_free_mb: int
    sandboxes: Annotated[int, Meta(description="By its last report.")]
    sandboxes_max: int
    starting: Annotated[int, Meta(description="Creates that this gateway waits for.")]
    unseen: Annotated[
        int, Meta(description="Placements of this gateway that no report of it shows yet.")
    ]


class NodeList(Struct, kw_only=True, frozen=True):
    """All nodes."""

    nodes: list[Node]


class MarkNode(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What to replace. The node keeps it."""

    labels: Annotated[dict[str, str] | None, Meta(description="All its labels.")] = None
    draining: Annotated[
        bool | None, Meta(description="Whether it refuses new sandboxes. Those it has go on.")
    ] = None


class Forgotten(Struct, kw_only=True, frozen=True):
    """What was given up."""

    lost: Annotated[int, Meta(description="Sandboxes that ended as `lost`.")]

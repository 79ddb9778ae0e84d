# SPDX-License-Identifier: AGPL-3.0-only
"""What hooks work with: one value, so that each hook takes what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from opendsec_server.config import Config
from opendsec_server.images.store import ImageStore

from .cgroups import CgroupSet
from .container.bundle import HostTraits
from .container.runtime import OciRuntime
from .groups import Groups
from .journal import Journal
from .network.slots import SlotPool
from .paths import NodePaths
from .snapshots import Snapshots
from .storage.layers import LayerMounts
from .storage.pool import DiskPool
from .usage import Meters


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a running node."""

    config: Config
    paths: NodePaths
    journal: Journal
    pool: DiskPool
    snapshots: Snapshots
    store: ImageStore
    layers: LayerMounts
    slots: SlotPool
    groups: Groups
    runtime: OciRuntime
    cgroups: CgroupSet
    traits: HostTraits
    boot_id: str
    meters: Meters

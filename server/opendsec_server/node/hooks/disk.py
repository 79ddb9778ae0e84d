# SPDX-License-Identifier: AGPL-3.0-only
"""A container's disk: what lasts from its creation to its end."""

from __future__ import annotations

from opendsec_server.contract.errors import SnapshotNotFound
from opendsec_server.node.network.policy import RESOLVERS
from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.storage.rootfs import prepare_upper, rename_host


class Disk:
    """A subvolume with the disk limit: empty, or a copy of a snapshot's."""

    name = "disk"

    def __init__(self, services: Services) -> None:
        self._pool = services.pool
        self._snapshots = services.snapshots

    async def setup(self, box: Sandbox) -> None:
        """Make it. Under two milliseconds of system calls, off the event loop."""
        await finish_in_thread(self._make, box)

    def _make(self, box: Sandbox) -> None:
        spec = box.spec
        if spec.snapshot_id is None:
            disk = self._pool.create(spec.sandbox_id, spec.disk_mb)
            prepare_upper(disk, hostname=spec.sandbox_id, resolvers=RESOLVERS)
            return
        snapshot = self._snapshots.get(spec.snapshot_id)
        try:
            disk = self._pool.clone(spec.snapshot_id, spec.sandbox_id, spec.disk_mb)
        except FileNotFoundError as exc:
            raise SnapshotNotFound(f"snapshot {spec.snapshot_id} is gone") from exc
        box.record.disk_base_bytes = snapshot.disk_bytes
        (disk / "agent.log").unlink(missing_ok=True)
        rename_host(disk / "upper", old=snapshot.source_id, new=spec.sandbox_id)

    async def teardown(self, box: Sandbox) -> None:
        """Delete it."""
        self._pool.destroy(box.sandbox_id)

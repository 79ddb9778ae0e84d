# SPDX-License-Identifier: AGPL-3.0-only
"""The sandbox's disk and root file system."""

from __future__ import annotations

from opendsec_server.node.network.policy import RESOLVERS
from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.storage.rootfs import mount_rootfs, prepare_upper, unmount_rootfs


class Storage:
    """A subvolume with the disk limit, and the overlay on top of the image's layers."""

    name = "storage"

    def __init__(self, services: Services) -> None:
        self._paths = services.paths
        self._pool = services.pool

    async def setup(self, box: Sandbox) -> None:
        """Make and mount. About two milliseconds of system calls, off the event loop."""
        await finish_in_thread(self._make, box)

    def _make(self, box: Sandbox) -> None:
        slot = box.slot
        assert slot is not None
        disk = self._pool.create(box.sandbox_id, box.spec.disk_mb)
        prepare_upper(disk, hostname=box.sandbox_id, resolvers=RESOLVERS)
        mount_rootfs(
            box.layers,
            disk,
            self._paths.bundle(box.sandbox_id),
            slot.userns_fd,
            slot.id_base if slot.userns_fd is not None else 0,
        )

    async def teardown(self, box: Sandbox) -> None:
        """Unmount and delete."""
        unmount_rootfs(self._paths.bundle(box.sandbox_id))
        self._pool.destroy(box.sandbox_id)

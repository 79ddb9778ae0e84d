# SPDX-License-Identifier: AGPL-3.0-only
"""A container's root file system: the overlay of the image's layers and its own disk."""

from __future__ import annotations

from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.storage.rootfs import (
    forget_last_mount,
    mount_rootfs,
    unmount_rootfs,
)


class Rootfs:
    """Mounts and unmounts."""

    name = "rootfs"

    def __init__(self, services: Services) -> None:
        self._paths = services.paths

    async def setup(self, box: Sandbox) -> None:
        """Mount. About a millisecond of system calls, off the event loop."""
        await finish_in_thread(self._mount, box)

    def _mount(self, box: Sandbox) -> None:
        slot = box.slot
        assert slot is not None
        forget_last_mount(self._paths.disk(box.sandbox_id))
        mount_rootfs(
            box.layers,
            self._paths.disk(box.sandbox_id),
            self._paths.bundle(box.sandbox_id),
            slot.userns_fd,
            slot.id_base if slot.userns_fd is not None else 0,
        )

    async def teardown(self, box: Sandbox) -> None:
        """Unmount."""
        unmount_rootfs(self._paths.bundle(box.sandbox_id))

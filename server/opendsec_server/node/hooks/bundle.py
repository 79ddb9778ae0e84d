# SPDX-License-Identifier: AGPL-3.0-only
"""The sandbox's run directory with its OCI configuration."""

from __future__ import annotations

import os
import shutil

from opendsec_server.node.container.bundle import write_bundle
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.storage.rootfs import unmount_rootfs


class Bundle:
    """Makes and removes ``<run_dir>/sandboxes/<id>``."""

    name = "bundle"

    def __init__(self, services: Services) -> None:
        self._paths = services.paths
        self._traits = services.traits

    async def setup(self, box: Sandbox) -> None:
        """Write the configuration; the runtime finds the namespace through our descriptor."""
        assert box.slot is not None
        bundle = self._paths.bundle(box.sandbox_id)
        bundle.mkdir()
        bundle.chmod(0o711)
        write_bundle(
            bundle,
            box.spec,
            self._traits,
            netns_path=f"/proc/{os.getpid()}/fd/{box.slot.netns_fd}",
            id_base=None if box.slot.userns_fd is None else box.slot.id_base,
        )

    async def teardown(self, box: Sandbox) -> None:
        """Remove the directory; unmount first, or a left mount would be emptied with it."""
        bundle = self._paths.bundle(box.sandbox_id)
        unmount_rootfs(bundle)
        if bundle.exists():
            shutil.rmtree(bundle)

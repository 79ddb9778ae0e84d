# SPDX-License-Identifier: AGPL-3.0-only
"""Images packed of sandboxes."""

from __future__ import annotations

import msgspec
import structlog

from opendsec_server.contract.images import ImageInfo, PackOptions
from opendsec_server.contract.node import NodeClient

from .attempts import Attempts
from .iam import Caller
from .image_names import nameless, own_name, shown_names
from .lifecycle import Lifecycle
from .metrics import ControlMetrics

log = structlog.get_logger(__name__)


class Packing:
    """Makes images of a caller's sandboxes."""

    def __init__(self, node: NodeClient, lifecycle: Lifecycle, metrics: ControlMetrics) -> None:
        self._node = node
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._attempts: Attempts[ImageInfo] = Attempts("pack")

    async def pack(
        self, caller: Caller, sandbox_id: str, *, name: str | None, squash: bool, scrub: bool
    ) -> ImageInfo:
        """Make an image of a sandbox's changes. It goes on when the caller goes away.

        Raises:
            InvalidRequest: not a name.
            SandboxNotFound: not one of the caller's, or ended.
            StateConflict: it is starting, resuming or ending.
            NotSupported: its backend has no layers.
            SnapshotFailed: it could not be saved; it goes on, nothing is left.
            NodeFull: no room on the disk.
        """
        project_id = caller.project_id
        kept_as = nameless(project_id) if name is None else own_name(project_id, name)
        record = await self._lifecycle.get_started(caller, sandbox_id)
        options = PackOptions(squash=squash, scrub=scrub, name=kept_as)

        async def work() -> ImageInfo:
            with self._metrics.timed("pack", record.backend):
                return await self._node.pack(record.sandbox_id, options)

        image, _ = await self._attempts.run(work, project_id=caller.project_id)
        log.info("sandbox packed", sandbox_id=record.sandbox_id, image=image.digest)
        return msgspec.structs.replace(image, names=shown_names(caller.project_id, image.names))

    async def stop(self) -> None:
        """Give what is under way a moment to end."""
        await self._attempts.stop()

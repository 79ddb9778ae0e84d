# SPDX-License-Identifier: AGPL-3.0-only
"""Makes templates of imported disk images, those that are imported while the server is up too."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from opendsec_server.config import Config
from opendsec_server.contract import limits
from opendsec_server.contract.errors import OpendsecError
from opendsec_server.control.templates import TemplateDefinition, Templates
from opendsec_server.images.disk_images import DiskImageNotFound, DiskImages

log = structlog.get_logger(__name__)

LOOK_AGAIN_S = 1.0


class DiskTemplates:
    """Looks at the list of images, and registers a template of each under its name.

    Args:
        config: Names the state directory.
        templates: Where they are registered.
    """

    def __init__(self, config: Config, templates: Templates) -> None:
        self._images = DiskImages(config.state_path / "images")
        self._templates = templates
        self._known: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name="disk-templates")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except (OSError, OpendsecError) as exc:
                log.warning("disk_images_not_registered", error=str(exc))
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _look(self) -> None:
        for name, digest in self._images.names().items():
            if self._known.get(name) == digest:
                continue
            try:
                image = self._images.find(name)
            except DiskImageNotFound:
                continue
            await self._templates.register(
                TemplateDefinition(
                    name=name,
                    image=name,
                    disk_mb=max(limits.DISK_MB_DEFAULT, image.size_mb),
                    backend="vm",
                )
            )
            self._known[name] = digest
            log.info("disk_image_registered", name=name, firmware=image.firmware)

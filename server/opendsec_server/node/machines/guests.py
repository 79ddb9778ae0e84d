# SPDX-License-Identifier: AGPL-3.0-only
"""The guest kernel and initramfs, made when the first machine needs them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from opendsec_server.config import Config
from opendsec_server.images.guest import GuestImage, ensure_guest


class Guests:
    """The one guest image of this node.

    Args:
        config: Settings.
        images: Where it is kept.
        agent: The guest agent, which is the guest's init.
    """

    def __init__(self, config: Config, images: Path, agent: Path) -> None:
        self._config = config
        self._images = images
        self._agent = agent
        self._making: asyncio.Task[GuestImage] | None = None

    async def get(self) -> GuestImage:
        """The guest image. The first call makes it; those during that wait for it.

        Raises:
            ConfigError, SandboxStartFailed: it cannot be made; the next call tries again.
        """
        if self._making is None or (self._making.done() and self._making.exception() is not None):
            self._making = asyncio.create_task(
                ensure_guest(self._config, self._images, self._agent), name="guest-image"
            )
        return await asyncio.shield(self._making)

# SPDX-License-Identifier: AGPL-3.0-only
"""Read-only layers, each mounted once for all sandboxes.

Mounted in the host's mount namespace: a new mount of the same file would not share its page
cache with the sandboxes that still run on the old one after the daemon was restarted.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

from opendsec_server.contract.errors import Internal, TemplateNotFound
from opendsec_server.images.store import ImageNotFound, ImageStore
from opendsec_server.node import mountns
from opendsec_server.node.process import finish_in_thread

from .lazy import LazyLayers, mount_erofs
from .pool import attach_loop, release_loop


class LayerMounts:
    """Resolves image names to mounted layers."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._ready: set[str] = set()
        self._lock = asyncio.Lock()
        self.how: str | None = None
        """``file`` or ``loop``, once something was mounted by this process."""
        self.lazy = LazyLayers(store)

    async def resolve(self, image: str) -> list[Path]:
        """Mounted layers of an image, the topmost first.

        Raises:
            TemplateNotFound: the image is not on this node.
        """
        layers = self._layers_of(image)
        for layer in layers:
            if layer not in self._ready:
                async with self._lock:
                    if layer not in self._ready:
                        await self._mount(layer)
                        self._ready.add(layer)
        return [self._store.mount_path(layer) for layer in layers]

    async def resolve_remote(self, image: str) -> None:
        """For those who mount ``files`` themselves: the devices of remote layers are there.

        Raises:
            TemplateNotFound: the image is not on this node.
        """
        if any(self._store.is_remote(layer) for layer in self._layers_of(image)):
            await self.resolve(image)

    def files(self, image: str) -> list[Path]:
        """Files of an image's layers, the topmost first, for those who mount them themselves.

        Raises:
            TemplateNotFound: the image is not on this node.
        """
        return [self._store.layer_path(layer) for layer in self._layers_of(image)]

    def _layers_of(self, image: str) -> list[str]:
        """Digests (hex) of an image's layers, the topmost first."""
        try:
            return list(reversed(self._store.find(image).layers))
        except ImageNotFound as exc:
            raise TemplateNotFound(f"image {image!r} is not on this node: {exc}") from exc

    def forget(self, layer: str) -> None:
        """Unmount a layer (hex) whose file is about to be removed. Idempotent."""
        self._ready.discard(layer)
        mountns.unmount_everywhere(self._store.mount_path(layer))
        if self._store.is_remote(layer):
            self.lazy.end(layer)

    def trouble(self, image: str) -> str | None:
        """Why reads of an image's files may fail now: its store is lost. None: they do not."""
        try:
            layers = self._layers_of(image)
        except TemplateNotFound:
            return None
        return next((why for layer in layers if (why := self.lazy.trouble(layer))), None)

    async def _mount(self, digest: str) -> None:
        layer, target = self._store.layer_path(digest), self._store.mount_path(digest)
        if mountns.is_mounted_on_host(target):
            mountns.show_here(target)
            return
        mountns.make_directory(target)
        if self._store.is_remote(digest):
            await finish_in_thread(self.lazy.mount, digest, target)
        else:
            try:
                mountns.on_host(lambda: mount_erofs(str(layer), target))
                self.how = "file"
            except OSError as exc:
                if exc.errno != errno.ENOTBLK:
                    raise Internal(
                        f"cannot mount the layer {layer}: {exc}",
                        remediation="Check that the kernel has EROFS (modprobe erofs).",
                    ) from exc
                device = await attach_loop(layer, read_only=True)
                try:
                    mountns.on_host(lambda: mount_erofs(device, target))
                finally:
                    await release_loop(device)
                self.how = "loop"
        mountns.show_here(target)

    def unmount_all(self) -> None:
        """Unmount every layer of the store. Idempotent."""
        for layer in self._store.layers():
            self.forget(layer)
        self._ready.clear()

# SPDX-License-Identifier: AGPL-3.0-only
"""The node's images: what the control plane asks of them (``contract.images.NodeImages``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from opendsec_server.config import Config
from opendsec_server.contract.errors import ImageInUse, ImageNotFound, InvalidRequest
from opendsec_server.contract.images import (
    LAYERS_MAX,
    ImageConfig,
    ImageInfo,
    ImageInfos,
    PruneReport,
    PullProgress,
    PullProgresses,
    RegistryAuth,
)
from opendsec_server.images import auth as credentials
from opendsec_server.images import importing, lazy, manifests, references
from opendsec_server.images.collapse import collapse
from opendsec_server.images.convert import disk_errors
from opendsec_server.images.pull import Puller
from opendsec_server.images.push import Pusher
from opendsec_server.images.room import Room
from opendsec_server.images.store import Image, ImageStore


class Images:
    """Images of one node.

    Args:
        store: Where they are.
        config: Registries and limits.
        in_use: What sandboxes and snapshots name as their images: digests or names.
        unmount: Called with each layer (hex) before its file is removed.
        have_remote: Called with an image whose layers are about to be read: those whose data lies
            on a store get their devices. None: no image has such.

    Raises:
        ConfigError: a setting contradicts the machine.
    """

    def __init__(
        self,
        store: ImageStore,
        config: Config,
        in_use: Callable[[], Iterable[str]],
        unmount: Callable[[str], None],
        have_remote: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        credentials.check(config.registry_auth_file)
        self.store = store
        self._config = config
        self._named_in_use = in_use
        store.before_removal = unmount
        self._have_remote = have_remote
        self.room = Room(store, config, self._in_use)
        self._puller = Puller(store, config, self.room)
        self._pusher = Pusher(store, config)

    async def sweep(self) -> None:
        """At the node's start: remove what a killed daemon left half-made."""
        await asyncio.to_thread(self.store.sweep)

    def _in_use(self) -> set[str]:
        found = set()
        for name in set(self._named_in_use()):
            try:
                found.add(self.store.find(name).digest)
            except ImageNotFound:
                continue
        return found

    # --- NodeImages -------------------------------------------------------------

    async def pull(
        self, reference: str, *, auth: RegistryAuth | None = None, refresh: bool = True
    ) -> ImageInfo:
        """See ``NodeImages.pull``."""
        lazily = lazy.parse(reference)
        if lazily is not None:
            return await self._attached(lazily, refresh=refresh)
        with disk_errors():
            return await self._pull(reference, auth, refresh)

    async def _pull(self, reference: str, auth: RegistryAuth | None, refresh: bool) -> ImageInfo:
        local = importing.source(reference, self._config)
        if local is not None:
            return await self._told(await importing.take_in(self._puller, local))
        wanted = references.parse(reference)
        # Credentials are for the registry to judge, also for what is here.
        if not refresh or (wanted.digest is not None and auth is None):
            try:
                return await self.get(str(wanted))
            except ImageNotFound:
                pass
        return await self._told(await self._puller.pull(wanted, auth))

    async def _attached(self, source: lazy.Source, *, refresh: bool) -> ImageInfo:
        if not refresh or source.digest is not None:
            try:
                lazy.check_allowed(source.place, self._config)
                # By its name: a digest alone must open nothing.
                found = await self.get(source.text)
            except ImageNotFound:
                pass
            else:
                if source.digest in (None, found.digest):
                    return found
        return await self._told(await lazy.attach(self.store, source, self._config))

    async def compose(
        self, parts: Sequence[str], *, config: ImageConfig | None = None
    ) -> ImageInfo:
        """See ``NodeImages.compose``."""
        images = [await asyncio.to_thread(self.store.find, part) for part in parts]
        if not images:
            raise ImageNotFound("an image is composed of one image at least")
        layers: Sequence[str] = [layer for image in images for layer in image.layers]
        config = config or manifests.merged([image.config for image in images])
        with disk_errors(), self.store.holding() as hold:
            await asyncio.to_thread(hold.add, layers)
            if len(set(layers)) > LAYERS_MAX:
                for image in images:
                    await self._readable(image.digest)
                await self.room.make(sum(self.store.layer_bytes(layer) for layer in set(layers)))
                layers = await collapse(self.store, layers, hold)
            return await self._told(await asyncio.to_thread(self.store.put, layers, config))

    async def fewer_layers(self, image: ImageInfo, most: int) -> ImageInfo:
        """An image that shows the same in at most ``most`` layers; itself if it has no more.

        Raises:
            NodeFull: no room to collapse them.
        """
        if len(image.layers) <= most:
            return image
        with self.store.holding() as hold:
            await asyncio.to_thread(hold.add, image.layers)
            await self._readable(image.digest)
            await self.room.make(sum(self.store.layer_bytes(layer) for layer in image.layers))
            layers = await collapse(self.store, image.layers, hold, most)
            made = await asyncio.to_thread(self.store.put, layers, image.config)
            return await self._told(made)

    async def all(self) -> ImageInfos:
        """See ``NodeImages.all``."""

        def look() -> ImageInfos:
            names = self.store.names()
            return [self.store.info(image, names) for image in self.store.all()]

        return await asyncio.to_thread(look)

    async def get(self, name: str) -> ImageInfo:
        """See ``NodeImages.get``. Counts as a use of it."""

        def look() -> ImageInfo:
            image = self.store.find(name)
            self.store.touch(image.digest)
            return self.store.info(image)

        return await asyncio.to_thread(look)

    async def remove(self, name: str) -> None:
        """See ``NodeImages.remove``."""
        image = await asyncio.to_thread(self.store.find, name)
        table = await asyncio.to_thread(self.store.names)
        names = [known for known, digest in table.items() if digest == image.digest]
        by = next((known for known in (name, _full(name)) if known in names), None)
        if by is not None and len(names) > 1:
            await asyncio.to_thread(self.store.unname, by)
            return
        if image.digest in self.room.used():
            raise ImageInUse(f"image {name!r} is in use", details={"digest": image.digest})
        await asyncio.to_thread(self.store.remove, [image.digest])

    async def prune(self, *, unused_for_s: float = 0.0, keep: Sequence[str] = ()) -> PruneReport:
        """See ``NodeImages.prune``."""
        return await self.room.prune(unused_before=time.time() - unused_for_s, keep=keep)

    async def keep(self, digests: Sequence[str]) -> None:
        """See ``NodeImages.keep``."""
        self.room.keep = set(digests)

    async def progress(self) -> PullProgresses:
        """See ``NodeImages.progress``."""
        return [
            PullProgress(
                reference=pull.reference,
                layers=pull.layers,
                layers_done=pull.layers_done,
                bytes_total=pull.bytes_total,
                bytes_done=sum(pull.bytes_read.values()),
            )
            for pull in self._puller.running.values()
        ]

    async def push(self, name: str, reference: str, *, auth: RegistryAuth | None = None) -> str:
        """See ``NodeImages.push``."""
        image = await asyncio.to_thread(self.store.find, name)
        self.store.touch(image.digest)
        await self._readable(image.digest)
        with disk_errors():
            return await self._pusher.push(image, references.parse(reference), auth)

    async def _readable(self, digest: str) -> None:
        if self._have_remote is not None:
            await self._have_remote(digest)

    async def _told(self, image: Image) -> ImageInfo:
        return await asyncio.to_thread(self.store.info, image)


def _full(name: str) -> str | None:
    try:
        return references.canonical(name)
    except InvalidRequest:
        return None

# SPDX-License-Identifier: AGPL-3.0-only
"""A node's image store without a disk. Tests only."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence

import msgspec

from opendsec_server.contract.errors import ImageNotFound, InvalidRequest, RegistryDenied
from opendsec_server.contract.images import (
    ImageConfig,
    ImageInfo,
    PruneReport,
    PullProgress,
    RegistryAuth,
)
from opendsec_server.control.image_access import full_name


def _full(name: str) -> str | None:
    try:
        return full_name(name)
    except InvalidRequest:
        return None


class FakeImages:
    """Images as maps of path to text. ``base`` is there; a registry offers some more."""

    def __init__(self) -> None:
        self.disks: dict[str, dict[str, str]] = {}
        self.infos: dict[str, ImageInfo] = {}
        self.offered: dict[str, tuple[dict[str, str], ImageConfig, RegistryAuth | None]] = {
            "alpine": ({"/etc/os-release": "alpine"}, ImageConfig(env={"A": "1"}), None),
        }
        """What can be pulled: files, configuration, and who may."""
        self.pulls: list[str] = []
        self.fail_pull: Exception | None = None
        self.pushed: dict[str, str] = {}
        self.kept: set[str] = set()
        self.gate: asyncio.Event | None = None
        """Pulls wait here."""
        self.landed: asyncio.Event | None = None
        """Pulls wait here when the image is there."""
        self.base = self.add({"/etc/os-release": "debian"}, names=("base",)).digest

    def add(
        self,
        disk: dict[str, str],
        config: ImageConfig | None = None,
        *,
        names: tuple[str, ...] = (),
    ) -> ImageInfo:
        """An image of these files."""
        config = config or ImageConfig()
        text = msgspec.json.encode((disk, config), order="deterministic")
        digest = "sha256:" + hashlib.sha256(text).hexdigest()
        now = time.time()
        known = self.infos[digest].names if digest in self.infos else ()
        info = ImageInfo(
            digest=digest,
            names=tuple(dict.fromkeys((*known, *names))),
            layers=(digest[7:],),
            size_bytes=len(text),
            config=config,
            created_at=now,
            last_used_at=now,
        )
        self.disks[digest] = dict(disk)
        self.infos[digest] = info
        return info

    async def pull(
        self, reference: str, *, auth: RegistryAuth | None = None, refresh: bool = True
    ) -> ImageInfo:
        self.pulls.append(reference)
        if self.gate is not None:
            await self.gate.wait()
        if self.fail_pull is not None:
            raise self.fail_pull
        name = full_name(reference)
        here = next((i for i in self.infos.values() if name in i.names), None)
        # As a node: nobody asks a registry for a digest that is here, but with a password.
        if here is not None and (not refresh or ("@" in reference and auth is None)):
            return here
        if reference not in self.offered:
            raise ImageNotFound(f"the registry has no `{reference}`")
        disk, config, needed = self.offered[reference]
        if needed is not None and auth != needed:
            raise RegistryDenied(f"`{reference}` needs other credentials")
        info = self.add(disk, config, names=(name,))
        if self.landed is not None:
            # It is here, and who asked does not know yet.
            await self.landed.wait()
        return info

    async def compose(
        self, parts: Sequence[str], *, config: ImageConfig | None = None
    ) -> ImageInfo:
        disk: dict[str, str] = {}
        for part in parts:
            disk.update(self.disks[(await self.get(part)).digest])
        return self.add(disk, config)

    async def all(self) -> list[ImageInfo]:
        return list(self.infos.values())

    async def get(self, name: str) -> ImageInfo:
        for info in self.infos.values():
            if name == info.digest or name in info.names or _full(name) in info.names:
                return info
        raise ImageNotFound(f"there is no image `{name}`")

    async def remove(self, name: str) -> None:
        del self.infos[(await self.get(name)).digest]

    async def prune(self, *, unused_for_s: float = 0.0, keep: Sequence[str] = ()) -> PruneReport:
        gone = tuple(d for d in self.infos if d not in keep and d != self.base)
        for digest in gone:
            del self.infos[digest]
        return PruneReport(images=gone, layers=len(gone), freed_bytes=0)

    async def keep(self, digests: Sequence[str]) -> None:
        self.kept = set(digests)

    async def progress(self) -> list[PullProgress]:
        return []

    async def push(self, name: str, reference: str, *, auth: RegistryAuth | None = None) -> str:
        info = await self.get(name)
        self.pushed[reference] = info.digest
        return info.digest

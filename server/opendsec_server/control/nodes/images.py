# SPDX-License-Identifier: AGPL-3.0-only
"""The images of all nodes.

Each node has its own store. An image that came from a registry is pulled by a node that is given a
sandbox of it and lacks it, by the digest that the first node pulled. What was packed or composed
on a node is there only, and so are the sandboxes made of it, until it is pushed to a registry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from opendsec_server.contract.errors import (
    ImageInUse,
    ImageNotFound,
    NodeFull,
    OpendsecError,
    RegistryDenied,
    TemplateNotFound,
)
from opendsec_server.contract.images import (
    DIGEST_RE,
    ImageConfig,
    ImageInfo,
    ImageInfos,
    NodeImages,
    PruneReport,
    PullProgresses,
    RegistryAuth,
)
from opendsec_server.contract.node import NodeClient, SandboxSpec, SandboxStatus
from opendsec_server.control.placement import Need

from .member import Member

if TYPE_CHECKING:
    from .fleet import Fleet

log = structlog.get_logger(__name__)

KNOWN_MAX = 65_536
"""Images whose names are remembered."""
_PULLS = Need(backend="container", cpu=0.0, memory_mb=0, disk_mb=0)


class ImageMissing(NodeFull):
    """The node lacks the image and cannot have it: others may hold it."""


class FleetImages:
    """Implements ``NodeImages`` over all nodes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: OrderedDict[str, ImageInfo] = OrderedDict()
        """By digest: how it was named and where it came from."""
        self._held_only: OrderedDict[str, None] = OrderedDict()
        """Images that nodes could not pull by themselves."""

    @property
    def _only(self) -> NodeImages | None:
        """The store of a single node."""
        members = self._fleet.members
        return members[0].client.images if len(members) == 1 else None

    # --- who holds what -----------------------------------------------------

    def note(self, node_id: str, image: ImageInfo) -> None:
        """A node holds an image, as its own answer has just said."""
        if len(self._fleet.members) == 1:
            return
        standing = self._fleet.member(node_id).standing
        standing.images |= {image.digest}
        self._known[image.digest] = image
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def only_on(self, digest: str) -> frozenset[str] | None:
        """Ids of the nodes that sandboxes of an image can be placed on. None: all, since it can be
        pulled, or nothing is known of it."""
        if len(self._fleet.members) == 1 or DIGEST_RE.fullmatch(digest) is None:
            return None
        known = self._known.get(digest)
        if known is not None and digest not in self._held_only and _pullable(known) is not None:
            return None
        holders = frozenset(
            m.standing.node_id for m in self._fleet.members if digest in m.standing.images
        )
        return holders or None

    async def with_image(self, client: NodeClient, spec: SandboxSpec) -> SandboxStatus:
        """Create a sandbox; pull its image first if the node lacks it.

        Raises:
            As ``NodeClient.create`` and ``NodeImages.pull``.
        """
        try:
            return await client.create(spec)
        except TemplateNotFound:
            if self._only is not None or DIGEST_RE.fullmatch(spec.image) is None:
                raise
            reference = await self._reference(spec.image)
            if reference is None:
                raise
        try:
            image = await client.images.pull(reference, refresh=False)
        except (RegistryDenied, ImageNotFound) as exc:
            # It was pulled with credentials that only its caller had, or is gone there.
            self._held_only[spec.image] = None
            if len(self._held_only) > KNOWN_MAX:
                self._held_only.popitem(last=False)
            raise ImageMissing(
                f"the node lacks the image `{spec.image[:19]}` and cannot pull it: {exc.message}",
                remediation="Give the node credentials for the registry (registry_auth_file).",
            ) from exc
        if image.digest != spec.image:
            raise TemplateNotFound(
                f"image `{spec.image[:19]}` is not on the node, and `{reference}` gave another one",
                remediation="Pull the image anew; nodes of one release unpack it alike.",
            )
        return await client.create(spec)

    async def _reference(self, digest: str) -> str | None:
        known = self._known.get(digest)
        if known is None:
            try:
                known = await self.get(digest)
            except ImageNotFound:
                return None
        return _pullable(known)

    def _holders(self, digest: str) -> list[Member]:
        return [m for m in self._fleet.reachable() if digest in m.standing.images]

    def _puller(self) -> Member:
        return self._fleet.member(self._fleet.choose(_PULLS).node_id)

    # --- NodeImages ---------------------------------------------------------

    async def pull(
        self, reference: str, *, auth: RegistryAuth | None = None, refresh: bool = True
    ) -> ImageInfo:
        """See ``NodeImages.pull``. One node pulls; others when they are given a sandbox."""
        if self._only is not None:
            return await self._only.pull(reference, auth=auth, refresh=refresh)
        if not refresh:
            for image in self._known.values():
                if reference in image.names and self._holders(image.digest):
                    return image
        member = self._puller()
        image = await member.client.images.pull(reference, auth=auth, refresh=refresh)
        self.note(member.standing.node_id, image)
        return image

    async def compose(
        self, parts: Sequence[str], *, config: ImageConfig | None = None
    ) -> ImageInfo:
        """See ``NodeImages.compose``. On the node that holds most parts."""
        if self._only is not None:
            return await self._only.compose(parts, config=config)
        member = max(
            self._fleet.reachable(),
            key=lambda m: (sum(part in m.standing.images for part in parts), m.up),
        )
        for part in parts:
            if part not in member.standing.images:
                reference = await self._reference(part)
                if reference is not None:
                    image = await member.client.images.pull(reference, refresh=False)
                    self.note(member.standing.node_id, image)
        image = await member.client.images.compose(parts, config=config)
        self.note(member.standing.node_id, image)
        return image

    async def all(self) -> ImageInfos:
        """See ``NodeImages.all``. An image that several nodes hold is told once."""
        if self._only is not None:
            return await self._only.all()
        found: dict[str, ImageInfo] = {}
        for member, images in await self._fleet.every(lambda client: client.images.all()):
            member.standing.images = frozenset(image.digest for image in images)
            for image in images:
                found[image.digest] = _joined(found.get(image.digest), image)
        return sorted(found.values(), key=lambda image: image.created_at)

    async def get(self, name: str) -> ImageInfo:
        """See ``NodeImages.get``."""
        if self._only is not None:
            return await self._only.get(name)
        for member in self._holders(name)[:2]:
            try:
                return await member.client.images.get(name)
            except OpendsecError:
                continue
        answers = await self._fleet.every(lambda client: _get(client, name))
        found = [(member, image) for member, image in answers if image is not None]
        if not found:
            raise ImageNotFound(f"no image `{name[:80]}` is here")
        for member, image in found:
            self.note(member.standing.node_id, image)
        return max((image for _, image in found), key=lambda image: image.last_used_at)

    async def remove(self, name: str) -> None:
        """See ``NodeImages.remove``. From every node that holds it."""
        if self._only is not None:
            await self._only.remove(name)
            return

        async def one(client: NodeClient) -> OpendsecError | None:
            try:
                await client.images.remove(name)
            except (ImageNotFound, ImageInUse) as exc:
                return exc
            return None

        answers = [got for _, got in await self._fleet.every(one)]
        for got in answers:
            if isinstance(got, ImageInUse):
                raise got
        if answers and all(isinstance(got, ImageNotFound) for got in answers):
            raise ImageNotFound(f"no image `{name[:80]}` is here")

    async def prune(self, *, unused_for_s: float = 0.0, keep: Sequence[str] = ()) -> PruneReport:
        """See ``NodeImages.prune``. The sum of all nodes."""
        if self._only is not None:
            return await self._only.prune(unused_for_s=unused_for_s, keep=keep)
        reports = [
            report
            for _, report in await self._fleet.every(
                lambda client: client.images.prune(unused_for_s=unused_for_s, keep=keep)
            )
        ]
        return PruneReport(
            images=tuple(sorted({name for report in reports for name in report.images})),
            layers=sum(report.layers for report in reports),
            freed_bytes=sum(report.freed_bytes for report in reports),
        )

    async def keep(self, digests: Sequence[str]) -> None:
        """See ``NodeImages.keep``."""
        if self._only is not None:
            await self._only.keep(digests)
        else:
            await self._fleet.every(lambda client: client.images.keep(digests))

    async def progress(self) -> PullProgresses:
        """See ``NodeImages.progress``."""
        if self._only is not None:
            return await self._only.progress()
        answers = await self._fleet.every(lambda client: client.images.progress())
        return [pull for _, pulls in answers for pull in pulls]

    async def push(self, name: str, reference: str, *, auth: RegistryAuth | None = None) -> str:
        """See ``NodeImages.push``. By a node that holds it."""
        if self._only is not None:
            return await self._only.push(name, reference, auth=auth)
        image = await self.get(name)
        holders = self._holders(image.digest)
        if not holders:
            raise ImageNotFound(f"no image `{name[:80]}` is here")
        return await holders[0].client.images.push(image.digest, reference, auth=auth)


async def _get(client: NodeClient, name: str) -> ImageInfo | None:
    try:
        return await client.images.get(name)
    except ImageNotFound:
        return None


def _joined(one: ImageInfo | None, other: ImageInfo) -> ImageInfo:
    if one is None:
        return other
    return msgspec.structs.replace(
        one,
        names=tuple(dict.fromkeys((*one.names, *other.names))),
        source=one.source or other.source,
        last_used_at=max(one.last_used_at, other.last_used_at),
    )


def _pullable(image: ImageInfo) -> str | None:
    """A reference that gives exactly this image on any node, if it came from a registry."""
    if image.source is None or not image.names:
        return None
    for name in image.names:
        repository, _, tag = name.rpartition(":")
        if repository and "/" not in tag and "/" in repository:
            return f"{repository}@{image.source}"
    return None

# SPDX-License-Identifier: AGPL-3.0-only
"""The images of the installation, as its projects see them.

What came from a registry is everybody's: any project may pull, and uses what others pulled, unless
it came with another project's password (see ``image_access``). What a
project packed is its own, and so is the image of a template for those who may use that. What has no
name (steps of builds, compositions) is seen by the installation's first project only, which alone
may remove what is everybody's. A digest opens nothing by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from opendsec_server.contract.errors import (
    Forbidden,
    ImageInUse,
    ImageNotFound,
    InvalidRequest,
    OpendsecError,
)
from opendsec_server.contract.images import (
    DIGEST_RE,
    ImageInfo,
    PruneReport,
    PullProgresses,
    RegistryAuth,
)
from opendsec_server.contract.node import NodeClient

from .attempts import Attempts
from .iam import Caller, Iam
from .image_access import ImageAccess
from .image_names import is_own_name, is_owner, may_use, own_name, shown_names
from .templates import Templates

log = structlog.get_logger(__name__)

_DIGEST_RE = re.compile(r"(?:sha256:)?[0-9a-f]{12,64}")
KEEP_INTERVAL_S = 60.0
"""How often the node is told which images templates stand on."""


InUse = Callable[[], Awaitable[set[str]]]
"""Asks for the digests that templates, and builds under way, stand on."""


class Images:
    """Lists, pulls, removes and pushes images for callers."""

    def __init__(
        self,
        node: NodeClient,
        iam: Iam,
        access: ImageAccess,
        templates: Templates,
        in_use: InUse,
    ) -> None:
        self._access = access
        self._templates = templates
        self._in_use = in_use
        self._node = node
        self._iam = iam
        self._attempts: Attempts[ImageInfo] = Attempts("pull")
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Tell the nodes what templates stand on, and go on doing so.

        One that cannot be reached now is told later: it must not keep the server from starting.
        """
        await self._tell_kept_or_log()
        self._keeper = asyncio.create_task(self._keep(), name="images-kept")

    async def stop(self) -> None:
        """Give what is under way a moment to end."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        await self._attempts.stop()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(KEEP_INTERVAL_S)
            await self._tell_kept_or_log()

    async def _tell_kept_or_log(self) -> None:
        try:
            await self._node.images.keep(sorted(await self._in_use()))
        except OpendsecError as exc:
            log.warning("nodes not told what templates stand on", error=exc.message)

    async def list(self, caller: Caller) -> list[ImageInfo]:
        """The images that the caller may see, the oldest first."""
        everything = await self._iam.operates(caller)
        images = await self._node.images.all()
        table = await self._access.table()
        return [
            self._shown(caller, image)
            for image in images
            if everything
            or may_use(
                caller.project_id,
                image.names,
                closed=not table.open_to(caller.project_id, image),
            )
        ]

    async def get(self, caller: Caller, name: str) -> ImageInfo:
        """One image, by reference, own name, digest or a digest's first 12 characters.

        Raises:
            ImageNotFound: there is none, or the caller may not see it.
        """
        return self._shown(caller, await self.find(caller, name))

    async def pull(
        self, caller: Caller, reference: str, *, auth: RegistryAuth | None, refresh: bool
    ) -> ImageInfo:
        """Pull an image. It goes on when the caller goes away.

        Raises:
            As ``ImageAccess.pull``.
        """
        if is_own_name(reference) or DIGEST_RE.fullmatch(reference):
            raise InvalidRequest(f"reference: `{reference[:80]}` names no image of a registry")

        async def work() -> ImageInfo:
            return await self._access.pull(caller.project_id, reference, auth=auth, refresh=refresh)

        image, _ = await self._attempts.run(work, project_id=caller.project_id)
        log.info("image pulled", image=image.digest, project=caller.project_id)
        return self._shown(caller, image)

    async def remove(self, caller: Caller, name: str) -> None:
        """Remove an image, or one of its names.

        Raises:
            ImageNotFound: there is none, or the caller may not see it.
            Forbidden: it is everybody's, and the caller is not the installation's project.
            ImageInUse: sandboxes, snapshots or templates stand on it.
        """
        own = await self._own(caller, name)
        image = own or await self.find(caller, name)
        mine = own is not None or is_owner(caller.project_id, image.names)
        if not mine and not await self._iam.operates(caller):
            raise Forbidden(
                "images that were pulled belong to all projects",
                remediation="Have it removed with a key of the installation's first project.",
            )
        one_of_several = len(image.names) > 1 and _DIGEST_RE.fullmatch(name) is None
        if not one_of_several and image.digest in await self._in_use():
            raise ImageInUse(
                f"a template stands on the image `{name}`",
                remediation="Delete the template first.",
                details={"digest": image.digest},
            )
        await self._node.images.remove(name if own is None else own_name(caller.project_id, name))
        log.info("image removed", image=image.digest, project=caller.project_id)

    async def prune(self, caller: Caller, *, unused_for_s: float) -> PruneReport:
        """Remove the images that nothing uses.

        Raises:
            Forbidden: the caller is not the installation's project.
        """
        if not await self._iam.operates(caller):
            raise Forbidden(
                "images belong to all projects",
                remediation="Prune with a key of the installation's first project.",
            )
        keep = sorted(await self._in_use())
        return await self._node.images.prune(unused_for_s=unused_for_s, keep=keep)

    async def push(
        self, caller: Caller, name: str, reference: str, *, auth: RegistryAuth | None
    ) -> str:
        """Send an image to a registry; the digest of its manifest there.

        Raises:
            ImageNotFound: there is none, or the caller may not see it.
            Forbidden: the settings do not allow the registry.
            As ``NodeImages.push``.
        """
        await self._access.check_registry(caller.project_id, reference)
        image = await self.find(caller, name)
        return await self._node.images.push(image.digest, reference, auth=auth)

    async def progress(self, caller: Caller) -> PullProgresses:
        """The pulls at work for the caller's project; the installation's sees all."""
        pulls = await self._node.images.progress()
        if await self._iam.operates(caller):
            return pulls
        mine = self._access.pulls_of(caller.project_id)
        return [pull for pull in pulls if pull.reference in mine]

    def _shown(self, caller: Caller, image: ImageInfo) -> ImageInfo:
        return msgspec.structs.replace(image, names=shown_names(caller.project_id, image.names))

    async def _own(self, caller: Caller, name: str) -> ImageInfo | None:
        try:
            return await self._node.images.get(own_name(caller.project_id, name))
        except (InvalidRequest, ImageNotFound):
            return None

    async def find(self, caller: Caller, name: str) -> ImageInfo:
        """As ``get``, with the names that the node knows.

        Raises:
            ImageNotFound: there is none, or the caller may not use it.
        """
        if not is_own_name(name):
            image = await self._own(caller, name) or await self._node.images.get(name)
            if await self._may_use(caller, image):
                return image
        raise ImageNotFound(f"no image `{name[:80]}` is here")

    async def _may_use(self, caller: Caller, image: ImageInfo) -> bool:
        table = await self._access.table(image)
        closed = not table.open_to(caller.project_id, image)
        if may_use(caller.project_id, image.names, closed=closed):
            return True
        if any(t.image == image.digest for t in await self._templates.visible(caller)):
            return True
        return await self._iam.operates(caller)

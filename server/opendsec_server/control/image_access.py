# SPDX-License-Identifier: AGPL-3.0-only
"""Which project may have which image of a registry.

An image that came with a project's own password is that project's, until another shows the registry
a password that is good for it, or has it without one. All others are everybody's. What the node's
own file of credentials opens is open to every project. An image that is being pulled with a
password is nobody's until it is noted whose it is.
"""

from __future__ import annotations

import re
from collections import Counter

from opendsec_server.config import Config
from opendsec_server.contract import limits
from opendsec_server.contract.errors import (
    Forbidden,
    ImageNotFound,
    InvalidRequest,
    NodeUnavailable,
    RegistryDenied,
)
from opendsec_server.contract.images import ImageInfo, RegistryAuth
from opendsec_server.contract.node import NodeClient
from opendsec_server.store import images
from opendsec_server.store.images import EVERYONE, Access
from opendsec_server.store.store import Store

from .iam import Iam

DOCKER_HUB = "docker.io"
# Sources that are no registries; the node's settings say which are allowed.
_OTHER_SOURCE_RE = re.compile(r"lazy\+|(?:oci|oci-archive|docker-archive|tar):/")


class ImageAccess:
    """Pulls for projects, and knows what each may have."""

    def __init__(self, config: Config, store: Store, node: NodeClient, iam: Iam) -> None:
        self._allowed = config.image_registries
        self._store = store
        self._node = node
        self._iam = iam
        self._pulls: Counter[tuple[str, str]] = Counter()
        """What is being pulled: for which project, and the full name."""

    async def table(self, image: ImageInfo | None = None) -> Access:
        """Who may have which image, or one of them; to be read after the images are."""
        return await images.access(self._store, image)

    def pulls_of(self, project_id: str) -> frozenset[str]:
        """Full names of what this process pulls for a project now."""
        return frozenset(name for whose, name in self._pulls if whose == project_id)

    async def check_registry(self, project_id: str, reference: str) -> None:
        """Go on only with a registry that the settings allow.

        Raises:
            Forbidden: they do not. The installation's own project is not bound.
        """
        if not self._allowed or _OTHER_SOURCE_RE.match(reference):
            return
        host = registry_of(reference)
        if any(_fits(host, allowed) for allowed in self._allowed):
            return
        if await self._iam.is_first(project_id):
            return
        raise Forbidden(
            f"images of the registry `{host[:80]}` are not allowed here",
            remediation=f"Allowed are: {', '.join(self._allowed)}. The operator sets "
            "`image_registries`.",
            details={"registry": host[:80], "allowed": list(self._allowed)},
        )

    async def pull(
        self, project_id: str, reference: str, *, auth: RegistryAuth | None, refresh: bool
    ) -> ImageInfo:
        """Pull for a project. What is here is enough if the project may have it.

        Raises:
            Forbidden: the settings do not allow the registry.
            RegistryDenied: it came with another project's password.
            As ``NodeImages.pull``.
        """
        await self.check_registry(project_id, reference)
        name = full_name(reference)
        self._pulls[project_id, name] += 1
        try:
            if auth is None:
                return await self._pull_openly(project_id, reference, refresh=refresh)
            return await self._pull_with(project_id, reference, name, auth, refresh=refresh)
        finally:
            self._pulls[project_id, name] -= 1
            if not self._pulls[project_id, name]:
                del self._pulls[project_id, name]

    async def _pull_openly(self, project_id: str, reference: str, *, refresh: bool) -> ImageInfo:
        """Without a password. What another's password has brought meanwhile is not given away."""
        denied = RegistryDenied(
            f"`{reference[:80]}` came with another project's password",
            remediation="Give credentials that may pull it.",
        )
        here = await self._here(reference)
        mine = here is not None and (await self.table(here)).open_to(project_id, here)
        # A node asks no registry for a digest that it has.
        pinned = "@" in reference
        if pinned and here is not None and not mine:
            raise denied
        ask = refresh or not mine
        image = await self._node.images.pull(reference, auth=None, refresh=ask)
        table = await self.table(image)
        if ask and not pinned:
            if table.known(image.digest) or not table.settled(image):
                # The registry gave it to nobody in particular.
                await images.let_have(self._store, image.digest, EVERYONE)
        elif not table.open_to(project_id, image):
            raise denied
        return image

    async def _pull_with(
        self, project_id: str, reference: str, name: str, auth: RegistryAuth, *, refresh: bool
    ) -> ImageInfo:
        """With a password. The image is nobody's until it is noted whose it is, also if this
        process is killed meanwhile."""
        everything = await self._node.images.all()
        table = await self.table()
        before = {image.digest for image in everything if table.settled(image)}
        for image in everything:
            if name in image.names and image.digest in before and not table.known(image.digest):
                # It stays everybody's meanwhile.
                await images.let_have(self._store, image.digest, EVERYONE)
        here = next((image for image in everything if name in image.names), None)
        mine = here is not None and table.open_to(project_id, here)
        attempt = await images.begin_pull(self._store, name, project_id)
        try:
            image = await self._node.images.pull(reference, auth=auth, refresh=refresh or not mine)
        except NodeUnavailable:
            # It may go on there.
            raise
        except Exception:
            await images.end_pull(self._store, name, attempt)
            raise
        known = (await self.table(image)).known(image.digest)
        if known or image.digest not in before:
            await images.let_have(self._store, image.digest, project_id)
        await images.end_pull(self._store, name, attempt)
        return image

    async def _here(self, reference: str) -> ImageInfo | None:
        try:
            return await self._node.images.get(reference)
        except (ImageNotFound, InvalidRequest):
            return None


def registry_of(reference: str) -> str:
    """The registry that a reference names."""
    return _split(reference)[0]


def full_name(reference: str) -> str:
    """What nodes name the image that a reference means: ``docker.io/library/alpine:latest``.

    Raises:
        InvalidRequest: nothing that could be a reference.
    """
    if len(reference) > limits.NAME_CHARS_MAX or not reference.isprintable():
        raise InvalidRequest(f"reference: {reference[:80]!r} is not a reference of an image")
    if _OTHER_SOURCE_RE.match(reference):
        return reference
    host, rest = _split(reference)
    path = rest.partition("@")[0].partition(":")[0]
    if host == DOCKER_HUB and "/" not in path:
        rest = f"library/{rest}"
    return f"{host}/{rest}" if "@" in rest or ":" in rest else f"{host}/{rest}:latest"


def _split(reference: str) -> tuple[str, str]:
    """Registry and the rest, by docker's rule."""
    head, slash, tail = reference.partition("/")
    if slash and (head == "localhost" or "." in head or ":" in head or head.lower() != head):
        return (DOCKER_HUB if head == "index.docker.io" else head), tail
    return DOCKER_HUB, reference


def _fits(host: str, allowed: str) -> bool:
    if allowed.startswith("*."):
        return host.lower().endswith(allowed[1:].lower())
    return host.lower() == allowed.lower()

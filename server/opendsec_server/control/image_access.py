# SPDX-License-Identifier: AGPL-3.0-only
"""Which project may have which image of a registry.

An image that came with a project's own password is that project's, until another shows the registry
a password that is good for it, or has it without one. All others are everybody's. What the node's
own file of credentials opens is open to every project.
"""

from __future__ import annotations

import re

from opendsec_server.config import Config
from opendsec_server.contract.errors import Forbidden, ImageNotFound, InvalidRequest, RegistryDenied
from opendsec_server.contract.images import ImageInfo, RegistryAuth
from opendsec_server.contract.node import NodeClient
from opendsec_server.store import images
from opendsec_server.store.images import EVERYONE
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

    async def may_have(self, project_id: str, digest: str) -> bool:
        """Whether an image is everybody's, or the project has shown that it may have it."""
        found = await images.projects_with(self._store, digest)
        return not found or project_id in found or EVERYONE in found

    async def closed_to(self, project_id: str) -> frozenset[str]:
        """Digests of the images that a project may not have."""
        return await images.closed_to(self._store, project_id)

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
        here = await self._here(reference)
        mine = here is None or await self.may_have(project_id, here.digest)
        if not mine and auth is None and "@" in reference:
            # A node asks no registry for a digest that it has.
            raise RegistryDenied(
                f"`{reference[:80]}` came with another project's password",
                remediation="Give credentials that may pull it.",
            )
        before: frozenset[str] = frozenset()
        if auth is not None:
            before = frozenset(image.digest for image in await self._node.images.all())
        image = await self._node.images.pull(reference, auth=auth, refresh=refresh or not mine)
        known = await images.projects_with(self._store, image.digest)
        if auth is not None:
            if known or image.digest not in before:
                await images.let_have(self._store, image.digest, project_id)
        elif known and (refresh or not mine or here is None):
            # The registry gave it to nobody in particular.
            await images.let_have(self._store, image.digest, EVERYONE)
        return image

    async def _here(self, reference: str) -> ImageInfo | None:
        try:
            return await self._node.images.get(reference)
        except (ImageNotFound, InvalidRequest):
            return None


def registry_of(reference: str) -> str:
    """The registry that a reference names, by docker's rule."""
    head, slash, _ = reference.partition("/")
    if slash and (head == "localhost" or "." in head or ":" in head or head.lower() != head):
        return DOCKER_HUB if head == "index.docker.io" else head
    return DOCKER_HUB


def _fits(host: str, allowed: str) -> bool:
    if allowed.startswith("*."):
        return host.lower().endswith(allowed[1:].lower())
    return host.lower() == allowed.lower()

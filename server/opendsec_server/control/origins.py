# SPDX-License-Identifier: AGPL-3.0-only
"""What a create starts from: a template, a snapshot, an image, or layers put on one of them.

References of images are resolved here, once: what comes out names everything by digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.errors import ImageNotFound, InvalidRequest, TemplateNotFound
from opendsec_server.contract.images import DIGEST_RE, ImageConfig, ImageInfo, StartCommand
from opendsec_server.contract.node import NodeClient
from opendsec_server.store.records import SandboxExtra

from .iam import Caller
from .image_access import ImageAccess
from .image_names import is_own_name
from .images import Images
from .params import CreateParams
from .snapshots import Origin, Snapshots
from .templates import Templates, parse_reference

_ID_AT, _ID_CHARS = len("sha256:"), 20
_ROOT = "root"


class Origins:
    """Finds, pulls and composes what sandboxes start from."""

    def __init__(
        self,
        node: NodeClient,
        templates: Templates,
        snapshots: Snapshots,
        images: Images,
        access: ImageAccess,
    ) -> None:
        self._node = node
        self._access = access
        self._images = images
        self._templates = templates
        self._snapshots = snapshots

    @contextlib.asynccontextmanager
    async def using(self, caller: Caller, params: CreateParams) -> AsyncIterator[Origin]:
        """What a create starts from. A snapshot is not removed while it is lent.

        Raises:
            InvalidRequest: not a reference; or parameters that do not go together.
            TemplateNotFound: no template or snapshot of that name, or it is not the caller's.
            ImageNotFound, RegistryDenied, RegistryLimited, RegistryUnavailable, ImageDamaged,
                NodeFull: as ``NodeImages.pull`` and ``compose``.
        """
        asked = params.extra
        _check(params)
        if asked.image is not None:
            image = await self._image(caller, asked.image)
            parts = [image.digest, *[await self._part(caller, text) for text in asked.layers]]
            if len(parts) > 1:
                image = await self._node.images.compose(parts)
            yield _of_image(image, params)
            return
        async with self._snapshots.using(caller, params.template) as origin:
            if not asked.layers:
                yield await self._with_environment(origin)
                return
            if origin.snapshot_id is not None:
                raise InvalidRequest(
                    f"layers: `{origin.name}` is a snapshot, and nothing can be put below its disk",
                    remediation="Pack the sandbox (`opendsec pack`), and put layers on that image.",
                )
            parts = [origin.image, *[await self._part(caller, text) for text in asked.layers]]
            image = await self._node.images.compose(
                [(await self._node.images.get(part)).digest for part in parts]
            )
            yield msgspec.structs.replace(
                origin, image=image.digest, env={**origin.env, **image.config.env}
            )

    async def _image(self, caller: Caller, reference: str) -> ImageInfo:
        """An image that is here is enough: whoever wants to know of a moved tag pulls it."""
        if is_own_name(reference):
            raise InvalidRequest(f"image: `{reference[:64]}` is not a reference of an image")
        try:
            return await self._images.find(caller, reference)
        except ImageNotFound:
            if DIGEST_RE.fullmatch(reference):
                raise
        return await self._access.pull(caller.project_id, reference, auth=None, refresh=False)

    async def _part(self, caller: Caller, text: str) -> str:
        """Digest or name of the image of one of ``layers``: a template's, else by reference."""
        with contextlib.suppress(InvalidRequest, TemplateNotFound):
            if await self._templates.find(caller, parse_reference(text)) is not None:
                async with self._snapshots.using(caller, text) as origin:
                    return origin.image
        return (await self._image(caller, text)).digest

    async def _with_environment(self, origin: Origin) -> Origin:
        """A snapshot's image has an environment, too."""
        if origin.snapshot_id is None or not DIGEST_RE.fullmatch(origin.image):
            return origin
        try:
            image = await self._node.images.get(origin.image)
        except ImageNotFound:
            return origin
        return msgspec.structs.replace(origin, env={**image.config.env, **origin.env})


def _check(params: CreateParams) -> None:
    asked = params.extra
    if asked.image is not None and params.template != "base":
        raise InvalidRequest(
            "image: give a template or an image, not both",
            remediation="`layers` puts images on a template.",
        )
    if asked.image is None and (asked.start_image or asked.ready is not None):
        raise InvalidRequest("start_image and ready: only with `image`")
    if asked.ready is not None and not asked.start_image:
        raise InvalidRequest("ready: only with `start_image`")


def _of_image(image: ImageInfo, params: CreateParams) -> Origin:
    asked, config = params.extra, image.config
    assert asked.image is not None
    return Origin(
        template_id=image.digest[_ID_AT : _ID_AT + _ID_CHARS],
        name=asked.image,
        image=image.digest,
        cpu=limits.CPU_DEFAULT,
        memory_mb=limits.MEMORY_MB_DEFAULT,
        disk_mb=limits.DISK_MB_DEFAULT,
        default_user=config.user or _ROOT,
        default_workdir=config.workdir or "/",
        backend=None,
        env=config.env,
        start=_start(config, params) if asked.start_image else None,
    )


def _start(config: ImageConfig, params: CreateParams) -> StartCommand:
    argv = (*config.entrypoint, *config.cmd)
    if not argv:
        raise InvalidRequest(
            f"start_image: the image `{params.extra.image}` has neither ENTRYPOINT nor CMD"
        )
    start = StartCommand(
        argv=argv,
        user=config.user or _ROOT,
        workdir=config.workdir or "/",
        env={**config.env, **params.env},
        # What differs between sandboxes cannot be in memory that they share.
        warm=not params.env,
    )
    if params.extra.ready is not None:
        start = msgspec.structs.replace(start, ready=params.extra.ready)
    return start


def needs_layers(asked: SandboxExtra) -> bool:
    """Whether only a backend that starts layers can do what was asked for."""
    return asked.image is not None or bool(asked.layers)

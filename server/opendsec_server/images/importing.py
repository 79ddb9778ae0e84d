# SPDX-License-Identifier: AGPL-3.0-only
"""Images from files of this machine: ``oci:``, ``oci-archive:``, ``docker-archive:`` and ``tar:``.

Only from directories that the configuration names: a path is read with root's rights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opendsec_server.config import Config
from opendsec_server.contract.errors import Forbidden, ImageNotFound, InvalidRequest

from .pull import Puller
from .store import Image

_SKOPEO_KINDS = ("oci", "oci-archive", "docker-archive")
_KINDS = (*_SKOPEO_KINDS, "tar")


@dataclass(frozen=True, slots=True)
class LocalSource:
    """An image in files.

    Attributes:
        kind: One of ``_KINDS``.
        path: Real path.
        tag: Which image of several; None: the only one.
        text: As the caller wrote it: the name that the image gets.
    """

    kind: str
    path: Path
    tag: str | None
    text: str


def source(text: str, config: Config) -> LocalSource | None:
    """Read what names files; None: it is a registry's reference.

    Raises:
        Forbidden: the path is in no directory that may be imported from.
        ImageNotFound: there is nothing.
        InvalidRequest: not an absolute path.
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in _KINDS or not rest.startswith(("/", ".")):
        return None
    name, _, tag = rest.partition(":")
    if not name.startswith("/") or "\0" in rest:
        raise InvalidRequest(f"{kind}: takes an absolute path on the node")
    path = Path(name).resolve()
    allowed = [Path(entry).resolve() for entry in config.image_import_dirs]
    if not any(path.is_relative_to(entry) for entry in allowed):
        raise Forbidden(
            f"images cannot be imported from {name}",
            remediation="Have the directory added to image_import_dirs in the node's settings.",
        )
    if not path.exists():
        raise ImageNotFound(f"there is no {name} on the node")
    if kind == "tar" and not path.is_file():
        raise InvalidRequest(f"{name} is not a file")
    if ":" in str(path):
        raise InvalidRequest("a path with a colon cannot be imported from")
    return LocalSource(kind, path, tag or None, text)


async def take_in(puller: Puller, local: LocalSource) -> Image:
    """Import it.

    Raises:
        As ``contract.images.NodeImages.pull``.
    """
    if local.kind == "tar":
        return await puller.import_tar(local.path, local.text)
    tag = "" if local.tag is None else f":{local.tag}"
    return await puller.import_from(f"{local.kind}:{local.path}{tag}", local.text)

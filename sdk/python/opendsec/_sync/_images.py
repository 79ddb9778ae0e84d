# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_images.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""Container images on the server: what sandboxes start from without a template."""

from __future__ import annotations

import builtins
from urllib.parse import quote

import msgspec

from opendsec import _limits
from opendsec._errors import InvalidRequest
from opendsec._models import ImageInfo, ImagePull, PruneReport, RegistryAuth
from opendsec._retry import Repeat

from ._transport import Transport


class _Images(msgspec.Struct):
    images: list[ImageInfo] = []


class _Pulls(msgspec.Struct):
    pulls: list[ImagePull] = []


class _Pushed(msgspec.Struct):
    digest: str


class _Nothing(msgspec.Struct):
    pass


class Images:
    """The images that the server has. What was pulled is shared by all projects.

    An image is named by its reference, its digest or the digest's first 12 characters, or by the
    name that ``pack`` gave it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> builtins.list[ImageInfo]:
        """All that the project may see, the oldest first."""
        return (self._transport.api("GET", "/v1/images", _Images)).images

    def get(self, image: str) -> ImageInfo:
        """One image.

        Raises:
            ImageNotFound: the server has none of that name.
        """
        return self._transport.api("GET", _path(image), ImageInfo)

    def pull(
        self,
        reference: str,
        *,
        auth: RegistryAuth | None = None,
        refresh: bool = True,
        timeout_s: float = _limits.PULL_TIMEOUT_S,
    ) -> ImageInfo:
        """Have the server pull an image; returns when it is there.

        Args:
            reference: As docker takes it: ``alpine``, ``host:5000/name:tag``,
                ``name@sha256:...``.
            auth: Log-in for the registry, used once. None: what the server has for it.
            refresh: Ask the registry whether the tag has moved. False: what is there will do.
            timeout_s: How long to wait; the server goes on even so.

        Raises:
            ImageNotFound: the registry has none of that name for the server's processor.
            RegistryDenied: credentials are missing or wrong.
            RegistryLimited: too much was asked of the registry; ``retry_after_s`` says when.
            RegistryUnavailable: it cannot be reached, fails or is too slow.
            ImageDamaged: it sent something that cannot be used.
            NodeFull: the server has no room for it.
        """
        body = {"reference": reference, "refresh": refresh, "registry_auth": auth}
        return self._transport.api(
            "POST",
            "/v1/images/pull",
            ImageInfo,
            body=body,
            timeout_s=timeout_s,
            # The server has tried more than once when it gives up.
            repeat=Repeat.IF_UNSENT,
        )

    def pulls(self) -> builtins.list[ImagePull]:
        """How far the pulls are that are at work now."""
        return (self._transport.api("GET", "/v1/image-pulls", _Pulls)).pulls

    def delete(self, image: str) -> None:
        """Remove an image; by one of several names, that name only.

        Raises:
            ImageNotFound: there is none.
            ImageInUse: sandboxes, snapshots or templates stand on it.
            Forbidden: it was pulled, and the key is not of the installation's first project.
        """
        self._transport.api("DELETE", _path(image), _Nothing)

    def prune(self, *, unused_for_s: float = 0.0) -> PruneReport:
        """Remove the images that nothing uses.

        Args:
            unused_for_s: Only those not used for so many seconds.

        Raises:
            Forbidden: the key is not of the installation's first project.
        """
        return self._transport.api(
            "POST",
            "/v1/images/prune",
            PruneReport,
            body={"unused_for_s": unused_for_s},
            timeout_s=_limits.PULL_TIMEOUT_S,
        )

    def push(
        self,
        image: str,
        reference: str,
        *,
        auth: RegistryAuth | None = None,
        timeout_s: float = _limits.PULL_TIMEOUT_S,
    ) -> str:
        """Send an image to a registry as an OCI image; the digest of its manifest there.

        Raises:
            ImageNotFound: the server has none of that name.
            RegistryDenied, RegistryLimited, RegistryUnavailable: as ``pull``.
        """
        pushed = self._transport.api(
            "POST",
            f"{_path(image)}/push",
            _Pushed,
            body={"reference": reference, "registry_auth": auth},
            timeout_s=timeout_s,
            repeat=Repeat.IF_UNSENT,
        )
        return pushed.digest


def _path(image: str) -> str:
    """Its path; the name is quoted, so that a bad one cannot name another path."""
    if not image:
        raise InvalidRequest("The name of the image is empty.")
    return f"/v1/images/{quote(image, safe='')}"

# SPDX-License-Identifier: AGPL-3.0-only
"""Images as the control plane and a node speak of them.

An image is an ordered list of read-only layers and a configuration. Its digest is made of both,
so that it names one thing for ever. A reference (``python:3.12-slim``) is resolved once and pinned
by digest afterwards. All sizes name their unit, all times are Unix seconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

DIGEST_RE = re.compile(r"sha256:[0-9a-f]{64}")
LAYERS_MAX = 64
"""Layers of one sandbox; what has more is collapsed once (paper, section on layered images)."""


class ImageConfig(msgspec.Struct, kw_only=True, frozen=True):
    """What an image says of how to run it (OCI image-spec 1.1, ``config``)."""

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    """``name``, ``uid``, with ``:group`` if given. None: root."""
    exposed_ports: tuple[str, ...] = ()
    """``8080/tcp``. Told, not enforced: every port of a sandbox can be reached."""
    stop_signal: str | None = None
    labels: dict[str, str] = {}


class ImageInfo(msgspec.Struct, kw_only=True, frozen=True):
    """One image that is on a node."""

    digest: str
    """``sha256:…`` of layers and configuration: what a sandbox's record pins."""
    names: tuple[str, ...] = ()
    """References that mean it now (``docker.io/library/alpine:3.20``), and own names."""
    layers: tuple[str, ...]
    """Digests (hex) of its EROFS layers, the lowest first."""
    size_bytes: int
    """Of its layers on disk; other images may share them."""
    config: ImageConfig = ImageConfig()
    source: str | None = None
    """Digest of the OCI manifest it was pulled as. None: made here."""
    created_at: float
    last_used_at: float
    on_demand_bytes: int = 0
    """Length of those of its layers whose data lies on a store and is fetched as it is read."""
    fetched_bytes: int = 0
    """What of them is here."""


ImageInfos = list[ImageInfo]


class RegistryAuth(msgspec.Struct, kw_only=True, frozen=True):
    """How to log in to a registry. Never logged, never stored with an image."""

    username: str
    password: str

    def __repr__(self) -> str:
        return "RegistryAuth(…)"


class PullProgress(msgspec.Struct, kw_only=True, frozen=True):
    """How far a pull is."""

    reference: str
    layers: int
    layers_done: int
    bytes_total: int
    """Of the layers that are sent, as the registry has them; those that are here do not count."""
    bytes_done: int


PullProgresses = list[PullProgress]


class PruneReport(msgspec.Struct, kw_only=True, frozen=True):
    """What a prune removed."""

    images: tuple[str, ...]
    layers: int
    freed_bytes: int


class ReadyCheck(msgspec.Struct, kw_only=True, frozen=True):
    """When a start command counts as up. Exactly one of the first three, or none: at once."""

    command: str | None = None
    """Run by a shell every half second until it exits with 0."""
    port: int | None = None
    """Something listens there."""
    url: str | None = None
    """Answers with a status below 400 (``http://localhost:49999/health``)."""
    timeout_s: float = 300.0


class StartCommand(msgspec.Struct, kw_only=True, frozen=True):
    """A program that is started with the sandbox and goes on running.

    On a microVM it is part of the template's saved memory; on containers it is started and
    awaited at each create, and after a resume that had to reboot.
    """

    argv: tuple[str, ...]
    user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    ready: ReadyCheck = ReadyCheck()
    warm: bool = True
    """May be part of a template's saved memory, which every sandbox with an equal start command
    then begins with. False: it is started at each create (it has what differs between them)."""


class PackOptions(msgspec.Struct, kw_only=True, frozen=True):
    """How a sandbox's changes become an image."""

    config: ImageConfig | None = None
    """Configuration of the new image. None: that of the sandbox's own image."""
    squash: bool = False
    """One layer of everything, instead of one on top."""
    scrub: bool = True
    """Leave out tokens, shell histories, logs of the agent, and mount points that we made."""
    name: str | None = None
    """Give the image this name as well."""


ExecOutput = Literal["stdout", "stderr", "end"]


class ExecEvent(msgspec.Struct, kw_only=True, frozen=True):
    """One piece of a command's life. The last one is ``end``."""

    kind: ExecOutput
    data: bytes = b""
    exit_code: int | None = None
    """Of ``end``; None: it did not exit by itself (``signal``, or a time-out)."""
    signal: int | None = None
    timed_out: bool = False


class NodeImages(Protocol):
    """A node's image store as the control plane sees it."""

    async def pull(
        self, reference: str, *, auth: RegistryAuth | None = None, refresh: bool = True
    ) -> ImageInfo:
        """Have the image that a reference means; concurrent calls for one reference join.

        Args:
            reference: As docker takes it (``alpine``, ``host:5000/name:tag``, ``name@sha256:…``),
                or ``oci:``, ``docker-archive:`` or ``oci-archive:`` with a path on the node, if
                its ``image_import_dirs`` allow it.
            auth: Instead of what the node's configuration has for the registry.
            refresh: Ask the registry whether a tag has moved. False: one that is here is enough.

        Raises:
            InvalidRequest: not a reference.
            ImageNotFound: the registry has no such image, or none for this machine's processor.
            RegistryDenied: credentials are missing or wrong.
            RegistryLimited: the registry asks to come later (429).
            RegistryUnavailable: it cannot be reached, fails, or is too slow.
            ImageDamaged: it sent something that is not what its digest says, or no valid layer.
            NodeFull: no room for it, or beyond the limit of one image's size.
        """

    async def compose(
        self, parts: Sequence[str], *, config: ImageConfig | None = None
    ) -> ImageInfo:
        """One image of several, the lowest first: later ones win, as in an overlay.

        Environments are joined; of the other settings the last image that has one wins; or all
        are as ``config`` says. More than ``LAYERS_MAX`` layers are collapsed once.

        Raises:
            ImageNotFound: a part is not on this node.
            NodeFull: no room to collapse them.
        """

    async def all(self) -> ImageInfos:
        """Every image on the node."""

    async def get(self, name: str) -> ImageInfo:
        """The image of a digest (whole or its first 12 characters at least), reference or name.

        Raises:
            ImageNotFound: not on this node.
        """

    async def remove(self, name: str) -> None:
        """Forget an image, and remove the layers that no other needs. What is in use stays.

        By one of several names: that name only is taken away.

        Raises:
            ImageNotFound: not on this node.
            ImageInUse: a sandbox or snapshot stands on it.
        """

    async def prune(self, *, unused_for_s: float = 0.0, keep: Sequence[str] = ()) -> PruneReport:
        """Remove images that nothing uses.

        Args:
            unused_for_s: Only those not used for this long.
            keep: Digests that stay (templates stand on them).
        """

    async def keep(self, digests: Sequence[str]) -> None:
        """Images that the node does not take for its quota: templates stand on them. Instead of
        those of the last call."""

    async def progress(self) -> PullProgresses:
        """The pulls that are at work."""

    async def push(self, name: str, reference: str, *, auth: RegistryAuth | None = None) -> str:
        """Send an image to a registry as an OCI image; the digest of its manifest there.

        Raises:
            ImageNotFound: not on this node.
            InvalidRequest, RegistryDenied, RegistryLimited, RegistryUnavailable: as ``pull``.
        """

# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of the native API's images. Their descriptions are also its documentation."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .schemas import Image, Name
from .template_schemas import RegistryLogin

Reference = Annotated[
    Name,
    Meta(
        description="As docker takes it (`alpine`, `host:5000/name:tag`, `name@sha256:…`).",
        examples=["python:3.12-slim"],
    ),
]


class ImageList(Struct, kw_only=True, frozen=True):
    """Images on the node."""

    images: list[Image]


class PullImage(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Which image to have."""

    reference: Annotated[
        Reference,
        Meta(
            description="As docker takes it (`alpine`, `host:5000/name:tag`, `name@sha256:…`), or "
            "`oci:`, `oci-archive:`, `docker-archive:` or `tar:` with a path on the node, where "
            "its settings allow it."
        ),
    ]
    registry_auth: Annotated[
        RegistryLogin | None,
        Meta(description="Instead of what the node's settings have for the registry."),
    ] = None
    refresh: Annotated[
        bool, Meta(description="Ask whether the tag has moved. False: one that is here will do.")
    ] = True


class Pull(Struct, kw_only=True, frozen=True):
    """A pull at work."""

    reference: str
    layers: int
    layers_done: int
    bytes_total: Annotated[int, Meta(description="Of the layers that are sent.")]
    bytes_done: int


class PullList(Struct, kw_only=True, frozen=True):
    """Pulls at work."""

    pulls: list[Pull]


class PruneImages(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What to remove."""

    unused_for_s: Annotated[
        float, Meta(ge=0, le=1e9, description="Only images not used for so many seconds.")
    ] = 0


class Pruned(Struct, kw_only=True, frozen=True):
    """What was removed."""

    images: Annotated[list[str], Meta(description="Digests.")]
    layers: int
    freed_bytes: int


class PushImage(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Where to send an image."""

    reference: Reference
    registry_auth: RegistryLogin | None = None


class PushedImage(Struct, kw_only=True, frozen=True):
    """An image that is in a registry now."""

    digest: Annotated[str, Meta(description="Of its manifest there.")]

# SPDX-License-Identifier: AGPL-3.0-only
"""Images on this machine: EROFS layers by digest, and the table of names.

::

    images/index.json              name → digest, written whole and renamed into place
    images/<sha256>/layer.erofs    the layer
    images/<sha256>/manifest.json  what it is made of
    images/<sha256>/mnt            where it is mounted, once, on the host
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

LAYER_FILE = "layer.erofs"
MANIFEST_FILE = "manifest.json"
_HASH_CHUNK_BYTES = 1 << 20


class Manifest(msgspec.Struct, kw_only=True, frozen=True):
    """What a layer is.

    Attributes:
        digest: SHA-256 of the layer file, hex.
        size_bytes: Its length.
        recipe: Hash of everything that decides the content; equal recipe, no new build.
        description: One line for people.
        created_at: Unix seconds.
    """

    digest: str
    size_bytes: int
    recipe: str
    description: str
    created_at: float


class ImageNotFound(Exception):
    """No image of that name is on this machine."""


class ImageStore:
    """The images directory of one node.

    Args:
        root: ``<state_dir>/images``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._index_path = root / "index.json"

    def names(self) -> dict[str, str]:
        """The table of names: name → digest."""
        try:
            return msgspec.json.decode(self._index_path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}

    def find(self, name: str) -> Manifest:
        """The image of a name.

        Raises:
            ImageNotFound: none, or its files are gone.
        """
        digest = self.names().get(name)
        if digest is None:
            raise ImageNotFound(f"no image named {name!r}")
        try:
            raw = (self.root / digest / MANIFEST_FILE).read_bytes()
        except FileNotFoundError as exc:
            raise ImageNotFound(f"the files of image {name!r} are missing") from exc
        return msgspec.json.decode(raw, type=Manifest)

    def layer_path(self, digest: str) -> Path:
        """The layer's file."""
        return self.root / digest / LAYER_FILE

    def mount_path(self, digest: str) -> Path:
        """Where the layer is mounted."""
        return self.root / digest / "mnt"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One builder at a time, across processes. Blocks."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def add(self, name: str, layer: Path, *, recipe: str, description: str, at: float) -> Manifest:
        """Take a finished layer file into the store and give it a name. Call it locked.

        The file is linked where possible, copied otherwise; ``layer`` itself is left alone.
        """
        digest = _sha256(layer)
        manifest = Manifest(
            digest=digest,
            size_bytes=layer.stat().st_size,
            recipe=recipe,
            description=description,
            created_at=at,
        )
        target = self.root / digest
        target.mkdir(mode=0o700, exist_ok=True)
        if not self.layer_path(digest).exists():
            half = target / f".{LAYER_FILE}.new"
            half.unlink(missing_ok=True)
            try:
                half.hardlink_to(layer)
            except OSError as exc:
                if exc.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                    raise
                shutil.copyfile(layer, half)
            half.rename(self.layer_path(digest))
        _write_atomically(target / MANIFEST_FILE, msgspec.json.encode(manifest))
        names = {**self.names(), name: digest}
        _write_atomically(self._index_path, msgspec.json.encode(names))
        return manifest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _write_atomically(path: Path, data: bytes) -> None:
    half = path.with_name(f".{path.name}.new")
    fd = os.open(half, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    half.rename(path)

# SPDX-License-Identifier: AGPL-3.0-only
"""Images on this machine: EROFS layers and images by digest, and the table of names.

::

    images/layers/<sha256>/layer.erofs   a layer
    images/layers/<sha256>/layer.json    what it is
    images/layers/<sha256>/mnt           where it is mounted, once, on the host
    images/layers/<sha256>/remote.json   instead of layer.erofs: its data is fetched as it is read
                                         (``images.lazy``), and <sha256> is that of its index
    images/images/<sha256>.json          an image: its layers and how to run it; its time of
                                         modification is when it was last used
    images/names.json                    reference or name → image digest
    images/diffs/<sha256>                digest of a layer's tar → layer, or of layers that were
                                         collapsed → the layer that they became
    images/pulls/                        half-made things; nothing here outlives the daemon

Everything is written beside its place and renamed into it, layers before the images that have
them, images before their names: what can be seen is whole, whenever the daemon was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from opendsec_server.contract.errors import ImageNotFound, InvalidRequest
from opendsec_server.contract.images import DIGEST_RE, ImageConfig, ImageInfo

from . import limits
from .files import copy_or_link, sha256_of, sync, write_atomically
from .references import canonical

LAYER_FILE = "layer.erofs"
REMOTE_FILE = "remote.json"
DEVICE_LINK = "device"
_LAYER_RECORD = "layer.json"
_HEX_RE = re.compile(r"[0-9a-f]{64}")
_SHORT_RE = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")

__all__ = [
    "LAYER_FILE", "Hold", "Image", "ImageNotFound", "ImageStore", "Layer", "distinct",
    "image_digest",
]  # fmt: skip


class Layer(msgspec.Struct, kw_only=True, frozen=True):
    """What a layer is.

    Attributes:
        digest: SHA-256 of the EROFS file, hex; with ``opaque_root``, of that and a word more.
        size_bytes: Its length.
        diff_id: ``sha256:…`` of the tar it was made of. None: it was not made of one.
        opaque_root: Nothing of the layers below it shows. An overlay would not see this of a
            layer's topmost directory.
        created_at: Unix seconds.
    """

    digest: str
    size_bytes: int
    diff_id: str | None = None
    opaque_root: bool = False
    created_at: float


class Image(msgspec.Struct, kw_only=True, frozen=True):
    """What an image is.

    Attributes:
        digest: ``sha256:…`` of layers and configuration.
        layers: Digests (hex) of its layers, the lowest first.
        config: How to run it.
        source: Digest of the OCI manifest it was pulled as.
        recipe: Hash of everything that decides the content; equal recipe, no new build.
        description: One line for people.
        created_at: Unix seconds.
    """

    digest: str
    layers: tuple[str, ...]
    config: ImageConfig = ImageConfig()
    source: str | None = None
    recipe: str | None = None
    description: str | None = None
    created_at: float


def image_digest(layers: Sequence[str], config: ImageConfig) -> str:
    """The digest of an image: of the canonical JSON of its layers and configuration."""
    whole = msgspec.json.encode({"layers": list(layers), "config": config}, order="sorted")
    return "sha256:" + hashlib.sha256(whole).hexdigest()


def distinct(layers: Sequence[str]) -> tuple[str, ...]:
    """Layers without repetition, each where it lies highest (last)."""
    return tuple(reversed(dict.fromkeys(reversed(layers))))


def remote_bytes_here(folder: Path) -> int:
    """Bytes on disk of what was fetched of a remote layer."""
    try:
        return (folder / "cache").stat().st_blocks * 512
    except FileNotFoundError:
        return 0


class ImageStore:
    """The images directory of one node. Blocks; may be used by several threads and processes.

    Args:
        root: ``<state_dir>/images``. A store of the earlier form is taken over.
    """

    before_removal: Callable[[str], None] = staticmethod(lambda _layer: None)
    """Called with each layer (hex) whose files are about to be removed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names_path = root / "names.json"
        self._pins: Counter[str] = Counter()
        self._pins_lock = threading.Lock()
        if (root / "index.json").exists():
            self._take_over()

    # --- reading --------------------------------------------------------------

    def names(self) -> dict[str, str]:
        """The table of names: name → image digest."""
        try:
            return msgspec.json.decode(self._names_path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}

    def find(self, name: str) -> Image:
        """The image of a digest, name, reference, or a digest's first 12 characters at least.

        Raises:
            ImageNotFound: none, or its files are gone.
        """
        digest = self._resolve(name)
        if digest is None:
            raise ImageNotFound(f"no image {name!r} is on this node")
        image = self._image(digest)
        if image is None or not all(self.has_layer(layer) for layer in image.layers):
            raise ImageNotFound(f"the files of image {name!r} are missing")
        return image

    def _resolve(self, name: str) -> str | None:
        if DIGEST_RE.fullmatch(name):
            return name
        names = self.names()
        if name in names:
            return names[name]
        short = _SHORT_RE.fullmatch(name)
        if short is not None:
            found = {d for d in self._digests() if d.startswith(f"sha256:{short.group(1)}")}
            if len(found) > 1:
                raise InvalidRequest(f"{name!r} is the beginning of {len(found)} images' digests")
            if found:
                return found.pop()
        try:
            return names.get(canonical(name))
        except InvalidRequest:
            return None

    def _digests(self) -> list[str]:
        try:
            entries = list((self.root / "images").iterdir())
        except FileNotFoundError:
            return []
        return [f"sha256:{entry.stem}" for entry in entries if _HEX_RE.fullmatch(entry.stem)]

    def _record_path(self, digest: str) -> Path:
        return self.root / "images" / f"{digest.removeprefix('sha256:')}.json"

    def _image(self, digest: str) -> Image | None:
        try:
            return msgspec.json.decode(self._record_path(digest).read_bytes(), type=Image)
        except FileNotFoundError:
            return None

    def all(self) -> list[Image]:
        """Every whole image, the oldest first."""
        images = [image for digest in self._digests() if (image := self._image(digest))]
        whole = [i for i in images if all(self.has_layer(layer) for layer in i.layers)]
        return sorted(whole, key=lambda image: (image.created_at, image.digest))

    def info(self, image: Image, names: dict[str, str] | None = None) -> ImageInfo:
        """An image as the contract describes it.

        Args:
            image: Which.
            names: The table of names, where the caller has it already.
        """
        names = self.names() if names is None else names
        try:
            used_at = self._record_path(image.digest).stat().st_mtime
        except FileNotFoundError:
            used_at = image.created_at
        remote = [layer for layer in set(image.layers) if self.is_remote(layer)]
        return ImageInfo(
            digest=image.digest,
            names=tuple(sorted(name for name, digest in names.items() if digest == image.digest)),
            layers=image.layers,
            size_bytes=sum(self.layer_bytes(layer) for layer in set(image.layers)),
            config=image.config,
            source=image.source,
            created_at=image.created_at,
            last_used_at=used_at,
            on_demand_bytes=sum(self.layer(layer).size_bytes for layer in remote),
            fetched_bytes=sum(self.layer_bytes(layer) for layer in remote),
        )

    def has_layer(self, layer: str) -> bool:
        """Whether a layer (hex) is here, whole."""
        return (self.layer_dir(layer) / LAYER_FILE).exists() or self.is_remote(layer)

    def is_remote(self, layer: str) -> bool:
        """Whether a layer's data lies elsewhere and is fetched as it is read."""
        return (self.layer_dir(layer) / REMOTE_FILE).exists()

    def layer_bytes(self, layer: str) -> int:
        """Length of a layer's file; 0 when it is gone. Of a remote one: what is here of it."""
        if self.is_remote(layer):
            return remote_bytes_here(self.layer_dir(layer))
        try:
            return self.layer_path(layer).stat().st_size
        except FileNotFoundError:
            return 0

    def layer(self, layer: str) -> Layer:
        """What a layer (hex) is.

        Raises:
            ImageNotFound: it is not here.
        """
        try:
            raw = (self.layer_dir(layer) / _LAYER_RECORD).read_bytes()
        except FileNotFoundError as exc:
            raise ImageNotFound(f"layer {layer} is not on this node") from exc
        return msgspec.json.decode(raw, type=Layer)

    def visible(self, layers: Sequence[str]) -> tuple[str, ...]:
        """Those of an image's layers that can show something, without repetition.

        Raises:
            ImageNotFound: a layer is not here.
        """
        found = distinct(layers)
        for at in range(len(found) - 1, 0, -1):
            if self.layer(found[at]).opaque_root:
                return found[at:]
        return found

    def layers(self) -> list[str]:
        """Every layer (hex)."""
        try:
            entries = list((self.root / "layers").iterdir())
        except FileNotFoundError:
            return []
        return [entry.name for entry in entries if _HEX_RE.fullmatch(entry.name)]

    def size_bytes(self) -> int:
        """Of all layers together."""
        return sum(self.layer_bytes(layer) for layer in self.layers())

    def layer_dir(self, layer: str) -> Path:
        """All that is kept of a layer."""
        return self.root / "layers" / layer

    def layer_path(self, layer: str) -> Path:
        """A layer's file; of a remote one that is mounted, its block device."""
        name = DEVICE_LINK if self.is_remote(layer) else LAYER_FILE
        return self.layer_dir(layer) / name

    def mount_path(self, layer: str) -> Path:
        """Where a layer is mounted."""
        return self.layer_dir(layer) / "mnt"

    def layer_of(self, key: str) -> str | None:
        """The layer that was made of a tar (``sha256:…``) or of collapsed layers, if it is here."""
        try:
            layer = (self.root / "diffs" / key.removeprefix("sha256:")).read_text()
        except FileNotFoundError:
            return None
        return layer if self.has_layer(layer) else None

    # --- writing --------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One builder at a time, across processes. Blocks, for minutes perhaps."""
        with self._flock(".lock"):
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One change of the tables at a time, across threads and processes. Short."""
        with self._flock(".change"):
            yield

    @contextmanager
    def _flock(self, name: str) -> Iterator[None]:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.root / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def scratch(self, prefix: str) -> Iterator[Path]:
        """A directory on the store's file system for something half-made; removed afterwards."""
        parent = self.root / "pulls"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        """Meanwhile the layers that it holds are not removed, even if no image has them."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            with self._pins_lock:
                self._pins.subtract(hold.layers)
                self._pins += Counter()

    @contextmanager
    def pinned(self, layers: Iterable[str]) -> Iterator[None]:
        """``holding`` of layers that are known beforehand.

        Raises:
            ImageNotFound: one is not here.
        """
        with self.holding() as hold:
            hold.add(layers)
            yield

    def _hold(self, hold: Hold, layer: str) -> None:
        with self._pins_lock:
            self._pins[layer] += 1
        hold.layers.append(layer)

    def adopt(
        self,
        file: Path,
        *,
        hold: Hold | None = None,
        key: str | None = None,
        diff: bool = True,
        opaque_root: bool = False,
    ) -> str:
        """Take a finished layer file into the store; its digest, hex.

        A layer that no image has is removed sooner or later. The file is linked where
        possible, copied otherwise, and itself left alone.

        Args:
            file: An EROFS file.
            hold: Keeps it until an image was made of it.
            key: What it was made of, for ``layer_of``.
            diff: Whether ``key`` is the digest of a tar.
            opaque_root: Nothing of what lies below it shows.
        """
        digest = sha256_of(file)
        if opaque_root:
            # The file is as that of a layer without it, and must not be taken for one.
            digest = hashlib.sha256(f"opaque {digest}".encode()).hexdigest()
        sync(file)
        with self._changing():
            if hold is not None:
                self._hold(hold, digest)
            target = self.layer_dir(digest)
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.has_layer(digest):
                half = target / f".{LAYER_FILE}.new"
                copy_or_link(file, half)
                record = Layer(
                    digest=digest,
                    size_bytes=half.stat().st_size,
                    diff_id=key if diff else None,
                    opaque_root=opaque_root,
                    created_at=time.time(),
                )
                write_atomically(target / _LAYER_RECORD, msgspec.json.encode(record))
                half.rename(self.layer_path(digest))
            if key is not None:
                (self.root / "diffs").mkdir(mode=0o700, exist_ok=True)
                write_atomically(self.root / "diffs" / key.removeprefix("sha256:"), digest.encode())
        return digest

    def adopt_remote(
        self, layer: str, files: Mapping[str, bytes], remote: bytes, size_bytes: int, hold: Hold
    ) -> None:
        """Take in a layer whose data lies elsewhere. One that is here goes on with the new source
        when it is served the next time.

        Args:
            layer: SHA-256 of its index, hex.
            files: What is kept with it, by name.
            remote: Where its data is, for the program that serves it.
            size_bytes: Length of all of it.
            hold: Keeps it until an image was made of it.
        """
        with self._changing():
            self._hold(hold, layer)
            target = self.layer_dir(layer)
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.is_remote(layer):
                for name, data in files.items():
                    write_atomically(target / name, data)
                record = Layer(digest=layer, size_bytes=size_bytes, created_at=time.time())
                write_atomically(target / _LAYER_RECORD, msgspec.json.encode(record))
            write_atomically(target / REMOTE_FILE, remote)

    def put(
        self,
        layers: Sequence[str],
        config: ImageConfig,
        *,
        names: Iterable[str] = (),
        source: str | None = None,
        recipe: str | None = None,
        description: str | None = None,
        at: float | None = None,
    ) -> Image:
        """Make an image of layers that are here, and give it names. One that is here is kept.

        A layer that occurs twice is kept where it lies highest: overlayfs refuses the same one
        twice, and what lies below it again cannot show. Nor can what lies below an opaque one.

        Raises:
            ImageNotFound: a layer is not here.
        """
        now = time.time() if at is None else at
        layers = self.visible(layers)
        digest = image_digest(layers, config)
        with self._changing():
            for layer in layers:
                if not self.has_layer(layer):
                    raise ImageNotFound(f"layer {layer} is not on this node")
            image = self._image(digest)
            if image is None or (source, recipe) != (image.source, image.recipe):
                image = Image(
                    digest=digest,
                    layers=tuple(layers),
                    config=config,
                    source=source or (image.source if image else None),
                    recipe=recipe or (image.recipe if image else None),
                    description=description or (image.description if image else None),
                    created_at=image.created_at if image else now,
                )
                (self.root / "images").mkdir(mode=0o700, exist_ok=True)
                write_atomically(self._record_path(digest), msgspec.json.encode(image))
            os.utime(self._record_path(digest))
            table = self.names()
            wanted = {**table, **dict.fromkeys(names, digest)}
            if wanted != table:
                write_atomically(self._names_path, msgspec.json.encode(wanted))
        return image

    def add(
        self,
        name: str,
        layer: Path,
        *,
        config: ImageConfig,
        recipe: str,
        description: str,
        at: float,
    ) -> Image:
        """Take a finished layer file in and make a named image of it alone."""
        return self.put(
            [self.adopt(layer)],
            config,
            names=[name],
            recipe=recipe,
            description=description,
            at=at,
        )

    def name(self, digest: str, names: Iterable[str]) -> None:
        """Let names mean an image from now on.

        Raises:
            ImageNotFound: no such image is here.
        """
        with self._changing():
            if self._image(digest) is None:
                raise ImageNotFound(f"no image {digest!r} is on this node")
            table = {**self.names(), **dict.fromkeys(names, digest)}
            write_atomically(self._names_path, msgspec.json.encode(table))

    def unname(self, name: str) -> bool:
        """Take a name away; whether there was one. The image stays."""
        with self._changing():
            table = self.names()
            if table.pop(name, None) is None:
                return False
            write_atomically(self._names_path, msgspec.json.encode(table))
        return True

    def touch(self, digest: str) -> None:
        """Note that an image is used now."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._record_path(digest))

    # --- removing -------------------------------------------------------------

    def remove(self, digests: Iterable[str]) -> tuple[int, int]:
        """Forget images, and remove the layers that no other image has.

        Returns:
            How many layers were removed, and their bytes.
        """
        going = set(digests)
        with self._changing():
            table = self.names()
            kept = {name: digest for name, digest in table.items() if digest not in going}
            if kept != table:
                write_atomically(self._names_path, msgspec.json.encode(kept))
            candidates: set[str] = set()
            for digest in going:
                image = self._image(digest)
                if image is not None:
                    candidates.update(image.layers)
                    self._record_path(digest).unlink(missing_ok=True)
            return self._remove_layers(candidates)

    def remove_orphans(self, older_than_s: float) -> tuple[int, int]:
        """Remove layers that no image has and nobody holds: of pulls that failed, kept for their
        repetition. How many, and their bytes."""
        before = time.time() - older_than_s
        with self._changing():
            old = set()
            for layer in self.layers():
                with contextlib.suppress(FileNotFoundError):
                    if (self.layer_dir(layer) / _LAYER_RECORD).stat().st_mtime < before:
                        old.add(layer)
            return self._remove_layers(old)

    def sweep(self) -> None:
        """What a killed daemon left half-made; and layers that no image has, unless they were made
        just now and can be found again: a pull that is repeated goes on from them. Call it before
        anything is pulled or built."""
        shutil.rmtree(self.root / "pulls", ignore_errors=True)
        self.remove_orphans(limits.ORPHAN_LAYER_SWEPT_S)
        with self._changing():
            diffs, found = self.root / "diffs", set()
            for path in diffs.iterdir() if diffs.is_dir() else ():
                layer = path.read_text()
                if self.has_layer(layer):
                    found.add(layer)
                else:
                    path.unlink()
            # Packed of a sandbox, for an image that was not made any more.
            self._remove_layers(set(self.layers()) - found)

    def _remove_layers(self, candidates: set[str]) -> tuple[int, int]:
        used = {layer for digest in self._digests() if (i := self._image(digest)) for layer in
                i.layers}  # fmt: skip
        with self._pins_lock:
            used.update(self._pins)
        going = candidates - used
        freed = 0
        for layer in going:
            freed += self.layer_bytes(layer)
            self.before_removal(layer)
            # The file first: without it the layer does not exist, whatever else is left.
            for name in (LAYER_FILE, REMOTE_FILE):
                (self.layer_dir(layer) / name).unlink(missing_ok=True)
            shutil.rmtree(self.layer_dir(layer), ignore_errors=True)
        return len(going), freed

    # --- the earlier form -----------------------------------------------------

    def _take_over(self) -> None:
        """From ``images/index.json`` and ``images/<sha256>/manifest.json``: one layer per image.

        May be repeated from any point. Directories are renamed, so layers stay mounted.
        """
        with self._changing():
            index = self.root / "index.json"
            if not index.exists():
                return
            table = msgspec.json.decode(index.read_bytes(), type=dict[str, str])
            for folder in ("layers", "images"):
                (self.root / folder).mkdir(mode=0o700, exist_ok=True)
            for path in [p for p in self.root.iterdir() if _HEX_RE.fullmatch(p.name)]:
                if (path / LAYER_FILE).exists() and (path / "manifest.json").exists():
                    self._take_over_layer(path)
            names = self.names()
            for name, layer in table.items():
                digest = image_digest([layer], _EARLIER_CONFIG)
                if self._image(digest) is not None:
                    names.setdefault(name, digest)
            write_atomically(self._names_path, msgspec.json.encode(names))
            index.unlink()

    def _take_over_layer(self, path: Path) -> None:
        old = msgspec.json.decode((path / "manifest.json").read_bytes(), type=_EarlierManifest)
        layer = Layer(digest=path.name, size_bytes=old.size_bytes, created_at=old.created_at)
        write_atomically(path / _LAYER_RECORD, msgspec.json.encode(layer))
        image = Image(
            digest=image_digest([path.name], _EARLIER_CONFIG),
            layers=(path.name,),
            config=_EARLIER_CONFIG,
            recipe=old.recipe,
            description=old.description,
            created_at=old.created_at,
        )
        write_atomically(self._record_path(image.digest), msgspec.json.encode(image))
        target = self.layer_dir(path.name)
        if target.exists():
            shutil.rmtree(path)
        else:
            path.rename(target)


class Hold:
    """Layers that are kept while an image is being made of them: see ``ImageStore.holding``."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self.layers: list[str] = []

    def claim(self, key: str) -> str | None:
        """``ImageStore.layer_of``, and hold it."""
        with self._store._changing():
            layer = self._store.layer_of(key)
            if layer is not None:
                self._store._hold(self, layer)
        return layer

    def add(self, layers: Iterable[str]) -> None:
        """Hold layers that are here.

        Raises:
            ImageNotFound: one is not.
        """
        with self._store._changing():
            for layer in layers:
                if not self._store.has_layer(layer):
                    raise ImageNotFound(f"layer {layer} is not on this node")
                self._store._hold(self, layer)


class _EarlierManifest(msgspec.Struct, kw_only=True, frozen=True):
    """``manifest.json`` of the earlier form."""

    size_bytes: int
    recipe: str
    description: str
    created_at: float


_EARLIER_CONFIG = ImageConfig(user="user")
"""All that there was then is the template ``base``."""

# SPDX-License-Identifier: AGPL-3.0-only
"""Images whose data stays on a store and is fetched as it is read.

A published image is a directory that any static HTTP server, object store or shared file system
can hold::

    image.json                the image: layers, sizes, configuration
    layers/<name>.erofs       a layer's data
    layers/<name>.index       its length and a sum of each chunk; <name> is SHA-256 of this file
    layers/<name>.trace       order in which chunks were first read, if somebody recorded it

The image's digest is made of its layers' names and its configuration, as for every image, and a
layer's name of its sums: with ``@sha256:…`` in the reference nothing of it has to be trusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx2
import msgspec

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    Forbidden,
    ImageDamaged,
    ImageNotFound,
    InvalidRequest,
    OpendsecError,
    RegistryDenied,
    RegistryLimited,
    RegistryUnavailable,
)
from opendsec_server.contract.images import DIGEST_RE, LAYERS_MAX, ImageConfig

from .children import lazy_program
from .files import copy_or_link, sync, write_atomically
from .store import Image, ImageStore, distinct, image_digest

PREFIX = "lazy+"
IMAGE_FILE = "image.json"
INDEX_FILE = "index"
TRACE_FILE = "trace"
_VERSION = 1
_IMAGE_BYTES_MAX = 1 << 20
_INDEX_BYTES_MAX = 512 << 20
_TRACE_BYTES_MAX = 64 << 10
_HEAD = struct.Struct("<8sIIQ")
_MAGIC = b"ODLAZY01"
_SUM_BYTES = 32
_NAME_RE = re.compile(r"[0-9a-f]{64}")
_WAY_UP_RE = re.compile(r"(?:^|/)\.\.(?:/|$)|\\|%(?:25)*(?:2e|2f|5c)", re.I)
_CONNECT_S = 5.0
_STALL_S = 20.0
_TOTAL_S = 300.0
_INDEX_TIMEOUT_S = 3_600.0
CHUNK_BYTES = 128 << 10


class PublishedLayer(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One layer in ``image.json``.

    Attributes:
        name: SHA-256 of its index, hex.
        size_bytes: Length of its data.
        data: Where its data is, if not beside: an address, such as a signed one.
        index: Where its index is, if not beside.
    """

    name: str
    size_bytes: int
    data: str | None = None
    index: str | None = None


class Published(msgspec.Struct, kw_only=True, frozen=True):
    """``image.json``."""

    version: int
    digest: str
    layers: tuple[PublishedLayer, ...]
    config: ImageConfig = ImageConfig()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a published image is.

    Attributes:
        place: Address, or absolute path, of its directory or its ``image.json``.
        digest: What it must be; None: whatever is there.
        text: The name it gets: without what may be a secret in an address.
    """

    place: str
    digest: str | None
    text: str

    @property
    def is_http(self) -> bool:
        """Whether it is an address."""
        return self.place.startswith(("http://", "https://"))

    @property
    def image(self) -> str:
        """Where ``image.json`` is."""
        path = urlsplit(self.place).path if self.is_http else self.place
        return self.place if path.endswith(".json") else f"{self.place.rstrip('/')}/{IMAGE_FILE}"

    def beside(self, relative: str) -> str:
        """Where a file of the image is."""
        if self.is_http:
            return urljoin(self.image, relative)
        return str(Path(self.image).parent / relative)


def parse(text: str) -> Source | None:
    """Read a reference that begins with ``lazy+``; None: it does not.

    Raises:
        InvalidRequest: what follows is neither an address nor ``dir:`` with an absolute path.
    """
    if not text.startswith(PREFIX):
        return None
    place, at, digest = text.removeprefix(PREFIX).partition("@sha256:")
    if at and not DIGEST_RE.fullmatch(f"sha256:{digest}"):
        raise InvalidRequest("lazy+…@sha256: takes an image's digest of 64 hexadecimal digits")
    if place.startswith("dir:/"):
        place = os.path.normpath(place.removeprefix("dir:"))
        shown = f"dir:{place}"
    elif place.startswith(("http://", "https://")):
        try:
            parts = urlsplit(place)
            host = parts.hostname
            _ = parts.port
        except ValueError as exc:
            raise InvalidRequest(f"not an address: {exc}") from exc
        if not host or parts.username is not None or not place.isprintable() or " " in place:
            raise InvalidRequest("lazy+http(s): takes an address without a user in it")
        shown = parts._replace(query="", fragment="").geturl()
    else:
        raise InvalidRequest(
            "lazy+ is followed by https:, http: or dir:/path",
            remediation="Name the directory that `opendsecd image publish` wrote, as it is served.",
        )
    return Source(place, f"sha256:{digest}" if at else None, f"{PREFIX}{shown}{at}{digest}")


def check_allowed(place: str, config: Config) -> None:
    """Callers may only have those stores read that the node's owner named.

    Raises:
        Forbidden: this is not one.
    """
    for allowed in config.lazy_sources:
        if place == allowed or place.startswith(f"{allowed.rstrip('/')}/"):
            path = urlsplit(place).path if "://" in place else os.path.realpath(place)
            # No way up out of the named place, by dots or by links. A store may take an encoded
            # separator, or a backslash, for one.
            if "://" in place and _WAY_UP_RE.search(path):
                continue
            if "://" in place or Path(path).is_relative_to(Path(allowed).resolve()):
                return
    raise Forbidden(
        "images of this store may not be used on demand",
        remediation="Have the store added to lazy_sources in the node's settings, or have root "
        "attach the image: opendsecd image attach.",
    )


# --- publishing -----------------------------------------------------------------


def publish(
    store: ImageStore, image: Image, target: Path, *, chunk_bytes: int = CHUNK_BYTES
) -> str:
    """Write an image into a directory as stores serve it; its digest there. Blocks.

    May be repeated; ``image.json`` comes last, so what is seen of it is whole.

    Raises:
        InvalidRequest: it is an image whose data lies elsewhere itself.
        OSError: the directory cannot be written.
        RuntimeError: the program failed.
    """
    if any(store.is_remote(layer) for layer in image.layers):
        raise InvalidRequest("an image whose data lies on a store is published there already")
    layers = target / "layers"
    layers.mkdir(parents=True, exist_ok=True)
    published = []
    for layer in image.layers:
        half = layers / f".{layer}.index.new"
        half.unlink(missing_ok=True)
        told = _program(
            "index", str(store.layer_path(layer)), "--out", str(half),
            "--chunk-bytes", str(chunk_bytes),
        )  # fmt: skip
        name = str(told["name"])
        data = layers / f"{name}.erofs"
        if not data.exists():
            new = layers / f".{name}.erofs.new"
            copy_or_link(store.layer_path(layer), new)
            new.rename(data)
        half.chmod(0o644)
        half.rename(layers / f"{name}.index")
        sync(layers / f"{name}.index")
        published.append(PublishedLayer(name=name, size_bytes=int(str(told["size_bytes"]))))
    digest = image_digest(distinct([layer.name for layer in published]), image.config)
    whole = Published(version=_VERSION, digest=digest, layers=tuple(published), config=image.config)
    write_atomically(target / IMAGE_FILE, msgspec.json.format(msgspec.json.encode(whole)))
    # A web server runs as another user.
    (target / IMAGE_FILE).chmod(0o644)
    return digest


def publish_traces(store: ImageStore, image: Image, target: Path) -> int:
    """Put what was recorded here of a lazy image's start beside its published layers; how many."""
    count = 0
    for layer in image.layers:
        trace = store.layer_dir(layer) / TRACE_FILE
        at = target / "layers" / f"{layer}.trace"
        if store.is_remote(layer) and trace.exists() and at.parent.is_dir():
            new = at.with_name(f".{at.name}.new")
            shutil.copyfile(trace, new)
            new.rename(at)
            count += 1
    return count


def _program(*arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [lazy_program(), *arguments],
        check=False, capture_output=True, text=True, timeout=_INDEX_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"opendsec-lazy ended with {done.returncode}")
    told: dict[str, object] = json.loads(done.stdout)
    return told


# --- attaching ------------------------------------------------------------------


async def attach(store: ImageStore, source: Source, config: Config | None) -> Image:
    """Have a published image in the store: its metadata now, its data when it is read.

    Args:
        store: The node's.
        source: Where it is.
        config: Limits the stores that may be used; None: any.

    Raises:
        Forbidden: the store may not be used.
        ImageNotFound, RegistryDenied, RegistryLimited, RegistryUnavailable, ImageDamaged: as
            ``contract.images.NodeImages.pull``.
    """
    if config is not None:
        check_allowed(source.place, config)
    async with _Reader(source) as reader:
        published = _read_image(await reader.get(source.image, _IMAGE_BYTES_MAX), source)
        with store.holding() as hold:
            for layer in published.layers:
                data = layer.data or source.beside(f"layers/{layer.name}.erofs")
                at = layer.index or source.beside(f"layers/{layer.name}.index")
                for place in (data, at):
                    _check_place(place, source, config)
                index = await reader.get(at, _INDEX_BYTES_MAX)
                _check_index(index, layer)
                files = {INDEX_FILE: index}
                trace = await reader.maybe(
                    source.beside(f"layers/{layer.name}.trace"), _TRACE_BYTES_MAX
                )
                if trace is not None:
                    files[TRACE_FILE] = trace
                remote = msgspec.json.encode({"source": data})
                await asyncio.to_thread(
                    store.adopt_remote, layer.name, files, remote, layer.size_bytes, hold
                )
            names = [layer.name for layer in published.layers]
            return await asyncio.to_thread(
                store.put, names, published.config, names=[source.text],
                description="fetched as it is read",
            )  # fmt: skip


def _read_image(raw: bytes, source: Source) -> Published:
    try:
        published = msgspec.json.decode(raw, type=Published)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise ImageDamaged(f"{source.text}: {IMAGE_FILE} cannot be read: {exc}") from exc
    names = [layer.name for layer in published.layers]
    if published.version != _VERSION:
        raise ImageDamaged(f"{source.text}: {IMAGE_FILE} is of version {published.version}")
    if not 1 <= len(names) <= LAYERS_MAX or not all(_NAME_RE.fullmatch(name) for name in names):
        raise ImageDamaged(f"{source.text}: {IMAGE_FILE} names impossible layers")
    digest = image_digest(distinct(names), published.config)
    if digest != published.digest or source.digest not in (None, digest):
        raise ImageDamaged(
            f"{source.text}: the store has an image of another digest, {digest}",
            details={"expected": source.digest or published.digest, "found": digest},
        )
    return published


def _check_index(index: bytes, layer: PublishedLayer) -> None:
    if hashlib.sha256(index).hexdigest() != layer.name:
        raise ImageDamaged(f"the index of layer {layer.name} is not what its name says")
    try:
        magic, chunk_bytes, zero, size = _HEAD.unpack_from(index)
    except struct.error as exc:
        raise ImageDamaged(f"the index of layer {layer.name} is cut off") from exc
    chunks = -(-size // chunk_bytes) if chunk_bytes else -1
    if (
        magic != _MAGIC
        or zero
        or size != layer.size_bytes
        or len(index) != _HEAD.size + chunks * _SUM_BYTES
    ):
        raise ImageDamaged(f"the index of layer {layer.name} cannot be read")


def _check_place(place: str, source: Source, config: Config | None) -> None:
    """Where ``image.json`` sends us: never from an address to a file, and only where we may go."""
    is_http = place.startswith(("http://", "https://"))
    if is_http != source.is_http:
        raise ImageDamaged(f"{source.text}: {IMAGE_FILE} leads to another kind of store")
    if config is not None:
        check_allowed(place, config)


class _Reader:
    """Reads small files of a store."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(_STALL_S, connect=_CONNECT_S), follow_redirects=False
        )

    async def __aenter__(self) -> _Reader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def maybe(self, place: str, bytes_max: int) -> bytes | None:
        """A file that need not be there, nor be readable."""
        try:
            return await self.get(place, bytes_max)
        except OpendsecError:
            return None

    async def get(self, place: str, bytes_max: int) -> bytes:
        """A file.

        Raises:
            As ``attach``.
        """
        try:
            async with asyncio.timeout(_TOTAL_S):
                if self._source.is_http:
                    return await self._fetch(place, bytes_max)
                return await asyncio.to_thread(_read_file, Path(place), bytes_max)
        except FileNotFoundError as exc:
            raise ImageNotFound(f"{self._source.text}: there is no {Path(place).name}") from exc
        except PermissionError as exc:
            raise RegistryDenied(
                f"{self._source.text}: {Path(place).name} may not be read"
            ) from exc
        except (OSError, TimeoutError) as exc:
            raise RegistryUnavailable(f"{self._source.text}: the store does not answer") from exc
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as exc:
            raise RegistryUnavailable(
                f"{self._source.text}: the store cannot be reached: {type(exc).__name__}"
            ) from exc

    async def _fetch(self, url: str, bytes_max: int) -> bytes:
        async with self._client.stream("GET", url) as answer:
            name = urlsplit(url).path.rsplit("/", 1)[-1]
            what = f"{self._source.text}: {name}: the store answered with {answer.status_code}"
            match answer.status_code:
                case 200:
                    pass
                case 404 | 410:
                    raise ImageNotFound(what)
                case 401 | 403:
                    raise RegistryDenied(what)
                case 429:
                    raise RegistryLimited(what)
                case _:
                    raise RegistryUnavailable(what)
            data = bytearray()
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > bytes_max:
                    raise ImageDamaged(f"{self._source.text}: {name} is too long")
            return bytes(data)


def _read_file(path: Path, bytes_max: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ImageDamaged(f"{path.name} is too long")
    return data

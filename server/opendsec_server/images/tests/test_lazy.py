# SPDX-License-Identifier: AGPL-3.0-only
"""Published images: what is written, and what is refused of what a store has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from opendsec_server.binaries import find_lazy
from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import (
    Forbidden,
    ImageDamaged,
    ImageNotFound,
    InvalidRequest,
    RegistryUnavailable,
)
from opendsec_server.contract.images import ImageConfig
from opendsec_server.images import lazy
from opendsec_server.images.store import Image, ImageStore

from .lazy_store import LazyStore, lazy_store

CONFIG = ImageConfig(env={"A": "b"}, user="1000")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[LazyStore]:
    (tmp_path / "web").mkdir()
    with lazy_store(tmp_path / "web") as store:
        yield store


@pytest.fixture
def published(tmp_path: Path, web: LazyStore) -> str:
    """Digest of an image of two layers in the web server's directory."""
    try:
        find_lazy()
    except ConfigError as exc:
        pytest.skip(str(exc))
    store = ImageStore(tmp_path / "from")
    layers = []
    for at in range(2):
        (tmp_path / "file").write_bytes(os.urandom(300_000 + at))
        layers.append(store.adopt(tmp_path / "file"))
        (tmp_path / "file").unlink()
    return lazy.publish(store, store.put(layers, CONFIG), web.root)


def source(text: str) -> lazy.Source:
    found = lazy.parse(text)
    assert found is not None
    return found


async def attach(tmp_path: Path, text: str) -> tuple[ImageStore, Image]:
    store = ImageStore(tmp_path / "to")
    return store, await lazy.attach(store, source(text), None)


async def test_attached_as_published(tmp_path: Path, web: LazyStore, published: str) -> None:
    for place in (web.url, f"dir:{web.root}", f"{web.url}/image.json?signed=1"):
        store, image = await attach(tmp_path, f"lazy+{place}@{published}")
        assert (image.digest, image.config, len(image.layers)) == (published, CONFIG, 2)
        info = store.info(image)
        assert (info.on_demand_bytes, info.fetched_bytes) == (600_001, 0)
        assert not any("signed" in name for name in info.names)
        assert all(store.is_remote(layer) for layer in image.layers)
    assert store.remove([published])[0] == 2
    assert store.layers() == []


def test_references() -> None:
    assert lazy.parse("alpine") is None
    assert source("lazy+https://h/x?y=z").text == "lazy+https://h/x"
    assert source("lazy+dir:/a/../b").place == "/b"
    assert source("lazy+https://h/x").beside("layers/y") == "https://h/x/layers/y"
    for bad in ("lazy+", "lazy+dir:a", "lazy+file:///x", "lazy+http://", "lazy+http://u@h/",
                "lazy+http://h:99999/", "lazy+http://h/ b", "lazy+http://h/@sha256:1"):  # fmt: skip
        with pytest.raises(InvalidRequest):
            lazy.parse(bad)


def test_only_named_stores(tmp_path: Path) -> None:
    (tmp_path / "in/side").mkdir(parents=True)
    (tmp_path / "in/out").symlink_to("/etc")
    config = Config(lazy_sources=("https://h/images", str(tmp_path / "in")))
    for good in ("https://h/images", "https://h/images/x", str(tmp_path / "in/side")):
        lazy.check_allowed(good, config)
    for bad in ("https://h/images2", "http://h/images", "https://h/images/../x", str(tmp_path),
                "https://h/images/%2e%2e/x", "https://h/images/..%2fx", "https://h/images/a%5C..",
                "https://h/images/%252e%252e/x", "https://h/images/..\\x",
                str(tmp_path / "in/out")):  # fmt: skip
        with pytest.raises(Forbidden):
            lazy.check_allowed(bad, config)


def _change(**values: object) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / lazy.IMAGE_FILE
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | values))

    return change


def _index(data: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for path in (root / "layers").glob("*.index"):
            path.write_bytes(data(path.read_bytes()))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        _change(version=2),
        _change(digest="sha256:" + "0" * 64),
        _change(config={"user": "root"}),
        _change(layers=[]),
        _change(layers=[{"name": "../../x", "size_bytes": 1}]),
        _change(layers="x"),
        _index(lambda data: data[:-1]),
        _index(lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:]),
        _index(lambda data: b""),
        lambda root: (root / lazy.IMAGE_FILE).write_bytes(b"{" * 100_000),
        lambda root: (root / lazy.IMAGE_FILE).write_bytes(b" " * (2 << 20)),
    ],
)
async def test_damaged(
    tmp_path: Path, web: LazyStore, published: str, damage: Callable[[Path], object]
) -> None:
    damage(web.root)
    for place in (web.url, f"dir:{web.root}"):
        with pytest.raises(ImageDamaged):
            await attach(tmp_path, f"lazy+{place}")
    assert ImageStore(tmp_path / "to").all() == []


async def test_a_store_leads_nowhere_else(tmp_path: Path, web: LazyStore, published: str) -> None:
    path = web.root / lazy.IMAGE_FILE
    whole = msgspec.json.decode(path.read_bytes())
    whole["layers"][0]["data"] = "/etc/shadow"
    path.write_bytes(msgspec.json.encode(whole))
    with pytest.raises(ImageDamaged):
        await attach(tmp_path, f"lazy+{web.url}")
    whole["layers"][0]["data"] = "http://127.0.0.1:1/secret"
    path.write_bytes(msgspec.json.encode(whole))
    with pytest.raises(Forbidden):
        await lazy.attach(
            ImageStore(tmp_path / "to"), source(f"lazy+{web.url}"), Config(lazy_sources=(web.url,))
        )


async def test_another_digest_and_nothing_there(
    tmp_path: Path, web: LazyStore, published: str
) -> None:
    with pytest.raises(ImageDamaged):
        await attach(tmp_path, f"lazy+{web.url}@sha256:{'1' * 64}")
    with pytest.raises(ImageNotFound):
        await attach(tmp_path, f"lazy+{web.url}/none")
    with pytest.raises(ImageNotFound):
        await attach(tmp_path, f"lazy+dir:{tmp_path}/none")
    web.down()
    with pytest.raises(RegistryUnavailable):
        await attach(tmp_path, f"lazy+{web.url}")

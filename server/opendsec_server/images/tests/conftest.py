# SPDX-License-Identifier: AGPL-3.0-only
"""A registry, and a store with everything that pulls into it."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from opendsec_server.binaries import find_layer
from opendsec_server.config import Config, ConfigError
from opendsec_server.images.collapse import run_merged
from opendsec_server.images.store import ImageStore
from opendsec_server.node.images import Images

from .registries import FaultProxy, Registry, fault_proxy, running_registry


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that lets everybody in."""
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def closed_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that wants credentials."""
    with running_registry(tmp_path_factory.mktemp("closed"), auth=True) as running:
        yield running


@pytest.fixture
def faults(registry: Registry) -> Iterator[FaultProxy]:
    """A proxy in front of the open registry."""
    with fault_proxy(registry.host) as proxy:
        yield proxy


@dataclass
class World:
    """Images as a node has them, without the node."""

    root: Path
    changes: dict[str, object] = field(default_factory=dict)
    in_use: set[str] = field(default_factory=set)

    def images(self, **changes: object) -> Images:
        """A fresh view of the store, as after a restart."""
        store = ImageStore(self.root / "images")
        config = Config(state_dir=str(self.root), **changes)  # type: ignore[arg-type]
        return Images(store, config, lambda: self.in_use, lambda _layer: None)

    def tree(self, images: Images, digest: str) -> dict[str, tarfile.TarInfo]:
        """What a sandbox of an image would see."""
        return {name: info for name, (info, _data) in self._whole(images, digest).items()}

    def texts(self, images: Images, digest: str) -> dict[str, str]:
        """Contents of its regular files."""
        whole = self._whole(images, digest)
        return {n: data.decode() for n, (info, data) in whole.items() if info.isreg()}

    def count(self, images: Images, digest: str, folder: str) -> int:
        """How many entries a directory of an image has."""
        store = images.store
        layers = [store.layer_path(layer) for layer in store.find(digest).layers]
        with store.scratch("look") as scratch:
            script = f'ls -U "merged/$0" | wc -l > {scratch}/count'
            asyncio.run(run_merged(layers, scratch, ["sh", "-c", script, folder]))
            return int((scratch / "count").read_text())

    def _whole(self, images: Images, digest: str) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
        store = images.store
        layers = [store.layer_path(layer) for layer in store.find(digest).layers]
        with store.scratch("look") as scratch:
            asyncio.run(
                run_merged(
                    layers,
                    scratch,
                    ["tar", "--xattrs", "--xattrs-include=*", "-C", "merged", "-cf",
                     str(scratch / "tar"), "."],
                )
            )  # fmt: skip
            found = {}
            with tarfile.open(scratch / "tar") as tar:
                for info in tar:
                    file = tar.extractfile(info) if info.isreg() else None
                    found[info.name.removeprefix("./")] = (info, file.read() if file else b"")
            return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An empty store. Layers are unpacked with their owners and devices, which takes root."""
    if os.geteuid() != 0:
        pytest.skip("unpacking layers needs root")
    try:
        find_layer()
    except ConfigError as exc:
        pytest.skip(str(exc))
    return World(tmp_path)

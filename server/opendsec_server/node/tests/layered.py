# SPDX-License-Identifier: AGPL-3.0-only
"""Small images for tests, made in a node's own store."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from opendsec_server.config import Config
from opendsec_server.contract.images import ImageConfig
from opendsec_server.images.convert import make_erofs
from opendsec_server.images.store import Image, ImageStore

WHITEOUT = object()
"""The file is removed."""
OPAQUE = object()
"""A directory that hides what is below it."""

Tree = dict[str, str | bytes | object | None]
"""Path → text, bytes, ``WHITEOUT``, ``OPAQUE``; None: a directory."""

BUSYBOX = Path("/bin/busybox")
APPLETS = (
    "sh",
    "cat",
    "ls",
    "id",
    "pwd",
    "env",
    "touch",
    "rm",
    "mkdir",
    "sleep",
    "grep",
    "head",
    "ps",
)


def store_of(config: Config) -> ImageStore:
    """The store of a node, which may run."""
    return ImageStore(config.state_path / "images")


def busybox() -> Tree:
    """A shell and little else: no /etc, no /tmp, no users."""
    if not BUSYBOX.exists():
        pytest.skip("busybox-static is not installed")
    tree: Tree = {"bin/busybox": BUSYBOX.read_bytes()}
    return tree | {f"bin/{name}": "-> busybox" for name in APPLETS}


def lay_out(tree: Tree, root: Path) -> None:
    """Make the files. Text that begins with ``-> `` is where a link leads."""
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is WHITEOUT:
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        elif content is None or content is OPAQUE:
            path.mkdir(exist_ok=True)
            if content is OPAQUE:
                os.setxattr(path, "trusted.overlay.opaque", b"y")
        elif isinstance(content, bytes):
            path.write_bytes(content)
            path.chmod(0o755)
        elif isinstance(content, str) and content.startswith("-> "):
            path.symlink_to(content[3:])
        else:
            path.write_text(str(content))


async def make_layer(store: ImageStore, tree: Tree) -> str:
    """A layer of files; its digest, hex."""
    scratch = Path(tempfile.mkdtemp(prefix="opendsec-layer-", dir="/var/tmp"))
    try:
        root = scratch / "root"
        root.mkdir(mode=0o755)
        lay_out(tree, root)
        await make_erofs(root, scratch / "layer")
        return await asyncio.to_thread(store.adopt, scratch / "layer")
    finally:
        shutil.rmtree(scratch)


async def make_image(store: ImageStore, *trees: Tree, config: ImageConfig | None = None) -> Image:
    """An image of layers, the lowest first."""
    with store.holding() as hold:
        layers = []
        for tree in trees:
            layers.append(await make_layer(store, tree))
            hold.add(layers[-1:])
        return store.put(layers, config or ImageConfig())

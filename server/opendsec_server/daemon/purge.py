# SPDX-License-Identifier: AGPL-3.0-only
"""Remove everything of one instance: sandboxes, kernel objects, pool, and its records."""

from __future__ import annotations

import asyncio
import shutil

from opendsec_server.config import Config
from opendsec_server.node.mountns import enter_private_mount_namespace
from opendsec_server.node.node import Node

from .process import read_identity, stop_process
from .serve import prepare_directories

EDGE_GRACE_S = 5.0


def purge_instance(config: Config, *, images: bool) -> None:
    """Remove the instance's sandboxes and what they left. The server must not run.

    Args:
        config: Names the instance.
        images: Remove the templates' images too, so that the next start builds them again.

    Raises:
        ConfigError: a server still runs, or this is not root.
    """
    prepare_directories(config)
    # An edge that outlived a killed daemon has no other owner.
    edge = read_identity(config.run_path / "edge.pid")
    if edge is not None:
        stop_process(edge, grace_s=EDGE_GRACE_S)
    if config.role != "gateway":
        enter_private_mount_namespace()
        asyncio.run(_purge(config))
    shutil.rmtree(config.run_path, ignore_errors=True)
    if images:
        shutil.rmtree(config.state_path / "images", ignore_errors=True)


async def _purge(config: Config) -> None:
    node = await Node.start(config)
    await node.purge()

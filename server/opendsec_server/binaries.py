# SPDX-License-Identifier: AGPL-3.0-only
"""Finds our own Rust programs: the guest agent, the edge, the keeper of VM memory,
the unpacker of image layers, the server of remote ones."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from .config import Config, ConfigError


def find_binary(name: str, configured: str | None, env_name: str) -> Path:
    """The path of one of our programs.

    Looks at the setting, the environment variable, the folder of the running Python (where
    ``pip install`` puts the wheels' programs), then PATH.

    Args:
        name: Program name, such as ``opendsec-agent``.
        configured: The setting's value, if any. Must exist when given.
        env_name: Environment variable that may name it. Must exist when set.

    Raises:
        ConfigError: it is nowhere, or the named file is not executable.
    """
    for source, value in (("setting", configured), (env_name, os.environ.get(env_name))):
        if value:
            path = Path(value)
            if not (path.is_file() and os.access(path, os.X_OK)):
                raise ConfigError(f"{name}: {source} names {value}, which is not executable")
            return path.resolve()
    beside = Path(sys.executable).parent / name
    if beside.is_file():
        return beside.resolve()
    found = shutil.which(name)
    if found:
        return Path(found).resolve()
    raise ConfigError(
        f"{name} was not found. Install the package {name} (pip install {name}), "
        f"or set {env_name} to its path."
    )


def find_agent(config: Config) -> Path:
    """The guest agent. Raises as ``find_binary``."""
    return find_binary("opendsec-agent", config.agent_path, "OPENDSEC_AGENT")


def find_edge(config: Config) -> Path:
    """The edge. Raises as ``find_binary``."""
    return find_binary("opendsec-edge", config.edge_path, "OPENDSEC_EDGE")


def find_ram() -> Path:
    """The program that saves and maps the memory of VMs. Raises as ``find_binary``."""
    return find_binary("opendsec-ram", None, "OPENDSEC_RAM")


def find_layer() -> Path:
    """The program that unpacks, packs and copies image layers. Raises as ``find_binary``."""
    return find_binary("opendsec-layer", None, "OPENDSEC_LAYER")


def find_lazy() -> Path:
    """The program that serves layers of a remote store. Raises as ``find_binary``."""
    return find_binary("opendsec-lazy", None, "OPENDSEC_LAZY")

# SPDX-License-Identifier: AGPL-3.0-only
"""Credentials of registries, in the form that skopeo and docker read.

They are given to skopeo as a file in memory (memfd), named by descriptor: never in arguments, the
environment or on a disk.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opendsec_server.config import ConfigError
from opendsec_server.contract.images import RegistryAuth

from .references import DOCKER_HUB

_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", DOCKER_HUB)


@dataclass(frozen=True, slots=True)
class AuthOptions:
    """What one run of skopeo is told.

    Attributes:
        arguments: Of its command line.
        fds: Descriptors that it must inherit.
    """

    arguments: tuple[str, ...]
    fds: tuple[int, ...] = ()


def auth_file_of(configured: str | None) -> Path | None:
    """The node's own file of credentials: as configured, or root's docker configuration."""
    if configured is not None:
        return Path(configured)
    try:
        path = Path.home() / ".docker/config.json"
    except RuntimeError:
        return None
    return path if path.is_file() else None


def check(configured: str | None) -> None:
    """At the node's start.

    Raises:
        ConfigError: the configured file does not exist.
    """
    if configured is not None and not Path(configured).is_file():
        raise ConfigError(f"registry_auth_file: there is no file {configured}")


@contextmanager
def for_skopeo(
    host: str, auth: RegistryAuth | None, node_file: Path | None
) -> Iterator[AuthOptions]:
    """Options for a run of skopeo against a registry.

    Args:
        host: The registry.
        auth: The request's own, which wins.
        node_file: The node's.
    """
    if auth is None and node_file is None:
        yield AuthOptions(("--no-creds",))
        return
    if auth is None:
        yield AuthOptions(("--authfile", str(node_file)))
        return
    token = base64.b64encode(f"{auth.username}:{auth.password}".encode()).decode()
    fd = os.memfd_create("registry-auth", os.MFD_CLOEXEC)
    try:
        os.write(fd, json.dumps({"auths": {host: {"auth": token}}}).encode())
        yield AuthOptions(("--authfile", f"/proc/self/fd/{fd}"), (fd,))
    finally:
        os.close(fd)


def known(host: str, auth: RegistryAuth | None, node_file: Path | None) -> RegistryAuth | None:
    """The credentials for a registry, as far as a file holds them itself (no helper programs)."""
    if auth is not None or node_file is None:
        return auth
    try:
        entries = json.loads(node_file.read_text()).get("auths", {})
        for key in (*_HUB_KEYS,) if host == DOCKER_HUB else (host, f"https://{host}"):
            if (token := entries.get(key, {}).get("auth")) is not None:
                user, _, password = base64.b64decode(token).decode().partition(":")
                return RegistryAuth(username=user, password=password)
    except (OSError, ValueError, AttributeError, binascii.Error):
        return None
    return None

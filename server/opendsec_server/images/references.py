# SPDX-License-Identifier: AGPL-3.0-only
"""Image references as docker takes them: ``alpine``, ``host:5000/name:tag``, ``name@sha256:…``.

The grammar is that of the distribution project's ``reference`` package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from opendsec_server.contract.errors import InvalidRequest

from . import limits

DOCKER_HUB = "docker.io"

_PATH_RE = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST_RE = (
    r"(?:\[[0-9a-fA-F:]+\]|[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*)(?::[0-9]{1,5})?"
)
_REFERENCE_RE = re.compile(
    rf"(?:(?P<host>{_HOST_RE})/)?(?P<path>{_PATH_RE}(?:/{_PATH_RE})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """One image of one registry.

    Attributes:
        host: Registry, ``docker.io`` or ``host:5000``.
        path: Repository, ``library/alpine``.
        tag: None with a digest alone.
        digest: ``sha256:…`` of a manifest; wins over the tag.
    """

    host: str
    path: str
    tag: str | None
    digest: str | None

    def __str__(self) -> str:
        tag = "" if self.tag is None else f":{self.tag}"
        digest = "" if self.digest is None else f"@{self.digest}"
        return f"{self.host}/{self.path}{tag}{digest}"

    @property
    def selector(self) -> str:
        """What names the manifest in the registry's API."""
        return self.digest or self.tag or "latest"

    def at(self, host: str) -> str:
        """For skopeo: at this host, by digest where there is one (it takes no tag beside it)."""
        tail = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"docker://{host}/{self.path}{tail}"


def parse(text: str) -> Reference:
    """Read a reference.

    Raises:
        InvalidRequest: not one.
    """
    if len(text) > limits.NAME_CHARS_MAX:
        raise InvalidRequest(
            f"an image reference has at most {limits.NAME_CHARS_MAX} characters, "
            f"this one {len(text)}"
        )
    host: str | None
    head, slash, tail = text.partition("/")
    # Docker's rule: what looks like a host name is one, and anything else a part of the path.
    if slash and (head == "localhost" or "." in head or ":" in head or head.lower() != head):
        host, rest = head, tail
    else:
        host, rest = DOCKER_HUB, text
    if host == "index.docker.io":
        host = DOCKER_HUB
    match = _REFERENCE_RE.fullmatch(f"{host}/{rest}")
    if match is None or match["host"] is None or not _is_host(match["host"]):
        raise InvalidRequest(
            f"{text!r} is not an image reference",
            remediation="Write it as docker does: NAME, NAME:TAG, HOST:PORT/NAME:TAG or "
            "NAME@sha256:…, in lower case.",
        )
    path, tag, digest = match["path"], match["tag"], match["digest"]
    if host == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    if tag is None and digest is None:
        tag = "latest"
    return Reference(host, path, tag, digest)


def _is_host(text: str) -> bool:
    """What the grammar leaves open: addresses of IPv6, and numbers of ports."""
    try:
        parts = urlsplit(f"//{text}")
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def canonical(text: str) -> str:
    """The full form of a reference: ``docker.io/library/alpine:latest``.

    Raises:
        InvalidRequest: not a reference.
    """
    return str(parse(text))

# SPDX-License-Identifier: Apache-2.0
"""Where the server is and which key opens it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ._errors import NotConfigured, Unauthenticated

DEFAULT_URL = "http://127.0.0.1:7300"
DEFAULT_STATE_DIR = "/var/lib/opendsec"
API_KEY_FILE = "api-key"


@dataclass(frozen=True)
class Settings:
    """A resolved configuration of a client.

    Attributes:
        base_url: The server, without a trailing slash.
        sandbox_url: Where sandbox traffic goes; the same unless set apart.
        api_key_source: In words, for error messages and ``opendsec doctor``.
        project_id: Where to act. None: the key's own project.
    """

    base_url: str
    sandbox_url: str
    api_key: str | None = field(repr=False)
    url_source: str
    api_key_source: str
    project_id: str | None = None

    def key_headers(self) -> dict[str, str]:
        """What every call of the API carries: the key, and the project to act in.

        Raises:
            Unauthenticated: no key is configured.
        """
        if self.api_key is None:
            raise Unauthenticated("No API key is configured.")
        if self.project_id is None:
            return {"X-API-Key": self.api_key}
        return {"X-API-Key": self.api_key, "X-Project-Id": self.project_id}


def is_loopback(url: str) -> bool:
    """Whether the address can only be this machine."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.") or host.endswith(".localhost")


def resolve(
    base_url: str | None = None,
    api_key: str | None = None,
    sandbox_url: str | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    project_id: str | None = None,
) -> Settings:
    """Fill in what was not given.

    Address: argument, ``OPENDSEC_API_URL``, ``E2B_API_URL``, else this machine's port 7300.
    Key: argument, ``OPENDSEC_API_KEY``, ``E2B_API_KEY``, else the key file of a server on this
    machine (only for loopback addresses: a local key must not travel to another host).
    Project: argument, ``OPENDSEC_PROJECT_ID``, ``E2B_TEAM_ID`` beside ``E2B_API_URL``, else the
    key's own.

    Raises:
        NotConfigured: the address is not an http(s) URL.
    """
    env = os.environ if environ is None else environ
    url, url_source = _first(
        ("argument", base_url),
        ("OPENDSEC_API_URL", env.get("OPENDSEC_API_URL")),
        ("E2B_API_URL", env.get("E2B_API_URL")),
        ("default", DEFAULT_URL),
    )
    url = _checked_url(url, url_source)
    traffic_url = sandbox_url or env.get("OPENDSEC_SANDBOX_URL")
    if not traffic_url and url_source == "E2B_API_URL":
        traffic_url = env.get("E2B_SANDBOX_URL")
    traffic_url = _checked_url(traffic_url, "sandbox_url") if traffic_url else url
    key, key_source = _first(
        ("argument", api_key),
        ("OPENDSEC_API_KEY", env.get("OPENDSEC_API_KEY")),
        ("E2B_API_KEY", env.get("E2B_API_KEY")),
    )
    if not key and is_loopback(url):
        key, key_source = _local_key(env)
    project_id, _ = _first(
        ("argument", project_id),
        ("OPENDSEC_PROJECT_ID", env.get("OPENDSEC_PROJECT_ID")),
        # It belongs to the server that E2B's settings name.
        ("E2B_TEAM_ID", env.get("E2B_TEAM_ID") if url_source == "E2B_API_URL" else None),
    )
    return Settings(url, traffic_url, key or None, url_source, key_source, project_id or None)


def _first(*candidates: tuple[str, str | None]) -> tuple[str, str]:
    for source, value in candidates:
        if value:
            return value, source
    return "", "none"


def _checked_url(url: str, source: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise NotConfigured(
            f"{url!r} (from {source}) is not an address of a server.",
            remediation="Give an address such as http://127.0.0.1:7300.",
        )
    return url.rstrip("/")


def _local_key(env: Mapping[str, str]) -> tuple[str, str]:
    path = Path(env.get("OPENDSEC_STATE_DIR") or DEFAULT_STATE_DIR) / API_KEY_FILE
    try:
        return path.read_text(encoding="ascii").strip(), str(path)
    except (OSError, UnicodeDecodeError):
        return "", "none"

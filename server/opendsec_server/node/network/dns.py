# SPDX-License-Identifier: AGPL-3.0-only
"""Which resolvers sandboxes' questions are sent to."""

from __future__ import annotations

import ipaddress
from pathlib import Path

RESOLV_CONF = Path("/etc/resolv.conf")
SYSTEMD_RESOLV_CONF = Path("/run/systemd/resolve/resolv.conf")
RESOLVERS_MAX = 3


def _nameservers(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                found.append(str(ipaddress.IPv4Address(words[1])))
            except ValueError:
                continue
    return found[:RESOLVERS_MAX]


def host_resolvers(configured: tuple[str, ...]) -> tuple[str, ...]:
    """IPv4 resolvers for sandboxes, at most three.

    Args:
        configured: The setting; it wins when not empty.

    systemd-resolved's stub answers on the loopback interface only, so when ``resolv.conf`` names
    nothing but loopback addresses, the servers behind the stub are used.
    """
    if configured:
        return configured[:RESOLVERS_MAX]
    servers = _nameservers(RESOLV_CONF)
    if all(ipaddress.IPv4Address(s).is_loopback for s in servers):
        servers = _nameservers(SYSTEMD_RESOLV_CONF) or servers
    return tuple(servers)

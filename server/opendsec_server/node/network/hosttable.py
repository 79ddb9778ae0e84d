# SPDX-License-Identifier: AGPL-3.0-only
"""The one nftables table of an instance on the host, and the host's forwarding.

Its rules never change with sandboxes: links are matched by name prefix, addresses by network. What
they do: no sandbox reaches the host or another sandbox; nobody but the host reaches a sandbox;
egress is masqueraded; DNS questions to the link-local resolvers go to the host's real ones.

Only its set ``peers`` changes: pairs of members of one group, each by link and address, so that no
sandbox passes for another. It outlasts a new ruleset, so that groups stay connected while the
daemon starts.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from .policy import METADATA, RESOLVERS

_IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


PEERS = "peers"
"""Set of the ways that are open between sandboxes: link, source, link, destination."""


def table_name(instance: str) -> str:
    """Name of the instance's table."""
    return f"opendsec_{instance}"


def _redirects(links: str, resolvers: tuple[str, ...]) -> str:
    if not resolvers:
        return ""
    rules = (
        f"iifname {links} ip daddr {front} {protocol} dport 53 "
        f"dnat ip to {resolvers[index % len(resolvers)]}"
        for index, front in enumerate(RESOLVERS)
        for protocol in ("udp", "tcp")
    )
    return "\n    ".join(rules)


def ruleset(instance: str, network_cidr: str, resolvers: tuple[str, ...]) -> str:
    """Commands that make, or replace in one transaction, the instance's table."""
    name = table_name(instance)
    links = f'"{instance}-*"'
    dns = (
        f"meta l4proto {{ tcp, udp }} ct original ip daddr {{ {', '.join(RESOLVERS)} }} "
        "ct original proto-dst 53 accept"
    )
    return f"""
table inet {name}
flush table inet {name}
table inet {name} {{
  set {PEERS} {{ type ifname . ipv4_addr . ifname . ipv4_addr; }}
  chain input {{
    type filter hook input priority -10; policy accept;
    iifname != {links} accept
    ct state established,related accept
    {dns}
    drop
  }}
  chain forward {{
    type filter hook forward priority -10; policy accept;
    iifname . ip saddr . oifname . ip daddr @{PEERS} accept
    iifname {links} oifname {links} drop
    oifname {links} ct state established,related accept
    oifname {links} drop
    iifname != {links} accept
    meta nfproto ipv6 drop
    {dns}
    ip daddr {{ {", ".join(METADATA)}, {network_cidr} }} drop
    ip saddr != {network_cidr} drop
  }}
  chain prerouting {{
    type nat hook prerouting priority -100; policy accept;
    {_redirects(links, resolvers)}
  }}
  chain nat_input {{
    type nat hook input priority 100; policy accept;
    iifname {links} ip daddr 127.0.0.0/8 snat ip to 127.0.0.1
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
    ip saddr {network_cidr} oifname != {links} masquerade
  }}
}}
"""


def removal(instance: str) -> str:
    """Commands that remove the instance's table; no error when there is none."""
    name = table_name(instance)
    return f"table inet {name}\ndelete table inet {name}\n"


def need_route_localnet(resolvers: tuple[str, ...]) -> bool:
    """Whether some resolver lives on the loopback, which the kernel routes only on request."""
    return any(ipaddress.IPv4Address(r).is_loopback for r in resolvers)


def forwarding_enabled() -> bool:
    """Whether the host forwards IPv4."""
    return _IP_FORWARD.read_text().strip() == "1"


def set_forwarding(enabled: bool) -> None:
    """Switch the host's IPv4 forwarding."""
    _IP_FORWARD.write_text("1" if enabled else "0")

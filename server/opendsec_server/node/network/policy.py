# SPDX-License-Identifier: AGPL-3.0-only
"""A sandbox's egress policy as an nftables ruleset for its own network namespace.

Root in the sandbox cannot change it: the namespace belongs to the initial user namespace, where
the sandbox has no capability.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.contract.node import NetworkPolicy

GATEWAY = "169.254.0.1"
"""Host end of every slot's link, and the source of every connection to a guest agent."""

RESOLVERS = ("169.254.0.1", "169.254.0.2", "169.254.0.3")
"""What a sandbox's resolv.conf names; the host redirects each to a real resolver."""

AGENT_PORT = 49_983

NAMES_PORT = 49_984
"""Where the node answers a group's questions for names, in a member's namespace. Always the same:
a question that was asked while the node was away reaches the next answerer when it is repeated."""

NAMES_ADDRESS = "127.0.0.11"
"""The address that goes with it in a container's namespace."""

METADATA = ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32")
"""Where clouds serve machines their credentials: link-local, and the addresses of Alibaba, Azure
and Oracle outside it. Closed whatever ``allow`` names."""

CLOSED_RANGES = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/3",
)
"""Private, shared, loopback, link-local, benchmark, multicast and reserved ranges
(RFC 6890): closed unless ``allow`` names them."""

NAMES_QUESTION = "meta l4proto { tcp, udp } ct original ip daddr @names ct original proto-dst 53"
"""Matches a group member's questions for names, also after they were turned to the answerer."""

REFUSE = "reject with icmpx admin-prohibited"
"""An answer at once, so that programs fail fast and do not wait for a time-out."""


def check(policy: NetworkPolicy) -> None:
    """Refuse entries that are not IPv4 addresses or networks.

    Raises:
        InvalidRequest: names the entry.
    """
    for entry in (*policy.allow, *policy.deny):
        try:
            ipaddress.IPv4Network(entry, strict=False)
        except ValueError as exc:
            raise InvalidRequest(
                f"network rule {entry!r} is not an IPv4 address or CIDR",
                remediation="Use entries like 203.0.113.7 or 203.0.113.0/24.",
            ) from exc


def _elements(networks: Iterable[str]) -> str:
    """Collapsed, because an interval set refuses entries that overlap."""
    parsed = [ipaddress.IPv4Network(n, strict=False) for n in networks]
    return ", ".join(str(n) for n in ipaddress.collapse_addresses(parsed))


def base_ruleset(network_cidr: str) -> str:
    """What every slot's namespace has, whatever the policy: made once with the slot.

    Replies of the guest agent are let out by port, not only by connection tracking, so that the
    table can be flushed when a policy is replaced without cutting streams to the agent.

    ``peers`` and ``names`` are empty but in a member of a group (see ``groups.rules``): the
    addresses of the other members, and those where the group's names are asked for. What they open
    is open whatever the policy. The agent's port is closed to peers.
    """
    return f"""
table inet sandbox {{
  set allowed {{ type ipv4_addr; flags interval; }}
  set denied {{ type ipv4_addr; flags interval; }}
  set peers {{ type ipv4_addr; }}
  set names {{ type ipv4_addr; }}
  set closed {{ type ipv4_addr; flags interval; elements = {{ {_elements(CLOSED_RANGES)} }} }}
  chain egress {{ }}
  chain inbound {{
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
    ip saddr {GATEWAY} tcp dport {AGENT_PORT} accept
    ip saddr @peers tcp dport {AGENT_PORT} {REFUSE}
    ip saddr @peers accept
  }}
  chain outbound {{
    type filter hook output priority 0; policy drop;
    oif lo accept
    ct state established,related accept
    ip daddr {GATEWAY} tcp sport {AGENT_PORT} accept
    ip daddr @peers accept
    {NAMES_QUESTION} accept
    ip daddr {{ {", ".join(RESOLVERS)} }} udp dport 53 jump egress
    ip daddr {{ {", ".join(RESOLVERS)} }} tcp dport 53 jump egress
    ip daddr {{ {", ".join(METADATA)}, {network_cidr} }} {REFUSE}
    meta nfproto ipv4 jump egress
    {REFUSE}
  }}
}}
"""


def policy_commands(policy: NetworkPolicy, *, forwarded: bool = False) -> str:
    """Commands that replace the policy of a slot's namespace in one transaction.

    Args:
        policy: The new one.
        forwarded: For a slot with a machine behind a tap, see ``tap.tap_ruleset``: packets of
            both directions are judged, so the address is the one the connection was opened to.

    Order matters: what stays closed in any case (other sandboxes, link-local metadata) was
    refused before; then ``allow``, ``deny``, the closed ranges, and the default.

    Raises:
        InvalidRequest: an entry is not an IPv4 address or network.
    """
    check(policy)
    if forwarded:
        chain, allowed, denied = "guest_egress", "guest_allowed", "guest_denied"
        to, refuse = "ct original ip daddr", "goto refuse"
    else:
        chain, allowed, denied = "egress", "allowed", "denied"
        to, refuse = "ip daddr", REFUSE
    lines = [
        f"flush chain inet sandbox {chain}",
        f"flush set inet sandbox {allowed}",
        f"flush set inet sandbox {denied}",
    ]
    for name, entries in ((allowed, policy.allow), (denied, policy.deny)):
        if entries:
            lines.append(f"add element inet sandbox {name} {{ {_elements(entries)} }}")
    rules = [f"{to} @{allowed} accept", f"{to} @{denied} {refuse}"]
    if policy.internet or policy.allow:
        rules.insert(0, f"{to} {{ {', '.join(RESOLVERS)} }} accept")
    rules.append(f"{to} @closed {refuse}")
    if policy.internet:
        rules.append("accept")
    lines += [f"add rule inet sandbox {chain} {rule}" for rule in rules]
    return "\n".join(lines) + "\n"

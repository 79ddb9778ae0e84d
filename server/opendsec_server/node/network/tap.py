# SPDX-License-Identifier: AGPL-3.0-only
"""What makes a slot one for a virtual machine: a tap device behind the slot's link.

The machine behind the tap has the same address and link address in every slot, so that saved
memory runs again in any of them. The namespace between is a router with one client: what arrives
for the slot's address goes to the guest, what the guest sends leaves as the slot's address. Seen
from the host a slot with a machine is the same as one with a container.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass

from .policy import (
    AGENT_PORT,
    GATEWAY,
    METADATA,
    NAMES_QUESTION,
    REFUSE,
    RESOLVERS,
)

TAP = "tap0"
TAP_ADDRESS = "169.254.0.22"
GUEST_ADDRESS = "169.254.0.21"
PREFIX_LENGTH = 30
TAP_MAC = bytes.fromhex("0200a9fe0016")
GUEST_MAC = bytes.fromhex("0200a9fe0015")

TAP_INDEX = 3
"""Index of the tap in a slot's namespace; chosen by us, so that no look-up is needed."""

_TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_TUNSETOWNER = 0x400454CC
_TUNSETIFINDEX = 0x400454DA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000

SETTINGS = (
    ("net/ipv4/ip_forward", "1"),
    ("net/netfilter/nf_conntrack_tcp_loose", "0"),
    ("net/netfilter/nf_conntrack_tcp_be_liberal", "1"),
    ("net/ipv4/icmp_ratelimit", "0"),
)
"""Of the namespace. ``tcp_loose`` off: a connection of another life is not taken for one of
this. ``tcp_be_liberal`` on: a packet that only arrives late is none of another life, and is not
answered with a reset. ``icmp_ratelimit`` off: every refusal is told at once, not only the first
six."""


def _mac_text(raw: bytes) -> str:
    return raw.hex(":")


@dataclass(frozen=True, slots=True)
class TapInfo:
    """What a machine monitor and its guest must know.

    Attributes:
        name: The device, in the slot's namespace. Persistent; one queue.
        mac: Its link address.
        address: Its address: the guest's gateway.
        guest_mac: Link address of the guest's card.
        guest_address: The guest's address.
        prefix_length: Of the network between both.
        resolver: What the guest asks for names.
        owner_uid: The user that may open it without capabilities.
    """

    owner_uid: int
    name: str = TAP
    mac: str = _mac_text(TAP_MAC)
    address: str = TAP_ADDRESS
    guest_mac: str = _mac_text(GUEST_MAC)
    guest_address: str = GUEST_ADDRESS
    prefix_length: int = PREFIX_LENGTH
    resolver: str = RESOLVERS[0]


def make_device(owner_uid: int) -> None:
    """Make the tap in the thread's network namespace; it stays until that namespace goes.

    QEMU and Firecracker open it again with the flags they want; only multi-queue could not be
    changed later, and neither asks for it.

    Raises:
        OSError: no tun driver, or a tap is there already.
    """
    fd = os.open(_TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFINDEX, struct.pack("=I", TAP_INDEX))
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("=16sH22x", TAP.encode(), flags))
        fcntl.ioctl(fd, _TUNSETOWNER, owner_uid)
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)


def tap_ruleset(network_cidr: str, address: str) -> str:
    """Commands that turn a container slot's table into a machine slot's. The policy follows with
    ``policy_commands(…, forwarded=True)`` in the same transaction.

    Every packet of a connection that the guest opened is judged, in both directions and by the
    address it was opened to. So a new policy holds from one packet to the next, ends what it no
    longer allows, and leaves everything else alone; nothing has to be forgotten.

    Nothing is replaced, only added: to let go of a rule, the kernel waits for a grace period.

    * ``guard``: before connections are tracked, so that forged packets leave no trace.
    * ``inbound``, ``outbound``: the namespace itself. Nobody lives there but the monitor, which
      needs no network. A packet of an unknown connection to the slot's address ends here, because
      only known and new ones are redirected.
    """
    dns = (
        f"meta l4proto {{ tcp, udp }} ct original ip daddr {{ {', '.join(RESOLVERS)} }} "
        "ct original proto-dst 53"
    )
    unknown = "ct state invalid meta l4proto tcp reject with tcp reset"
    return f"""
insert rule inet sandbox inbound iifname "{TAP}" {REFUSE}
insert rule inet sandbox inbound {unknown}
insert rule inet sandbox inbound iifname "{TAP}" {NAMES_QUESTION} accept
insert rule inet sandbox outbound drop
insert rule inet sandbox outbound ct state invalid,untracked tcp flags & rst == rst accept
insert rule inet sandbox outbound ct state established,related accept
insert rule inet sandbox outbound oif lo accept
table inet sandbox {{
  chain guard {{
    type filter hook prerouting priority -300; policy accept;
    iifname "{TAP}" ip saddr {GUEST_ADDRESS} accept
    iifname "{TAP}" drop
  }}
  chain to_guest_address {{
    type nat hook prerouting priority -100; policy accept;
    iifname "eth0" ip daddr {address} dnat ip to {GUEST_ADDRESS}
  }}
  chain to_slot_address {{
    type nat hook postrouting priority 100; policy accept;
    oifname "eth0" ip saddr {GUEST_ADDRESS} snat ip to {address}
  }}
  set guest_allowed {{ type ipv4_addr; flags interval; }}
  set guest_denied {{ type ipv4_addr; flags interval; }}
  chain guest_egress {{ }}
  chain refuse {{
    ct state established meta l4proto tcp reject with tcp reset
    {REFUSE}
  }}
  chain judge {{
    ct original ip daddr @peers accept
    {dns} jump guest_egress
    ct original ip daddr {{ {", ".join(METADATA)}, {network_cidr} }} goto refuse
    jump guest_egress
    goto refuse
  }}
  chain from_guest {{
    ct direction reply accept
    goto judge
  }}
  chain to_guest {{
    ct direction reply goto judge
    ct status & dnat == 0 drop
    ct state established,related accept
    ip saddr {GATEWAY} tcp dport {AGENT_PORT} accept
    ip saddr @peers tcp dport {AGENT_PORT} goto refuse
    ip saddr @peers accept
    drop
  }}
  chain forward {{
    type filter hook forward priority 0; policy drop;
    {unknown}
    ct state invalid,untracked drop
    iifname "{TAP}" oifname "eth0" goto from_guest
    iifname "eth0" oifname "{TAP}" goto to_guest
  }}
}}
"""

# SPDX-License-Identifier: AGPL-3.0-only
"""The few rtnetlink and ctnetlink messages that a slot needs, sent in batches.

pyroute2 was measured first: 0.6 s to import and 7.5 ms per slot on the build machine, against
under 1 ms here; slots are what a burst of creates waits for. See rtnetlink(7), netlink(7) and
``linux/netfilter/nfnetlink_conntrack.h``.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from types import TracebackType

_NLM_F_REQUEST = 0x1
_NLM_F_ACK = 0x4
_NLM_F_EXCL = 0x200
_NLM_F_CREATE = 0x400
_NLM_F_DUMP = 0x300

_NLMSG_ERROR = 0x2
_NLMSG_DONE = 0x3

_RTM_NEWLINK = 16
_RTM_DELLINK = 17
_RTM_GETLINK = 18
_RTM_NEWADDR = 20
_RTM_NEWROUTE = 24
_RTM_NEWNEIGH = 28

_IFLA_ADDRESS = 1
_IFLA_IFNAME = 3
_IFLA_LINKINFO = 18
_IFLA_NET_NS_FD = 28
_IFLA_INFO_KIND = 1
_IFLA_INFO_DATA = 2
_VETH_INFO_PEER = 1
_IFA_ADDRESS = 1
_IFA_LOCAL = 2
_NDA_DST = 1
_NDA_LLADDR = 2
_NUD_PERMANENT = 0x80
_RTA_DST = 1
_RTA_OIF = 4
_RTA_GATEWAY = 5
_RTA_PREFSRC = 7
_NLA_F_NESTED = 0x8000

_IFF_UP = 0x1
_RT_TABLE_MAIN = 254
_RTPROT_STATIC = 4
_RT_SCOPE_LINK = 253
_RT_SCOPE_UNIVERSE = 0
_RTN_UNICAST = 1
_RTNH_F_ONLINK = 4

_NETLINK_ROUTE = 0
_NETLINK_NETFILTER = 12
_CT_DELETE = (1 << 8) | 2
_CTA_TUPLE_ORIG = 1
_CTA_TUPLE_IP = 1
_CTA_IP_V4_SRC = 1
_CTA_FILTER = 25
_CTA_FILTER_ORIG_FLAGS = 1
_CTA_FILTER_IP_SRC = 1

_RECEIVE_BYTES = 1 << 17

LOOPBACK_INDEX = 1
GUEST_INDEX = 2
"""Index of eth0 in a slot's namespace; chosen by us, so that no look-up is needed."""


def _attr(kind: int, payload: bytes) -> bytes:
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + b"\0" * (-length % 4)


def _u32(value: int) -> bytes:
    return struct.pack("=I", value)


def _name(text: str) -> bytes:
    return text.encode() + b"\0"


def _ifinfo(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


Message = tuple[int, int, bytes]
"""Type, extra flags, payload."""


HOST_MAC = bytes.fromhex("020d5ec00001")
GUEST_MAC = bytes.fromhex("020d5ec00002")
"""Link addresses of the two ends. Each pair is a network of its own, so all may be alike."""


def veth(name: str, peer_netns_fd: int) -> Message:
    """Create a pair: ``name`` here, ``eth0`` in the namespace behind the descriptor. Both down."""
    peer = (
        _ifinfo(GUEST_INDEX)
        + _attr(_IFLA_ADDRESS, GUEST_MAC)
        + _attr(_IFLA_IFNAME, _name("eth0"))
        + _attr(_IFLA_NET_NS_FD, _u32(peer_netns_fd))
    )
    info = _attr(_IFLA_INFO_KIND, b"veth") + _attr(
        _IFLA_INFO_DATA | _NLA_F_NESTED, _attr(_VETH_INFO_PEER | _NLA_F_NESTED, peer)
    )
    payload = (
        _ifinfo()
        + _attr(_IFLA_IFNAME, _name(name))
        + _attr(_IFLA_ADDRESS, HOST_MAC)
        + _attr(_IFLA_LINKINFO | _NLA_F_NESTED, info)
    )
    return _RTM_NEWLINK, _NLM_F_CREATE | _NLM_F_EXCL, payload


def link_up(index: int) -> Message:
    """Set a link up."""
    return _RTM_NEWLINK, 0, _ifinfo(index, _IFF_UP, _IFF_UP)


def link_delete(name: str) -> Message:
    """Remove a link (and its peer) by name."""
    return _RTM_DELLINK, 0, _ifinfo() + _attr(_IFLA_IFNAME, _name(name))


def link_address(index: int, mac: bytes) -> Message:
    """Give a link its link address."""
    return _RTM_NEWLINK, 0, _ifinfo(index) + _attr(_IFLA_ADDRESS, mac)


def address(index: int, ip: str, prefix_length: int = 32) -> Message:
    """Give a link one address."""
    raw = socket.inet_aton(ip)
    payload = struct.pack("=BBBBi", socket.AF_INET, prefix_length, 0, _RT_SCOPE_UNIVERSE, index)
    payload += _attr(_IFA_LOCAL, raw) + _attr(_IFA_ADDRESS, raw)
    return _RTM_NEWADDR, _NLM_F_CREATE | _NLM_F_EXCL, payload


def neighbour(index: int, ip: str, mac: bytes) -> Message:
    """A permanent neighbour. Learnt ones are counted over all namespaces together against
    ``net.ipv4.neigh.default.gc_thresh3`` (1,024 by default), which 512 slots would exhaust."""
    payload = struct.pack("=BxxxiHBB", socket.AF_INET, index, _NUD_PERMANENT, 0, _RTN_UNICAST)
    payload += _attr(_NDA_DST, socket.inet_aton(ip)) + _attr(_NDA_LLADDR, mac)
    return _RTM_NEWNEIGH, _NLM_F_CREATE, payload


def host_route(index: int, ip: str, source: str) -> Message:
    """Reach ``ip``/32 over a link, from ``source``."""
    head = struct.pack(
        "=BBBBBBBBI",
        socket.AF_INET,
        32,
        0,
        0,
        _RT_TABLE_MAIN,
        _RTPROT_STATIC,
        _RT_SCOPE_LINK,
        _RTN_UNICAST,
        0,
    )
    payload = head + _attr(_RTA_DST, socket.inet_aton(ip)) + _attr(_RTA_OIF, _u32(index))
    payload += _attr(_RTA_PREFSRC, socket.inet_aton(source))
    return _RTM_NEWROUTE, _NLM_F_CREATE | _NLM_F_EXCL, payload


def default_route_onlink(index: int, gateway: str) -> Message:
    """Default route to a gateway that no route covers."""
    head = struct.pack(
        "=BBBBBBBBI",
        socket.AF_INET,
        0,
        0,
        0,
        _RT_TABLE_MAIN,
        _RTPROT_STATIC,
        _RT_SCOPE_UNIVERSE,
        _RTN_UNICAST,
        _RTNH_F_ONLINK,
    )
    payload = head + _attr(_RTA_OIF, _u32(index))
    payload += _attr(_RTA_GATEWAY, socket.inet_aton(gateway))
    return _RTM_NEWROUTE, _NLM_F_CREATE | _NLM_F_EXCL, payload


def conntrack_delete_from(ip: str) -> Message:
    """Forget every tracked connection that ``ip`` opened (kernel 6.3 or later filters here)."""
    family = struct.pack("=BBH", socket.AF_INET, 0, 0)
    ip_attr = _attr(_CTA_IP_V4_SRC, socket.inet_aton(ip))
    tuple_orig = _attr(
        _CTA_TUPLE_ORIG | _NLA_F_NESTED, _attr(_CTA_TUPLE_IP | _NLA_F_NESTED, ip_attr)
    )
    wanted = _attr(
        _CTA_FILTER | _NLA_F_NESTED, _attr(_CTA_FILTER_ORIG_FLAGS, _u32(_CTA_FILTER_IP_SRC))
    )
    return _CT_DELETE, 0, family + tuple_orig + wanted


def conntrack_flush() -> Message:
    """Forget every tracked connection of the namespace."""
    return _CT_DELETE, 0, struct.pack("=BBH", socket.AF_UNSPEC, 0, 0)


class Netlink:
    """One netlink socket, bound to the network namespace of the thread that made it. Blocks.

    Args:
        netfilter: speak to netfilter instead of routing.
    """

    def __init__(self, *, netfilter: bool = False) -> None:
        protocol = _NETLINK_NETFILTER if netfilter else _NETLINK_ROUTE
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol
        )
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Netlink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _pack(self, message: Message, flags: int) -> bytes:
        kind, extra, payload = message
        self._sequence += 1
        length = 16 + len(payload)
        head = struct.pack(
            "=IHHII", length, kind, _NLM_F_REQUEST | flags | extra, self._sequence, 0
        )
        return head + payload + b"\0" * (-length % 4)

    def send(self, *messages: Message) -> None:
        """Send messages in one call and wait for every acknowledgement.

        Raises:
            OSError: the first refusal; messages after it were still tried by the kernel.
        """
        first = self._sequence + 1
        self._socket.send(b"".join(self._pack(m, _NLM_F_ACK) for m in messages))
        missing = set(range(first, self._sequence + 1))
        failure: OSError | None = None
        while missing:
            for kind, sequence, body in _parse(self._socket.recv(_RECEIVE_BYTES)):
                if kind != _NLMSG_ERROR or sequence not in missing:
                    continue
                missing.discard(sequence)
                code = -struct.unpack_from("=i", body)[0]
                if code and failure is None:
                    which = sequence - first
                    failure = OSError(code, f"netlink message {which}: {os.strerror(code)}")
        if failure is not None:
            raise failure

    def link_names(self) -> list[str]:
        """Names of all links of the namespace."""
        self._socket.send(self._pack((_RTM_GETLINK, 0, _ifinfo()), _NLM_F_DUMP))
        names: list[str] = []
        while True:
            for kind, _sequence, body in _parse(self._socket.recv(_RECEIVE_BYTES)):
                if kind == _NLMSG_DONE:
                    return names
                if kind == _RTM_NEWLINK:
                    names.append(_attribute(body, 16, _IFLA_IFNAME).rstrip(b"\0").decode())


def _parse(data: bytes) -> list[tuple[int, int, bytes]]:
    found = []
    at = 0
    while at + 16 <= len(data):
        length, kind, _flags, sequence, _pid = struct.unpack_from("=IHHII", data, at)
        found.append((kind, sequence, data[at + 16 : at + length]))
        at += (length + 3) & ~3
    return found


def _attribute(body: bytes, at: int, wanted: int) -> bytes:
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        if kind & 0x3FFF == wanted:
            return body[at + 4 : at + length]
        at += (length + 3) & ~3
    return b""


def delete_link_if_there(netlink: Netlink, name: str) -> bool:
    """Remove a link; whether there was one."""
    try:
        netlink.send(link_delete(name))
    except OSError as exc:
        if exc.errno == errno.ENODEV:
            return False
        raise
    return True


def link_index(name: str) -> int:
    """Index of a link in the thread's network namespace.

    Raises:
        OSError: no such link.
    """
    return socket.if_nametoindex(name)


def link_there(name: str) -> bool:
    """Whether the thread's network namespace has a link of this name."""
    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True

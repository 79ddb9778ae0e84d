# SPDX-License-Identifier: AGPL-3.0-only
"""The slot maker: a small helper process that makes namespaces for the daemon.

A process of its own, because it must be single-threaded to fork (user namespaces) and to change
its network namespace freely, because libnftables must not be able to end the daemon, and because
a burst of creates must not wait for it in the event loop. It holds nothing: it hands over file
descriptors (SCM_RIGHTS) and ends when the daemon's end of the socket closes. So namespaces of
unused slots vanish with the daemon, and those of used slots live exactly as long as their sandbox.

One request, one answer, in order, over SOCK_SEQPACKET; JSON, because both sides are one release.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from opendsec_server.node import syscalls

from . import netlink, tap
from .nft import Nft, NftError
from .policy import GATEWAY, NAMES_ADDRESS, NAMES_PORT

MESSAGE_BYTES_MAX = 512 * 1024
IDS_PER_SANDBOX = 65_536


class SlotMaker:
    """Serves requests from one socket until it closes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._nft = Nft()
        self._host_netns = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._host = netlink.Netlink()
        self._conntrack = netlink.Netlink(netfilter=True)

    def serve(self) -> None:
        """Answer until the daemon is gone."""
        while True:
            data, fds, _flags, _address = socket.recv_fds(self._channel, MESSAGE_BYTES_MAX, 1)
            if not data:
                return
            answer, out_fds = self._answer(json.loads(data), fds)
            try:
                socket.send_fds(self._channel, [json.dumps(answer).encode()], out_fds)
            except BrokenPipeError:
                return
            finally:
                for fd in (*fds, *out_fds):
                    os.close(fd)

    def _answer(self, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        operation = request.pop("op")
        made: list[int] = []
        try:
            if operation == "make":
                self._make(made, **request)
                return {"ok": True}, made
            if operation == "policy":
                self._inside(fds[0], lambda: self._replace_policy(**request))
            elif operation == "tap":
                self._inside(fds[0], lambda: self._add_tap(**request))
            elif operation == "inside":
                self._inside(fds[0], lambda: self._run_inside(**request))
            elif operation == "listen":
                self._inside(fds[0], lambda: self._listen(made))
                return {"ok": True}, made
            elif operation == "unlink":
                self._unlink(**request)
            elif operation == "host":
                return {"ok": True, "output": self._nft.run(request["commands"])}, []
            elif operation == "links":
                return {"ok": True, "names": self._links(request["prefix"])}, []
            return {"ok": True}, []
        except (OSError, NftError) as exc:
            for fd in made:
                os.close(fd)
            code = exc.errno if isinstance(exc, OSError) else None
            return {"ok": False, "error": str(exc), "errno": code}, []

    # --- one slot -----------------------------------------------------------

    def _make(
        self,
        made: list[int],
        *,
        link: str,
        address: str,
        ruleset: str,
        id_base: int | None,
        route_localnet: bool,
    ) -> None:
        """Network namespace, link, firewall, and the user namespace whose map the slot uses.

        The address may have been another sandbox's: the host first forgets its connections.
        """
        with contextlib.suppress(OSError):
            self._conntrack.send(netlink.conntrack_delete_from(address))
        syscalls.unshare(syscalls.CLONE_NEWNET)
        try:
            netns = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            made.append(netns)
            inside = netlink.Netlink()
            _settings_inside()
            self._nft.run(ruleset)
        finally:
            syscalls.setns(self._host_netns, syscalls.CLONE_NEWNET)
        with inside:
            self._connect(link, address, netns, inside)
        if route_localnet:
            _write_sysctl(f"net/ipv4/conf/{link}/route_localnet", "1")
        if id_base is not None:
            made.append(_user_namespace(id_base))

    def _connect(self, link: str, address: str, netns: int, inside: netlink.Netlink) -> None:
        try:
            self._host.send(netlink.veth(link, netns))
        except FileExistsError:
            # The number's last namespace is still being taken apart by the kernel.
            netlink.delete_link_if_there(self._host, link)
            self._host.send(netlink.veth(link, netns))
        index = netlink.link_index(link)
        _write_sysctl(f"net/ipv6/conf/{link}/disable_ipv6", "1")
        _write_sysctl(f"net/ipv4/conf/{link}/rp_filter", "1")
        inside.send(
            netlink.link_up(netlink.LOOPBACK_INDEX),
            netlink.link_up(netlink.GUEST_INDEX),
            netlink.address(netlink.GUEST_INDEX, address),
            netlink.default_route_onlink(netlink.GUEST_INDEX, GATEWAY),
            netlink.neighbour(netlink.GUEST_INDEX, GATEWAY, netlink.HOST_MAC),
        )
        self._host.send(
            netlink.link_up(index),
            netlink.address(index, GATEWAY),
            netlink.host_route(index, address, GATEWAY),
            netlink.neighbour(index, address, netlink.GUEST_MAC),
        )

    def _unlink(self, *, links: list[str]) -> None:
        """Remove links left by nobody knows whom. Costs about 15 ms each; a slot's own link goes
        by itself, and in batches, with its namespace."""
        for link in links:
            netlink.delete_link_if_there(self._host, link)

    def _links(self, prefix: str) -> list[str]:
        return [name for name in self._host.link_names() if name.startswith(prefix)]

    def _add_tap(self, *, owner_uid: int, ruleset: str) -> None:
        """Put a tap behind the slot's link. The rules come first and the link goes up last, so
        that no packet of the guest ever passes unjudged."""
        for name, value in tap.SETTINGS:
            _write_sysctl(name, value)
        self._nft.run(ruleset)
        tap.make_device(owner_uid)
        with netlink.Netlink() as inside:
            inside.send(
                netlink.link_address(tap.TAP_INDEX, tap.TAP_MAC),
                netlink.address(tap.TAP_INDEX, tap.TAP_ADDRESS, tap.PREFIX_LENGTH),
                netlink.link_up(tap.TAP_INDEX),
                netlink.neighbour(tap.TAP_INDEX, tap.GUEST_ADDRESS, tap.GUEST_MAC),
            )

    def _replace_policy(self, *, ruleset: str, forwarded_ruleset: str) -> None:
        """By the namespace itself it is known which kind of slot this is, whoever adopted it.

        With a container, connections that the new policy would not open end because they are no
        longer known. With a machine, every packet is judged anew.
        """
        if netlink.link_there(tap.TAP):
            self._nft.run(forwarded_ruleset)
            return
        self._nft.run(ruleset)
        with netlink.Netlink(netfilter=True) as conntrack:
            conntrack.send(netlink.conntrack_flush())

    def _run_inside(self, *, ruleset: str, forwarded_ruleset: str) -> None:
        """Commands for the thread's namespace, by which kind of slot it is."""
        self._nft.run(forwarded_ruleset if netlink.link_there(tap.TAP) else ruleset)

    def _listen(self, made: list[int]) -> None:
        """Two sockets of the thread's namespace for questions for names: datagrams, connections.

        They stay in the namespace whoever holds them, and keep nobody's processes alive.
        """
        address = tap.TAP_ADDRESS if netlink.link_there(tap.TAP) else NAMES_ADDRESS
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            with socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK) as end:
                if kind == socket.SOCK_STREAM:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                end.bind((address, NAMES_PORT))
                if kind == socket.SOCK_STREAM:
                    end.listen()
                made.append(end.detach())

    def _inside(self, netns: int, function: Any) -> None:
        syscalls.setns(netns, syscalls.CLONE_NEWNET)
        try:
            function()
        finally:
            syscalls.setns(self._host_netns, syscalls.CLONE_NEWNET)


def _write_sysctl(name: str, value: str) -> None:
    fd = os.open(f"/proc/sys/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _settings_inside() -> None:
    """Per namespace: no IPv6 except on the loopback, every port and ping open to all users.

    The namespace belongs to the initial user namespace, so root in the sandbox has no
    CAP_NET_BIND_SERVICE and no CAP_NET_RAW over it; these two settings take their place.
    """
    if Path("/proc/sys/net/ipv6").is_dir():
        _write_sysctl("net/ipv6/conf/default/disable_ipv6", "1")
    _write_sysctl("net/ipv4/ip_unprivileged_port_start", "0")
    _write_sysctl("net/ipv4/ping_group_range", "0 2147483647")


def _user_namespace(id_base: int) -> int:
    """A descriptor of a user namespace that maps 0..65535 to ``id_base`` and up."""
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go_write)
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(ready_write, b"x")
            os.read(go_read, 1)  # returns at the parent's close
        finally:
            os._exit(0)
    try:
        os.close(ready_write)
        if os.read(ready_read, 1) != b"x":
            raise OSError("cannot make a user namespace")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(f"0 {id_base} {IDS_PER_SANDBOX}")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.close(go_read)
        os.close(go_write)
        os.waitpid(pid, 0)


def main() -> None:
    """Entry point of the helper process; the socket is its standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    SlotMaker(channel).serve()


if __name__ == "__main__":
    main()

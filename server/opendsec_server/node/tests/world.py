# SPDX-License-Identifier: AGPL-3.0-only
"""A network namespace that stands for the internet in tests of egress."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from opendsec_server.node import syscalls

PUBLIC = "203.0.114.10"
PRIVATE = "192.168.77.10"
METADATA = "169.254.169.254"
HOST_END = "203.0.114.1"
PORT = 8_080
NAME = "service.example"
ANSWER = "203.0.114.77"
LOCK = "/var/tmp/opendsec-test-world.lock"


@dataclass
class World:
    """The far side: a web port and a resolver on public, private and metadata addresses."""

    questions: list[bytes]
    namespace: str = ""


def ip(*arguments: str) -> None:
    """The program of that name; its failure is the test's."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _dns_answer(question: bytes) -> bytes:
    """Every name is ``ANSWER`` (RFC 1035)."""
    head = question[:2] + b"\x81\x80\0\1\0\1\0\0\0\0"
    body = question[12 : question.index(b"\0", 12) + 5]
    return head + body + b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton(ANSWER)


def _serve(namespace: str, stop: threading.Event, world: World, ready: threading.Event) -> None:
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    syscalls.setns(fd, syscalls.CLONE_NEWNET)
    os.close(fd)
    with (
        socket.create_server(("0.0.0.0", PORT), backlog=64) as web,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as dns,
    ):
        web.settimeout(0.05)
        dns.settimeout(0.05)
        dns.bind((PRIVATE, 53))
        ready.set()
        while not stop.is_set():
            with contextlib.suppress(TimeoutError, ConnectionError):  # some only knock
                connection, _peer = web.accept()
                with connection:
                    connection.sendall(b"hello\n")
            with contextlib.suppress(TimeoutError):
                question, peer = dns.recvfrom(512)
                world.questions.append(question)
                # An address record only; other kinds are answered without one.
                kind = struct.unpack(">H", question[question.index(b"\0", 12) + 1 :][:2])[0]
                dns.sendto(
                    _dns_answer(question)
                    if kind == 1
                    else question[:2] + b"\x81\x80" + question[4:6] + b"\0" * 6 + question[12:],
                    peer,
                )


def make_world() -> Iterator[World]:
    """A namespace behind a link; nothing leaves the machine. A fixture's body.

    Its addresses are fixed, so there is one at a time on a machine.
    """
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    with Path(LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_stale_worlds()
        yield from _make_world()


def remove_stale_worlds() -> None:
    """What killed runs left, of this kind and of the conformance suite's: same addresses."""
    for prefix in ("odw", "odo"):
        for entry in Path("/run/netns").glob(f"{prefix}*"):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", entry.name)
            # At once: a process in the namespace would hold the link and its routes.
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("link", "del", prefix[2] + entry.name.removeprefix(prefix))


def _make_world() -> Iterator[World]:
    name = "odw" + secrets.token_hex(3)
    link = f"w{name[3:]}"
    ip("netns", "add", name)
    stop, ready, world = threading.Event(), threading.Event(), World([], name)
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", "far", "netns", name)
        ip("addr", "add", f"{HOST_END}/24", "dev", link)
        ip("link", "set", link, "up")
        for address in (f"{PUBLIC}/24", f"{PRIVATE}/32", f"{METADATA}/32"):
            ip("-n", name, "addr", "add", address, "dev", "far")
        ip("-n", name, "link", "set", "far", "up")
        for address in (PRIVATE, METADATA):
            ip("route", "add", f"{address}/32", "dev", link)
        thread = threading.Thread(target=_serve, args=(name, stop, world, ready))
        thread.start()
        assert ready.wait(10)
        yield world
        stop.set()
        thread.join()
    finally:
        stop.set()
        ip("netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", link)

# SPDX-License-Identifier: AGPL-3.0-only
"""A network namespace that stands for the internet, so that egress can be tested without one.

Run as a program it is the far side: a TCP port that logs and echoes lines, and a resolver.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendsec_server.node.tests.world import LOCK, remove_stale_worlds

PUBLIC = "198.51.100.10"
PRIVATE = "192.168.78.10"
METADATA = "169.254.169.254"
HOST_END = "198.51.100.1"
PORT = 8_080
ANSWER = "198.51.100.77"
NAME = "service.example"
PREFIX = "odo"
READY_WITHIN_S = 20.0

TALKER = f"""
import socket, sys, time
s = socket.create_connection(("{PUBLIC}", {PORT}), timeout=15)
f = s.makefile("rw")
def say(word):
    f.write(word + "\\n"); f.flush()
    return f.readline()
print(say("first " + sys.argv[1]), end="", flush=True)
sys.stdin.readline()
try:
    answer = say("second " + sys.argv[1])
    print("answered" if answer else "closed", flush=True)
except ConnectionError as exc:
    print("reset", flush=True)
"""
"""Holds a connection over a pause and says what became of it; silence would be a time-out."""


@dataclass(frozen=True)
class Outside:
    """The far side: what it heard is in ``log``, one JSON object a line."""

    log: Path

    def heard(self, word: str) -> int:
        """How many lines with this word have come in."""
        lines = self.log.read_text().splitlines()
        return sum(word in json.loads(line)["line"] for line in lines)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def open_outside(folder: Path) -> Iterator[Outside]:
    """Make it; its addresses are fixed, so there is one at a time on a machine."""
    with Path(LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_stale_worlds()
        name = PREFIX + secrets.token_hex(3)
        link = _link_of(name)
        _ip("netns", "add", name)
        try:
            _ip("link", "add", link, "type", "veth", "peer", "name", "far", "netns", name)
            _ip("addr", "add", f"{HOST_END}/24", "dev", link)
            _ip("link", "set", link, "up")
            for address in (f"{PUBLIC}/24", f"{PRIVATE}/32", f"{METADATA}/32"):
                _ip("-n", name, "addr", "add", address, "dev", "far")
            _ip("-n", name, "link", "set", "far", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            for address in (PRIVATE, METADATA):
                _ip("route", "add", f"{address}/32", "dev", link)
            yield from _run(name, folder / "outside.log")
        finally:
            _ip("netns", "del", name)
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "del", link)


def _link_of(name: str) -> str:
    return f"o{name.removeprefix(PREFIX)}"


def _run(name: str, log: Path) -> Iterator[Outside]:
    log.touch()
    program = subprocess.Popen(["ip", "netns", "exec", name, sys.executable, __file__, str(log)])
    try:
        end = time.monotonic() + READY_WITHIN_S
        while not Outside(log).heard("ready"):
            assert program.poll() is None and time.monotonic() < end, "the far side did not start"
            time.sleep(0.05)
        yield Outside(log)
    finally:
        program.terminate()
        program.wait(10)


def _dns_answer(question: bytes) -> bytes:
    """Every name has the address ``ANSWER`` and nothing else (RFC 1035)."""
    end = question.index(b"\0", 12) + 5
    (kind,) = struct.unpack(">H", question[end - 4 : end - 2])
    if kind != 1:
        return question[:2] + b"\x81\x80\0\1" + b"\0" * 6 + question[12:end]
    head = question[:2] + b"\x81\x80\0\1\0\1\0\0\0\0"
    return head + question[12:end] + b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton(ANSWER)


class _Resolver(asyncio.DatagramProtocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.transport.sendto(_dns_answer(data), addr)


async def _main(log: Path) -> None:
    def note(peer: str, line: str) -> None:
        with log.open("a") as out:
            out.write(json.dumps({"peer": peer, "line": line}) + "\n")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[0]
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                note(peer, line.decode(errors="replace").strip())
                writer.write(b"echo " + line)
                await writer.drain()
        writer.close()

    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(_Resolver, local_addr=(PRIVATE, 53))
    server = await asyncio.start_server(talk, "0.0.0.0", PORT)
    note("", "ready")
    parent = os.getppid()
    while os.getppid() == parent:  # a killed test run must not leave it behind
        await asyncio.sleep(1)
    server.close()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))

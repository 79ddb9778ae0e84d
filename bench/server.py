# SPDX-License-Identifier: AGPL-3.0-only
"""A server for one benchmark, and what the benchmarks ask of it."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness import Server, new_server

LOCK = Path("/var/tmp/opendsec-bench.lock")


@contextlib.contextmanager
def bench_server(**settings: object) -> Iterator[Server]:
    """A running server of its own; removed at the end. One at a time on a machine: its names and
    addresses are fixed, and the purge of one would take away those of another."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = new_server("bench", "10.212.0.0/16", **settings)
        try:
            server.start()
            yield server
        finally:
            server.purge()


def create_sandbox(server: Server, **parameters: object) -> dict[str, Any]:
    """One sandbox by the native API."""
    body = {"timeout_s": 3600, **parameters}
    status, _, answer = server.request("POST", "/v1/sandboxes", body)
    if status != 201:
        raise RuntimeError(f"create: HTTP {status}: {answer.decode(errors='replace')}")
    return dict(json.loads(answer))


def agent_route(server: Server, sandbox_id: str) -> dict[str, Any]:
    """Where the guest agent listens, as the edge is told."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(str(server.config.control_socket))
    connection.request("GET", f"/routes/{sandbox_id}")
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return dict(answer)


def resident_kb(pid: int) -> int:
    """Resident memory of a process, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def cpu_ticks(pid: int) -> int:
    """CPU time a process used, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def agent_pids(server: Server) -> list[int]:
    """Host pids of this instance's guest agents, found by their cgroup."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            group = f"opendsec-{server.config.instance}/"
            status = (folder / "status").read_text()
            inside = status.partition("\nNSpid:")[2].partition("\n")[0].split()
            if group in (folder / "cgroup").read_text() and inside[-1:] == ["1"]:
                found.append(int(folder.name))
    return found

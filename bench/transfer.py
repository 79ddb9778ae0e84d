# SPDX-License-Identifier: AGPL-3.0-only
"""1 GiB up and down through the edge against direct to the guest agent, with memory of both.

sudo .venv/bin/python -m bench.transfer
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time

from bench.server import agent_pids, agent_route, bench_server, create_sandbox, resident_kb
from bench.stats import print_ratio

CHUNK = bytes(1024 * 1024)


def upload(host: str, port: int, headers: dict[str, str], total_bytes: int) -> float:
    """Seconds to send a file of zeros by POST /files (octet-stream)."""
    with socket.create_connection((host, port)) as connection:
        head = [
            "POST /files?path=/home/user/big.bin HTTP/1.1",
            f"Host: {host}:{port}",
            "Content-Type: application/octet-stream",
            f"Content-Length: {total_bytes}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        started = time.perf_counter()
        connection.sendall(("\r\n".join(head) + "\r\n\r\n").encode())
        for _ in range(total_bytes // len(CHUNK)):
            connection.sendall(CHUNK)
        answer = connection.recv(65536)
        elapsed_s = time.perf_counter() - started
    if b" 200 " not in answer.split(b"\r\n")[0]:
        raise RuntimeError(answer.decode(errors="replace"))
    return elapsed_s


def download(host: str, port: int, headers: dict[str, str], total_bytes: int) -> float:
    """Seconds to receive the file by GET /files."""
    with socket.create_connection((host, port)) as connection:
        head = [
            "GET /files?path=/home/user/big.bin HTTP/1.1",
            f"Host: {host}:{port}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        buffer = bytearray(1024 * 1024)
        received = 0
        started = time.perf_counter()
        connection.sendall(("\r\n".join(head) + "\r\n\r\n").encode())
        while size := connection.recv_into(buffer):
            received += size
        elapsed_s = time.perf_counter() - started
    if received < total_bytes:
        raise RuntimeError(f"only {received} bytes")
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    total = options.mib * 1024 * 1024
    with bench_server() as server:
        sandbox = create_sandbox(server, disk_mb=4 * options.mib, memory_mb=2048)
        route = agent_route(server, sandbox["sandbox_id"])
        token = {"X-Access-Token": sandbox["access_token"]}
        routed = {**token, "E2b-Sandbox-Id": sandbox["sandbox_id"], "E2b-Sandbox-Port": "49983"}
        host, port = server.config.listen.rsplit(":", 1)
        edge, (agent,) = server.edge(), agent_pids(server)
        assert edge is not None
        memory = [(resident_kb(edge.pid), resident_kb(agent))]
        times: dict[str, list[float]] = {}
        for _ in range(options.rounds + 1):
            for name, where, sent in (
                ("direct", (route["address"], route["agent_port"]), token),
                ("edge", (host, int(port)), routed),
            ):
                times.setdefault(f"{name} up", []).append(upload(*where, sent, total))
                times.setdefault(f"{name} down", []).append(download(*where, sent, total))
            memory.append((resident_kb(edge.pid), resident_kb(agent)))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:12} {options.mib / value:8.0f} MiB/s (median of {options.rounds})")
    for way in ("up", "down"):
        print_ratio(
            f"throughput {way}load through edge / direct",
            medians[f"direct {way}"],
            medians[f"edge {way}"],
            "at least 0.8x",
        )
    print("resident KiB before, then after each round: edge", [m[0] for m in memory])
    print("resident KiB before, then after each round: agent", [m[1] for m in memory])


if __name__ == "__main__":
    main()

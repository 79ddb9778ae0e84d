# SPDX-License-Identifier: Apache-2.0
"""``info``: a sandbox, or the server with its backends, in a form that can be read."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from opendsec import BackendInfo, SandboxInfo, ServerInfo

from . import _exit
from ._output import print_json, print_table, size
from ._session import client_of

NAME_WIDTH = 16
YES = "yes"
EMPTY: tuple[object, ...] = (None, "", [], {}, ())


def info(args: argparse.Namespace) -> int:
    """Describe a sandbox or the server."""
    with client_of(args) as client:
        found = client.info(args.sandbox) if args.sandbox else client.server_info()
    if args.json:
        print_json(found)
    elif isinstance(found, SandboxInfo):
        _print_sandbox(found)
    else:
        _print_server(found)
    return _exit.OK


def _line(name: str, text: str) -> None:
    print(f"{name:{NAME_WIDTH}} {text}")


def _print_sandbox(record: SandboxInfo) -> None:
    for name, value in msgspec.to_builtins(record).items():
        if value not in EMPTY:
            hidden = name.endswith("_token")
            _line(name, "(hidden; --json shows it)" if hidden else _shown(value))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return YES if value else "no"
    if isinstance(value, dict):
        filled = {key: item for key, item in value.items() if item not in EMPTY}
        return " ".join(f"{key}={_shown(item)}" for key, item in filled.items())
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    return str(value)


def _print_server(server: ServerInfo) -> None:
    node = server.node
    _line("version", server.version)
    _line("domain", server.domain or "-")
    _line("protocol", f"envd {server.envd_version}" if server.envd_version else "-")
    if node:
        _line("node", " ".join(str(node[key]) for key in ("node_id", "hostname") if node.get(key)))
        _line("cpus", _shown(node.get("cpu_count", "-")))
        _line("memory", size(node.get("memory_total_bytes", 0)))
        free, total = node.get("disk_free_bytes", 0), node.get("disk_total_bytes", 0)
        _line("disk", f"{size(free)} free of {size(total)}")
        _line("sandboxes", f"{node.get('sandboxes', '-')} of {node.get('sandboxes_max', '-')}")
    for label, wanted in (("offers", True), ("does not offer", False)):
        names = [name for name, value in server.features.items() if bool(value) is wanted]
        if names:
            _line(label, ", ".join(name.replace("_", " ") for name in names))
    facts = node.get("features") if node else None
    if isinstance(facts, dict):
        for name, value in facts.items():
            _line(name.replace("_", " "), _shown(value))
    if server.backends:
        print()
        print_table(
            ["BACKEND", "DEFAULT", "ACCELERATOR", "VMM", "CAN"],
            [_backend_row(backend, server.default_backend) for backend in server.backends],
        )


def _backend_row(backend: BackendInfo, default: str) -> list[str]:
    can = [
        name.replace("_", " ")
        for name, value in msgspec.to_builtins(backend.capabilities).items()
        if value
    ]
    return [
        backend.name,
        YES if backend.name == default else "-",
        backend.accelerator,
        backend.vmm or "-",
        ", ".join(can) or "-",
    ]

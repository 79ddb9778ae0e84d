# SPDX-License-Identifier: Apache-2.0
"""``node``: the machines that run sandboxes."""

from __future__ import annotations

import argparse
import sys

from opendsec import InvalidRequest
from opendsec._node_models import NodeInfo

from . import _exit
from ._output import note, print_json, print_table, span
from ._session import client_of


def ls(args: argparse.Namespace) -> int:
    """List nodes."""
    with client_of(args) as client:
        found = client.nodes.list()
    if args.json:
        print_json(found)
    elif args.quiet:
        for node in found:
            print(node.node_id or node.name)
    else:
        print_table(
            ["NODE", "NAME", "HEALTH", "SANDBOXES", "CPU", "MEMORY FREE", "LABELS"],
            [_row(node) for node in found],
        )
    return _exit.OK


def _row(node: NodeInfo) -> list[str]:
    health = node.health
    if node.unreached_s:
        health += f" for {span(node.unreached_s)}"
    if node.draining:
        health += ", draining"
    free = 100 * node.memory_available_mb / node.memory_total_mb if node.memory_total_mb else 0
    return [
        node.node_id or "-",
        node.name,
        health,
        f"{node.sandboxes} of {node.sandboxes_max}",
        f"{100 * node.cpu_used:.0f} %",
        f"{free:.0f} %",
        ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items())) or "-",
    ]


def drain(args: argparse.Namespace) -> int:
    """Let nodes take no new sandboxes."""
    with client_of(args) as client:
        return _shown(args, [client.nodes.drain(node) for node in args.nodes])


def undrain(args: argparse.Namespace) -> int:
    """Let nodes take new sandboxes again."""
    with client_of(args) as client:
        return _shown(args, [client.nodes.undrain(node) for node in args.nodes])


def label(args: argparse.Namespace) -> int:
    """Set labels of a node, or remove them. Without any: show them."""
    with client_of(args) as client:
        node = client.nodes.get(args.node)
        if args.labels:
            wanted = {**node.labels, **dict(args.labels)}
            kept = {name: value for name, value in wanted.items() if value}
            node = client.nodes.set_labels(args.node, kept)
    if args.json:
        print_json(node)
    else:
        for name, value in sorted(node.labels.items()):
            print(f"{name}={value}")
    return _exit.OK


def forget(args: argparse.Namespace) -> int:
    """Give up what nodes that are gone have."""
    if not args.yes:
        if not sys.stdin.isatty():
            raise InvalidRequest("say --yes: sandboxes of these nodes end as lost")
        sys.stderr.write(f"End all sandboxes of {', '.join(args.nodes)} as lost? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return _exit.OK
    with client_of(args) as client:
        lost = {node: client.nodes.forget(node) for node in args.nodes}
    if args.json:
        print_json(lost)
    else:
        for node, count in lost.items():
            note(f"{node}: {count} sandboxes are lost.")
    return _exit.OK


def _shown(args: argparse.Namespace, nodes: list[NodeInfo]) -> int:
    if args.json:
        print_json(nodes)
    else:
        for node in nodes:
            print(node.node_id)
    return _exit.OK

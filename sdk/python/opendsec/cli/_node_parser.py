# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``opendsec node``."""

from __future__ import annotations

import argparse
from typing import Any

from ._parser import _command, _group


def add_node(commands: Any) -> None:
    """Add the command and those below it."""
    inner = _group(
        commands,
        "node",
        "machines that run sandboxes, for operators: list, drain, label",
        example="  opendsec node ls\n  opendsec node drain 7xk2\n"
        "  opendsec node label 7xk2 zone=a gpu=h200",
    )
    p = _command(inner, "ls", "_nodes:ls", "list nodes, with their health and load")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    _named(inner, "drain", "let nodes take no new sandboxes; those that they have go on")
    _named(inner, "undrain", "let nodes take new sandboxes again")
    p = _command(inner, "label", "_nodes:label", "set labels of a node, or remove them")
    p.add_argument("node", metavar="NODE", help="id or name")
    p.add_argument(
        "labels", metavar="NAME=VALUE", nargs="*", type=_label, help="to set; `NAME=` removes one"
    )
    p = _named(inner, "forget", "give up what nodes that are gone have: it ends as lost")
    p.add_argument("--yes", action="store_true", help="do not ask")


def _named(inner: Any, name: str, text: str) -> argparse.ArgumentParser:
    p = _command(inner, name, f"_nodes:{name}", text)
    p.add_argument("nodes", metavar="NODE", nargs="+", help="id or name")
    return p


def _label(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not name:
        raise argparse.ArgumentTypeError(f"`{text}` is not NAME=VALUE")
    return name, value

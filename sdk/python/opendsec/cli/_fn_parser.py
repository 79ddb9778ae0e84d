# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``opendsec fn``."""

from __future__ import annotations

import argparse
from typing import Any

from ._parser import _command, _group


def add_fn(commands: Any) -> None:
    """Add the command and those below it."""
    inner = _group(
        commands,
        "fn",
        "call functions on workers that are there already",
        example="  opendsec fn run -c 'result = 6 * 7'\n"
        "  seq 1000 | opendsec fn map grade.py --entry grade\n"
        "  opendsec fn pool set graders --preload numpy --workers 8",
    )
    p = _command(inner, "run", "_functions:run", "run Python text in a worker")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("-c", dest="code", metavar="CODE", help="the text")
    source.add_argument("script", nargs="?", metavar="FILE", help="file that holds it; `-`: stdin")
    p.add_argument("--entry", metavar="NAME", help="function in it to call; else `result` is shown")
    p.add_argument(
        "--arg", action="append", default=[], metavar="JSON", help="argument of the function"
    )
    p.add_argument(
        "--file", action="append", default=[], metavar="FILE[:NAME]",
        help="local file put into the call's directory",
    )  # fmt: skip
    p.add_argument(
        "--collect", action="append", default=[], metavar="PATTERN",
        help="files to hand back; written below --out",
    )  # fmt: skip
    p.add_argument("--out", metavar="DIR", default=".", help="where to (default: here)")
    _call_options(p)
    p = _command(
        inner, "map", "_functions:map_lines", "call a function for each line of JSON on stdin"
    )
    p.add_argument("script", metavar="FILE", help="file that holds the function")
    p.add_argument("--entry", metavar="NAME", required=True, help="the function's name")
    p.add_argument("--unordered", action="store_true", help="as they are over, each with its index")
    _call_options(p)
    pool = _group(
        inner, "pool", "pools of workers", example="  opendsec fn pool set graders --workers 8"
    )
    _command(pool, "ls", "_functions:pool_ls", "list pools, and what they do now")
    p = _command(pool, "show", "_functions:pool_show", "show a pool")
    p.add_argument("pool", metavar="POOL", help="its name")
    p = _command(pool, "set", "_functions:pool_set", "make a pool, or change one")
    p.add_argument("pool", metavar="POOL", help="letters, digits and ._-")
    p.add_argument("--template", default="base", help="needs python3 (default: base)")
    p.add_argument("--cpu", type=float, default=1.0, help="cores of a worker (default: 1)")
    p.add_argument("--memory", type=int, default=512, metavar="MB", help="of a worker")
    p.add_argument("--disk", type=int, default=512, metavar="MB", help="of a worker")
    p.add_argument("--no-network", action="store_true", help="calls do not reach the internet")
    p.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="imported in advance"
    )
    p.add_argument("--workers", type=int, default=4, metavar="COUNT", help="at most (default: 4)")
    p.add_argument("--keep", type=int, default=0, metavar="COUNT", help="kept ready (default: 0)")
    p.add_argument(
        "--idle", type=float, default=120.0, metavar="SECONDS",
        help="a worker with nothing to do for so long is ended (default: 120)",
    )  # fmt: skip
    p = _command(pool, "rm", "_functions:pool_rm", "end pools' workers and forget the pools")
    p.add_argument("pools", metavar="POOL", nargs="+", help="their names")


def _call_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--pool", default="default", help="of workers (default: default)")
    p.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="of each call (default: 60)"
    )
    p.add_argument("--memory", type=int, metavar="MB", help="of each process of a call")

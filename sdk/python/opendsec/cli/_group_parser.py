# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``opendsec group``."""

from __future__ import annotations

import argparse
from typing import Any

from ._parser import _command, _group

STATES = ("starting", "running", "paused", "ending", "ended")
DEFAULT_FILES = ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml")


def add_group(commands: Any) -> None:
    """Add the command and those below it."""
    inner = _group(
        commands,
        "group",
        "several sandboxes on one private network, from a docker-compose file or JSON",
        example="  opendsec group up -f compose.yml --name shop\n"
        "  opendsec group exec shop db -- psql -c 'select 1'\n"
        "  opendsec group down shop",
    )
    p = _command(inner, "up", "_groups:up", "make a group, and wait until all its services are up")
    p.add_argument(
        "-f", "--file", metavar="FILE",
        help="a docker-compose file, or JSON as the API takes it (*.json; default: "
        f"{', '.join(DEFAULT_FILES)}, the first that is here)",
    )  # fmt: skip
    p.add_argument("--name", help="unique among living groups (default: the file's, else its id)")
    p.add_argument(
        "--timeout", type=int, metavar="SECONDS", help="all of it ends after them (default: 3600)"
    )
    p.add_argument(
        "--start-timeout", type=int, metavar="SECONDS",
        help="how long it may take until all services are up (default: 600)",
    )  # fmt: skip
    p.add_argument("--task", metavar="JOB", help="id of the job that its sandboxes belong to")
    p.add_argument("--label", action="append", default=[], metavar="LABEL", help="of its sandboxes")
    p.add_argument(
        "--profile", action="append", default=[], metavar="NAME",
        help="services of this profile of the file too",
    )  # fmt: skip
    p.add_argument("-d", "--detach", action="store_true", help="do not wait until it is up")
    p = _command(inner, "ls", "_groups:ls", "list groups")
    p.add_argument("--state", choices=STATES, action="append", default=[], help="only in this one")
    p.add_argument("--limit", type=int, metavar="COUNT", help="at most so many")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    _named(inner, "inspect", "all about a group, as JSON")
    _named(inner, "ps", "the services of a group and their sandboxes")
    p = _named(inner, "logs", "what the programs of its services have written")
    p.add_argument("service", metavar="SERVICE", nargs="?", help="only of this one")
    p = _named(inner, "exec", "run a program in the sandbox of a service")
    p.add_argument("service", metavar="SERVICE", help="in whose sandbox")
    p.add_argument("--timeout", type=float, metavar="SECONDS", help="end it after so long")
    p.add_argument(
        "command", metavar="COMMAND", nargs=argparse.REMAINDER, help="program and arguments"
    )
    p.set_defaults(runs_program=True)
    _named(inner, "pause", "pause all sandboxes of a group")
    _named(inner, "resume", "let all sandboxes of a group run on")
    _named(inner, "down", "end all sandboxes of a group; returns when none is left")


def _named(inner: Any, name: str, text: str) -> argparse.ArgumentParser:
    p = _command(inner, name, f"_groups:{name}", text)
    p.add_argument("group", metavar="GROUP", help="its id or name")
    return p

# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``opendsec task``."""

from __future__ import annotations

import argparse
from typing import Any

from ._parser import STATE_MODES, _command, _group

STATES = ("open", "paused", "ended")
UNTIL = ("ended", "running", "paused", "idle")
NONE = "none"


def add_task(commands: Any) -> None:
    """Add the command and those below it."""
    inner = _group(
        commands,
        "task",
        "pause, resume, end and account for all sandboxes of a job",
        example="  opendsec create --task train-7\n  opendsec task pause train-7\n"
        "  opendsec task show train-7",
    )
    p = _command(inner, "ls", "_tasks:ls", "list tasks")
    p.add_argument("--state", choices=STATES, action="append", default=[], help="only in this one")
    p.add_argument("--limit", type=int, metavar="COUNT", help="at most so many")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    _named(inner, "show", "a task's sandboxes, what they used, and what was done to it")
    p = _named(inner, "create", "make a task with limits; others are made by their first sandbox")
    _limits(p)
    p = _named(inner, "set", "change a task's limits; `none` removes one")
    _limits(p)
    p.add_argument(
        "--reopen", action="store_true", help="let one that has ended take sandboxes again"
    )
    p = _named(inner, "pause", "pause every sandbox of a task; none is started in it meanwhile")
    p.add_argument(
        "--mode", choices=STATE_MODES, default="full", help="what each keeps (default: full)"
    )
    _following(p)
    p = _named(inner, "resume", "let every paused sandbox of a task run on")
    p.add_argument(
        "--timeout", type=int, metavar="SECONDS",
        help="how long each may live (default: what it was created with)",
    )  # fmt: skip
    _following(p)
    p = _named(inner, "kill", "end every sandbox of a task, and the task")
    p.add_argument(
        "--keep-open", action="store_true", help="let it take sandboxes, during the kill too"
    )
    _following(p)
    p = _named(inner, "follow", "follow what is being done to a task, from its begin on")
    p.add_argument("operation", metavar="OPERATION", nargs="?", help="its id (default: the newest)")
    p = _named(inner, "wait", "wait for a task's sandboxes; exit code 1 if the time is over before")
    p.add_argument("--until", choices=UNTIL, default="ended", help="for what (default: ended)")
    p.add_argument(
        "--timeout", type=int, metavar="SECONDS", default=3_600, help="how long (default: 3600)"
    )


def _named(inner: Any, name: str, text: str) -> argparse.ArgumentParser:
    p = _command(inner, name, f"_tasks:{name}", text)
    p.add_argument("task", metavar="TASK", help="the task's id")
    return p


def _following(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--detach", action="store_true", help="print the operation's id and do not wait for its end"
    )


def _limits(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--deadline", metavar="SECONDS", type=_limit,
        help="seconds from now after which it ends with all of its sandboxes",
    )  # fmt: skip
    p.add_argument(
        "--sandboxes", metavar="COUNT", type=_limit, help="how many may be made in it in all"
    )
    p.add_argument(
        "--cpu-seconds", metavar="SECONDS", type=_limit,
        help="processor time after which it ends with all of its sandboxes",
    )  # fmt: skip


def _limit(text: str) -> float | str:
    if text == NONE:
        return NONE
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number or `{NONE}`, not `{text}`") from None

# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``opendsec batch``."""

from __future__ import annotations

import argparse
from typing import Any

from ._parser import _command, _creation_options, _env_pair, _group, _ProgramParser, _seconds


def add_batch(commands: Any) -> None:
    """Add the command and those below it."""
    inner = _group(
        commands,
        "batch",
        "create many sandboxes in one call, and do one thing to many",
        example="  opendsec batch create 1000 --memory 128 --task train-7\n"
        "  opendsec batch exec --task train-7 -- pytest -q\n"
        "  opendsec batch kill --task train-7",
    )
    p = _command(
        inner,
        "create",
        "_batches:create",
        "create many sandboxes and print their ids as they come up",
        example="  opendsec batch create 1000 --timeout 600 --idempotency-key train-7-epoch-1\n"
        '  echo \'{"env": {"SEED": "1"}}\' | opendsec batch create --items -',
    )
    p.add_argument("count", metavar="COUNT", type=int, nargs="?", help="how many")
    p.add_argument(
        "--items", metavar="FILE",
        help="instead: a line of JSON for each, with what it has otherwise; - reads the input",
    )  # fmt: skip
    p.add_argument(
        "--wait", type=_seconds, metavar="SECONDS",
        help="how long each may wait for its turn (default: an hour)",
    )  # fmt: skip
    p.add_argument("-d", "--detach", action="store_true", help="print the batch's id, and go")
    _creation_options(p, timeout_s=300)
    p = _command(inner, "ls", "_batches:ls", "list batches")
    p.add_argument("--limit", type=int, metavar="COUNT", help="at most so many")
    p.add_argument("-q", "--quiet", action="store_true", help="ids only")
    p = _command(inner, "status", "_batches:status", "how far a batch is")
    p.add_argument("batch", metavar="BATCH", help="id of the batch")
    p = _command(inner, "watch", "_batches:watch", "print a batch's sandboxes as they come up")
    p.add_argument("batch", metavar="BATCH", help="id of the batch")
    p.add_argument(
        "--after", type=int, default=0, metavar="SEQ", help="leave out the outcomes up to this one"
    )
    p = _command(inner, "cancel", "_batches:cancel", "let no more of a batch begin")
    p.add_argument("batch", metavar="BATCH", help="id of the batch")
    p = _command(
        inner,
        "exec",
        "_batches:exec_",
        "run a command in many sandboxes",
        example="  opendsec batch exec --batch BATCH -- uname -a\n"
        "  opendsec batch exec --label eval --json -- pytest -q",
        parser_class=_ProgramParser,
    )
    _selection(p)
    p.add_argument("-w", "--workdir", metavar="DIR", help="directory in the sandboxes")
    p.add_argument("-u", "--user", help="account in the sandboxes")
    p.add_argument(
        "-e", "--env", action="append", default=[], type=_env_pair, metavar="NAME=VALUE",
        help="environment; NAME alone takes the value from here",
    )  # fmt: skip
    p.add_argument(
        "--timeout", type=_seconds, default=60, metavar="SECONDS",
        help="each is ended after so long (default: 60)",
    )  # fmt: skip
    p.add_argument(
        "--output-bytes", type=int, metavar="BYTES",
        help="what is kept of each one's output (default: 64 KiB)",
    )  # fmt: skip
    p.add_argument(
        "--concurrency", type=int, metavar="COUNT", help="how many run at a time (default: 64)"
    )
    p.add_argument("program", nargs="*", help="program and arguments")
    p = _command(inner, "kill", "_batches:kill", "end many sandboxes")
    _selection(p)
    p = _command(inner, "timeout", "_batches:timeout", "set when many sandboxes end")
    _selection(p)
    p.add_argument("seconds", type=_seconds, metavar="SECONDS", help="so long from now")


def _selection(p: argparse.ArgumentParser) -> None:
    p.add_argument("--batch", metavar="BATCH", help="those that this batch made")
    p.add_argument("--task", metavar="JOB", help="those of this job")
    p.add_argument(
        "--label", action="append", default=[], metavar="WORD", help="those with this label"
    )
    p.add_argument("--id", action="append", default=[], metavar="ID", help="this one; - reads ids")

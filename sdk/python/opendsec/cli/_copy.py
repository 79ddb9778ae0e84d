# SPDX-License-Identifier: Apache-2.0
"""``cp``: files and directories in both directions."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext

from . import _exit
from ._output import waiting
from ._session import client_of

REMOTE = re.compile(r"(?P<sandbox>[A-Za-z0-9_-]{2,}):(?P<path>.*)", re.DOTALL)
CHUNK_BYTES = 256 * 1024


def cp(args: argparse.Namespace) -> int:
    """Copy; exactly one side is in a sandbox."""
    source, target = REMOTE.fullmatch(args.source), REMOTE.fullmatch(args.target)
    if (source is None) == (target is None):
        raise _exit.Refused(
            "one of the two must be ID:PATH. (A local name with a colon: write ./NAME.)"
        )
    to_terminal = args.target == "-" and sys.stdout.isatty()
    shown = nullcontext() if to_terminal else waiting("Copying...")
    with client_of(args) as client, shown:
        if target is not None:
            files = client.connect(target["sandbox"]).files
            path = target["path"] or "."
            if args.source == "-":
                files.write(path, _stdin_chunks(), user=args.user)
            else:
                files.upload(args.source, path, user=args.user)
        elif source is not None:
            files = client.connect(source["sandbox"]).files
            path = source["path"] or "."
            if args.target == "-":
                with files.stream(path, user=args.user) as content:
                    for chunk in content:
                        _write_all(chunk)
            else:
                files.download(path, args.target, user=args.user)
    return _exit.OK


def _stdin_chunks() -> Iterator[bytes]:
    while chunk := os.read(0, CHUNK_BYTES):
        yield chunk


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]

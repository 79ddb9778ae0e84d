# SPDX-License-Identifier: Apache-2.0
"""``opendsec mcp``: tools for models, on standard input and output."""

from __future__ import annotations

import argparse
import os
import signal
from types import FrameType

from ._exit import OK, Refused


def serve(args: argparse.Namespace) -> int:
    """Serve until the client closes standard input, then end what was made."""
    try:
        from opendsec.adapters.mcp import Toolbox
    except ImportError as exc:
        raise Refused(
            f"opendsec mcp needs the package mcp, version 2 ({exc}): pip install 'opendsec[mcp]'"
        ) from exc
    toolbox = Toolbox(
        template=args.template,
        image=args.image,
        internet=not args.no_network,
        memory_mb=args.memory,
        life_s=args.timeout,
        sandboxes_max=args.max_sandboxes,
        given=args.sandbox,
        base_url=args.url,
    )

    def leave(number: int, frame: FrameType | None) -> None:
        # No exception, as elsewhere: a thread waits for standard input, and would hold the exit up
        # until the client closes it.
        try:
            toolbox.end_all()
        finally:
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        toolbox.server().run("stdio")
    finally:
        toolbox.end_all()
    return OK

# SPDX-License-Identifier: Apache-2.0
"""``opendsec mcp``: tools for models, on standard input and output."""

from __future__ import annotations

import argparse

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
    try:
        toolbox.server().run("stdio")
    finally:
        toolbox.end_all()
    return OK

# SPDX-License-Identifier: Apache-2.0
"""The grammar of the commands that connect OpenDsec with other programs."""

from __future__ import annotations

from typing import Any

from ._parser import _command, _mib, _seconds


def add_adapters(commands: Any) -> None:
    """Add them."""
    p = _command(
        commands,
        "mcp",
        "_mcp:serve",
        "serve sandboxes as tools of a model (Model Context Protocol) on standard input and output",
        example='  {"mcpServers": {"opendsec": {"command": "opendsec", "args": ["mcp"]}}}',
    )
    p.add_argument("--template", default="base", help="what sandboxes are made from")
    p.add_argument("--image", metavar="IMAGE", help="a container image instead of a template")
    p.add_argument("--memory", type=_mib, metavar="SIZE", help="memory of each, such as 512m")
    p.add_argument(
        "--timeout", type=_seconds, default=3600, metavar="TIME", help="how long each may live"
    )
    p.add_argument("--no-network", action="store_true", help="give no internet, even if asked for")
    p.add_argument(
        "--max-sandboxes", type=int, default=8, metavar="COUNT", help="at most so many at once"
    )
    p.add_argument(
        "--sandbox",
        action="append",
        default=[],
        metavar="ID",
        help="a sandbox that exists and may be used too; it is not ended",
    )

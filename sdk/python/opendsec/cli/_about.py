# SPDX-License-Identifier: Apache-2.0
"""``url``, ``env`` and ``completion``."""

from __future__ import annotations

import argparse
import shlex
import sys

from opendsec import _settings
from opendsec._errors import Unauthenticated

from . import _exit
from ._output import print_json


def url(args: argparse.Namespace) -> int:
    """Print where a port of a sandbox is served."""
    from ._session import client_of, look_at

    with client_of(args) as client:
        address = look_at(client, args.sandbox).url(args.port)
    if args.json:
        print_json({"url": address})
    else:
        print(address)
    return _exit.OK


def env(args: argparse.Namespace) -> int:
    """Print the three settings of the E2B SDKs."""
    settings = _settings.resolve(args.url)
    if settings.api_key is None:
        raise Unauthenticated(
            "No API key is configured.",
            remediation="Run this as root on the server's machine, where the key file can be "
            "read, or set OPENDSEC_API_KEY.",
        )
    values = {
        "E2B_API_KEY": settings.api_key,
        "E2B_API_URL": settings.base_url,
        "E2B_SANDBOX_URL": settings.sandbox_url,
    }
    if args.json:
        print_json(values)
    else:
        for name, value in values.items():
            print(f"export {name}={shlex.quote(value)}")
    return _exit.OK


def completion(args: argparse.Namespace) -> int:
    """Print the completion script."""
    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["opendsec"], shell=args.shell) + "\n")
    return _exit.OK

# SPDX-License-Identifier: Apache-2.0
"""Removing several things by name: as many as can be, each failure told by itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from opendsec import OpendsecError

from . import _exit
from ._output import print_error, print_json


def remove_each(
    args: argparse.Namespace, names: Iterable[str], remove: Callable[[str], object]
) -> int:
    """Print what is removed; the worst exit status of what is not.

    Args:
        args: ``json``.
        names: What to remove.
        remove: Removes one. ``OpendsecError`` says why it cannot.
    """
    code = _exit.OK
    removed: list[str] = []
    for name in names:
        try:
            remove(name)
        except OpendsecError as error:
            print_error(error, as_json=args.json)
            code = max(code, _exit.code_for(error, runs_program=False))
            continue
        removed.append(name)
        if not args.json:
            print(name)
    if args.json:
        print_json({"removed": removed})
    return code

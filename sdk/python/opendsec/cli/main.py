# SPDX-License-Identifier: Apache-2.0
# PYTHON_ARGCOMPLETE_OK
"""Entry point: parse, run one command, turn every failure into words and an exit code.

Only the standard library is imported before a command is chosen: ``opendsec --help`` and shell
completion have to feel instant.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import cast

from . import _exit
from ._parser import build_parser

Handler = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(argv)
    if getattr(args, "handler", None) is None:
        parser.print_help()
        return _exit.USAGE
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup(1) means it.
            signal.signal(number, _raise_terminated)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _exit.Terminated as ended:
        return 128 + ended.signal
    except BrokenPipeError:
        # The reader of our output is gone. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(args: argparse.Namespace) -> int:
    from opendsec._errors import OpendsecError

    from ._output import print_error

    module_name, function_name = args.handler.split(":")
    try:
        module = importlib.import_module(f".{module_name}", __package__)
        handler = cast(Handler, getattr(module, function_name))
        code = handler(args)
        sys.stdout.flush()
        return code
    except OpendsecError as error:
        print_error(error, as_json=args.json)
        return _exit.code_for(error, runs_program=args.runs_program)
    except _exit.Refused as refused:
        print(f"opendsec: {refused}", file=sys.stderr)
        return _exit.PROGRAM_NOT_RUN if args.runs_program else _exit.USER
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        # A local file that cannot be read or written; the network's errors are OpendsecErrors.
        where = f"{error.filename}: " if error.filename else ""
        print(f"opendsec: {where}{error.strerror or error}", file=sys.stderr)
        return _exit.PROGRAM_NOT_RUN if args.runs_program else _exit.USER


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise _exit.Terminated(number)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Exit codes. ``run``, ``exec`` and ``shell`` pass the program's own code through unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opendsec._errors import OpendsecError

OK = 0
USER = 1
"""The caller has to change something."""
USAGE = 2
"""The command line itself is wrong."""
UNREACHABLE = 69
"""No answer from the server (EX_UNAVAILABLE)."""
PLATFORM = 70
"""The server failed (EX_SOFTWARE)."""
CAPACITY = 75
"""No room now; try again later (EX_TEMPFAIL)."""
NO_PERMISSION = 77
"""The API key is missing, unknown or not enough (EX_NOPERM)."""

TIMED_OUT = 124
"""``run`` and ``exec --timeout``: the program was ended by its limit, as by timeout(1)."""
PROGRAM_NOT_RUN = 125
"""``run``, ``exec``, ``shell``: OpenDsec failed or refused; no exit code of the program exists."""
NOT_EXECUTABLE = 126
"""``run``, ``exec``: the sandbox has the program but cannot run it, as shells say it."""
COMMAND_NOT_FOUND = 127
"""``run``, ``exec``: the sandbox has no such program, as shells say it."""

HELP = """\
exit codes:
  0 success; 1 you have to change something; 2 wrong usage; 69 server not reachable;
  70 server failed; 75 no room now; 77 API key refused.
  run, exec and shell end with the program's own code (128+n: ended by signal n), and with
  124 when --timeout ended it, 125 when OpenDsec failed and there is no code of the program,
  126 when the program cannot be run, 127 when there is no such program.
"""


class Refused(Exception):
    """The command cannot be carried out as asked; the text says why and what to do."""


class Terminated(BaseException):
    """A signal asks this program to end; raised so that everything is cleaned up on the way."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def code_for(error: OpendsecError, *, runs_program: bool) -> int:
    """The exit code for a failure."""
    from opendsec import _errors as e

    if runs_program:
        for cls, code in (
            (e.CommandTimeout, TIMED_OUT),
            (e.ProgramNotFound, COMMAND_NOT_FOUND),
            (e.ProgramNotExecutable, NOT_EXECUTABLE),
        ):
            if isinstance(error, cls):
                return code
        return PROGRAM_NOT_RUN
    if isinstance(error, (e.Unauthenticated, e.Forbidden)):
        return NO_PERMISSION
    if isinstance(error, e.ConnectionFailed):
        return UNREACHABLE
    return {"user": USER, "capacity": CAPACITY, "platform": PLATFORM}[error.fault]

# SPDX-License-Identifier: AGPL-3.0-only
"""Crash injection for tests, in this one place.

``OPENDSEC_CRASH_AT=<hook>:<before|after>`` (set-up) or ``teardown.<hook>:<before|after>`` ends
the process by SIGKILL at that point, as a power cut or the OOM killer would.
"""

from __future__ import annotations

import os
import signal

_VARIABLE = "OPENDSEC_CRASH_AT"


def point(name: str) -> None:
    """End here if the test asked for it."""
    if os.environ.get(_VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)

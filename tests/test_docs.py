# SPDX-License-Identifier: AGPL-3.0-only
"""Tables in the documents that are derived from the code are current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_of_capabilities_is_current() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "capabilities"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr

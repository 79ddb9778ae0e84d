# SPDX-License-Identifier: AGPL-3.0-only
"""The copy of the guest agent's binary that sandboxes run."""

from __future__ import annotations

import hashlib
from pathlib import Path


def install_agent(binary: Path, run_dir: Path) -> Path:
    """Copy the binary to ``run_dir``, named by its content; returns the copy.

    Sandboxes run the copy: it can be reached with their ids wherever the original lies, and an
    upgrade of the package never touches a file that is in use.
    """
    data = binary.read_bytes()
    target = run_dir / f"agent-{hashlib.sha256(data).hexdigest()[:16]}"
    if not target.exists():
        half = target.with_suffix(".new")
        half.write_bytes(data)
        half.chmod(0o755)
        half.rename(target)
    for old in run_dir.glob("agent-*"):
        if old != target:
            old.unlink(missing_ok=True)
    return target

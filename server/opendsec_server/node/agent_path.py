# SPDX-License-Identifier: AGPL-3.0-only
"""Where the guest agent's binary is."""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
from pathlib import Path

from opendsec_server.config import Config, ConfigError

_NAME = "opendsec-agent"


def find_agent(config: Config) -> Path:
    """The setting, then ``OPENDSEC_AGENT``, then beside this Python, then PATH.

    Raises:
        ConfigError: not found, or not executable.
    """
    candidates = [
        config.agent_path,
        os.environ.get("OPENDSEC_AGENT"),
        str(Path(sysconfig.get_path("scripts")) / _NAME),
        shutil.which(_NAME),
    ]
    named = next((c for c in candidates[:2] if c), None)
    for candidate in [named] if named else candidates[2:]:
        if candidate and os.access(candidate, os.X_OK) and Path(candidate).is_file():
            return Path(candidate).resolve()
    raise ConfigError(
        f"the guest agent {named or _NAME} was not found or is not executable. Install the "
        "package opendsec-dataplane, or set agent_path (OPENDSEC_AGENT) to the binary."
    )


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

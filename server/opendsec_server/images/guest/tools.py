# SPDX-License-Identifier: AGPL-3.0-only
"""Running the programs of the host that a build needs: bounded, and with errors that help."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from opendsec_server.config import ConfigError

Progress = Callable[[str], None]

_OUTPUT_LINES_KEPT = 12

_PACKAGE_OF = {
    "apt-cache": "apt",
    "apt-get": "apt",
    "depmod": "kmod",
    "dpkg-deb": "dpkg",
    "lz4": "lz4",
    "mkfs.erofs": "erofs-utils",
    "zstd": "zstd",
}


class GuestBuildError(ConfigError):
    """The guest of microVMs could not be made. The message names the step and the remedy."""


def run(
    what: str,
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    stdin: bytes | None = None,
) -> bytes:
    """Run a program; returns its standard output.

    Args:
        what: The step, for people.
        argv: Program and arguments.
        timeout_s: Seconds until it is killed.
        cwd: Working directory; None: the daemon's.
        stdin: Its whole input; None: nothing.

    Raises:
        GuestBuildError: it is not installed, failed, or took too long.
    """
    program = str(argv[0])
    try:
        done = subprocess.run(
            [str(word) for word in argv],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            check=False,
            timeout=timeout_s,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
        )
    except FileNotFoundError as exc:
        package = _PACKAGE_OF.get(program, program)
        raise GuestBuildError(
            f"{what}: {program} is not installed. Install the package {package}."
        ) from exc
    except subprocess.TimeoutExpired as exc:
        raise GuestBuildError(f"{what}: {program} did not end within {timeout_s:.0f} s") from exc
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        text = "\n".join(lines[-_OUTPUT_LINES_KEPT:])
        raise GuestBuildError(f"{what}: {program} failed (exit status {done.returncode}):\n{text}")
    return done.stdout

# SPDX-License-Identifier: AGPL-3.0-only
"""The server's command line and the installer's, as far as they do nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opendsec_server import __version__

INSTALLER = Path(__file__).parents[4] / "install.sh"


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd="/")


def opendsecd(*args: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "opendsec_server.daemon.main", *args)


@pytest.mark.parametrize("args", [("--version",), ("version",), ("--version", "purge")])
def test_version(args: tuple[str, ...]) -> None:
    done = opendsecd(*args)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


def test_no_command_shows_what_there_is() -> None:
    done = opendsecd()
    assert done.returncode == 2
    assert "--version" in done.stdout + done.stderr
    assert opendsecd("--versions").returncode == 2


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_installer_explains_itself(option: str) -> None:
    done = run(str(INSTALLER), option)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Installs OpenDsec")
    for wanted in ("--no-start", "--uninstall", "--help", "$PREFIX"):
        assert wanted in done.stdout
    assert not any(line.startswith(("#", "set ")) for line in lines)


def test_installer_does_nothing_for_what_it_does_not_know() -> None:
    done = run(str(INSTALLER), "--helpp")
    assert (done.returncode, done.stdout) == (1, "")
    assert "unknown option --helpp" in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""``doctor``: is the server reachable and the key good; and is this machine fit to be a server."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from opendsec import Client, OpendsecError, __version__
from opendsec._settings import is_loopback

from . import _exit
from ._output import print_json, wants_colour
from ._session import client_of

SERVER_DOCTOR_TIMEOUT_S = 120
START = "Start it: sudo systemctl start opendsecd, or without systemd: sudo opendsecd start"
MARKS = {"ok": ("ok", "32"), "warn": ("!!", "33"), "fail": ("XX", "31"), "skip": ("--", "2")}


class Check(msgspec.Struct, frozen=True):
    """One finding; the shape ``opendsecd doctor --json`` uses too."""

    name: str
    status: str
    detail: str
    remedy: str = ""


class _Report(msgspec.Struct):
    checks: list[Check] = []


def doctor(args: argparse.Namespace) -> int:
    """Check everything that can be checked from here."""
    with client_of(args, retries_max=0) as client:
        checks = _client_checks(client)
        local = is_loopback(client.settings.base_url)
    checks += _machine_checks() if local else []
    if args.json:
        print_json({"checks": checks})
    else:
        _print(checks)
    return _exit.USER if any(check.status == "fail" for check in checks) else _exit.OK


def _client_checks(client: Client) -> list[Check]:
    settings = client.settings
    python = ".".join(map(str, sys.version_info[:3]))
    checks = [Check("client", "ok", f"opendsec {__version__}, Python {python}")]
    checks.append(Check("address", "ok", f"{settings.base_url} (from {settings.url_source})"))
    if settings.api_key is None:
        checks.append(
            Check(
                "API key",
                "fail",
                "none is configured",
                "Set OPENDSEC_API_KEY, or run as root on the server's machine.",
            )
        )
    else:
        checks.append(Check("API key", "ok", f"from {settings.api_key_source}"))
    checks.append(_server_check(client))
    return checks


def _server_check(client: Client) -> Check:
    try:
        info = client.server_info()
    except OpendsecError as error:
        down = error.code in ("connection_failed", "control_plane_unavailable")
        ours = down and is_loopback(client.settings.base_url)
        return Check("server", "fail", error.message, START if ours else error.remediation)
    if info.version.split(".")[:2] != __version__.split(".")[:2]:
        return Check(
            "server",
            "warn",
            f"version {info.version}, this client is {__version__}",
            "Install the client of the server's version.",
        )
    return Check("server", "ok", f"version {info.version}, serves ports under {info.domain}")


def _machine_checks() -> list[Check]:
    """The findings of the server's own doctor, if the server is installed here."""
    daemon = _find_daemon()
    if daemon is None:
        return [Check("machine", "skip", "the server package is not installed here")]
    if os.geteuid() != 0:
        reason = f"not checked: that needs root, and this runs as uid {os.geteuid()}"
        return [Check("machine", "skip", reason, "sudo opendsec doctor")]
    try:
        done = subprocess.run(
            [daemon, "doctor", "--json"],
            capture_output=True,
            timeout=SERVER_DOCTOR_TIMEOUT_S,
            check=False,
        )
        return msgspec.json.decode(done.stdout, type=_Report).checks
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        return [Check("machine", "fail", f"{daemon} doctor: {error}", f"Run: {daemon} doctor")]


def _find_daemon() -> str | None:
    beside = Path(sys.executable).with_name("opendsecd")
    if os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which("opendsecd")


def _print(checks: list[Check]) -> None:
    colour = wants_colour(sys.stdout)
    for check in checks:
        mark, code = MARKS.get(check.status, ("??", "33"))
        shown: Any = f"\x1b[{code}m{mark}\x1b[0m" if colour else mark
        print(f"{shown}  {check.name:16} {check.detail}")
        if check.remedy and check.status != "ok":
            print(f"{'':21}→ {check.remedy}")

# SPDX-License-Identifier: AGPL-3.0-only
"""``opendsecd doctor``: run every check and say in words what to mend."""

from __future__ import annotations

import sys

import msgspec
import typer

from opendsec_server.config import Config

from .checks import ALL_CHECKS, Check
from .kvm_probe import probe_kvm as run_kvm_probe

MARKS = {"ok": ("ok", "green"), "warn": ("!!", "yellow"), "fail": ("XX", "red"), "skip": ("--", "")}


def run_checks(config: Config, *, probe_kvm: bool) -> list[Check]:
    """Run all checks. A check that breaks is itself reported as a failure.

    Args:
        config: The settings to check against.
        probe_kvm: Boot a guest to see whether ``/dev/kvm`` really works (up to 30 s).
    """
    checks = []
    for function in ALL_CHECKS:
        try:
            checks.append(function(config))
        except Exception as exc:
            name = getattr(function, "__name__", "check").removeprefix("check_")
            checks.append(Check(name, "fail", f"the check itself broke: {exc!r}"))
    checks.append(_kvm_check(config) if probe_kvm else Check("KVM", "skip", "not probed"))
    return checks


def _kvm_check(config: Config) -> Check:
    answer = run_kvm_probe(config.state_path)
    if answer.usable:
        return Check("KVM", "ok", answer.detail)
    return Check("KVM", "skip", f"{answer.detail}; containers do not need it", answer.remedy)


def print_report(checks: list[Check], *, as_json: bool) -> None:
    """Print the report: JSON for machines, aligned lines for people."""
    if as_json:
        typer.echo(msgspec.json.encode({"checks": checks}).decode())
        return
    colour = sys.stdout.isatty()
    for check in checks:
        mark, style = MARKS[check.status]
        shown = typer.style(mark, fg=style) if colour and style else mark
        typer.echo(f"{shown}  {check.name:16} {check.detail}")
        if check.remedy and check.status != "ok":
            typer.echo(f"{'':21}→ {check.remedy}")
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    if failed:
        typer.echo(f"\n{failed} to mend before sandboxes can run.")
    elif warned:
        typer.echo(f"\nSandboxes can run. {warned} to look at.")
    else:
        typer.echo("\nThis machine is ready.")

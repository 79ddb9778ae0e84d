# SPDX-License-Identifier: AGPL-3.0-only
"""Command line of ``opendsecd``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from opendsec_server import __version__
from opendsec_server.config import Config, ConfigError, load_config

from .audit_commands import app as audit_app
from .image_commands import app as image_app

EX_CONFIG = 78  # sysexits.h: the configuration or the machine must be changed
EX_UNAVAILABLE = 69  # sysexits.h: the service is not running

app = typer.Typer(
    name="opendsecd",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.add_typer(image_app, name="image")
app.add_typer(audit_app, name="audit")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """OpenDsec server: gateway, control plane and node agent in one process."""


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file. Default: /etc/opendsec/config.toml."),
]


def _config(path: Path | None) -> Config:
    try:
        return load_config(path)
    except ConfigError as exc:
        _fail(str(exc))


def _require_root() -> None:
    """Others cannot read the pid file: they would be told that no server runs."""
    if os.geteuid() != 0:
        _fail("run this as root: only root can see the server's files")


def _fail(message: str, code: int = EX_CONFIG) -> NoReturn:
    typer.secho(f"opendsecd: {message}", err=True, fg="red" if sys.stderr.isatty() else None)
    raise typer.Exit(code)


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Run in the foreground until SIGTERM. Sandboxes go on running afterwards."""
    settings = _config(config)
    from opendsec_server.logs import configure_logging

    from .serve import serve as run

    configure_logging(settings)
    try:
        run(settings)
    except ConfigError as exc:
        _fail(str(exc))


@app.command()
def start(config: ConfigOption = None) -> None:
    """Run in the background; return when the server is ready. Shows progress."""
    settings = _config(config)
    from .background import StartFailed, start_in_background

    try:
        start_in_background(settings, config)
    except (ConfigError, StartFailed) as exc:
        _fail(str(exc))


@app.command()
def stop(config: ConfigOption = None) -> None:
    """Stop the background server and its edge. Sandboxes go on running."""
    from .background import stop_background

    _require_root()
    if not stop_background(_config(config)):
        _fail("not running", EX_UNAVAILABLE)
    typer.echo("stopped; sandboxes go on running (`opendsecd purge` removes them)")


@app.command()
def status(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Say whether the server runs and is ready."""
    from .background import read_status

    _require_root()
    found = read_status(_config(config))
    if as_json:
        typer.echo(json.dumps(found))
    else:
        for key, value in found.items():
            typer.echo(f"{key:10} {value}")
    if not found["ready"]:
        raise typer.Exit(EX_UNAVAILABLE)


@app.command()
def doctor(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    kvm: Annotated[bool, typer.Option(help="Probe KVM by booting a guest (up to 30 s).")] = True,
) -> None:
    """Explain what this machine lacks and how to mend it."""
    from opendsec_server.ops.doctor import print_report, run_checks

    checks = run_checks(_config(config), probe_kvm=kvm)
    print_report(checks, as_json=as_json)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(EX_CONFIG)


@app.command()
def purge(
    config: ConfigOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    images: Annotated[bool, typer.Option(help="Remove templates' images too.")] = False,
) -> None:
    """Remove every sandbox of this instance and all it left in the kernel. Stops the server."""
    _require_root()
    settings = _config(config)
    if not yes:
        typer.confirm(f"Remove all sandboxes under {settings.state_dir}?", abort=True)
    from opendsec_server.logs import configure_logging

    from .background import stop_background
    from .purge import purge_instance

    configure_logging(settings)
    stop_background(settings)
    try:
        purge_instance(settings, images=images)
    except ConfigError as exc:
        _fail(str(exc))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()

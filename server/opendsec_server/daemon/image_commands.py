# SPDX-License-Identifier: AGPL-3.0-only
"""``opendsecd image``: disk images that full virtual machines begin as."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from opendsec_server.config import Config, ConfigError, load_config
from opendsec_server.contract.node import Firmware
from opendsec_server.images.disk_images import DiskImageError, DiskImageNotFound, DiskImages

EX_CONFIG = 78
RESERVED = ("base",)
"""Templates of the installation that are no disk images."""

app = typer.Typer(help="Disk images for full virtual machines.", no_args_is_help=True)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file. Default: /etc/opendsec/config.toml."),
]


def _fail(message: str) -> NoReturn:
    typer.secho(f"opendsecd: {message}", err=True)
    raise typer.Exit(EX_CONFIG)


def _images(path: Path | None) -> DiskImages:
    if os.geteuid() != 0:
        _fail("run this as root: only root can see the server's files")
    try:
        config: Config = load_config(path)
    except ConfigError as exc:
        _fail(str(exc))
    return DiskImages(config.state_path / "images")


@app.command("import")
def import_image(
    name: Annotated[str, typer.Argument(help="Name of the template that it becomes.")],
    file: Annotated[Path, typer.Argument(help="Raw or qcow2 disk image.")],
    firmware: Annotated[
        str | None,
        typer.Option(help="bios, uefi or direct. Default: what the image looks like."),
    ] = None,
    kernel: Annotated[Path | None, typer.Option(help="Kernel to start without a loader.")] = None,
    initrd: Annotated[Path | None, typer.Option(help="Its initial file system.")] = None,
    cmdline: Annotated[str | None, typer.Option(help="Its command line.")] = None,
    config: ConfigOption = None,
) -> None:
    """Take a disk image into the server. A running server offers it a second later."""
    if name in RESERVED:
        _fail(f"the name {name} is taken by the server itself")
    try:
        kind = None if firmware is None else msgspec.convert(firmware, Firmware)
    except msgspec.ValidationError:
        _fail("--firmware: bios, uefi or direct")
    images = _images(config)
    try:
        image = images.add(
            name,
            file,
            at=time.time(),
            firmware=kind,
            kernel=kernel,
            initrd=initrd,
            cmdline=cmdline,
        )
    except (DiskImageError, OSError) as exc:
        _fail(str(exc))
    typer.echo(f"{name}: {image.size_mb} MiB, {image.source_format}, starts by {image.firmware}")


@app.command("list")
def list_images(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Show the disk images."""
    images = _images(config)
    found = {}
    for name in sorted(images.names()):
        try:
            found[name] = images.find(name)
        except DiskImageNotFound as exc:
            typer.secho(f"opendsecd: {exc}", err=True)
    if as_json:
        typer.echo(json.dumps({n: msgspec.to_builtins(image) for n, image in found.items()}))
        return
    for name, image in found.items():
        typer.echo(f"{name:24} {image.size_mb:>8} MiB  {image.firmware:7} {image.digest[:12]}")


@app.command("remove")
def remove_image(
    name: Annotated[str, typer.Argument(help="Which.")], config: ConfigOption = None
) -> None:
    """Forget a disk image. Sandboxes and snapshots made of it go on."""
    if not _images(config).remove(name):
        _fail(f"there is no disk image {name}")

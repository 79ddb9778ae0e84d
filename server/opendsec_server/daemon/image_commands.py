# SPDX-License-Identifier: AGPL-3.0-only
"""``opendsecd image``: disk images that full virtual machines begin as, and images on demand."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from opendsec_server.config import Config, ConfigError, load_config
from opendsec_server.contract.errors import OpendsecError
from opendsec_server.contract.node import Firmware
from opendsec_server.images import lazy
from opendsec_server.images.disk_images import DiskImageError, DiskImageNotFound, DiskImages
from opendsec_server.images.store import ImageStore

EX_CONFIG = 78
RESERVED = ("base",)
"""Templates of the installation that are no disk images."""

app = typer.Typer(
    help="Disk images for full virtual machines; images on demand.", no_args_is_help=True
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file. Default: /etc/opendsec/config.toml."),
]


def _fail(message: str) -> NoReturn:
    typer.secho(f"opendsecd: {message}", err=True)
    raise typer.Exit(EX_CONFIG)


def _settings(path: Path | None) -> Config:
    if os.geteuid() != 0:
        _fail("run this as root: only root can see the server's files")
    try:
        return load_config(path)
    except ConfigError as exc:
        _fail(str(exc))


def _images(path: Path | None) -> DiskImages:
    return DiskImages(_settings(path).state_path / "images")


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


# --- images on demand -------------------------------------------------------------


def _store(path: Path | None) -> ImageStore:
    return ImageStore(_settings(path).state_path / "images")


@app.command("publish")
def publish_image(
    name: Annotated[str, typer.Argument(help="Name, reference or digest of an image.")],
    directory: Annotated[Path, typer.Argument(help="Where to write it.")],
    config: ConfigOption = None,
    chunk_kb: Annotated[
        int, typer.Option(help="What is fetched and checked as one: a power of two.")
    ] = lazy.CHUNK_BYTES >> 10,
) -> None:
    """Write an image into a directory that a web server, an object store or a shared file system
    serves, for nodes that start it on demand."""
    store = _store(config)
    try:
        image = store.find(name)
        with store.pinned(image.layers):
            digest = lazy.publish(store, image, directory, chunk_bytes=chunk_kb << 10)
    except (OpendsecError, OSError, RuntimeError) as exc:
        _fail(str(exc))
    typer.echo(f"{digest}\n{directory}: upload all of it, {lazy.IMAGE_FILE} last")


@app.command("attach")
def attach_image(
    place: Annotated[
        str, typer.Argument(help="Address or directory of a published image; @sha256:… pins it.")
    ],
    config: ConfigOption = None,
    name: Annotated[str | None, typer.Option(help="A name for it.")] = None,
) -> None:
    """Have a published image on this node: its metadata now, its data as it is read."""
    store = _store(config)
    if not place.startswith(lazy.PREFIX):
        is_address = place.startswith(("http://", "https://"))
        place = lazy.PREFIX + (place if is_address else f"dir:{Path(place).absolute()}")
    try:
        source = lazy.parse(place)
        assert source is not None
        image = asyncio.run(lazy.attach(store, source, None))
        if name is not None:
            store.name(image.digest, [name])
    except (OpendsecError, OSError) as exc:
        _fail(str(exc))
    size = store.info(image).on_demand_bytes
    typer.echo(f"{image.digest}  {source.text}  {size >> 20} MiB on demand")


@app.command("trace")
def publish_trace(
    name: Annotated[str, typer.Argument(help="An attached image that was started here.")],
    directory: Annotated[Path, typer.Argument(help="The directory that it was published to.")],
    config: ConfigOption = None,
) -> None:
    """Put the order in which an image's data was first read here beside the published image:
    nodes that attach it from then on fetch that ahead."""
    store = _store(config)
    try:
        count = lazy.publish_traces(store, store.find(name), directory)
    except (OpendsecError, OSError) as exc:
        _fail(str(exc))
    if not count:
        _fail("nothing was recorded: a trace is written a minute after the first read of a layer")
    typer.echo(f"traces of {count} layers")

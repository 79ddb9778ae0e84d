# SPDX-License-Identifier: AGPL-3.0-only
"""OCI manifests and configurations (image-spec 1.1): what of them counts here."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import msgspec

from opendsec_server.contract.errors import ImageDamaged, ImageNotFound
from opendsec_server.contract.images import DIGEST_RE, ImageConfig

from . import limits

_ARCHITECTURES = {
    "x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "ppc64le": "ppc64le",
    "s390x": "s390x", "riscv64": "riscv64", "i686": "386",
}  # fmt: skip
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


class Descriptor(msgspec.Struct, kw_only=True, frozen=True, rename="camel"):
    """What a manifest says of one of its parts."""

    media_type: str = ""
    digest: str
    size: int


class Manifest(msgspec.Struct, kw_only=True, frozen=True, rename="camel"):
    """The manifest of one image for one processor."""

    config: Descriptor
    layers: tuple[Descriptor, ...] = ()


class _RootFs(msgspec.Struct, kw_only=True, frozen=True):
    diff_ids: tuple[str, ...] | None = None


class _Run(msgspec.Struct, kw_only=True, frozen=True):
    user: str | None = msgspec.field(name="User", default=None)
    exposed_ports: dict[str, Any] | None = msgspec.field(name="ExposedPorts", default=None)
    env: tuple[str, ...] | None = msgspec.field(name="Env", default=None)
    entrypoint: tuple[str, ...] | None = msgspec.field(name="Entrypoint", default=None)
    cmd: tuple[str, ...] | None = msgspec.field(name="Cmd", default=None)
    workdir: str | None = msgspec.field(name="WorkingDir", default=None)
    labels: dict[str, str] | None = msgspec.field(name="Labels", default=None)
    stop_signal: str | None = msgspec.field(name="StopSignal", default=None)


class Configuration(msgspec.Struct, kw_only=True, frozen=True):
    """The configuration beside a manifest."""

    architecture: str = ""
    os: str = "linux"
    config: _Run | None = None
    rootfs: _RootFs = _RootFs()


def architecture() -> str:
    """This machine's processor, as OCI names it."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def read(manifest: bytes, configuration: bytes, what: str) -> tuple[Manifest, Configuration]:
    """Both, checked against each other.

    Raises:
        ImageDamaged: they cannot be used.
        ImageNotFound: it is an image for another processor.
    """
    try:
        found = msgspec.json.decode(manifest, type=Manifest)
        config = msgspec.json.decode(configuration, type=Configuration)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ImageDamaged(f"{what} is not a container image: {exc}") from exc
    diff_ids = config.rootfs.diff_ids or ()
    if len(diff_ids) != len(found.layers):
        raise ImageDamaged(
            f"{what}: the manifest has {len(found.layers)} layers, the configuration "
            f"{len(diff_ids)}"
        )
    if len(found.layers) > limits.IMAGE_LAYERS_MAX:
        raise ImageDamaged(
            f"{what} has {len(found.layers)} layers; at most {limits.IMAGE_LAYERS_MAX} are taken"
        )
    for digest in (*diff_ids, *(layer.digest for layer in found.layers)):
        if not DIGEST_RE.fullmatch(digest):
            raise ImageDamaged(f"{what}: {digest[:100]!r} is not a sha256 digest")
    if any(layer.size < 0 for layer in found.layers):
        raise ImageDamaged(f"{what}: a layer has a negative size")
    if config.architecture not in ("", architecture()) or config.os != "linux":
        raise ImageNotFound(
            f"{what} is for {config.os}/{config.architecture}; this node is linux/{architecture()}"
        )
    return found, config


def to_config(configuration: Configuration, what: str) -> ImageConfig:
    """How to run an image.

    Raises:
        ImageDamaged: a value cannot be one of a program.
    """
    run = configuration.config or _Run()
    env = dict(entry.split("=", 1) for entry in run.env or () if "=" in entry)
    found = ImageConfig(
        entrypoint=run.entrypoint or (),
        cmd=run.cmd or (),
        env={name: value for name, value in env.items() if name},
        workdir=run.workdir or None,
        user=run.user or None,
        exposed_ports=tuple(sorted(run.exposed_ports or ())),
        stop_signal=run.stop_signal or None,
        labels=run.labels or {},
    )
    if b"\\u0000" in msgspec.json.encode(found):
        raise ImageDamaged(f"{what}: its configuration holds a null character")
    return found


def from_config(config: ImageConfig, diff_ids: list[str], created: str) -> bytes:
    """The OCI configuration of an image of ours.

    Args:
        config: How to run it.
        diff_ids: ``sha256:…`` of the layers' tars.
        created: RFC 3339.
    """
    run: dict[str, Any] = {
        "User": config.user or "",
        "Env": [f"{name}={value}" for name, value in sorted(config.env.items())],
        "Entrypoint": list(config.entrypoint) or None,
        "Cmd": list(config.cmd) or None,
        "WorkingDir": config.workdir or "",
        "ExposedPorts": {port: {} for port in config.exposed_ports} or None,
        "Labels": config.labels or None,
        "StopSignal": config.stop_signal,
    }
    return msgspec.json.encode(
        {
            "created": created,
            "architecture": architecture(),
            "os": "linux",
            "config": {name: value for name, value in run.items() if value is not None},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "history": [{"created": created, "created_by": "opendsec"} for _ in diff_ids],
        }
    )


def merged(configs: list[ImageConfig]) -> ImageConfig:
    """The configuration of composed images, the lowest first: environments are joined, of the
    rest the last that has one wins."""

    def last(values: list[Any], empty: Any) -> Any:
        return next((value for value in reversed(values) if value), empty)

    env: Mapping[str, str] = {k: v for config in configs for k, v in config.env.items()}
    programs = [c for c in configs if c.entrypoint or c.cmd]
    return ImageConfig(
        # A command means nothing without the entry point that it was written for.
        entrypoint=programs[-1].entrypoint if programs else (),
        cmd=programs[-1].cmd if programs else (),
        env=dict(env),
        workdir=last([c.workdir for c in configs], None),
        user=last([c.user for c in configs], None),
        exposed_ports=last([c.exposed_ports for c in configs], ()),
        stop_signal=last([c.stop_signal for c in configs], None),
        labels=last([c.labels for c in configs], {}),
    )

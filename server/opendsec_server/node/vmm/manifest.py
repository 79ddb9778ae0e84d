# SPDX-License-Identifier: AGPL-3.0-only
"""``manifest.json`` of saved memory: what it is, what it needs, and how to tell that it is whole.

Written in two steps: ``write_draft`` when the memory is saved, ``seal`` when its checksums are
known. Only the second makes the file that makes the directory usable.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from opendsec_server.contract.errors import SnapshotDamaged, SnapshotIncompatible
from opendsec_server.images.files import sha256_of

from .base import DEVICES_FILE, MANIFEST_FILE, RAM_FILE, SUMS_FILE, VmConfig, VmmInfo

FORMAT = 1
DRAFT_FILE = "manifest.draft"
_TSC_TOLERANCE = 0.001
_MANIFEST_BYTES_MAX = 256 * 1024


class SavedDisk(msgspec.Struct, frozen=True, kw_only=True):
    """A disk that the saved machine had."""

    serial: str
    bytes: int
    read_only: bool


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content.

    Attributes:
        format: Version of this structure.
        vmm: ``qemu`` or ``firecracker``.
        vmm_version: Exact version; another one does not load the devices.
        accelerator: ``kvm`` or ``tcg``.
        cpu_model: As ``VmmInfo.cpu_model``.
        tsc_khz: Rate at which the guest's time stamp counter ran, if the VMM cannot scale it; 0: of
            no importance.
        machine: Type of virtual machine.
        vcpus: Processors.
        memory_mb: RAM in MiB.
        kernel: Version of the guest kernel.
        agent: Identity of the guest agent.
        disks: In order.
        ram_bytes: Length of ``ram``.
        devices_bytes: Length of ``devices``.
        devices_sha256: Of ``devices``.
        sums_sha256: Of ``ram.sums``, which has a checksum of every page of ``ram``.
        sha256: Of this structure with this field empty.
    """

    format: int = FORMAT
    vmm: str
    vmm_version: str
    accelerator: str
    cpu_model: str
    tsc_khz: int = 0
    machine: str
    vcpus: int
    memory_mb: int
    kernel: str
    agent: str
    disks: tuple[SavedDisk, ...] = ()
    ram_bytes: int
    devices_bytes: int = 0
    devices_sha256: str = ""
    sums_sha256: str = ""
    sha256: str = ""


def saved_disks(config: VmConfig) -> tuple[SavedDisk, ...]:
    """A configuration's disks, as the manifest has them. Raises ``OSError`` if one is missing."""
    return tuple(
        SavedDisk(serial=d.serial, bytes=d.path.stat().st_size, read_only=d.read_only)
        for d in config.disks
    )


def new_manifest(info: VmmInfo, config: VmConfig, *, machine: str, tsc_khz: int = 0) -> Manifest:
    """What is known of a VM when it is started. Raises ``OSError`` if a disk is missing."""
    return Manifest(
        vmm=info.name,
        vmm_version=info.version,
        accelerator=info.accelerator,
        cpu_model=info.cpu_model,
        tsc_khz=tsc_khz,
        machine=machine,
        vcpus=config.vcpus,
        memory_mb=config.memory_mb,
        kernel=config.kernel_id,
        agent=config.agent_id,
        disks=saved_disks(config),
        ram_bytes=config.ram_bytes,
    )


def write_draft(memory: Path, manifest: Manifest) -> None:
    """Note what is being saved, for ``seal``."""
    (memory / DRAFT_FILE).write_bytes(msgspec.json.encode(manifest))


def seal(memory: Path, *, durable: bool) -> Manifest:
    """Complete the manifest of saved memory and put it in place. Blocks.

    Args:
        memory: Directory with ``ram``, ``ram.sums``, ``devices`` and the draft.
        durable: Wait until everything is on the medium.

    Raises:
        OSError: a file is missing, or the disk failed.
        msgspec.DecodeError: the draft is malformed.
    """
    draft_path = memory / DRAFT_FILE
    draft = msgspec.json.decode(draft_path.read_bytes(), type=Manifest)
    devices = memory / DEVICES_FILE
    manifest = msgspec.structs.replace(
        draft,
        devices_bytes=devices.stat().st_size,
        devices_sha256=sha256_of(devices),
        sums_sha256=sha256_of(memory / SUMS_FILE),
    )
    manifest = msgspec.structs.replace(manifest, sha256=_own_sha256(manifest))
    draft_path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    if durable:
        for name in (RAM_FILE, SUMS_FILE, DEVICES_FILE, DRAFT_FILE):
            _fsync(memory / name)
    draft_path.rename(memory / MANIFEST_FILE)
    if durable:
        _fsync(memory)
    return manifest


def read_manifest(memory: Path) -> Manifest:
    """The manifest of saved memory.

    Raises:
        SnapshotDamaged: there is none, or it is not what was written.
        SnapshotIncompatible: a newer OpenDsec wrote it.
    """
    path = memory / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(_MANIFEST_BYTES_MAX)
        data: Any = msgspec.json.decode(raw)
        written = data.get("format") if isinstance(data, dict) else None
        if isinstance(written, int) and written > FORMAT:
            raise SnapshotIncompatible(
                f"the saved memory has format {written}; this server knows {FORMAT}"
            )
        manifest = msgspec.convert(data, Manifest)
    except FileNotFoundError as exc:
        raise SnapshotDamaged("the saved memory is incomplete: it has no manifest") from exc
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as exc:
        raise SnapshotDamaged(f"the manifest of the saved memory cannot be read: {exc}") from exc
    if manifest.sha256 != _own_sha256(manifest):
        raise SnapshotDamaged("the manifest of the saved memory does not match its checksum")
    return manifest


def require_compatible(
    manifest: Manifest,
    info: VmmInfo,
    *,
    machine: str,
    tsc_khz: int = 0,
    config: VmConfig | None = None,
) -> None:
    """Make sure that this VMM (and this configuration) can take the saved memory.

    Raises:
        SnapshotIncompatible: it cannot; names what differs.
    """
    pairs: list[tuple[str, object, object]] = [
        ("VMM", manifest.vmm, info.name),
        ("VMM version", manifest.vmm_version, info.version),
        ("accelerator", manifest.accelerator, info.accelerator),
        ("CPU model", manifest.cpu_model, info.cpu_model),
        ("machine", manifest.machine, machine),
    ]
    if abs(manifest.tsc_khz - tsc_khz) > _TSC_TOLERANCE * max(manifest.tsc_khz, tsc_khz):
        pairs.append(("processor clock in kHz", manifest.tsc_khz, tsc_khz))
    if config is not None:
        try:
            disks = saved_disks(config)
        except OSError as exc:
            raise SnapshotIncompatible(f"a disk of the saved machine is missing: {exc}") from exc
        pairs += [
            ("number of processors", manifest.vcpus, config.vcpus),
            ("memory in MiB", manifest.memory_mb, config.memory_mb),
            ("guest kernel", manifest.kernel, config.kernel_id),
            ("guest agent", manifest.agent, config.agent_id),
            ("disks", _describe(manifest.disks), _describe(disks)),
        ]
    for what, saved, here in pairs:
        if saved != here:
            raise SnapshotIncompatible(
                f"the saved memory needs another {what}: it has {saved!r}, here is {here!r}",
                details={"what": what, "saved": saved, "here": here},
            )


def require_whole(memory: Path, manifest: Manifest) -> None:
    """The cheap part of the check: lengths of all files, checksum of the devices. Blocks shortly.

    Raises:
        SnapshotDamaged: something is missing, cut short or changed.
    """
    try:
        ram_bytes = (memory / RAM_FILE).stat().st_size
        devices = memory / DEVICES_FILE
        devices_bytes = devices.stat().st_size
        whole = (ram_bytes, devices_bytes) == (manifest.ram_bytes, manifest.devices_bytes)
        whole = whole and sha256_of(devices) == manifest.devices_sha256
    except OSError as exc:
        raise SnapshotDamaged(f"the saved memory is incomplete: {exc.strerror}") from exc
    if ram_bytes != manifest.ram_bytes:
        raise SnapshotDamaged(
            f"the saved RAM has {ram_bytes} bytes instead of {manifest.ram_bytes}"
        )
    if not whole:
        raise SnapshotDamaged("the saved devices do not match their checksum")


def require_sums_whole(memory: Path, manifest: Manifest) -> None:
    """The checksum of the page checksums. Blocks.

    Raises:
        SnapshotDamaged: they are missing or changed.
    """
    try:
        found = sha256_of(memory / SUMS_FILE)
    except OSError as exc:
        raise SnapshotDamaged(f"the saved memory is incomplete: {exc.strerror}") from exc
    if found != manifest.sums_sha256:
        raise SnapshotDamaged("the page checksums do not match their own checksum")


def _describe(disks: tuple[SavedDisk, ...]) -> list[str]:
    return [f"{d.serial} {d.bytes} {'ro' if d.read_only else 'rw'}" for d in disks]


def _own_sha256(manifest: Manifest) -> str:
    plain = msgspec.structs.replace(manifest, sha256="")
    return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

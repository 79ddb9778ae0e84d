# SPDX-License-Identifier: AGPL-3.0-only
"""The manifest of saved memory: what it needs to be restored, and its checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from opendsec_server.contract.errors import SnapshotDamaged, SnapshotIncompatible
from opendsec_server.node.vmm.base import (
    DEVICES_FILE,
    MANIFEST_FILE,
    RAM_FILE,
    VmConfig,
    VmmInfo,
)

DRAFT_FILE = "manifest.draft"
FORMAT = 1
_BLOCK_BYTES = 1024 * 1024
_ZERO_BLOCK = bytes(_BLOCK_BYTES)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """See ``vmm.base``; ``manifest.json``."""

    format: int = FORMAT
    vmm: str
    vmm_version: str
    accelerator: str
    cpu_model: str
    machine: str
    vcpus: int
    memory_mb: int
    kernel: str
    agent: str
    ram_bytes: int
    devices_sha256: str = ""
    ram_sha256: str = ""


def host_cpu_model() -> str:
    """What saved processors are bound to."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if not line.strip():
            break
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            found[name.strip()] = value.strip()
    return " ".join(found.get(name, "?") for name in wanted)


def write_draft(memory: Path, draft: Manifest) -> None:
    """Keep what ``seal`` needs beside the memory."""
    (memory / DRAFT_FILE).write_bytes(msgspec.json.encode(draft))


def seal(memory: Path, *, durable: bool) -> None:
    """Turn the draft into a manifest with checksums. Blocks. Idempotent.

    Raises:
        OSError: the disk failed. msgspec.DecodeError: the draft is damaged.
    """
    target = memory / MANIFEST_FILE
    draft_path = memory / DRAFT_FILE
    if target.exists() and not draft_path.exists():
        return
    draft = msgspec.json.decode(draft_path.read_bytes(), type=Manifest)
    done = msgspec.structs.replace(
        draft,
        devices_sha256=hashlib.sha256((memory / DEVICES_FILE).read_bytes()).hexdigest(),
        ram_sha256=ram_digest(memory / RAM_FILE),
    )
    fresh = memory / f"{MANIFEST_FILE}.new"
    fresh.write_bytes(msgspec.json.encode(done))
    if durable:
        for name in (RAM_FILE, DEVICES_FILE, fresh.name):
            _sync(memory / name)
    fresh.replace(target)
    draft_path.unlink()
    if durable:
        _sync(memory)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def ram_digest(path: Path) -> str:
    """Checksum of what a file reads as; holes cost nothing, wherever they are."""
    total = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        at = 0
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                break
            at -= at % _BLOCK_BYTES
            block = os.pread(file.fileno(), min(_BLOCK_BYTES, size - at), at)
            if block != _ZERO_BLOCK[: len(block)]:
                total.update(at.to_bytes(8, "little"))
                total.update(block)
            at += _BLOCK_BYTES
    total.update(size.to_bytes(8, "little"))
    return total.hexdigest()


def read(memory: Path) -> Manifest:
    """The manifest.

    Raises:
        SnapshotDamaged: there is none, or it is not one.
    """
    try:
        found = msgspec.json.decode((memory / MANIFEST_FILE).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as exc:
        raise SnapshotDamaged(f"the saved memory has no proper manifest: {exc}") from exc
    if found.format != FORMAT:
        raise SnapshotIncompatible(f"the saved memory has format {found.format}, not {FORMAT}")
    return found


def verify_cheaply(memory: Path, info: VmmInfo, config: VmConfig | None) -> Manifest:
    """All checks but the RAM's checksum. Blocks shortly.

    Raises:
        SnapshotDamaged, SnapshotIncompatible: see ``vmm.base``.
    """
    found = read(memory)
    needs = [
        ("VMM", f"{found.vmm} {found.vmm_version}", f"{info.name} {info.version}"),
        ("accelerator", found.accelerator, info.accelerator),
        ("CPU", found.cpu_model, info.cpu_model),
    ]
    if config is not None:
        needs += [
            ("processors", str(found.vcpus), str(config.vcpus)),
            ("memory (MiB)", str(found.memory_mb), str(config.memory_mb)),
            ("guest kernel", found.kernel, config.kernel_id),
            ("guest agent", found.agent, config.agent_id),
        ]
    for what, needed, have in needs:
        if needed != have:
            raise SnapshotIncompatible(f"the saved memory needs {what} {needed!r}, here: {have!r}")
    try:
        size = (memory / RAM_FILE).stat().st_size
        devices = (memory / DEVICES_FILE).read_bytes()
    except OSError as exc:
        raise SnapshotDamaged(f"a file of the saved memory is missing: {exc}") from exc
    if size != found.ram_bytes:
        raise SnapshotDamaged(f"the saved RAM has {size} bytes instead of {found.ram_bytes}")
    if hashlib.sha256(devices).hexdigest() != found.devices_sha256:
        raise SnapshotDamaged("the saved devices do not match their checksum")
    return found


def verify_fully(memory: Path, info: VmmInfo) -> None:
    """``verify_cheaply`` and the RAM's checksum. Blocks.

    Raises:
        SnapshotDamaged, SnapshotIncompatible: see ``vmm.base``.
    """
    found = verify_cheaply(memory, info, None)
    if ram_digest(memory / RAM_FILE) != found.ram_sha256:
        raise SnapshotDamaged("the saved RAM does not match its checksum")

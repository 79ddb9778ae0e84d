# SPDX-License-Identifier: AGPL-3.0-only
"""The disks of a full virtual machine, and what else lasts as long as it: seed, firmware's
variables, kernel."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from opendsec_server.contract.errors import (
    InvalidRequest,
    SandboxStartFailed,
    SnapshotNotFound,
    TemplateNotFound,
)
from opendsec_server.contract.node import VmOptions
from opendsec_server.images.disk_images import (
    DiskImage,
    DiskImageError,
    DiskImageNotFound,
    DiskImages,
)
from opendsec_server.node.machines import vm_files
from opendsec_server.node.machines.firmware import find_uefi
from opendsec_server.node.machines.seed import SeedContent, extra_authorities, make_seed
from opendsec_server.node.paths import MACHINE_DISK
from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.storage.pool import SNAPSHOT_MEMORY

_MIB = 1024 * 1024
_SMALL_FILES_MB = 128
"""Room for seed, variables, kernel and initial file system, in each of two copies."""


class VmDisks:
    """A subvolume with the machine's disks: as its image, or as a snapshot left them."""

    name = "disk"

    def __init__(self, services: Services, images: DiskImages, bases: vm_files.DiskBases) -> None:
        self._config = services.config
        self._paths = services.paths
        self._pool = services.pool
        self._snapshots = services.snapshots
        self._agent = services.traits.agent
        self._images = images
        self._bases = bases

    async def setup(self, box: Sandbox) -> None:
        """Make them, and a seed that tells the guest who it is."""
        if box.spec.snapshot_id is not None:
            await finish_in_thread(self._of_snapshot, box)
        else:
            try:
                await finish_in_thread(self._of_image, box)
            except DiskImageError as exc:
                raise SandboxStartFailed(str(exc)) from exc
        # Memory goes on with the seed that it has seen; the agent gives it its new names.
        if box.restore_from is None:
            await self._make_seed(box)

    async def _make_seed(self, box: Sandbox) -> None:
        spec = box.spec
        try:
            authorities = extra_authorities(self._config.extra_ca_certs)
        except OSError as exc:
            raise SandboxStartFailed(f"cannot read extra_ca_certs: {exc}") from exc
        content = SeedContent(
            instance_id=spec.sandbox_id,
            hostname=spec.sandbox_id,
            user_data=_options(box).user_data,
            agent=self._agent,
            authorities=authorities,
        )
        await make_seed(content, self._paths.disk(spec.sandbox_id) / vm_files.SEED_FILE)

    def _of_snapshot(self, box: Sandbox) -> None:
        spec = box.spec
        assert spec.snapshot_id is not None
        row = self._snapshots.row(spec.snapshot_id)
        try:
            disk = self._pool.clone(spec.snapshot_id, spec.sandbox_id, self._quota_mb(box))
        except FileNotFoundError as exc:
            raise SnapshotNotFound(f"snapshot {spec.snapshot_id} is gone") from exc
        box.record.disk_base_bytes = row.info.disk_bytes
        # Memory of the source's own pause, not of this snapshot.
        for name in (SNAPSHOT_MEMORY, f"{SNAPSHOT_MEMORY}.new"):
            shutil.rmtree(disk / name, ignore_errors=True)
        if row.info.mode == "full":
            box.restore_from = self._pool.snapshot_memory(spec.snapshot_id)
            box.agent_token = row.control_token

    def _of_image(self, box: Sandbox) -> None:
        spec, options = box.spec, _options(box)
        image = self._find(spec.image)
        if spec.disk_mb * _MIB < image.virtual_bytes:
            raise InvalidRequest(
                f"disk_mb: the image {spec.image!r} has {image.size_mb} MiB; "
                f"{spec.disk_mb} MiB are too few",
                details={"min_mb": image.size_mb},
            )
        others = [self._data_disk(disk.image, disk.size_mb) for disk in options.disks]
        folder = self._pool.create(spec.sandbox_id, self._quota_mb(box))
        self._bases.clone(image, folder, MACHINE_DISK, spec.disk_mb * _MIB)
        for number, (source, size_bytes) in enumerate(others, 1):
            name = vm_files.data_disk(number)
            if source is None:
                _make_empty(folder / name, size_bytes)
            else:
                self._bases.clone(source, folder, name, size_bytes)
        firmware = options.firmware or image.firmware
        if firmware == "direct":
            if image.firmware != "direct":
                raise InvalidRequest(
                    f"vm.firmware: the image {spec.image!r} was imported without a kernel"
                )
            self._bases.clone_kernel(image, folder)
        if firmware == "uefi":
            empty = find_uefi(self._config.firmware_dir).variables
            shutil.copyfile(empty, folder / vm_files.VARIABLES_FILE)
        facts = vm_files.Facts(
            image=image.digest,
            firmware=firmware,
            cmdline=image.cmdline,
            data_disks=len(others),
        )
        vm_files.write_facts(folder, facts)

    def _find(self, name: str) -> DiskImage:
        try:
            return self._images.find(name)
        except DiskImageNotFound as exc:
            raise TemplateNotFound(
                f"{exc} on this node",
                remediation="Import one: opendsecd image import NAME FILE",
            ) from exc

    def _data_disk(self, name: str | None, size_mb: int) -> tuple[DiskImage | None, int]:
        if name is None:
            if size_mb <= 0:
                raise InvalidRequest("vm.disks: a disk without an image needs a size_mb")
            return None, size_mb * _MIB
        image = self._find(name)
        if 0 < size_mb * _MIB < image.virtual_bytes:
            raise InvalidRequest(
                f"vm.disks: the image {name!r} has {image.size_mb} MiB; {size_mb} MiB are too few"
            )
        return image, max(size_mb * _MIB, image.virtual_bytes)

    def _quota_mb(self, box: Sandbox) -> int:
        """As of microVMs: beside the disks there is room for the saved memory, twice while one
        replaces the other, and for the disks kept while it is resumed."""
        spec = box.spec
        disks_mb = spec.disk_mb
        for disk in _options(box).disks:
            size_mb = disk.size_mb
            if disk.image is not None:
                size_mb = max(size_mb, self._size_of(disk.image))
            disks_mb += size_mb
        return 2 * disks_mb + 3 * spec.memory_mb + _SMALL_FILES_MB

    def _size_of(self, name: str) -> int:
        try:
            return self._images.find(name).size_mb
        except DiskImageNotFound:
            return 0  # of a snapshot whose image is gone; its own size is in the snapshot

    async def teardown(self, box: Sandbox) -> None:
        """Delete them."""
        self._pool.destroy(box.sandbox_id)


def _options(box: Sandbox) -> VmOptions:
    return box.spec.vm or VmOptions()


def _make_empty(path: Path, size_bytes: int) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_bytes)
    finally:
        os.close(fd)

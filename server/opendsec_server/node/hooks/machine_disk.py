# SPDX-License-Identifier: AGPL-3.0-only
"""A virtual machine's disk: what lasts from its creation to its end."""

from __future__ import annotations

import shutil
from pathlib import Path

from opendsec_server.contract.errors import SandboxStartFailed, SnapshotNotFound
from opendsec_server.contract.ids import random_chars
from opendsec_server.node.machines.templates import Templates, warm_start
from opendsec_server.node.paths import MACHINE_DISK
from opendsec_server.node.process import ProgramTimeout, finish_in_thread, run
from opendsec_server.node.sandbox import Sandbox
from opendsec_server.node.services import Services
from opendsec_server.node.storage.reflink import clone_file

_MKFS_TIMEOUT_S = 60.0
_MKFS = ("mkfs.ext4", "-q", "-F", "-m", "0", "-J", "size=16", "-L", "sandbox")
"""A small journal: it costs writes, and sandboxes are short-lived. Nothing is kept for root."""


class MachineDisk:
    """A subvolume with one sparse ext4 file: empty, or as a template or snapshot left it."""

    name = "disk"

    def __init__(self, services: Services, templates: Templates) -> None:
        self._paths = services.paths
        self._pool = services.pool
        self._snapshots = services.snapshots
        self._templates = templates

    async def setup(self, box: Sandbox) -> None:
        """Make it, and find out what memory belongs to it."""
        spec = box.spec
        if spec.snapshot_id is not None:
            await finish_in_thread(self._of_snapshot, box)
            return
        template = await self._templates.get(box)
        if template is None:
            blank = await self._blank(spec.disk_mb)
            await finish_in_thread(self._of_file, box, blank)
            return
        await finish_in_thread(self._of_file, box, template.disk)
        box.restore_from, box.agent_token = template.memory, template.agent_token
        box.start_in_memory = warm_start(spec) is not None

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
        shutil.rmtree(disk / "memory", ignore_errors=True)
        shutil.rmtree(disk / "memory.new", ignore_errors=True)
        if row.info.mode == "full":
            box.restore_from = self._pool.snapshot_memory(spec.snapshot_id)
            box.agent_token = row.control_token
            box.start_in_memory = True

    def _of_file(self, box: Sandbox, source: Path) -> None:
        disk = self._pool.create(box.sandbox_id, self._quota_mb(box))
        clone_file(source, disk / MACHINE_DISK)

    @staticmethod
    def _quota_mb(box: Sandbox) -> int:
        """The disk's own limit is its size; beside it there is room for the saved memory, twice
        while one replaces the other, and the disk kept while it is resumed."""
        return 2 * box.spec.disk_mb + 3 * box.spec.memory_mb

    async def _blank(self, disk_mb: int) -> Path:
        """A formatted empty disk of this size."""
        blank = self._paths.blank_disks / f"{disk_mb}.ext4"
        if blank.exists():
            return blank
        self._paths.blank_disks.mkdir(mode=0o700, exist_ok=True)
        half = blank.with_suffix(f".{random_chars(8)}")
        try:
            with half.open("xb") as file:
                file.truncate(disk_mb * 1024 * 1024)
            done = await run([*_MKFS, str(half)], timeout_s=_MKFS_TIMEOUT_S)
            if done.code != 0:
                raise SandboxStartFailed(f"mkfs.ext4 failed: {done.output}")
            half.rename(blank)
        except FileNotFoundError as exc:
            raise SandboxStartFailed(
                "mkfs.ext4 is not installed", remediation="Install the package e2fsprogs."
            ) from exc
        except ProgramTimeout as exc:
            raise SandboxStartFailed(str(exc)) from exc
        finally:
            half.unlink(missing_ok=True)
        return blank

    async def teardown(self, box: Sandbox) -> None:
        """Delete it."""
        self._pool.destroy(box.sandbox_id)

# SPDX-License-Identifier: AGPL-3.0-only
"""Every file and directory of a node, named in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opendsec_server.config import Config

POOL_NAME = "pool"
POOL_IMAGE_NAME = "pool.img"
MACHINE_DISK = "disk.ext4"


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Where a node keeps things.

    Args:
        state: Survives a reboot.
        run: Does not.
    """

    state: Path
    run: Path

    @classmethod
    def of(cls, config: Config) -> NodePaths:
        """The paths that a configuration means."""
        return cls(config.state_path, config.run_path)

    @property
    def journal(self) -> Path:
        """SQLite."""
        return self.state / "node.db"

    @property
    def lock(self) -> Path:
        """Held by the one daemon that owns this state."""
        return self.state / "node.lock"

    @property
    def marks(self) -> Path:
        """What operators say of the node."""
        return self.state / "node-marks.json"

    @property
    def images(self) -> Path:
        """Layers and their index."""
        return self.state / "images"

    @property
    def pool(self) -> Path:
        """Where the disk pool is mounted."""
        return self.state / POOL_NAME

    @property
    def pool_image(self) -> Path:
        """The pool's sparse file."""
        return self.state / POOL_IMAGE_NAME

    @property
    def disks(self) -> Path:
        """One subvolume per sandbox."""
        return self.pool / "sandboxes"

    @property
    def snapshots(self) -> Path:
        """One directory per snapshot: ``disk`` (a subvolume) and ``memory``."""
        return self.pool / "snapshots"

    @property
    def runtime_root(self) -> Path:
        """The OCI runtime's own state."""
        return self.run / "oci"

    @property
    def bundles(self) -> Path:
        """One directory per sandbox, being set up or running."""
        return self.run / "sandboxes"

    @property
    def machine_runs(self) -> Path:
        """One directory per virtual machine being started or running."""
        return self.run / "machines"

    def machine_run(self, sandbox_id: str) -> Path:
        """A virtual machine's sockets and the VMM's notes."""
        return self.machine_runs / sandbox_id

    def disk(self, sandbox_id: str) -> Path:
        """A sandbox's subvolume: ``upper`` and ``work``, or a machine's ``disk.ext4``."""
        return self.disks / sandbox_id

    @property
    def blank_disks(self) -> Path:
        """Formatted empty disks for machines, by size."""
        return self.pool / "blank"

    @property
    def templates(self) -> Path:
        """Saved memory and disks that machines start from."""
        return self.pool / "templates"

    @property
    def disk_bases(self) -> Path:
        """Disk images that full virtual machines' disks share blocks with."""
        return self.pool / "bases"

    def machine_disk(self, sandbox_id: str) -> Path:
        """The writable disk of a virtual machine."""
        return self.disk(sandbox_id) / MACHINE_DISK

    def kept_disk(self, sandbox_id: str) -> Path:
        """The disk as it was when the memory beside it was saved; there while it is resumed."""
        return self.saved_memory(sandbox_id) / MACHINE_DISK

    def kept_disks(self, sandbox_id: str) -> list[Path]:
        """All files of the machine that are kept so: those beside the memory whose like is one
        level above."""
        memory, disk = self.saved_memory(sandbox_id), self.disk(sandbox_id)
        if not memory.is_dir():
            return []
        return [path for path in memory.iterdir() if (disk / path.name).is_file()]

    def saved_memory(self, sandbox_id: str) -> Path:
        """Memory of a paused virtual machine, beside its disk."""
        return self.disk(sandbox_id) / "memory"

    def snapshot(self, snapshot_id: str) -> Path:
        """One snapshot's directory."""
        return self.snapshots / snapshot_id

    def bundle(self, sandbox_id: str) -> Path:
        """A sandbox's OCI bundle."""
        return self.bundles / sandbox_id

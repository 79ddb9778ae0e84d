# SPDX-License-Identifier: AGPL-3.0-only
"""The disk pool: a btrfs file system for sandboxes' writable layers.

Where the state directory already lies on btrfs it is used as it is. Otherwise one sparse image
file is made and mounted, in the host's mount namespace, so that it outlives the daemon. Quotas
are btrfs's: above a sandbox's limit its writes fail with EDQUOT ("Disk quota exceeded").
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import structlog

from opendsec_server.config import ConfigError
from opendsec_server.node import mountns, syscalls
from opendsec_server.node.paths import NodePaths
from opendsec_server.node.process import Finished, run

from . import btrfs

log = structlog.get_logger("opendsec.node")

SNAPSHOT_DISK = "disk"
"""The subvolume inside a snapshot's directory."""

SNAPSHOT_MEMORY = "memory"

POOL_SHARE_OF_FREE = 0.8
POOL_MB_MIN = 512
_TOOL_TIMEOUT_S = 120.0
_RELEASE_LOOK_S = 0.02
_RELEASE_LOOKS_MAX = 500
_MOUNT_OPTIONS = "discard=async"


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Bytes of the pool, as far as both it and the file system below allow."""

    total_bytes: int
    free_bytes: int


class DiskPool:
    """Subvolumes with limits.

    Args:
        paths: The node's paths.
        size_mb: Size of the image when one must be made; 0: 80 % of the free space.
    """

    def __init__(self, paths: NodePaths, size_mb: int) -> None:
        self._paths = paths
        self._size_mb = size_mb
        self._uuid = ""
        self.quota_kind = ""

    async def open(self) -> None:
        """Find, make and mount the pool. Idempotent.

        Raises:
            ConfigError: it cannot be made or mounted; the message says what to do.
        """
        self._paths.pool.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not btrfs.is_btrfs(self._paths.pool):
            try:
                await self._mount()
            except (OSError, RuntimeError) as exc:
                raise ConfigError(f"cannot mount the disk pool {self._paths.pool}: {exc}") from exc
        self._paths.disks.mkdir(mode=0o700, exist_ok=True)
        self._paths.snapshots.mkdir(mode=0o700, exist_ok=True)
        self._uuid = btrfs.filesystem_uuid(self._paths.pool)
        self.quota_kind = btrfs.enable_quota(self._paths.pool)

    async def _mount(self) -> None:
        target = self._paths.pool
        if not mountns.is_mounted_on_host(target):
            if not self._paths.pool_image.exists():
                await self._make_image()
            device = await attach_loop(self._paths.pool_image, read_only=False)
            try:
                mountns.on_host(
                    lambda: syscalls.mount(
                        device,
                        str(target),
                        "btrfs",
                        syscalls.MS_NOATIME | syscalls.MS_NODEV,
                        _MOUNT_OPTIONS,
                    )
                )
            finally:
                await release_loop(device)
        mountns.show_here(target)

    async def _make_image(self) -> None:
        """Under another name first, so that a crash never leaves half a file system."""
        image = self._paths.pool_image
        half = image.with_suffix(".new")
        half.unlink(missing_ok=True)
        free = os.statvfs(self._paths.state)
        size_mb = self._size_mb or int(
            free.f_bavail * free.f_frsize * POOL_SHARE_OF_FREE / (1024 * 1024)
        )
        if size_mb < POOL_MB_MIN:
            raise ConfigError(
                f"the disk pool would have {size_mb} MB; it needs {POOL_MB_MIN} MB. "
                f"Free space below {self._paths.state}, or set disk_pool_mb."
            )
        with half.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(size_mb * 1024 * 1024)
        await _tool("mkfs.btrfs", "-q", "-f", "-m", "single", "-d", "single", str(half))
        half.rename(image)

    async def remove(self) -> None:
        """Unmount and delete the pool with all that is in it. Idempotent."""
        target = self._paths.pool
        if not mountns.is_mounted_on_host(target) and btrfs.is_btrfs(target):
            for name in self.subvolumes():
                btrfs.destroy_subvolume(self._paths.disks, name)
            for name in self.snapshots():
                self.destroy_snapshot(name)
            for directory in (
                self._paths.templates,
                self._paths.blank_disks,
                self._paths.disk_bases,
            ):
                shutil.rmtree(directory, ignore_errors=True)
        mountns.unmount_everywhere(target)
        await self._wait_released()
        self._paths.pool_image.unlink(missing_ok=True)

    async def _wait_released(self) -> None:
        """The kernel takes the file system apart only after the last sandbox's mounts."""
        for _ in range(_RELEASE_LOOKS_MAX):
            if not loop_devices_on(self._paths.pool_image):
                return
            await asyncio.sleep(_RELEASE_LOOK_S)
        log.warning("the disk pool is still in use", image=str(self._paths.pool_image))

    # --- one sandbox --------------------------------------------------------

    def subvolumes(self) -> list[str]:
        """Names of all sandboxes that have a subvolume."""
        if not self._paths.disks.is_dir():
            return []
        return sorted(entry.name for entry in self._paths.disks.iterdir())

    def create(self, name: str, disk_mb: int) -> Path:
        """A subvolume that may hold ``disk_mb`` MiB. Blocks, well under a millisecond."""
        btrfs.create_subvolume(self._paths.disks, name)
        path = self._paths.disks / name
        btrfs.limit_subvolume(path, disk_mb * 1024 * 1024)
        return path

    def clone(self, snapshot_id: str, name: str, disk_mb: int) -> Path:
        """A subvolume that begins as a snapshot's disk, and may hold ``disk_mb`` MiB of its own.

        Raises:
            FileNotFoundError: there is no such snapshot.
        """
        source = self._paths.snapshot(snapshot_id) / SNAPSHOT_DISK
        btrfs.snapshot_subvolume(source, self._paths.disks, name, read_only=False)
        path = self._paths.disks / name
        btrfs.limit_subvolume(path, disk_mb * 1024 * 1024)
        return path

    def destroy(self, name: str) -> None:
        """Remove a subvolume. Idempotent. Blocks, well under a millisecond."""
        btrfs.destroy_subvolume(self._paths.disks, name)

    # --- snapshots ----------------------------------------------------------

    def snapshots(self) -> list[str]:
        """Names of all snapshots that have something on disk."""
        if not self._paths.snapshots.is_dir():
            return []
        return sorted(entry.name for entry in self._paths.snapshots.iterdir())

    def create_snapshot(self, sandbox_id: str, snapshot_id: str) -> Path:
        """Save a sandbox's subvolume as it is now, below the returned directory."""
        directory = self._paths.snapshot(snapshot_id)
        directory.mkdir(mode=0o700)
        btrfs.snapshot_subvolume(
            self._paths.disks / sandbox_id, directory, SNAPSHOT_DISK, read_only=True
        )
        return directory

    def snapshot_memory(self, snapshot_id: str) -> Path:
        """Where the memory of a snapshot is."""
        return self._paths.snapshot(snapshot_id) / SNAPSHOT_MEMORY

    def destroy_snapshot(self, snapshot_id: str, *, keep_memory: bool = False) -> None:
        """Remove a snapshot. Idempotent. Sandboxes that were started from it keep their blocks."""
        directory = self._paths.snapshot(snapshot_id)
        if not directory.is_dir():
            return
        btrfs.destroy_subvolume(directory, SNAPSHOT_DISK)
        if not keep_memory:
            shutil.rmtree(directory)

    def used_bytes(self, name: str) -> int:
        """Bytes that a sandbox's subvolume holds of its own."""
        return int(self.usage_file(name).read_text())

    def sync(self) -> None:
        """Bring everything written so far onto the disk."""
        fd = os.open(self._paths.pool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            syscalls.syncfs(fd)
        finally:
            os.close(fd)

    def usage_file(self, name: str) -> Path:
        """The kernel's live count of the bytes a subvolume holds."""
        subvolume = btrfs.subvolume_id(self._paths.disks / name)
        return Path(f"/sys/fs/btrfs/{self._uuid}/qgroups/0_{subvolume}/referenced")

    def usage(self) -> PoolUsage:
        """Total and free bytes; the sparse image can use no more than its file system has."""
        pool = os.statvfs(self._paths.pool)
        below = os.statvfs(self._paths.state)
        free = min(pool.f_bavail * pool.f_frsize, below.f_bavail * below.f_frsize)
        return PoolUsage(pool.f_blocks * pool.f_frsize, free)

    def sweep_qgroups(self) -> None:
        """Remove quota groups whose subvolume is gone (kernels that do not do it themselves)."""
        groups = {
            int(entry.name[2:])
            for entry in Path(f"/sys/fs/btrfs/{self._uuid}/qgroups").glob("0_*")
            if int(entry.name[2:]) >= btrfs.FIRST_FREE_OBJECTID
        }
        subvolumes = [self._paths.disks / name for name in self.subvolumes()]
        subvolumes += [self._paths.snapshot(name) / SNAPSHOT_DISK for name in self.snapshots()]
        for subvolume in subvolumes:
            try:
                groups.discard(btrfs.subvolume_id(subvolume))
            except OSError:
                continue
        for group in groups:
            btrfs.remove_qgroup(self._paths.pool, group)


def loop_devices_on(image: Path) -> list[str]:
    """Names of the loop devices that show ``image``."""
    wanted = str(image.resolve())
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if backing.read_text().strip().removesuffix(" (deleted)") == wanted:
                found.append(backing.parts[3])
    return found


async def attach_loop(image: Path, *, read_only: bool) -> str:
    """A loop device on ``image``; the one it already has, if any."""
    flags = ["--read-only"] if read_only else ["--direct-io=on"]
    done = await _tool("losetup", "--find", "--show", "--nooverlap", *flags, str(image))
    return done.output.splitlines()[-1].strip()


async def release_loop(device: str) -> None:
    """Let the kernel free the device as soon as nothing uses it any more."""
    await _tool("losetup", "--detach", device)


async def _tool(*argv: str) -> Finished:
    done = await run(argv, timeout_s=_TOOL_TIMEOUT_S)
    if done.code != 0:
        raise RuntimeError(f"{argv[0]} failed: {done.output or f'exit status {done.code}'}")
    return done

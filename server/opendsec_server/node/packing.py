# SPDX-License-Identifier: AGPL-3.0-only
"""A sandbox's changes as a layer, and an image of it.

The sandbox is saved as for a fork: it stands still for a copy of references only. All the rest is
made from that copy, which goes with the next start of the node at the latest. What the sandbox
wrote is hostile: ``opendsec-layer`` reads it, never this process. The disk of a machine is checked
before that by an e2fsck that has no privileges and can open nothing else: it would follow a
superblock to a journal on any of the host's devices. Then the host's kernel mounts it, read-only
and without its journal, in the daemon's own mount namespace.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import structlog

from opendsec_server.contract.errors import (
    ImageNotFound,
    Internal,
    NodeFull,
    NotSupported,
    SnapshotFailed,
)
from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.images import LAYERS_MAX, ImageInfo, PackOptions
from opendsec_server.contract.node import Snapshot
from opendsec_server.images.children import layer_program
from opendsec_server.images.collapse import collapse
from opendsec_server.images.convert import make_erofs, no_room
from opendsec_server.images.store import Hold, Image

from . import crash, limits, syscalls
from .images import Images
from .lifecycle import Lifecycle
from .paths import MACHINE_DISK
from .process import Finished, ProgramTimeout, finish_in_thread, run
from .sandbox import Sandbox
from .services import Services
from .storage.loop import loop_device
from .storage.pool import SNAPSHOT_DISK
from .storage.reflink import clone_file
from .suspend import Suspend

log = structlog.get_logger("opendsec.node")

NOT_CONTENT = ("/proc", "/sys", "/dev", "/run", "/.opendsec")
"""Mount points: what a sandbox has there is ours, or gone with it."""

SCRUBBED = (
    "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/etc/machine-id",
    "/var/lib/dbus/machine-id", "/.dockerenv",
    "**/.bash_history", "**/.ash_history", "**/.sh_history", "**/.zsh_history",
    "**/.python_history", "**/.node_repl_history", "**/.lesshst", "**/.viminfo",
    "**/.psql_history", "**/.mysql_history", "**/.sqlite_history", "**/.wget-hsts",
)  # fmt: skip
"""What names the one sandbox, and what shells and the like remember of their users."""

_CHECKER_ID = 65_534
"""User and group of e2fsck: nobody's."""
_CHECKER_BYTES_MAX = 4 * 1024**3
"""Memory of e2fsck. A disk of 1 TiB needs about a quarter."""
_EXIT_LIMIT, _EXIT_NO_SPACE = 5, 6
_FSCK_FAILED = 4
"""e2fsck(8): exit codes below this mean that the file system is sound, or was mended."""


class Packing:
    """Makes images of sandboxes.

    Args:
        services: The node's parts.
        lifecycle: Knows the backends.
        suspend: Saves the sandboxes' disks.
        images: Where they go.
    """

    def __init__(
        self, services: Services, lifecycle: Lifecycle, suspend: Suspend, images: Images
    ) -> None:
        self._store = services.store
        self._paths = services.paths
        self._snapshots = services.snapshots
        self._lifecycle = lifecycle
        self._suspend = suspend
        self._room = images.room

    async def pack(self, box: Sandbox, options: PackOptions) -> ImageInfo:
        """See ``NodeClient.pack``."""
        if self._lifecycle.backend_of(box).info.capabilities.disk_images:
            raise NotSupported(
                f"a {box.spec.backend} has a disk of its own and no layers",
                remediation="Take a snapshot of it instead.",
            )
        try:
            with self._store.holding() as hold:
                image = await finish_in_thread(self._store.find, box.spec.image)
                await finish_in_thread(hold.add, image.layers)
                return await self._pack(box, image, hold, options)
        except ImageNotFound as exc:
            raise SnapshotFailed(f"the sandbox's own image is gone: {exc.message}") from exc
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise no_room() from exc
            raise SnapshotFailed(f"its changes could not be packed: {exc}") from exc

    async def _pack(
        self, box: Sandbox, image: Image, hold: Hold, options: PackOptions
    ) -> ImageInfo:
        name = random_chars(20)
        saved = await self._suspend.snapshot(box, name, "filesystem", ephemeral=True)
        making = self._store.scratch("pack")
        scratch = await finish_in_thread(making.__enter__)
        try:
            layers = list(image.layers)
            layer = await self._layer(saved, scratch, hold, options.scrub)
            if layer is not None:
                layers.append(layer)
            layers = await collapse(self._store, layers, hold, 1 if options.squash else LAYERS_MAX)
            crash.point("pack:layer")
            made = await finish_in_thread(
                self._store.put,
                layers,
                image.config if options.config is None else options.config,
                names=() if options.name is None else (options.name,),
                description=f"packed from sandbox {saved.source_id}",
            )
            crash.point("pack:done")
        finally:
            await finish_in_thread(making.__exit__, None, None, None)
            await self._snapshots.remove(name)
        log.info("packed", sandbox_id=box.sandbox_id, image=made.digest, layers=len(layers))
        return await finish_in_thread(self._store.info, made)

    async def _layer(self, saved: Snapshot, scratch: Path, hold: Hold, scrub: bool) -> str | None:
        """A layer of the changes; None: there are none."""
        tree, file = scratch / "tree", scratch / "layer.erofs"
        await finish_in_thread(tree.mkdir, 0o755)
        async with self._upper(saved) as upper:
            await _copy_upper(upper, tree, SCRUBBED if scrub else ())
        crash.point("pack:copied")
        if await finish_in_thread(_is_untouched, tree):
            return None
        try:
            await make_erofs(tree, file)
        except Internal as exc:
            raise SnapshotFailed(
                f"its changes cannot be a layer: {exc.message}",
                remediation="Names of 255 bytes are too long for erofs-utils 1.5; or look at the "
                "node's log.",
            ) from exc
        await self._room.make(file.stat().st_size)
        return await finish_in_thread(self._store.adopt, file, hold=hold)

    @contextlib.asynccontextmanager
    async def _upper(self, saved: Snapshot) -> AsyncIterator[Path]:
        """The writable directory of the saved sandbox's overlay, by a path that nothing in it can
        turn elsewhere."""
        folder = self._paths.snapshot(saved.snapshot_id)
        if saved.backend == "container":
            with _held(folder / SNAPSHOT_DISK) as upper:
                yield upper
            return
        disk, target = folder / "pack.ext4", folder / "mnt"
        await finish_in_thread(clone_file, folder / SNAPSHOT_DISK / MACHINE_DISK, disk)
        await _check_disk(disk)
        await finish_in_thread(target.mkdir, 0o700)
        await finish_in_thread(_mount_disk, disk, target)
        crash.point("pack:mounted")
        try:
            with _held(target) as upper:
                yield upper
        finally:
            await finish_in_thread(syscalls.umount, str(target), 0)


@contextlib.contextmanager
def _held(parent: Path) -> Iterator[Path]:
    """The directory ``upper``, if it is one: root in a machine may have put a link there."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(parent / "upper", flags)
    except OSError as exc:
        raise SnapshotFailed(f"its disk holds no changes that can be read: {exc}") from exc
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


async def _copy_upper(upper: Path, tree: Path, scrubbed: Sequence[str]) -> None:
    argv = [
        layer_program(), "copy-upper", "--from", str(upper), "--into", str(tree),
        "--bytes-max", str(limits.PACK_FILES_BYTES_MAX),
        "--entries-max", str(limits.PACK_ENTRIES_MAX),
    ]  # fmt: skip
    for pattern in NOT_CONTENT:
        argv += ["--exclude", pattern]
    for pattern in scrubbed:
        # That such a file was deleted is content.
        argv += ["--scrub", pattern]
    done = await _tool(argv)
    if done.code == 0:
        return
    text = done.output.strip()[-1_000:]
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        text = json.loads(text.splitlines()[-1])["error"]
    if done.code == _EXIT_NO_SPACE:
        raise no_room()
    if done.code == _EXIT_LIMIT:
        raise NodeFull(f"its changes are too many for a layer: {text}")
    raise SnapshotFailed(f"its changes cannot be a layer: {text}")


async def _check_disk(disk: Path) -> None:
    """Write what the journal holds to its place, and refuse or mend what is no sound ext4."""
    fd = await finish_in_thread(os.open, disk, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        # It opens its standard input again by name, and no directory on the way there.
        os.fchown(fd, _CHECKER_ID, _CHECKER_ID)
        os.fchmod(fd, 0o600)
        done = await _tool([*_powerless(size), "e2fsck", "-f", "-y", "/proc/self/fd/0"], fd)
    finally:
        os.close(fd)
    if not 0 <= done.code < _FSCK_FAILED:
        raise SnapshotFailed(f"its disk is damaged: {done.output.strip()[-1_000:]}")


def _powerless(file_bytes_max: int) -> list[str]:
    """How a program is started that may do nothing but compute, and write to what it is given."""
    return [
        "setpriv", f"--reuid={_CHECKER_ID}", f"--regid={_CHECKER_ID}", "--clear-groups",
        "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--pdeathsig=KILL", "--",
        "prlimit", f"--as={_CHECKER_BYTES_MAX}", f"--fsize={file_bytes_max}", "--core=0",
        f"--cpu={int(limits.PACK_TOOL_TIMEOUT_S)}", "--",
    ]  # fmt: skip


def _mount_disk(disk: Path, target: Path) -> None:
    flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    with loop_device(disk) as device:
        syscalls.mount(device, str(target), "ext4", flags, "noload,errors=continue")


def _is_untouched(tree: Path) -> bool:
    """Whether nothing is there but the ``/etc`` that every sandbox's disk is laid out with."""
    entries = list(os.scandir(tree))
    if not entries:
        return True
    if len(entries) > 1 or entries[0].name != "etc" or not entries[0].is_dir(follow_symlinks=False):
        return False
    info = entries[0].stat(follow_symlinks=False)
    usual = (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o755, 0, 0)
    return usual and not any(Path(entries[0].path).iterdir()) and not os.listxattr(entries[0].path)


async def _tool(argv: Sequence[str], stdin_fd: int | None = None) -> Finished:
    try:
        return await run(argv, timeout_s=limits.PACK_TOOL_TIMEOUT_S, stdin_fd=stdin_fd)
    except FileNotFoundError as exc:
        raise SnapshotFailed(f"{argv[0]} is not installed") from exc
    except ProgramTimeout as exc:
        raise SnapshotFailed(str(exc)) from exc

# SPDX-License-Identifier: AGPL-3.0-only
"""Layers whose data lies on a store: one ``opendsec-lazy`` serves each, for all sandboxes.

The program's file is the backing of a loop device, and the layer is mounted from that. When the
program ends, whatever the reason, reads of the layer fail at once; another is started and the
device goes on with its file (``LOOP_CHANGE_FD``), below the mounts and machines that use it.
Programs and mounts outlive the daemon; the next one takes them over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path

import msgspec
import structlog

from opendsec_server.contract.errors import Internal
from opendsec_server.images.children import lazy_program
from opendsec_server.images.store import DEVICE_LINK, ImageStore
from opendsec_server.node import mountns, process, syscalls

from .loop import change_backing, loop_device_on

log = structlog.get_logger("opendsec.node")

_SERVED = "served"
_FILE = f"{_SERVED}/layer.erofs"
_STATUS = f"{_SERVED}/status"
_LOG = "log"
_STATUS_BYTES_MAX = 65_536
_START_S = 20.0
_END_S = 3.0
_LOOK_S = 0.5
_RESTART_PAUSE_S = 5.0


class LazyStatus(msgspec.Struct, kw_only=True, frozen=True):
    """What ``opendsec-lazy`` tells of a layer; counters since it was started."""

    pid: int
    size_bytes: int
    chunk_bytes: int
    chunks: int
    chunks_cached: int
    bytes_fetched: int
    chunks_fetched: int
    chunks_prefetched: int
    requests: int
    errors: int
    altered: int
    damaged_locally: int
    reads_failed: int
    lost_since: float | None = None
    last_error: str | None = None


class LazyLayers:
    """Starts, watches and ends the programs. Methods without ``async`` block."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._watched: dict[str, LazyStatus | None] = {}
        self._cut_off: set[str] = set()
        """Devices that have still the file of a program that ended."""
        self._children: dict[str, int] = {}
        """Processes that this daemon started."""
        self._failed_at: dict[str, float] = {}
        self._watch: asyncio.Task[None] | None = None
        self._changing = threading.RLock()
        """Held while a program is started or ended: not both at once."""

    # --- as a whole -----------------------------------------------------------

    async def adopt(self) -> None:
        """At the daemon's start: go on with what is mounted, tidy what is not."""
        for layer in await asyncio.to_thread(self._store.layers):
            if not self._store.is_remote(layer):
                continue
            if mountns.is_mounted_on_host(self._store.mount_path(layer)):
                self._watched[layer] = None
                # The last daemon may have ended between the two steps of a restart.
                self._cut_off.add(layer)
            else:
                await asyncio.to_thread(self.end, layer)
        self._watch = asyncio.create_task(self._keep_watch(), name="lazy-layers")

    async def stop(self) -> None:
        """Watch no longer. The programs go on."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for layer in list(self._watched):
                try:
                    await asyncio.to_thread(self._look_alone, layer)
                except Exception:
                    log.exception("a remote layer", layer=layer)

    def _look_alone(self, layer: str) -> None:
        with self._changing:
            self._look(layer)

    def _look(self, layer: str) -> None:
        if layer not in self._watched:
            return
        before, now = self._watched[layer], self._status(layer)
        self._watched[layer] = now
        if now is None:
            if time.monotonic() - self._failed_at.get(layer, 0.0) < _RESTART_PAUSE_S:
                return
            log.warning("the program of a remote layer is started again", layer=layer)
            _reap_child(self._children.pop(layer, None))
            self._cut_off.add(layer)
        if layer in self._cut_off:
            try:
                if now is None:
                    self._start(layer)
                self._reconnect(layer)
                self._cut_off.discard(layer)
            except (Internal, OSError) as exc:
                self._failed_at[layer] = time.monotonic()
                log.error("a remote layer cannot be served", layer=layer, error=str(exc))
        if now is None:
            return
        was_lost = before is not None and before.lost_since is not None
        if (now.lost_since is not None) != was_lost:
            told = log.info if was_lost else log.warning
            what = "the store of a layer answers again" if was_lost else "a layer's store is lost"
            told(what, layer=layer, error=now.last_error)

    # --- one layer ------------------------------------------------------------

    def mount(self, layer: str, target: Path) -> None:
        """Have the layer served and mounted on the host.

        Raises:
            Internal: the program cannot serve it, or the kernel refuses.
        """
        with self._changing:
            if self._status(layer) is None:
                self._start(layer)
            try:
                backing = self._open(layer)
                try:
                    with loop_device_on(backing, direct_io=True) as device:
                        mountns.on_host(lambda: mount_erofs(device, target))
                        link = self._store.layer_dir(layer) / DEVICE_LINK
                        link.unlink(missing_ok=True)
                        link.symlink_to(device)
                finally:
                    os.close(backing)
            except OSError as exc:
                self.end(layer)
                raise Internal(
                    f"cannot mount the remote layer {layer}: {exc}",
                    remediation="See `opendsec image inspect` whether the store is lost. Or the "
                    "kernel lacks EROFS or loop devices (modprobe erofs loop).",
                ) from exc
            self._watched[layer] = self._status(layer)

    def status(self, layer: str) -> LazyStatus | None:
        """As it was seen last; None: it is not in use, or its program has just ended."""
        return self._watched.get(layer)

    def trouble(self, layer: str) -> str | None:
        """Why reads of a layer in use may fail now; None: they do not."""
        if layer not in self._watched:
            return None
        status = self._watched[layer]
        if status is None:
            return f"the program that serves layer {layer[:12]} is being started again"
        if status.lost_since is None:
            return None
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(status.lost_since))
        return f"the store of layer {layer[:12]} is lost since {since}: {status.last_error}"

    def end(self, layer: str) -> None:
        """End the program of a layer that is not mounted any more. Idempotent."""
        with self._changing:
            self._end(layer)

    def _end(self, layer: str) -> None:
        self._watched.pop(layer, None)
        folder = self._store.layer_dir(layer)
        (folder / DEVICE_LINK).unlink(missing_ok=True)
        status = self._status(layer)
        if status is not None:
            _end_process(status.pid)
        served = folder / _SERVED

        def detach() -> None:
            with contextlib.suppress(OSError):
                while True:
                    syscalls.umount(str(served))

        detach()
        mountns.on_host(detach)

    def _status(self, layer: str) -> LazyStatus | None:
        path = self._store.layer_dir(layer) / _STATUS

        def read() -> bytes:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(fd, _STATUS_BYTES_MAX)
            finally:
                os.close(fd)

        try:
            return msgspec.json.decode(mountns.on_host(read), type=LazyStatus)
        except (OSError, msgspec.MsgspecError):
            return None

    def _open(self, layer: str) -> int:
        path = self._store.layer_dir(layer) / _FILE
        return mountns.on_host(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def _start(self, layer: str) -> None:
        """Start the program on the host: its mount and itself outlive the daemon.

        Raises:
            Internal: it does not come up.
        """
        folder = self._store.layer_dir(layer)
        program = lazy_program()
        ready, told = os.pipe2(os.O_CLOEXEC)
        try:
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
            pid = mountns.on_host(
                lambda: os.posix_spawn(
                    program,
                    ["opendsec-lazy", "serve", str(folder)],
                    {},
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, told, 1),
                        (os.POSIX_SPAWN_OPEN, 2, str(folder / _LOG), flags, 0o600),
                    ],
                    setsid=True,
                )
            )
        finally:
            os.close(told)
        try:
            came, _, _ = select.select([ready], [], [], _START_S)
            up = bool(came) and os.read(ready, 16).startswith(b"{}")
        finally:
            os.close(ready)
        self._children[layer] = pid
        if not up:
            _end_process(pid)
            with contextlib.suppress(OSError):
                tail = (folder / _LOG).read_text(errors="replace").splitlines()[-1:]
                raise Internal(f"opendsec-lazy does not serve layer {layer}: {' '.join(tail)}")
            raise Internal(f"opendsec-lazy does not serve layer {layer}")

    def _reconnect(self, layer: str) -> None:
        """Let the device go on with the file of the new process."""
        # Asked of the mount itself: a link may name what is somebody else's by now.
        mounted = mountns.on_host(self._store.mount_path(layer).stat).st_dev
        number = f"{os.major(mounted)}:{os.minor(mounted)}"
        device = f"/dev/{Path(f'/sys/dev/block/{number}').readlink().name}"
        backing = self._open(layer)
        try:
            change_backing(device, backing)
        finally:
            os.close(backing)


def _end_process(pid: int) -> None:
    """End a program of ours and wait for it, whoever's child it is."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() != "opendsec-lazy":
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            process.send_signal(pidfd, number)
            if select.select([pidfd], [], [], _END_S)[0]:
                break
        process.reap(pidfd)
    except FileNotFoundError:
        return
    finally:
        os.close(pidfd)


def _reap_child(pid: int | None) -> None:
    """Let go of a child that ended. Others' are their parents' business."""
    if pid is not None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def mount_erofs(source: str, target: Path) -> None:
    """Mount a layer."""
    syscalls.mount(
        source, str(target), "erofs", syscalls.MS_RDONLY | syscalls.MS_NODEV | syscalls.MS_NOATIME
    )

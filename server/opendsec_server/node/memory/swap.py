# SPDX-License-Identifier: AGPL-3.0-only
"""Swap for paused containers: a zram device or a file of the instance's own.

Nothing is written down about it. Ours is what carries our label in its swap header, or lies at
our path; so it is found again after any crash, and a device of somebody else is never touched.
It stays while the daemon is away, because frozen sandboxes' memory is in it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opendsec_server.config import Config, ConfigError
from opendsec_server.node import limits
from opendsec_server.node.process import Finished, ProgramTimeout, finish_in_thread, run

_SWAPS = Path("/proc/swaps")
_BLOCK = Path("/sys/block")
_ZRAM_CONTROL = Path("/sys/class/zram-control")
_ZRAM_FIRST = "zram0"
_LABEL_AT = 1024 + 3 * 4 + 16
_LABEL_BYTES = 16
_DEVICES_TRIED_MAX = 64
_BUSY_TRIES = 50
_BUSY_PAUSE_S = 0.02

_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
_FS_NOCOW_FL = 0x00800000
_BTRFS_MAGIC = 0x9123683E
_STATFS_BYTES = 256


@dataclass(frozen=True, slots=True)
class SwapUse:
    """How full it is, in bytes.

    Attributes:
        device: Path of the device or file.
        size: How much it can take.
        used: How much it holds, from whomever on the host.
        stored: What that costs: memory of zram after compression; of a file ``used``.
    """

    device: str
    size: int
    used: int
    stored: int


class PauseSwap:
    """The instance's swap. One per node.

    Args:
        config: ``pause_swap``, ``pause_swap_mb``, ``state_dir``, ``instance``.
    """

    def __init__(self, config: Config) -> None:
        self._kind = config.pause_swap
        self._bytes = config.pause_swap_mb * 1024 * 1024
        self._label = f"opendsec-{config.instance}"
        self._file = config.state_path / f"{self._label}.swap"

    # --- life ---------------------------------------------------------------

    async def set_up(self) -> None:
        """Have exactly the swap that is configured. Idempotent; takes over what is there.

        One of another kind or size, as after a change of settings, is removed first.

        Raises:
            ConfigError: the kernel or the file system cannot do it; the message says why.
        """
        active = self._active()
        if active is not None and self._is_wanted(active):
            return
        await self.tear_down()
        try:
            if self._kind == "zram":
                await self._add(await finish_in_thread(self._make_zram))
            elif self._kind == "file":
                await finish_in_thread(self._make_file)
                await self._add(self._file)
        except BaseException:
            await self.tear_down()
            raise

    async def tear_down(self) -> None:
        """Remove it, active or half made. What it holds goes back into memory. Idempotent.

        Raises:
            ConfigError: there is not enough memory for what it holds; it stays.
        """
        active = self._active()
        if active is not None:
            done = await self._run("swapoff", active.device, timeout_s=limits.SWAP_OFF_TIMEOUT_S)
            if done.code != 0:
                raise ConfigError(f"pause_swap: cannot remove {active.device}: {done.output}")
        await finish_in_thread(self._remove_devices)
        self._file.unlink(missing_ok=True)

    def use(self) -> SwapUse | None:
        """How full it is; None when there is none. Cheap."""
        return self._active()

    def features(self) -> dict[str, Any]:
        """For people and doctor; sizes in bytes."""
        use = self._active()
        return {"kind": self._kind, **(asdict(use) if use is not None else {})}

    def _is_wanted(self, active: SwapUse) -> bool:
        kind = "file" if active.device == str(self._file) else "zram"
        # The first page is the header.
        return kind == self._kind and active.size + os.sysconf("SC_PAGE_SIZE") == self._bytes

    # --- what is there ------------------------------------------------------

    def _active(self) -> SwapUse | None:
        """The kernel names swap by the path that whoever added it saw. Each daemon has a mount
        namespace of its own, so another one reads ``/zram0`` for ``/dev/zram0``; only the end of
        a path can be relied on."""
        for line in _SWAPS.read_text().splitlines()[1:]:
            seen, _kind, size_kib, used_kib, _priority = line.rsplit(maxsplit=4)
            used = int(used_kib) * 1024
            if seen.endswith(f"/{self._file.name}"):
                return SwapUse(str(self._file), int(size_kib) * 1024, used, used)
            device = Path("/dev", seen.rpartition("/")[2])
            if device.name.startswith("zram") and self._is_ours(device):
                stat = (_BLOCK / device.name / "mm_stat").read_text().split()
                return SwapUse(str(device), int(size_kib) * 1024, used, int(stat[2]))
        return None

    def _is_ours(self, device: Path) -> bool:
        try:
            with device.open("rb") as raw:
                raw.seek(_LABEL_AT)
                label = raw.read(_LABEL_BYTES)
        except OSError:
            return False
        return label.rstrip(b"\0").decode(errors="replace") == self._label

    def _remove_devices(self) -> None:
        """Those with our label that are not swap (any more). Blocks."""
        for entry in _BLOCK.glob("zram*"):
            if _disk_bytes(entry.name) > 0 and self._is_ours(Path("/dev", entry.name)):
                _give_back(entry.name)

    # --- making -------------------------------------------------------------

    def _make_zram(self) -> Path:
        """An idle device if there is one, else a new one. Blocks.

        A daemon that dies between a new device and its label leaves an idle one, which costs
        nothing and is the one taken next.
        """
        if not _ZRAM_CONTROL.is_dir():
            raise ConfigError(
                "pause_swap: this kernel has no zram, or its module is not loaded (modprobe zram)"
            )
        idle = sorted(e.name for e in _BLOCK.glob("zram*") if _disk_bytes(e.name) == 0)
        for name in idle[:_DEVICES_TRIED_MAX]:
            if self._claim(name):
                return Path("/dev", name)
        name = f"zram{(_ZRAM_CONTROL / 'hot_add').read_text().strip()}"
        if not self._claim(name):
            raise ConfigError(f"pause_swap: /dev/{name} was taken by somebody else; start again")
        return Path("/dev", name)

    def _claim(self, name: str) -> bool:
        """Give a device its size; False when somebody else was faster."""
        try:
            (_BLOCK / name / "disksize").write_text(str(self._bytes))
        except OSError as exc:
            if exc.errno == errno.EBUSY:
                return False
            raise ConfigError(f"pause_swap: zram refuses {self._bytes} bytes: {exc}") from exc
        return True

    def _make_file(self) -> None:
        """Without holes, and on btrfs without copies on write and so without compression, as the
        kernel demands of swap files. Blocks."""
        self._file.unlink(missing_ok=True)
        fd = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if _is_btrfs(fd):
                flags = struct.unpack("=I", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, b"\0" * 4))[0]
                fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("=I", flags | _FS_NOCOW_FL))
            os.posix_fallocate(fd, 0, self._bytes)
        except OSError as exc:
            raise ConfigError(
                f"pause_swap: cannot make {self._file} of {self._bytes >> 20} MiB: {exc}"
            ) from exc
        finally:
            os.close(fd)

    async def _add(self, path: Path) -> None:
        """Label it, and add it behind all other swap: without a priority given, each gets a lower
        one than those before."""
        for command in (["mkswap", "--label", self._label], ["swapon"]):
            done = await self._run(*command, str(path), timeout_s=limits.SWAP_CALL_TIMEOUT_S)
            if done.code != 0:
                if path != self._file:
                    await finish_in_thread(_give_back, path.name)
                raise ConfigError(f"pause_swap: {command[0]} {path}: {done.output}")

    async def _run(self, *command: str, timeout_s: float) -> Finished:
        try:
            return await run(command, timeout_s=timeout_s)
        except FileNotFoundError as exc:
            raise ConfigError(f"pause_swap: {command[0]} is missing (util-linux)") from exc
        except ProgramTimeout as exc:
            raise ConfigError(f"pause_swap: {exc}") from exc


def _disk_bytes(name: str) -> int:
    try:
        return int((_BLOCK / name / "disksize").read_text())
    except OSError:
        return -1


def _give_back(name: str) -> None:
    """Empty a zram device and remove it. The first one is the kernel module's own, and stays.
    Blocks; whoever looks into the device just then (udev, ``blkid``) is waited for."""
    for attempt in range(_BUSY_TRIES):
        try:
            (_BLOCK / name / "reset").write_text("1")
            if name != _ZRAM_FIRST:
                (_ZRAM_CONTROL / "hot_remove").write_text(name.removeprefix("zram"))
        except OSError as exc:
            if exc.errno != errno.EBUSY or attempt == _BUSY_TRIES - 1:
                raise ConfigError(f"pause_swap: cannot remove /dev/{name}: {exc}") from exc
            time.sleep(_BUSY_PAUSE_S)
        else:
            return


def _is_btrfs(fd: int) -> bool:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).fstatfs(fd, buffer) != 0:
        return False
    kind: int = struct.unpack_from("=q", buffer)[0]
    return kind == _BTRFS_MAGIC

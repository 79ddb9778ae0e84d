# SPDX-License-Identifier: AGPL-3.0-only
"""The memory of a machine's screen, which a save of its devices leaves out.

A text console has its text nowhere else. It is read from and written to the stopped QEMU process,
at the place that QEMU itself names. What cannot be found is left out: only the picture is lost,
until the guest draws it anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from opendsec_server.node.process import finish_in_thread
from opendsec_server.node.vmm.qemu.qmp import Qmp, QmpError

from .program import VIDEO_MB

SCREEN_FILE = "screen"
_DEVICE = "screen"
_REGION = "vga.vram"
_BYTES = VIDEO_MB * 1024 * 1024
_CHUNK_BYTES = 64 * 1024
_HOST_ADDRESS_RE = re.compile(r"\((?P<region>[^)]*)\) is 0x(?P<address>[0-9a-f]+)")


async def save_screen(qmp: Qmp, pid: int, memory: Path) -> None:
    """Keep the screen of a stopped machine in ``memory``.

    Raises:
        OSError: the disk is full.
    """
    address = await _find(qmp)
    if address is not None:
        await finish_in_thread(_read, pid, address, memory / SCREEN_FILE)


async def restore_screen(qmp: Qmp, pid: int, memory: Path) -> None:
    """Give it back to a machine whose devices were just loaded, and that is still stopped."""
    file = memory / SCREEN_FILE
    if not file.exists() or file.stat().st_size != _BYTES:
        return
    address = await _find(qmp)
    if address is not None:
        await finish_in_thread(_write, pid, address, file)


async def _find(qmp: Qmp) -> int | None:
    """Where video memory is in QEMU; None: the guest has switched it off or put it elsewhere."""
    try:
        for bus in await qmp.execute("query-pci"):
            place = _bar_of(bus["devices"])
            if place is None:
                continue
            said = await qmp.execute("human-monitor-command", command_line=f"gpa2hva {place:#x}")
            found = _HOST_ADDRESS_RE.search(said)
            # The guest decides where it is, but not what: nothing else may be overwritten.
            if found is not None and found["region"] == _REGION:
                return int(found["address"], 16)
    except (QmpError, KeyError, TypeError, AttributeError):
        return None
    return None


def _bar_of(devices: list[dict[str, Any]]) -> int | None:
    for device in devices:
        if device.get("qdev_id") != _DEVICE:
            continue
        for region in device["regions"]:
            if region["bar"] == 0 and region["address"] >= 0:
                return int(region["address"])
    return None


def _read(pid: int, address: int, target: Path) -> None:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as source, target.open("xb") as file:
        for offset in range(0, _BYTES, _CHUNK_BYTES):
            chunk = os.pread(source.fileno(), _CHUNK_BYTES, address + offset)
            if chunk.count(0) != len(chunk):
                os.pwrite(file.fileno(), chunk, offset)
        file.truncate(_BYTES)


def _write(pid: int, address: int, file: Path) -> None:
    with file.open("rb") as source, Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as target:
        for offset in range(0, _BYTES, _CHUNK_BYTES):
            chunk = source.read(_CHUNK_BYTES)
            if chunk.count(0) != len(chunk):
                os.pwrite(target.fileno(), chunk, address + offset)

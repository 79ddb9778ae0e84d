# SPDX-License-Identifier: AGPL-3.0-only
"""The program ``opendsec-ram``: it touches every byte of a VM's memory, so Python need not."""

from __future__ import annotations

from pathlib import Path

import msgspec

from opendsec_server.binaries import find_ram
from opendsec_server.contract.errors import PlatformError, SnapshotDamaged
from opendsec_server.node.process import Finished, ProgramTimeout, run

_DAMAGED_CODE = 3
_CALL_TIMEOUT_S = 60.0
_SLOWEST_BYTES_PER_S = 20 * 1024 * 1024
"""A disk below this is treated as hung."""


class RamReport(msgspec.Struct, frozen=True):
    """What ``save`` did; see ``opendsec-ram save --help``."""

    total_bytes: int
    written_bytes: int
    zero_bytes: int
    disk_bytes: int
    reflinked: bool


class _Clock(msgspec.Struct, frozen=True):
    tsc_khz: int


def _timeout_s(ram_bytes: int) -> float:
    return _CALL_TIMEOUT_S + ram_bytes / _SLOWEST_BYTES_PER_S


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


async def _call(failure: type[PlatformError], arguments: list[str], timeout_s: float) -> Finished:
    try:
        return await run([str(find_ram()), *arguments], timeout_s=timeout_s)
    except (OSError, ProgramTimeout) as exc:
        raise failure(f"opendsec-ram {arguments[0]}: {exc}") from exc


def _require(done: Finished, failure: type[PlatformError], what: str) -> str:
    if done.code != 0:
        raise failure(f"{what}: {done.output or f'opendsec-ram ended with {done.code}'}")
    return done.output


async def save(
    failure: type[PlatformError],
    *,
    pid: int,
    ram_bytes: int,
    mapped_file: Path | None,
    base_sums: Path | None,
    out: Path,
    sums: Path,
) -> RamReport:
    """Write the RAM of a frozen VM and its page checksums.

    Args:
        failure: Error class to raise.
        pid: The VMM.
        ram_bytes: The RAM's length.
        mapped_file: File that the RAM is mapped from; None: its RAM is anonymous.
        base_sums: Page checksums of that file, if known; else they are computed.
        out: File to make.
        sums: File to make.
    """
    arguments = ["save", "--pid", str(pid), "--out", str(out), "--sums", str(sums)]
    if mapped_file is None:
        arguments += ["--anonymous", str(ram_bytes)]
    else:
        arguments += ["--file", str(mapped_file), "--base", str(mapped_file)]
        if base_sums is not None:
            arguments += ["--base-sums", str(base_sums)]
    done = await _call(failure, arguments, _timeout_s(ram_bytes))
    output = _require(done, failure, "the RAM cannot be saved")
    return msgspec.json.decode(output, type=RamReport)


async def compute_sums(failure: type[PlatformError], ram: Path, sums: Path) -> None:
    """Compute the page checksums of a RAM file by reading it."""
    arguments = ["sums", "--file", str(ram), "--out", str(sums)]
    done = await _call(failure, arguments, _timeout_s(_length(ram)))
    _require(done, failure, "the page checksums cannot be computed")


async def check(ram: Path, sums: Path) -> None:
    """Read a RAM file and compare it with its page checksums.

    Raises:
        SnapshotDamaged: they differ, or cannot be read.
    """
    arguments = ["check", "--file", str(ram), "--sums", str(sums)]
    done = await _call(SnapshotDamaged, arguments, _timeout_s(_length(ram)))
    if done.code == _DAMAGED_CODE:
        raise SnapshotDamaged(f"the saved RAM is damaged: {done.output.rpartition(': ')[2]}")
    _require(done, SnapshotDamaged, "the saved RAM cannot be checked")


async def map_file(failure: type[PlatformError], *, pid: int, ram_bytes: int, fd: int) -> None:
    """Put a file (the VMM's descriptor ``fd``, open for reading) under the RAM of a VMM that does
    not run its guest yet."""
    arguments = ["map", "--pid", str(pid), "--bytes", str(ram_bytes), "--fd", str(fd)]
    done = await _call(failure, arguments, _CALL_TIMEOUT_S)
    _require(done, failure, "the saved RAM cannot be mapped")


async def tsc_khz(failure: type[PlatformError]) -> int:
    """Rate of the processor's time stamp counter."""
    done = await _call(failure, ["tsc"], _CALL_TIMEOUT_S)
    output = _require(done, failure, "the processor's clock cannot be measured")
    return msgspec.json.decode(output, type=_Clock).tsc_khz

# SPDX-License-Identifier: AGPL-3.0-only
"""From the tar of a layer to an EROFS file, and from several EROFS files to one.

The programs that meet foreign bytes are ``opendsec-layer`` (the archive) and ``mkfs.erofs`` (the
tree that came of it). Both are run as children; nothing of a layer passes through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec_server.contract.errors import ImageDamaged, Internal, NodeFull

from . import limits
from .children import layer_program, tied

EROFS_OPTIONS = (
    "--quiet", "-d0", "-zlz4", "-C16384", "--preserve-mtime", "-Enosbcrc",
    "-U0d5ec000-0000-4000-8000-000000000001",
)  # fmt: skip
"""lz4hc would save a fifth of the size for ten times the time."""

_SUPERBLOCK_AT = 1024
_BUILD_TIME_AT = _SUPERBLOCK_AT + 24
_EXIT_INVALID, _EXIT_DIGEST, _EXIT_LIMIT, _EXIT_NO_SPACE = 3, 4, 5, 6
_WATCH_EVERY_S = 0.5
_STALL_BYTES_MIN = 4 * 1024
_NO_SPACE_TEXT = "No space left on device"


class Stalled(Exception):
    """Too little of a layer came in the time it is given."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What was in a layer's tar.

    Attributes:
        diff: ``sha256:…`` of the tar itself.
        size_bytes: Of its files.
        entries: How many there are.
        opaque_root: It hides everything below it.
    """

    diff: str
    size_bytes: int
    entries: int
    opaque_root: bool


async def unpack(
    into: Path,
    *,
    source: int | Path,
    blob: str | None = None,
    diff: str | None = None,
    bytes_max: int,
    stall_s: float,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> Unpacked:
    """Unpack a layer's tar, compressed or not.

    Args:
        into: An empty directory.
        source: Where the archive is: a file, or a descriptor to read from, which stays open.
        blob: ``sha256:…`` that the archive must have as it comes.
        diff: ``sha256:…`` that it must have uncompressed.
        bytes_max: What it may hold.
        stall_s: How long next to nothing may come of a descriptor.
        progress: Gets the bytes read so far, now and then.

    Raises:
        ImageDamaged: it is no archive, is hostile, or is not what its digest says.
        NodeFull: it holds more than it may, or the disk is full.
        Stalled: nothing came.
    """
    argv = [
        layer_program(), "unpack", "--into", str(into),
        "--blob", str(source) if isinstance(source, Path) else "-",
        "--bytes-max", str(bytes_max), "--entries-max", str(limits.LAYER_ENTRIES_MAX),
    ]  # fmt: skip
    if blob is not None:
        argv += ["--expect-blob", blob]
    if diff is not None:
        argv += ["--expect-diff", diff]
    process = await asyncio.create_subprocess_exec(
        *tied(argv),
        stdin=asyncio.subprocess.DEVNULL if isinstance(source, Path) else source,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    talk = asyncio.ensure_future(process.communicate())
    try:
        await _watch(process.pid, talk, stall_s, progress)
        out, err = await talk
    finally:
        await _stop(process, talk)
    code = process.returncode
    if code == 0:
        told = json.loads(out.splitlines()[-1])
        return Unpacked(
            told["diff"], int(told["bytes"]), int(told["entries"]), bool(told["opaque_root"])
        )
    raise _layer_error(code, err, bytes_max)


def _layer_error(code: int | None, err: bytes, bytes_max: int) -> Exception:
    text = err.decode(errors="replace").strip()[-1_000:]
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        told = json.loads(text.splitlines()[-1])
        entry = told.get("entry")
        text = told["error"] if not entry else f"{told['error']} ({entry!r})"
    if code in (_EXIT_INVALID, _EXIT_DIGEST):
        return ImageDamaged(f"a layer cannot be used: {text}")
    if code == _EXIT_LIMIT:
        return NodeFull(
            f"a layer is larger than this node takes ({bytes_max >> 20} MiB left of the image's "
            f"limit): {text}",
            remediation="Use a smaller image, or raise image_size_max_mb.",
        )
    if code == _EXIT_NO_SPACE:
        return no_room()
    return Internal(f"opendsec-layer ended with {code}: {text}")


def no_room() -> NodeFull:
    """The store's file system is full."""
    return NodeFull(
        "the node has no disk left for the image",
        remediation="Remove images (`opendsec image prune`), or give state_dir more room.",
    )


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """What the file system refuses meanwhile becomes a typed error.

    Raises:
        NodeFull: there is no room.
        Internal: anything else of the kind.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room() from exc
        raise Internal(f"the image store cannot be used: {exc}") from exc


async def _watch(
    pid: int,
    done: asyncio.Future[tuple[bytes, bytes]],
    stall_s: float,
    progress: Callable[[int], None],
) -> None:
    """Wait for the end of a program that reads, but no longer than it goes on reading."""
    loop = asyncio.get_running_loop()
    seen, since = 0, loop.time()
    while not (await asyncio.wait({done}, timeout=_WATCH_EVERY_S))[0]:
        read = _bytes_read(pid)
        progress(read)
        if read - seen >= _STALL_BYTES_MIN:
            seen, since = read, loop.time()
        elif loop.time() - since > stall_s:
            raise Stalled(f"less than {_STALL_BYTES_MIN} bytes came in {stall_s:.0f} s")


def _bytes_read(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0
    return int(text.partition("rchar: ")[2].partition("\n")[0] or 0)


async def _stop(
    process: asyncio.subprocess.Process, talk: asyncio.Future[tuple[bytes, bytes]]
) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if not talk.done():
        await asyncio.wait({talk})
    if not talk.cancelled():
        talk.exception()


async def make_erofs(tree: Path, target: Path, timeout_s: float = limits.PULL_TIMEOUT_S) -> None:
    """Make an EROFS file of a tree: same tree, same bytes.

    Raises:
        NodeFull: the disk is full.
        Internal: it cannot be made.
    """
    await run_program(["mkfs.erofs", *EROFS_OPTIONS, str(target), str(tree)], timeout_s)
    fix_build_time(target)


def fix_build_time(erofs: Path) -> None:
    """The superblock's own time is that of the build and nothing reads it: zero, so that equal
    trees make equal files. (``-T`` of erofs-utils would set the time of every file as well.)"""
    with erofs.open("r+b") as file:
        file.seek(_BUILD_TIME_AT)
        file.write(struct.pack("<QI", 0, 0))


async def run_program(argv: Sequence[str], timeout_s: float, cwd: Path | None = None) -> None:
    """Run a program of the host that must work.

    Raises:
        NodeFull: it says that the disk is full.
        Internal: it is not installed, failed, or took too long.
    """
    process = await asyncio.create_subprocess_exec(
        *tied(argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        cwd=cwd,
    )
    talk = asyncio.ensure_future(process.communicate())
    try:
        out, _err = await asyncio.wait_for(asyncio.shield(talk), timeout_s)
    except TimeoutError as exc:
        raise Internal(f"{argv[0]} was not finished in {timeout_s:.0f} s") from exc
    finally:
        await _stop(process, talk)
    if process.returncode != 0:
        text = out.decode(errors="replace").strip()[-1_000:]
        if _NO_SPACE_TEXT in text:
            raise no_room()
        raise Internal(f"{argv[0]} ended with {process.returncode}: {text}")

# SPDX-License-Identifier: Apache-2.0
"""The local half of a build: the files that it may copy, packed. Blocking; no network."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from ._archive import spool
from ._errors import InvalidRequest

if TYPE_CHECKING:
    import pathspec

IGNORE_FILE = ".dockerignore"
_CHUNK_BYTES = 1 << 20


class PackedContext(msgspec.Struct):
    """A directory as an archive.

    Attributes:
        sha256: Of the archive, which is the same for the same files.
        content: The archive (tar, gzip), at its beginning. Close it.
        files: How many members it has.
        size_bytes: Of the archive.
    """

    sha256: str
    content: IO[bytes]
    files: int
    size_bytes: int


def pack_context(directory: Path) -> PackedContext:
    """Pack what ``.dockerignore`` leaves of a directory.

    Raises:
        InvalidRequest: not a directory, or it cannot be read.
    """
    if not directory.is_dir():
        raise InvalidRequest(f"The context {directory} is not a directory.")
    archive = spool()
    try:
        count = 0
        # No time in the header: the same files make the same archive.
        with (
            gzip.GzipFile(fileobj=archive, mode="wb", compresslevel=1, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for path in _wanted(directory):
                _add(tar, path, path.relative_to(directory).as_posix())
                count += 1
        size_bytes = archive.tell()
        archive.seek(0)
        digest = hashlib.sha256()
        while chunk := archive.read(_CHUNK_BYTES):
            digest.update(chunk)
        archive.seek(0)
    except OSError as exc:
        archive.close()
        raise InvalidRequest(f"The context cannot be read: {exc}") from exc
    except BaseException:
        archive.close()
        raise
    return PackedContext(digest.hexdigest(), archive, count, size_bytes)


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    member = tar.gettarinfo(path, arcname=name)
    # Who owns it here, and when it was written, is nobody's business there.
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    if member.isreg():
        with path.open("rb") as content:
            tar.addfile(member, content)
    else:
        tar.addfile(member)


def _wanted(directory: Path) -> Iterator[Path]:
    """Paths below a directory, parents first, in a fixed order. Links are not followed."""
    patterns = _patterns(directory)
    decided = {directory: (-1, False)}
    """For each folder: the last pattern that says something of it, and whether that ignores it."""
    for root, folders, files in os.walk(directory):
        folders.sort()
        here = Path(root)
        for name in sorted([*folders, *files]):
            path = here / name
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                continue
            found = patterns.check_file(path.relative_to(directory).as_posix())
            decision = decided[here]
            if found.include is not None and (found.index or 0) >= decision[0]:
                decision = (found.index or 0, found.include)
            if stat.S_ISDIR(mode):
                decided[path] = decision
            if not decision[1]:
                yield path


def _patterns(directory: Path) -> pathspec.PathSpec[Any]:
    # At first use: most programs build nothing.
    import pathspec

    ignore = directory / IGNORE_FILE
    lines = ignore.read_text(errors="replace").splitlines() if ignore.is_file() else []
    return pathspec.PathSpec.from_lines("gitignore", [_anchored(line) for line in lines])


def _anchored(line: str) -> str:
    """A pattern of docker as one of git: docker's begin at the context's top."""
    line = line.strip()
    if not line or line.startswith("#"):
        return ""
    sign = "!" if line.startswith("!") else ""
    return f"{sign}/{line.removeprefix('!').strip().strip('/')}"

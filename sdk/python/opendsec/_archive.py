# SPDX-License-Identifier: Apache-2.0
"""Local halves of a directory's transfer. Blocking; no network."""

from __future__ import annotations

import os
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from ._errors import BadResponse

SPOOL_BYTES_MAX = 8 * 1024 * 1024
"""Larger archives wait on the local disk instead of in memory."""


def spool() -> IO[bytes]:
    """A temporary place for an archive; gone when closed."""
    return tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES_MAX)


def pack(source: Path, name: str) -> IO[bytes]:
    """An archive of a directory under another name, at its beginning."""
    archive = spool()
    try:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
            tar.add(source, arcname=name, filter=_anonymous)
        archive.seek(0)
    except BaseException:
        archive.close()
        raise
    return archive


def unpack(archive: IO[bytes], parent: Path, name: str) -> None:
    """Extract what came from a sandbox as ``parent/name``; its content is not trusted.

    The rules are those of Python's "data" filter (PEP 706), which Python before 3.11.4 lacks:
    only files, directories and links; nothing written or linked to outside ``parent``.

    Raises:
        BadResponse: the archive is damaged, or tries to leave ``parent``.
    """
    archive.seek(0)
    root = parent.resolve()
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                # The top directory may be renamed; everything else stays below it.
                member.name = _renamed(member.name, name)
                if member.islnk():
                    member.linkname = _renamed(member.linkname, name)
                _check(member, root)
                # Every member was checked; newer Pythons would check again, and warn.
                member.mode = _mode(member)
                member.uid, member.gid = os.getuid(), os.getgid()
                member.uname = member.gname = ""
                if hasattr(tarfile, "fully_trusted_filter"):
                    tar.extraction_filter = tarfile.fully_trusted_filter
                tar.extract(member, root)
    except (tarfile.TarError, ValueError) as exc:
        raise BadResponse(f"The directory cannot be unpacked: {exc}") from exc


def _renamed(path: str, name: str) -> str:
    _, slash, rest = path.partition("/")
    return name + slash + rest


def _check(member: tarfile.TarInfo, root: Path) -> None:
    """Refuse what is no file, directory or link, and what leads out of ``root``."""
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise tarfile.ExtractError(f"{member.name!r} is neither a file, a directory nor a link")
    place = Path(os.path.realpath(root / member.name))
    if member.issym():
        if member.linkname.startswith("/"):
            raise tarfile.ExtractError(f"{member.name!r} links to an absolute path")
        # The link itself may exist already: only its directory is followed.
        place = Path(os.path.realpath((root / member.name).parent))
        target = os.path.realpath(place / member.linkname)
    elif member.islnk():
        target = os.path.realpath(root / member.linkname)
    else:
        target = str(place)
    for path in (place, Path(target)):
        if not path.is_relative_to(root):
            raise tarfile.ExtractError(f"{member.name!r} leads out of the directory")


def _mode(member: tarfile.TarInfo) -> int:
    """No set-id bits, nothing writable by others; what is the owner's stays readable to them."""
    if member.isdir():
        return 0o755
    mode = member.mode & 0o755 | 0o600
    return mode if mode & 0o100 else mode & ~0o111


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Local owners mean nothing in the sandbox: files belong to the user who unpacks."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member

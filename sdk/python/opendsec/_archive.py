# SPDX-License-Identifier: Apache-2.0
"""Local halves of a directory's transfer. Blocking; no network."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import IO

from ._errors import BadResponse, NotSupported

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

    Raises:
        BadResponse: the archive is damaged, or tries to leave ``parent``.
        NotSupported: this Python cannot extract archives safely.
    """
    if not hasattr(tarfile, "data_filter"):
        raise NotSupported(
            "This Python cannot unpack archives safely.",
            remediation="Use Python 3.11.4 or newer to copy directories out of a sandbox.",
        )
    archive.seek(0)
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                # The top directory may be renamed; everything else stays below it.
                _, slash, rest = member.name.partition("/")
                member.name = name + slash + rest
                if member.islnk():
                    _, slash, rest = member.linkname.partition("/")
                    member.linkname = name + slash + rest
                tar.extract(member, parent, filter="data")
    except tarfile.TarError as exc:
        raise BadResponse(f"The directory cannot be unpacked: {exc}") from exc


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Local owners mean nothing in the sandbox: files belong to the user who unpacks."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member

# SPDX-License-Identifier: Apache-2.0
"""What an agent left behind, on its way into a verifier's sandbox. Blocking; no network.

The archive was written in a sandbox that the agent owns, by a ``tar`` that it may have replaced. So
it is read member by member here, and written anew from what is harmless.
"""

from __future__ import annotations

import posixpath
import tarfile
from typing import IO

from . import _archive
from ._errors import ArtifactsRefused

MEMBERS_MAX = 200_000


def cleaned(archive: IO[bytes], name: str, *, bytes_max: int) -> IO[bytes]:
    """A new archive of the files, directories and links below ``name``, at its beginning.

    Devices, sockets and pipes are left out. Owners, set-id bits and sparse holes are forgotten.

    Args:
        name: The only top of what may be in it.
        bytes_max: Of all files together.

    Raises:
        ArtifactsRefused: it is damaged, too large, or has something outside of ``name``.
    """
    archive.seek(0)
    result = _archive.spool()
    try:
        _copy(archive, result, name, bytes_max)
        result.seek(0)
    except ArtifactsRefused:
        result.close()
        raise
    except (
        tarfile.TarError,
        ValueError,
        KeyError,
        OverflowError,
        EOFError,
        RecursionError,  # Of headers that are about headers.
    ) as exc:
        result.close()
        raise ArtifactsRefused(f"{name} cannot be read as an archive: {exc}") from exc
    except BaseException:
        result.close()
        raise
    return result


def _copy(archive: IO[bytes], result: IO[bytes], name: str, bytes_max: int) -> None:
    total_bytes = 0
    seen: set[str] = set()
    real: set[str] = set()  # Directories that are no links: only through them may a path go.
    with (
        tarfile.open(fileobj=archive, mode="r:") as source,
        tarfile.open(fileobj=result, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in source:
            path = _inside(member.name, name)
            if path in seen:
                raise ArtifactsRefused(f"{member.name!r} is in the archive twice.")
            seen.add(path)
            if len(seen) > MEMBERS_MAX:
                raise ArtifactsRefused(f"{name} has more than {MEMBERS_MAX} files.")
            if path != name and posixpath.dirname(path) not in real:
                raise ArtifactsRefused(f"{member.name!r} is in no directory of the archive.")
            clean = tarfile.TarInfo(path)
            clean.mtime = int(member.mtime)
            if member.isdir():
                real.add(path)
                clean.type, clean.mode = tarfile.DIRTYPE, 0o755
                target.addfile(clean)
            elif member.issym():
                if path == name:
                    raise ArtifactsRefused(f"{name} is a link.")
                clean.type, clean.linkname = tarfile.SYMTYPE, member.linkname
                target.addfile(clean)
            elif member.isreg() or member.islnk():
                # A second name of a file becomes a copy of it.
                content = source.extractfile(member)
                size_bytes = _size_of(source, member)
                total_bytes += size_bytes
                if total_bytes > bytes_max:
                    raise ArtifactsRefused(f"{name} is larger than {bytes_max} bytes.")
                if content is None:
                    raise ArtifactsRefused(f"{member.name!r} has no content.")
                clean.size = size_bytes
                clean.mode = 0o755 if member.mode & 0o100 else 0o644
                target.addfile(clean, content)


def _inside(path: str, name: str) -> str:
    """The path, if it is ``name`` or below it, in its plain form."""
    parts = path.rstrip("/").split("/")
    if parts[0] != name or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ArtifactsRefused(f"{path!r} is not below {name!r}.")
    return "/".join(parts)


def _size_of(source: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    """Of a file, or of the one that a hard link means."""
    seen = 0
    while member.islnk():
        seen += 1
        if seen > 40:
            raise ArtifactsRefused("Hard links lead in a circle.")
        member = source._find_link_target(member)  # type: ignore[attr-defined]
    return member.size

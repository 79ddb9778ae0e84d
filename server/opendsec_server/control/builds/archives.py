# SPDX-License-Identifier: AGPL-3.0-only
"""What is in an archive that was sent: found by pattern, and told apart by content."""

from __future__ import annotations

import fnmatch
import hashlib
import posixpath
import tarfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from opendsec_server.contract.errors import BuildFailed

MEMBERS_MAX = 1_000_000
NAME_CHARS_MAX = 4_096
NAMES_BYTES_MAX = 256 << 20
"""All names of an archive, which are kept in memory."""
HEADER_BYTES_MAX = 1 << 20
"""One long name, or one set of extended attributes."""
HEADERS_BYTES_MAX = 256 << 20
"""All of these of an archive."""
_HEADERS = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)  # fmt: skip
_CHUNK_BYTES = 1 << 20
WILDCARDS = frozenset("*?[")


class Manifest(msgspec.Struct, frozen=True):
    """The members of an archive: what identifies each, by its path."""

    members: dict[str, str]

    def matching(self, pattern: str) -> list[str]:
        """Paths that a pattern means, as a shell would: ``*`` stops at ``/``. Whoever unpacks the
        archive matches the same."""
        wanted = pattern.split("/")
        found: dict[str, None] = {}
        for name in self.members:
            parts = name.split("/")[: len(wanted)]
            if len(parts) == len(wanted) and all(
                fnmatch.fnmatchcase(part, piece) for part, piece in zip(parts, wanted, strict=True)
            ):
                found["/".join(parts)] = None
        return list(found)

    def digest(self, sources: Sequence[str]) -> str:
        """SHA-256 of what these paths hold: equal for archives that differ elsewhere only."""
        value = hashlib.sha256()
        wanted = frozenset(sources)
        for name in sorted(self.members):
            if "." in wanted or not wanted.isdisjoint(_with_parents(name)):
                value.update(f"{name}\0{self.members[name]}\n".encode(errors="surrogateescape"))
        return value.hexdigest()


def _with_parents(name: str) -> Iterator[str]:
    yield name
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def read_manifest(archive: Path, *, bytes_max: int, stop: threading.Event) -> Manifest:
    """Read an archive once. Takes as long as unpacking it; call it in a thread.

    Args:
        archive: A tar file, compressed or not.
        bytes_max: What its files may hold together.
        stop: Ends it early: nobody waits for the answer.

    Raises:
        BuildFailed: it is damaged, or is larger in any way than what is read.
    """
    members: dict[str, str] = {}
    size_bytes = names_bytes = 0
    try:
        with archive.open("rb") as file:
            # As a stream, it is asked for nothing but ``read``.
            stream: Any = _Stoppable(file, stop)
            tar: Any = tarfile.TarFile.open(fileobj=stream, mode="r|*", tarinfo=_bounded_members())
            while (member := tar.next()) is not None:
                # It would keep them all.
                tar.members.clear()
                name = posixpath.normpath(member.name.lstrip("/"))
                size_bytes += member.size
                names_bytes += len(name)
                for amount, most, what in (
                    (len(members), MEMBERS_MAX - 1, "members"),
                    (size_bytes, bytes_max, "bytes of files"),
                    (len(name), NAME_CHARS_MAX, "characters in a name"),
                    (names_bytes, NAMES_BYTES_MAX, "bytes of names"),
                ):
                    if amount > most:
                        raise BuildFailed(f"the archive of the files has too many {what}")
                value = hashlib.sha256()
                value.update(
                    f"{member.type!r} {member.mode} {member.size} {member.linkname}".encode(
                        errors="surrogateescape"
                    )
                )
                source = tar.extractfile(member) if member.isfile() else None
                while source is not None and (chunk := source.read(_CHUNK_BYTES)):
                    value.update(chunk)
                members[name] = value.hexdigest()
    except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError) as exc:
        raise BuildFailed(f"the archive of the files is damaged: {exc}") from exc
    return Manifest(members)


class _Stoppable:
    """A file that can be read until nobody waits any more."""

    def __init__(self, file: IO[bytes], stop: threading.Event) -> None:
        self._file = file
        self._stop = stop

    def read(self, size: int) -> bytes:
        if self._stop.is_set():
            raise OSError("reading was given up")
        return self._file.read(size)


def _bounded_members() -> type[tarfile.TarInfo]:
    """Members whose headers cannot fill the memory. ``tarfile`` reads each header whole, however
    long it says it is, and maps of sparse files without end; no public way changes that."""
    spent_bytes = 0

    class Member(tarfile.TarInfo):
        def _proc_member(self, tar: tarfile.TarFile) -> Any:
            nonlocal spent_bytes
            if self.type in _HEADERS:
                spent_bytes += self.size
                if self.size > HEADER_BYTES_MAX or spent_bytes > HEADERS_BYTES_MAX:
                    raise BuildFailed("the archive of the files has headers that are too long")
            if self.type == tarfile.GNUTYPE_SPARSE:
                raise _sparse()
            return super()._proc_member(tar)  # type: ignore[misc]

        def _proc_gnusparse_10(self, *_: object) -> None:
            raise _sparse()

    return Member


def _sparse() -> BuildFailed:
    return BuildFailed(
        "the archive of the files has sparse files", remediation="Pack it without `--sparse`."
    )

# SPDX-License-Identifier: AGPL-3.0-only
"""What is in an archive that was sent: found by pattern, and told apart by content."""

from __future__ import annotations

import fnmatch
import hashlib
import posixpath
import tarfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from opendsec_server.contract.errors import BuildFailed

MEMBERS_MAX = 1_000_000
_CHUNK_BYTES = 1 << 20
WILDCARDS = frozenset("*?[")


class Manifest(msgspec.Struct, frozen=True):
    """The members of an archive: what identifies each, by its path."""

    members: dict[str, str]

    def matching(self, pattern: str) -> list[str]:
        """Paths that a pattern means, as a shell would: ``*`` stops at ``/``."""
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
        for name in sorted(self.members):
            if any(_below(name, source) for source in sources):
                value.update(f"{name}\0{self.members[name]}\n".encode(errors="surrogateescape"))
        return value.hexdigest()


def _below(name: str, source: str) -> bool:
    return source == "." or name == source or name.startswith(f"{source}/")


def read_manifest(archive: Path, *, contents: bool) -> Manifest:
    """Read an archive once. Takes as long as unpacking it; call it in a thread.

    Args:
        archive: A tar file, compressed or not.
        contents: Also what the files hold, not only what they are called.

    Raises:
        BuildFailed: it is damaged, or has too many members.
    """
    members: dict[str, str] = {}
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                if len(members) >= MEMBERS_MAX:
                    raise BuildFailed(f"the archive of the files has more than {MEMBERS_MAX}")
                name = posixpath.normpath(member.name.lstrip("/"))
                value = hashlib.sha256()
                value.update(
                    f"{member.type!r} {member.mode} {member.size} {member.linkname}".encode(
                        errors="surrogateescape"
                    )
                )
                source = tar.extractfile(member) if contents and member.isfile() else None
                while source is not None and (chunk := source.read(_CHUNK_BYTES)):
                    value.update(chunk)
                members[name] = value.hexdigest()
    except (tarfile.TarError, EOFError, OSError, ValueError) as exc:
        raise BuildFailed(f"the archive of the files is damaged: {exc}") from exc
    return Manifest(members)

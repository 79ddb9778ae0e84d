# SPDX-License-Identifier: AGPL-3.0-only
"""Archives of builds that mean harm: refused before they cost memory or time."""

from __future__ import annotations

import gzip
import io
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec_server.contract.errors import BuildFailed
from opendsec_server.control.builds import archives
from opendsec_server.control.builds.archives import Manifest, read_manifest


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + b"\0" * (-len(data) % 512)


def read(archive: Path, tar: bytes, bytes_max: int = 1 << 30) -> Manifest:
    archive.write_bytes(gzip.compress(tar + b"\0" * 1024, 1))
    return read_manifest(archive, bytes_max=bytes_max, stop=threading.Event())


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "a.tar.gz"


def long_name(size: int) -> bytes:
    return member("././@LongLink", b"a" * size, tarfile.GNUTYPE_LONGNAME) + member("x")


def sparse_map(numbers: int) -> bytes:
    """GNU's format 1.0: the map is text before the data, as long as it says it is."""
    pax = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    return member("p", pax, tarfile.XHDTYPE) + member("x", b"%d\n" % numbers + b"1\n" * numbers)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: long_name(archives.HEADER_BYTES_MAX + 1), "headers"),
        (lambda: member("p", b" " * (2 << 20), tarfile.XHDTYPE) + member("x"), "headers"),
        (lambda: member("p", b" " * (2 << 20), tarfile.XGLTYPE) + member("x"), "headers"),
        (lambda: sparse_map(5_000), "sparse"),
        (lambda: member("x", kind=tarfile.GNUTYPE_SPARSE), "sparse"),
        (lambda: member("l", b"a\0", tarfile.GNUTYPE_LONGNAME) * 5_000 + member("x"), "damaged"),
        (lambda: member("x", b"1" * 600) + member("y", b"1" * 600), "bytes of files"),
    ],
    ids=["name", "pax", "global", "sparse-1.0", "sparse-old", "chain", "large"],
)
def test_hostile_archives(archive: Path, make: Callable[[], bytes], why: str) -> None:
    with pytest.raises(BuildFailed, match=why):
        read(archive, make(), bytes_max=1_000)


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        ("MEMBERS_MAX", 3),
        ("NAMES_BYTES_MAX", 15),
        ("NAME_CHARS_MAX", 5),
        ("HEADERS_BYTES_MAX", 600),
    ],
)
def test_limits_of_the_whole(
    archive: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    parts = [member(f"{n}", b"a" * 200, tarfile.GNUTYPE_LONGNAME) for n in range(3)]
    tar = b"".join(part + member("x") for part in parts) if "HEADERS" in limit else b""
    tar = tar or b"".join(member(f"name{n}") for n in range(3))
    monkeypatch.setattr(archives, limit, most)
    assert read(archive, tar).members
    monkeypatch.setattr(archives, limit, most - 1)
    with pytest.raises(BuildFailed, match=r"too many|too long"):
        read(archive, tar)


def test_ordinary_long_names_are_read(archive: Path) -> None:
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
            info = tarfile.TarInfo("d/" * 200 + "ü")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        assert list(read(archive, buffer.getvalue()).members) == ["d/" * 200 + "ü"]


def test_reading_ends_when_nobody_waits(archive: Path) -> None:
    archive.write_bytes(member("x", b"1" * 600))
    stop = threading.Event()
    stop.set()
    with pytest.raises(BuildFailed, match="given up"):
        read_manifest(archive, bytes_max=1_000, stop=stop)


def test_what_is_below_a_source() -> None:
    manifest = Manifest(dict.fromkeys(("a", "a/b", "ab", "c/d/e"), "1"))
    whole = manifest.digest(["."])
    assert manifest.digest(["a", "ab", "c/d"]) == manifest.digest(["a", "ab", "c"]) == whole
    assert manifest.digest(["a"]) != manifest.digest(["a", "ab"])
    assert manifest.digest(["a"]) == Manifest({"a": "1", "a/b": "1"}).digest(["."])
    assert manifest.digest(["a"]) != Manifest({"a": "1", "a/b": "2"}).digest(["a"])


def test_digest_of_many_files_named_one_by_one_ends() -> None:
    """In time that grows with its square, this one would take hours."""
    names = [f"f{n}" for n in range(200_000)]
    manifest = Manifest(dict.fromkeys(names, "1"))
    assert manifest.digest(names) == manifest.digest(["."])


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*", "a.py", True),
        ("*.py", "a.py", True),
        ("*.py", "a.pyc", False),
        ("a*b*c", "aXbYbZc", True),
        ("a*b*c", "aXbYbZ", False),
        ("?", "ü", True),
        ("??", "ü", False),
        ("[a-c]1", "b1", True),
        ("[!a-c]1", "b1", False),
        ("[!a-c]1", "d1", True),
        ("[]]", "]", True),
        ("[!]]", "x", True),
        ("[a", "[a", True),
        ("[a", "a", False),
        ("[z-a]", "m", False),
        ("[a-]", "-", True),
        ("[-a]", "-", True),
        ("[]-a]", "^", True),
        ("[^a]", "^", True),
        ("[[]x", "[x", True),
        ("x[", "x[", True),
        ("*[0-9]", "run7", True),
        ("**", "anything", True),
        ("a?c", "a/c", False),
    ],
)
def test_patterns_mean_what_the_guest_agent_means(pattern: str, name: str, expected: bool) -> None:
    # `dataplane/agent/src/unpack/sources.rs` has the same table.
    assert Manifest({name: ""}).matching(pattern) == ([name] if expected else [])

# SPDX-License-Identifier: Apache-2.0
"""Archives from a sandbox are hostile: what they may make here, and what not."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from opendsec import BadResponse
from opendsec._archive import pack, unpack


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


HOSTILE = {
    "parent": [(member("top/../../evil"), b"x")],
    "link out, then through it": [
        (member("top/out", tarfile.SYMTYPE, linkname="../.."), b""),
        (member("top/out/evil"), b"x"),
    ],
    "absolute link": [(member("top/out", tarfile.SYMTYPE, linkname="/etc/passwd"), b"")],
    "hard link out": [(member("top/out", tarfile.LNKTYPE, linkname="top/../../secret"), b"")],
    "device": [(member("top/null", tarfile.CHRTYPE, devmajor=1, devminor=3), b"")],
    "fifo": [(member("top/pipe", tarfile.FIFOTYPE), b"")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives(tmp_path: Path, case: str) -> None:
    parent = tmp_path / "a" / "b"
    parent.mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    with pytest.raises(BadResponse):
        unpack(archive(*HOSTILE[case]), parent, "new")
    assert sorted(os.listdir(tmp_path)) == ["a", "secret"]
    assert os.listdir(tmp_path / "a") == ["b"]
    assert not (parent / "new" / "evil").exists()
    assert os.stat(tmp_path / "secret").st_nlink == 1


def test_absolute_names_stay_below(tmp_path: Path) -> None:
    unpack(archive((member("top//etc/a"), b"x"), (member("/b"), b"x")), tmp_path, "new")
    assert (tmp_path / "new" / "etc" / "a").exists()
    assert (tmp_path / "new" / "b").exists()


def test_modes_and_owners(tmp_path: Path) -> None:
    unpack(
        archive(
            (member("top", tarfile.DIRTYPE, mode=0o000), b""),
            (member("top/suid", mode=0o6777, uid=12345, gid=12345), b"x"),
            (member("top/plain", mode=0o222), b"y"),
            (member("top/link", tarfile.SYMTYPE, linkname="plain"), b""),
            (member("top/hard", tarfile.LNKTYPE, linkname="top/plain", mode=0o222), b""),
        ),
        tmp_path,
        "new",
    )
    top = tmp_path / "new"
    assert (top / "suid").stat().st_mode & 0o7777 == 0o755
    assert (top / "suid").stat().st_uid == os.getuid()
    assert (top / "plain").stat().st_mode & 0o7777 == 0o600
    assert (top / "link").read_text() == (top / "hard").read_text() == "y"


def test_twice_over_the_same_place(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "file").write_text("1")
    (source / "link").symlink_to("sub/file")
    for content in ("1", "2"):
        (source / "sub" / "file").write_text(content)
        with pack(source, "top") as packed:
            unpack(packed, tmp_path, "copy")
        assert (tmp_path / "copy" / "link").read_text() == content


def test_damaged(tmp_path: Path) -> None:
    with pytest.raises(BadResponse):
        unpack(io.BytesIO(b"no archive at all" * 100), tmp_path, "new")
